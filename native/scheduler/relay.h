// The controller's loop over its sockets: what happens for every batch is done here, the rest is handed to Python.
//
// serve() waits for the next thing that is not routine. Routine, once every worker is here or dead and the client listens
// (`routine` says so), is: RECORDS from the client, split and sent on as BATCHes; and workers' PROGRESS and replies, sent
// on to the client as they are. A message that Python gets is complete and was not looked into; messages of one peer are
// handled in the order in which they came, by either side.
//
// One thread, which holds no Python lock while it is in here.
#pragma once

#include <string>
#include <vector>

#include "common/trace.h"
#include "common/zmq_api.h"
#include "scheduler/scheduler.h"

namespace dtorch {

class Relay {
 public:
  struct Sockets {
    void *inbox, *outbox, *router;
    int events;  // a descriptor that is readable when processes or their output need looking after
  };
  enum class Source { Client = 0, Worker = 1, Events = 2, Outbox = 3 };
  struct Event {
    Source source;
    std::vector<std::string> frames;  // of the message; a worker's starts with its identity
  };

  Relay(const zmq::Api& api, Scheduler& scheduler, const Sockets& sockets)
      : api_(api), scheduler_(scheduler), s_(sockets), gone_(scheduler.counters().size()) {}

  // A worker is dead: from now on its records are dropped, and so is what it still says.
  void forget(size_t worker) { gone_.at(worker) = some_gone_ = true; }

  // `watch_outbox`: also return when the client's socket can be written to.
  // Throws StreamError or std::invalid_argument when a peer said what cannot be.
  Event serve(bool routine, bool watch_outbox);

  // What dtorch.profile() records of the controller: what is handled here and, by note(), what Python handles.
  TraceLog& trace() { return trace_; }
  void note(TraceEvent event);  // it ends now

 private:
  bool take_worker(bool routine, Event* out);  // false: nothing there; out->frames is set if it is not routine
  bool take_client(bool routine, Event* out);
  bool is_gone(zmq::Frame& identity);
  void batch(const Part& part, zmq::Frame& stream);
  void rest(void* socket, zmq::Frame& last, Event* out);

  const zmq::Api api_;
  Scheduler& scheduler_;
  const Sockets s_;
  std::vector<bool> gone_;  // by worker
  bool some_gone_ = false;
  bool events_last_ = false;  // what serve() returned last
  TraceLog trace_;
};

}  // namespace dtorch
