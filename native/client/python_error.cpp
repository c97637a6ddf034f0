// See python_error.h. The exceptions are made by Python (dtorch/client/failures.py) because they are rare and read well
// there; C++ carries them as torch's python_error, which every torch binding turns back into the Python exception.
#include "client/python_error.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

namespace dtorch {

namespace {

// Calls dtorch.client.failures.<name>(*args) for the exception to raise and throws it. Steals `args`.
[[noreturn]] void throw_from(const char* name, PyObject* args) {
  PyObject* module = args ? PyImport_ImportModule("dtorch.client.failures") : nullptr;
  PyObject* f = module ? PyObject_GetAttrString(module, name) : nullptr;
  PyObject* error = f ? PyObject_CallObject(f, args) : nullptr;
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_XDECREF(error);
  Py_XDECREF(f);
  Py_XDECREF(module);
  Py_XDECREF(args);
  python_error e;
  e.persist();
  throw e;
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

}  // namespace

bool signals_ok(GilReleased& released) {
  bool ok;
  if (released.state_) {
    PyEval_RestoreThread(released.state_);
    ok = PyErr_CheckSignals() == 0;
    released.state_ = PyEval_SaveThread();
  } else {
    Gil gil;
    ok = PyErr_CheckSignals() == 0;
  }
  return ok;
}

void check_signals() {
  Gil gil;
  if (PyErr_CheckSignals() != 0) {
    python_error e;
    e.persist();
    throw e;
  }
}

void clear_python_error() {
  Gil gil;
  PyErr_Clear();
}

void throw_if_python_error() {
  Gil gil;
  if (PyErr_Occurred()) {
    python_error e;
    e.persist();
    throw e;
  }
}

void start_default_engine() {
  Gil gil;
  PyObject* module = PyImport_ImportModule("dtorch.client.lifecycle");
  PyObject* done = module ? PyObject_CallMethod(module, "start_default", nullptr) : nullptr;
  Py_XDECREF(module);
  if (!done) {
    python_error e;
    e.persist();
    throw e;
  }
  Py_DECREF(done);
}

void throw_engine_error(const std::string& why) {
  Gil gil;
  throw_from("session_ended", Py_BuildValue("(s#)", why.data(), static_cast<Py_ssize_t>(why.size())));
}

void throw_too_large(size_t n, size_t most) {
  Gil gil;
  throw_from("too_large", Py_BuildValue("(KK)", static_cast<unsigned long long>(n), static_cast<unsigned long long>(most)));
}

void throw_worker_died(int worker, const std::string& why) {
  Gil gil;
  throw_from("worker_died", Py_BuildValue("(is#)", worker, why.data(), static_cast<Py_ssize_t>(why.size())));
}

void throw_remote(const std::string& reply, bool at_call) {
  Gil gil;
  throw_from(at_call ? "at_call" : "remote",
             Py_BuildValue("(y#)", reply.data(), static_cast<Py_ssize_t>(reply.size())));
}

void throw_failure(const std::string& reply, const std::string& failure, int worker) {
  if (!reply.empty()) throw_remote(reply, false);
  Gil gil;
  throw_from("request_failed", Py_BuildValue("(is#)", worker, failure.data(), static_cast<Py_ssize_t>(failure.size())));
}

}  // namespace dtorch
