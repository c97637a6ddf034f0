// The workers' direct way to the client: one Unix socket per worker, on which its replies come past the controller.
//
// A reply by way of the controller wakes five threads more than one that the worker writes into the client's own socket,
// and a thread that waits can read that socket itself, which spares the reply thread's wake-up too. On two cores those
// wake-ups are most of a round trip. Only replies to requests come here, and RETURNED, each a whole packet; everything that
// has an order (progress, transfers, deaths) goes through the controller. A worker whose packet is too long, or whose socket is full or
// was not acknowledged (yet), sends the reply by way of the controller instead: either way it comes once (SES-3). So nothing
// stands in a socket that the client has not taken in.
//
// DIR-1  A packet is read by exactly one thread: by one that waits for a request of that worker, if there is such a
//        thread, else by the reply thread. While somebody waits, the reply thread is not woken.
// DIR-2  What a worker sent before it died counts: who handles the death drains its socket first, and waits for a thread
//        that has read a packet and not handled it yet.
// DIR-3  A descriptor is closed when nobody polls or reads it any more: the session, the reply thread and all who wait
//        share the object.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/protocol.h"

namespace dtorch {

class Direct {
 public:
  struct Peer {
    explicit Peer(int fd_) : fd(fd_) {}
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;
    ~Peer();

    const int fd;
    std::mutex reading;  // held from reading a packet till it has been handled; taken after Direct::mu_
    // Guarded by Direct::mu_.
    int worker = -1;   // unknown until its first packet
    int waiters = 0;
    bool gone = false; // the worker has closed its end
  };
  using PeerPtr = std::shared_ptr<Peer>;

  // A packet that is being handled: as long as it is there, or till the next one is taken into it.
  struct Packet {
    std::vector<uint8_t> bytes;
    PeerPtr peer;                           // outlives the lock on it
    std::unique_lock<std::mutex> reading;
    void done() {
      if (reading.owns_lock()) reading.unlock();
    }
  };

  // `listener`: a listening SOCK_SEQPACKET socket, not blocking, which stays the caller's.
  Direct(int listener, int workers);
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;
  ~Direct();

  // Readable when a packet waits that nobody else is waiting for, when a worker connects, and after nudge().
  int fd() const { return epoll_; }
  void nudge();
  // Accepts, and reads one packet; false when there is none left.
  bool take(Packet& to);
  // Reads one packet of that worker, if there is one.
  bool take_from(int worker, Packet& to);

  // A thread that waits for a reply of that worker. While it lives, the packets are that thread's to read.
  class Waiting {
   public:
    Waiting(std::shared_ptr<Direct> direct, int worker);
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    int fd() const;         // -1: the worker has no direct way (any more)
    bool take(Packet& to);  // false: nothing there now

   private:
    const std::shared_ptr<Direct> direct_;
    PeerPtr peer_;
  };

 private:
  enum class Read { Packet, Nothing, Gone };
  static Read read(const PeerPtr& peer, Packet& to);
  void accept_all();
  void introduce(const PeerPtr& peer, const std::vector<uint8_t>& packet);
  void watch(const Peer& peer, bool on);
  void drop(const PeerPtr& peer);

  const int epoll_, nudge_, listener_;
  std::mutex mu_;  // guards what follows
  std::vector<PeerPtr> strangers_;  // connected, and not introduced yet
  std::vector<PeerPtr> peers_;      // by worker
};

}  // namespace dtorch
