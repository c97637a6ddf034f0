// The libzmq functions native code calls, by address.
//
// pyzmq carries its own libzmq; native code must use that very copy because it works on sockets that Python made. Python
// hands the addresses over (dtorch/zmq_api.py), so nothing links against libzmq and no header of it is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

namespace dtorch::zmq {

struct Msg { alignas(8) unsigned char opaque[64]; };  // zmq_msg_t is 64 bytes by libzmq's ABI promise

struct PollItem {
  void* socket;
  int fd;
  short events;
  short revents;
};

constexpr int kDontWait = 1, kSendMore = 2;
constexpr short kPollIn = 1, kPollOut = 2;

struct Api {
  int (*send)(void* socket, const void* data, size_t n, int flags);
  int (*msg_init)(Msg*);
  int (*msg_init_size)(Msg*, size_t);
  void* (*msg_data)(Msg*);
  size_t (*msg_size)(const Msg*);
  int (*msg_send)(Msg*, void* socket, int flags);
  int (*msg_recv)(Msg*, void* socket, int flags);
  int (*msg_close)(Msg*);
  int (*msg_more)(const Msg*);
  int (*poll)(PollItem*, int n, long timeout_ms);
  int (*error)();
  const char* (*strerror)(int);
};

// One frame, received or to be sent; closes itself.
class Frame {
 public:
  explicit Frame(const Api& api) : api_(&api) { api_->msg_init(&msg_); }
  Frame(const Api& api, size_t n) : api_(&api) {
    if (api_->msg_init_size(&msg_, n) != 0) throw std::bad_alloc();
  }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;
  ~Frame() { api_->msg_close(&msg_); }

  // False when there is nothing to read now (flags kDontWait); throws on any other error but EINTR, which is retried.
  bool recv(void* socket, int flags) {
    for (;;) {
      if (api_->msg_recv(&msg_, socket, flags) >= 0) return true;
      int e = api_->error();
      if (e == 4 /* EINTR */) continue;
      if (e == 11 /* EAGAIN */) return false;
      throw std::runtime_error(std::string("zmq_msg_recv: ") + api_->strerror(e));
    }
  }
  // Sends it, and is empty after that. False when nobody takes it now (flags kDontWait).
  bool send(void* socket, int flags) {
    for (;;) {
      if (api_->msg_send(&msg_, socket, flags) >= 0) return true;
      int e = api_->error();
      if (e == 4 /* EINTR */) continue;
      if (e == 11 /* EAGAIN */) return false;
      throw std::runtime_error(std::string("zmq_msg_send: ") + api_->strerror(e));
    }
  }
  const uint8_t* data() { return static_cast<const uint8_t*>(api_->msg_data(&msg_)); }
  uint8_t* mutable_data() { return static_cast<uint8_t*>(api_->msg_data(&msg_)); }
  size_t size() const { return api_->msg_size(&msg_); }
  bool more() const { return api_->msg_more(&msg_) != 0; }

 private:
  const Api* api_;
  Msg msg_;
};

inline void send(const Api& api, void* socket, const void* data, size_t n, int flags) {
  while (api.send(socket, data, n, flags) < 0) {
    int e = api.error();
    if (e == 4) continue;
    throw std::runtime_error(std::string("zmq_send: ") + api.strerror(e));
  }
}

}  // namespace dtorch::zmq
