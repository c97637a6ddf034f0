// See direct.h.
#include "client/direct.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace dtorch {

Direct::Peer::~Peer() { close(fd); }

Direct::Direct(int listener, int workers)
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), nudge_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), listener_(listener) {
  for (int fd : {nudge_, listener_}) {
    epoll_event event{EPOLLIN, {.fd = fd}};
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0) continue;
    std::string why = std::strerror(errno);
    close(epoll_), close(nudge_);
    throw std::runtime_error("the workers' replies cannot be watched: " + why);
  }
  peers_.resize(static_cast<size_t>(workers));
}

Direct::~Direct() { close(epoll_), close(nudge_); }

void Direct::nudge() {
  uint64_t one = 1;
  [[maybe_unused]] auto n = write(nudge_, &one, sizeof one);
}

Direct::Read Direct::read(const PeerPtr& peer, Packet& to) {
  to.done();
  to.peer = peer;
  to.reading = std::unique_lock(peer->reading);
  to.bytes.resize(kDirectBytes);
  for (;;) {
    ssize_t n = recv(peer->fd, to.bytes.data(), to.bytes.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) {
      to.bytes.resize(static_cast<size_t>(n));
      return Read::Packet;
    }
    to.done();
    return n == 0 || errno == ECONNRESET || errno == EPIPE ? Read::Gone : Read::Nothing;
  }
}

// Called with mu_ held.
void Direct::watch(const Peer& peer, bool on) {
  epoll_event event{EPOLLIN, {.fd = peer.fd}};
  epoll_ctl(epoll_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, peer.fd, &event);
}

// Called with mu_ held.
void Direct::drop(const PeerPtr& peer) {
  if (peer->waiters == 0 && !peer->gone) watch(*peer, false);
  peer->gone = true;
  std::erase(strangers_, peer);
  for (auto& p : peers_)
    if (p == peer) p = nullptr;
}

// Called with mu_ held.
void Direct::accept_all() {
  for (;;) {
    int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      // Without a descriptor to spare nobody more is taken in: not acknowledged, they answer by way of the controller.
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED)
        epoll_ctl(epoll_, EPOLL_CTL_DEL, listener_, nullptr);
      return;
    }
    strangers_.push_back(std::make_shared<Peer>(fd));
    watch(*strangers_.back(), true);
  }
}

// Called with mu_ held. The first packet is the worker's name, "worker-INDEX".
void Direct::introduce(const PeerPtr& peer, const std::vector<uint8_t>& packet) {
  constexpr std::string_view kPrefix = "worker-";
  std::string_view name(reinterpret_cast<const char*>(packet.data()), packet.size());
  size_t worker = peers_.size();
  if (name.starts_with(kPrefix)) std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), worker);
  if (worker >= peers_.size()) return drop(peer);
  if (auto old = peers_[worker]) drop(old);
  std::erase(strangers_, peer);
  peer->worker = static_cast<int>(worker);
  peers_[worker] = peer;
  [[maybe_unused]] auto n = send(peer->fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);  // the acknowledgement
}

bool Direct::take(Packet& to) {
  to.done();
  std::lock_guard lock(mu_);
  for (;;) {
    epoll_event event{};
    if (epoll_wait(epoll_, &event, 1, 0) <= 0) return false;
    if (event.data.fd == listener_) {
      accept_all();
      continue;
    }
    if (event.data.fd == nudge_) {
      uint64_t n;
      [[maybe_unused]] auto got = ::read(nudge_, &n, sizeof n);
      continue;
    }
    auto is_it = [&](const PeerPtr& p) { return p && p->fd == event.data.fd; };
    auto stranger = std::find_if(strangers_.begin(), strangers_.end(), is_it);
    auto known = std::find_if(peers_.begin(), peers_.end(), is_it);
    PeerPtr peer = stranger != strangers_.end() ? *stranger : known != peers_.end() ? *known : nullptr;
    if (!peer) return false;
    switch (read(peer, to)) {
      case Read::Nothing: continue;
      case Read::Gone: drop(peer); continue;
      case Read::Packet:
        if (peer->worker >= 0) return true;
        introduce(peer, to.bytes);
        to.done();
    }
  }
}

bool Direct::take_from(int worker, Packet& to) {
  to.done();
  std::lock_guard lock(mu_);
  auto w = static_cast<size_t>(worker);
  return w < peers_.size() && peers_[w] && read(peers_[w], to) == Read::Packet;
}

Direct::Waiting::Waiting(std::shared_ptr<Direct> direct, int worker) : direct_(std::move(direct)) {
  if (!direct_) return;
  std::lock_guard lock(direct_->mu_);
  auto w = static_cast<size_t>(worker);
  if (w >= direct_->peers_.size() || !direct_->peers_[w]) return;
  peer_ = direct_->peers_[w];
  if (peer_->waiters++ == 0) direct_->watch(*peer_, false);
}

Direct::Waiting::~Waiting() {
  if (!peer_) return;
  std::lock_guard lock(direct_->mu_);
  if (--peer_->waiters == 0 && !peer_->gone) direct_->watch(*peer_, true);
  peer_.reset();
}

int Direct::Waiting::fd() const {
  if (!peer_) return -1;
  std::lock_guard lock(direct_->mu_);
  return peer_->gone ? -1 : peer_->fd;
}

bool Direct::Waiting::take(Packet& to) {
  to.done();
  if (!peer_) return false;
  auto got = read(peer_, to);
  if (got == Read::Gone) {
    std::lock_guard lock(direct_->mu_);
    direct_->drop(peer_);
  }
  return got == Read::Packet;
}

}  // namespace dtorch
