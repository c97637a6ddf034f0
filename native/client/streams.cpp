// See streams.h. An event is an EVENT request whose answer brings the worker's clock; STR-2 is a list of requests per
// worker, which events take along.
#include "client/streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "client/python_error.h"
#include "client/storage.h"
#include "client/value.h"

namespace dtorch {

namespace {

// A place in a worker's order; its request is forgotten with the last who may ask.
struct Point {
  RequestPtr request;
  uint32_t generation;  // of its session
  ~Point() { Session::get().forget(request->id); }

  bool reached() const { return request->state.load() == Request::State::Done; }
  void wait() const {
    if (request->state.load() == Request::State::Pending) {
      if (!Session::get().active() || generation != Session::get().generation()) throw_engine_error("");
      Session::get().wait(request);
    }
    if (request->state.load() == Request::State::Failed) throw_failure(request->reply, request->failure, request->worker);
  }
  bool query() const {
    if (reached()) return true;
    if (request->state.load() == Request::State::Failed) wait();
    Session::get().flush();  // what nobody sends never happens
    return false;
  }
  uint64_t nanoseconds() const {
    auto in = reply_body(request->reply);
    return in.uint();
  }
};
using PointPtr = std::shared_ptr<Point>;
using Points = std::vector<PointPtr>;

struct Event {
  PointPtr at;
  Points also;  // what its worker's streams had been told to wait for
};

std::mutex mu;  // guards `waited_for`
std::map<int, Points>& waited_for() {
  static auto& all = *new std::map<int, Points>;
  return all;
}

void drop_reached(Points& points) {
  points.erase(std::remove_if(points.begin(), points.end(),
                              [](auto& p) { return p->request->state.load() != Request::State::Pending; }),
               points.end());
}

// What a worker's streams have been told to wait for and have not seen yet.
Points pending(int worker) {
  std::lock_guard lock(mu);
  auto& points = waited_for()[worker];
  drop_reached(points);
  return points;
}

PointPtr mark(int worker) {
  auto& session = Session::get();
  session.admit(worker);
  PointPtr point(new Point{session.new_request(worker, 0), session.generation()});
  Session::Writer w(session);
  w.begin(Record::EVENT, point->request, 1);
  w.end();
  return point;
}

// Autograd asks for the current stream at every operator: null stands for the default stream everywhere.
DTORCH_TLS c10::StreamId* current = nullptr;
struct Current {
  c10::StreamId ids[128] = {};  // as many as a DeviceIndex can tell apart
  ~Current() { current = nullptr; }
};

}  // namespace

c10::Stream current_stream(c10::Device device) {
  if (!device.has_index()) device = c10::Device(device.type(), static_cast<c10::DeviceIndex>(current_worker()));
  return c10::Stream(c10::Stream::UNSAFE, device, current ? current[device.index()] : 0);
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  auto before = current_stream(stream.device());
  if (stream.id() == before.id()) return before;
  static thread_local Current own;
  current = own.ids;
  current[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(c10::Device device) {
  static std::atomic<c10::StreamId> next{1};
  return c10::Stream(c10::Stream::UNSAFE, device, next++);
}

void record_event(void** event, const c10::Stream& stream) {
  int worker = worker_of(stream.device());
  auto made = std::make_unique<Event>(Event{mark(worker), pending(worker)});
  destroy_event(*event);
  *event = made.release();
}

void destroy_event(void* event) { delete static_cast<Event*>(event); }

void wait_for_event(void* event, const c10::Stream& stream) {
  auto& e = *static_cast<Event*>(event);
  int worker = stream.device_index();
  std::lock_guard lock(mu);
  auto& points = waited_for()[worker];
  drop_reached(points);
  if (e.at->request->worker != worker && !e.at->reached()) points.push_back(e.at);
  for (auto& p : e.also)
    if (!p->reached()) points.push_back(p);
}

bool event_happened(void* event) {
  if (!event) return true;
  auto& e = *static_cast<Event*>(event);
  return e.at->query() && std::all_of(e.also.begin(), e.also.end(), [](auto& p) { return p->query(); });
}

void synchronize_event(void* event) {
  if (!event) return;
  auto& e = *static_cast<Event*>(event);
  e.at->wait();
  for (auto& p : e.also) p->wait();
}

double milliseconds_between(void* first, void* second) {
  auto a = static_cast<Event*>(first)->at->nanoseconds(), b = static_cast<Event*>(second)->at->nanoseconds();
  return (static_cast<double>(b) - static_cast<double>(a)) / 1e6;
}

bool stream_is_idle(const c10::Stream& stream) {
  auto& session = Session::get();
  if (!session.active()) return true;
  int worker = worker_of(stream.device());
  session.admit(worker);
  if (!session.idle(worker)) return false;
  auto points = pending(worker);
  return std::all_of(points.begin(), points.end(), [](auto& p) { return p->query(); });
}

void synchronize_stream(const c10::Stream& stream) {
  if (!Session::get().active()) return;
  int worker = worker_of(stream.device());
  auto points = pending(worker);
  synchronize(worker);
  for (auto& p : points) p->wait();
}

}  // namespace dtorch
