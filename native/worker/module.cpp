// dtorch._worker: the thin binding of the executor (stub: dtorch/_worker.pyi).
#include <Python.h>

#include <c10/util/Exception.h>

#include "common/py_api.h"
#include "worker/executor.h"
#include "worker/memory.h"

namespace {

// The client warns of a resized out= itself, where the program can see and filter it.
struct QuietAboutResizing final : c10::WarningHandler {
  void process(const c10::Warning& w) override {
    if (w.msg().rfind("An output with one or more elements was resized", 0) != 0) c10::WarningHandler::process(w);
  }
};

PyObject* py_run(PyObject*, PyObject* args) {
  PyObject* dict;
  unsigned long long socket;
  int worker, parent_fd;
  if (!PyArg_ParseTuple(args, "OKii", &dict, &socket, &worker, &parent_fd)) return nullptr;
  static dtorch::zmq::Api api;
  if (!dtorch::read_zmq_api(dict, &api)) return nullptr;
  dtorch::worker::install_allocator();
  static QuietAboutResizing warnings;
  c10::WarningUtils::set_warning_handler(&warnings);
  std::string failure;
  int status = 2;
  Py_BEGIN_ALLOW_THREADS
  try {
    dtorch::worker::Executor executor(api, reinterpret_cast<void*>(socket), worker, parent_fd);
    status = executor.run();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  Py_END_ALLOW_THREADS
  if (!failure.empty()) {
    PyErr_Format(PyExc_RuntimeError, "worker %d stopped: %s", worker, failure.c_str());
    return nullptr;
  }
  return PyLong_FromLong(status);
}

PyMethodDef methods[] = {
    {"run", py_run, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "dtorch._worker", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__worker() { return PyModule_Create(&module); }
