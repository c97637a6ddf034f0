// dtorch._worker: the thin binding of the executor (stub: dtorch/_worker.pyi).
#include <Python.h>

#include <c10/util/Exception.h>

#include "common/py_api.h"
#include "worker/device_python.h"
#include "worker/executor.h"
#include "worker/memory.h"
#include "worker/pool.h"
#include "worker/python.h"

namespace {

// The client warns of a resized out= itself, where the program can see and filter it. That the weights of a recurrent layer are
// not in one buffer is how workers have them (client/cudnn_rnn.h), and the program can do nothing about it.
struct Quieter final : c10::WarningHandler {
  void process(const c10::Warning& w) override {
    for (const char* known : {"An output with one or more elements was resized", "RNN module weights are not part of single"})
      if (w.msg().rfind(known, 0) == 0) return;
    c10::WarningHandler::process(w);
  }
};

PyObject* py_run(PyObject*, PyObject* args) {
  PyObject *dict, *importer, *hooks;
  const char* device;
  unsigned long long socket;
  int worker, parent_fd, replies;
  if (!PyArg_ParseTuple(args, "OKiiiOsO", &dict, &socket, &worker, &parent_fd, &replies, &importer, &device,
                        &hooks)) return nullptr;
  dtorch::worker::set_importer(importer);
  static dtorch::zmq::Api api;
  if (!dtorch::read_zmq_api(dict, &api)) return nullptr;
  dtorch::worker::install_allocator();
  dtorch::worker::register_nested();
  dtorch::worker::register_batch_norm();
  dtorch::worker::set_device_hooks(hooks);
  static Quieter warnings;
  c10::WarningUtils::set_warning_handler(&warnings);
  std::string failure;
  int status = 2;
  Py_BEGIN_ALLOW_THREADS
  try {
    dtorch::worker::compute_on(device);
    dtorch::worker::Executor executor(api, reinterpret_cast<void*>(socket), worker, parent_fd, replies);
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

// The worker's allocator in any process: benchmarks count eager PyTorch's memory with it, tests check the pool.

PyObject* py_install_allocator(PyObject*, PyObject*) {
  dtorch::worker::install_allocator();
  Py_RETURN_NONE;
}

PyObject* py_allocator_stats(PyObject*, PyObject*) {
  auto& m = dtorch::worker::memory_stats();
  auto& p = dtorch::worker::pool();
  return Py_BuildValue("{s:L,s:L,s:n,s:n}", "allocated", static_cast<long long>(m.allocated), "peak",
                       static_cast<long long>(m.peak), "reserved", static_cast<Py_ssize_t>(p.reserved()), "peak_reserved",
                       static_cast<Py_ssize_t>(p.peak_reserved()));
}

PyObject* py_reset_peaks(PyObject*, PyObject*) {
  dtorch::worker::reset_peaks();
  Py_RETURN_NONE;
}

PyObject* py_pool_allocate(PyObject*, PyObject* n) {
  size_t bytes = PyLong_AsSize_t(n);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromVoidPtr(dtorch::worker::pool().allocate(bytes));
}

PyObject* py_pool_free(PyObject*, PyObject* address) {
  void* data = PyLong_AsVoidPtr(address);
  if (PyErr_Occurred()) return nullptr;
  dtorch::worker::pool().free(data);
  Py_RETURN_NONE;
}

PyObject* py_pool_trim(PyObject*, PyObject*) { return PyLong_FromSize_t(dtorch::worker::pool().trim()); }

PyObject* py_pool_limit(PyObject*, PyObject* n) {
  size_t bytes = PyLong_AsSize_t(n);
  if (PyErr_Occurred()) return nullptr;
  dtorch::worker::pool().set_limit(bytes);
  Py_RETURN_NONE;
}

PyObject* py_pool_check(PyObject*, PyObject*) {
  try {
    dtorch::worker::pool().check();
  } catch (const std::logic_error& e) {
    PyErr_SetString(PyExc_AssertionError, e.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"run", py_run, METH_VARARGS, nullptr},
    {"install_allocator", py_install_allocator, METH_NOARGS, nullptr},
    {"allocator_stats", py_allocator_stats, METH_NOARGS, nullptr},
    {"reset_peaks", py_reset_peaks, METH_NOARGS, nullptr},
    {"pool_allocate", py_pool_allocate, METH_O, nullptr},
    {"pool_free", py_pool_free, METH_O, nullptr},
    {"pool_trim", py_pool_trim, METH_NOARGS, nullptr},
    {"pool_limit", py_pool_limit, METH_O, nullptr},
    {"pool_check", py_pool_check, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "dtorch._worker", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__worker() { return PyModule_Create(&module); }
