// The few places where native client code meets Python: the GIL around waits, signals, and our exception classes.
#pragma once

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <string>

namespace dtorch {

// Lets go of the GIL if this thread holds it, until the end of the scope.
class GilReleased {
 public:
  GilReleased() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~GilReleased() {
    if (state_) PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  friend bool signals_ok(GilReleased&);
  PyThreadState* state_;
};

// Serves pending signals; false when a handler raised (the Python error stays set for throw_if_python_error).
bool signals_ok(GilReleased& released);
// The same where the GIL may or may not be held; throws what a handler raised.
void check_signals();
// Drops the Python error that is set on this thread, if any: a kernel written in Python leaves it there when it throws.
void clear_python_error();
// Throws the Python error that is set on this thread, if any.
void throw_if_python_error();

// dtorch.client.engine.start_default(), with the GIL.
void start_default_engine();

[[noreturn]] void throw_engine_error(const std::string& why);
// A tensor of n bytes where the machine has `most` for it.
[[noreturn]] void throw_too_large(size_t n, size_t most);
[[noreturn]] void throw_worker_died(int worker, const std::string& why);
// `reply` is the ERROR message's frame; raises what dtorch.client.failures makes of it. `at_call` raises the worker's
// own exception type with its own message (shape errors found by asking the worker).
[[noreturn]] void throw_remote(const std::string& reply, bool at_call);
// A request that failed: by reply or by a death.
[[noreturn]] void throw_failure(const std::string& reply, const std::string& failure, int worker);

}  // namespace dtorch
