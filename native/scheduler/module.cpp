// dtorch._scheduler: the thin binding of Scheduler. Plain CPython API, so that it builds in a second and links nothing.
//
// split() works in three steps: walk without the GIL; make the bytes objects with it; fill them without it. Nobody else
// can see the objects until they are returned, so filling them without the GIL is safe.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <memory>

#include "common/py_api.h"
#include "scheduler/relay.h"
#include "scheduler/scheduler.h"

namespace {

using dtorch::Part;
using dtorch::Run;
using dtorch::Scheduler;

struct Object {
  PyObject_HEAD
  Scheduler* core;      // owned
  dtorch::Relay* relay;  // owned; null until attach()
};

struct Decref {
  void operator()(PyObject* o) const { Py_XDECREF(o); }
};
using Ref = std::unique_ptr<PyObject, Decref>;

class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() { PyEval_RestoreThread(state_); }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

class View {
 public:
  explicit View(PyObject* from) : ok_(PyObject_GetBuffer(from, &buffer_, PyBUF_SIMPLE) == 0) {}
  ~View() { if (ok_) PyBuffer_Release(&buffer_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  bool ok() const { return ok_; }
  const uint8_t* data() const { return static_cast<const uint8_t*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
  bool ok_;
};

// Turns the C++ exception in flight into the Python one.
PyObject* raise_current() {
  try {
    throw;
  } catch (const dtorch::StreamError& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

PyObject* unfilled(size_t size) { return PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)); }

void fill(PyObject* bytes, const std::vector<Run>& runs, const uint8_t* stream) {
  char* to = PyBytes_AS_STRING(bytes);
  for (const Run& run : runs) {
    std::memcpy(to, stream + run.begin, run.end - run.begin);
    to += run.end - run.begin;
  }
}

PyObject* split(PyObject* self, PyObject* stream) {
  View view(stream);
  if (!view.ok()) return nullptr;
  std::vector<Part> parts;
  try {
    ReleasedGil unlocked;
    parts = reinterpret_cast<Object*>(self)->core->split(view.data(), view.size());
  } catch (...) {
    return raise_current();
  }

  Ref list(PyList_New(static_cast<Py_ssize_t>(parts.size())));
  if (!list) return nullptr;
  struct Copy {
    PyObject* bytes;  // borrowed from the list
    const std::vector<Run>* runs;
  };
  std::vector<Copy> copies;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    // The stream as a whole is one worker's and has no releases: pass the caller's own object on.
    bool whole = part.record_bytes == view.size();
    Ref records(whole ? Py_NewRef(stream) : unfilled(part.record_bytes));
    Ref releases(unfilled(part.release_bytes));
    if (!records || !releases) return nullptr;
    if (!whole && part.record_bytes) copies.push_back({records.get(), &part.records});
    if (part.release_bytes) copies.push_back({releases.get(), &part.releases});
    PyObject* tuple = Py_BuildValue("(IKKKNN)", part.worker, part.first_seq, part.count, part.release_count,
                                    records.release(), releases.release());
    if (!tuple) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), tuple);
  }
  {
    ReleasedGil unlocked;
    for (const Copy& copy : copies) fill(copy.bytes, *copy.runs, view.data());
  }
  return list.release();
}

PyObject* executed(PyObject* self, PyObject* args) {
  Py_ssize_t worker;
  long long seq;
  if (!PyArg_ParseTuple(args, "nL:executed", &worker, &seq)) return nullptr;
  try {
    reinterpret_cast<Object*>(self)->core->executed(static_cast<size_t>(worker), static_cast<uint64_t>(seq));
  } catch (...) {
    return raise_current();
  }
  Py_RETURN_NONE;
}

PyObject* attach(PyObject* self, PyObject* args) {
  PyObject* dict;
  unsigned long long inbox, outbox, router;
  int events;
  if (!PyArg_ParseTuple(args, "OKKKi:attach", &dict, &inbox, &outbox, &router, &events)) return nullptr;
  dtorch::zmq::Api api;
  if (!dtorch::read_zmq_api(dict, &api)) return nullptr;
  auto* object = reinterpret_cast<Object*>(self);
  auto socket = [](unsigned long long address) { return reinterpret_cast<void*>(address); };
  delete object->relay;
  object->relay = new dtorch::Relay(api, *object->core, {socket(inbox), socket(outbox), socket(router), events});
  Py_RETURN_NONE;
}

dtorch::Relay* relay_of(PyObject* self) {
  auto* relay = reinterpret_cast<Object*>(self)->relay;
  if (!relay) PyErr_SetString(PyExc_ValueError, "the scheduler has no sockets yet: attach() comes first");
  return relay;
}

PyObject* forget(PyObject* self, PyObject* args) {
  Py_ssize_t worker;
  if (!PyArg_ParseTuple(args, "n:forget", &worker)) return nullptr;
  auto* relay = relay_of(self);
  if (!relay) return nullptr;
  try {
    relay->forget(static_cast<size_t>(worker));
  } catch (...) {
    return raise_current();
  }
  Py_RETURN_NONE;
}

PyObject* serve(PyObject* self, PyObject* args) {
  int routine, watch_outbox;
  if (!PyArg_ParseTuple(args, "pp:serve", &routine, &watch_outbox)) return nullptr;
  auto* relay = relay_of(self);
  if (!relay) return nullptr;
  dtorch::Relay::Event event{};
  try {
    ReleasedGil unlocked;
    event = relay->serve(routine != 0, watch_outbox != 0);
  } catch (...) {
    return raise_current();
  }
  Ref frames(PyList_New(static_cast<Py_ssize_t>(event.frames.size())));
  if (!frames) return nullptr;
  for (size_t i = 0; i < event.frames.size(); ++i) {
    const auto& f = event.frames[i];
    PyObject* bytes = PyBytes_FromStringAndSize(f.data(), static_cast<Py_ssize_t>(f.size()));
    if (!bytes) return nullptr;
    PyList_SET_ITEM(frames.get(), static_cast<Py_ssize_t>(i), bytes);
  }
  return Py_BuildValue("(iN)", static_cast<int>(event.source), frames.release());
}

// Starts the trace, or stops it and hands over the oldest events.
PyObject* trace(PyObject* self, PyObject* args) {
  unsigned long long limit;
  auto* relay = relay_of(self);
  if (!relay || !PyArg_ParseTuple(args, "K:trace", &limit)) return nullptr;
  auto& log = relay->trace();
  if (limit) log.start(limit);
  else log.stop();
  auto events = log.take();
  auto dropped = log.dropped();
  if (!limit && events.empty()) log.clear();
  return Py_BuildValue("(y#K)", events.empty() ? "" : reinterpret_cast<const char*>(events.data()),
                       static_cast<Py_ssize_t>(events.size() * sizeof(dtorch::TraceEvent)), dropped);
}

PyObject* note(PyObject* self, PyObject* args) {
  int kind, worker;
  unsigned long long start, number, bytes;
  unsigned int records;
  auto* relay = relay_of(self);
  if (!relay || !PyArg_ParseTuple(args, "iiKKKI:note", &kind, &worker, &start, &number, &bytes, &records)) return nullptr;
  dtorch::TraceEvent event{};
  event.start = start;
  event.number = number;
  event.bytes = bytes;
  event.detail = records;
  event.worker = static_cast<int8_t>(worker);
  event.kind = static_cast<uint8_t>(dtorch::kTraceMessage + kind);
  relay->note(event);
  Py_RETURN_NONE;
}

PyObject* streams(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(reinterpret_cast<Object*>(self)->core->streams());
}

PyObject* stats(PyObject* self, PyObject*) {
  const auto& counters = reinterpret_cast<Object*>(self)->core->counters();
  Ref list(PyList_New(static_cast<Py_ssize_t>(counters.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < counters.size(); ++i) {
    const auto& c = counters[i];
    PyObject* dict = Py_BuildValue("{s:n,s:K,s:K,s:K,s:K,s:K}", "worker", static_cast<Py_ssize_t>(i), "records", c.records,
                                   "releases", c.releases, "bytes", c.bytes, "queued", c.records, "executed", c.executed);
    if (!dict) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), dict);
  }
  return list.release();
}

// {kind: elements} -> table; false with a Python error set.
bool read_lengths(PyObject* dict, Scheduler::Lengths* lengths) {
  lengths->fill(0);
  PyObject *key, *value;
  for (Py_ssize_t pos = 0; PyDict_Next(dict, &pos, &key, &value);) {
    long kind = PyLong_AsLong(key), length = PyLong_AsLong(value);
    if (PyErr_Occurred()) return false;
    if (kind < 0 || kind >= static_cast<long>(Scheduler::kKinds) || length < 2 || length > 0xffff) {
      PyErr_Format(PyExc_ValueError, "a record of kind %ld with %ld elements cannot be", kind, length);
      return false;
    }
    (*lengths)[static_cast<size_t>(kind)] = static_cast<uint32_t>(length);
  }
  return true;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"workers", "lengths", nullptr};
  Py_ssize_t workers;
  PyObject* dict;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO!:Scheduler", const_cast<char**>(names), &workers, &PyDict_Type, &dict))
    return nullptr;
  if (workers < 1 || workers > 0xffff) {
    PyErr_Format(PyExc_ValueError, "a scheduler for %zd workers cannot be", workers);
    return nullptr;
  }
  Scheduler::Lengths lengths;
  if (!read_lengths(dict, &lengths)) return nullptr;
  auto* self = reinterpret_cast<Object*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  try {
    self->core = new Scheduler(static_cast<size_t>(workers), lengths);
  } catch (...) {
    Py_DECREF(self);
    return raise_current();
  }
  return reinterpret_cast<PyObject*>(self);
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object*>(self)->relay;
  delete reinterpret_cast<Object*>(self)->core;
  type->tp_free(self);
  Py_DECREF(type);  // instances of a heap type own a reference to it
}

PyMethodDef methods[] = {
    {"split", split, METH_O, "Split a record stream into one batch per worker; see dtorch/_scheduler.pyi."},
    {"executed", executed, METH_VARARGS, "Note that a worker has executed all up to a number."},
    {"attach", attach, METH_VARARGS, "Give it the sockets that serve() works on."},
    {"forget", forget, METH_VARARGS, "A worker is dead: drop its records and what it still says."},
    {"serve", serve, METH_VARARGS, "Relay what is routine until something is not; see dtorch/_scheduler.pyi."},
    {"trace", trace, METH_VARARGS, "Start the trace, or stop it and take its oldest events."},
    {"note", note, METH_VARARGS, "Add an event that ends now to the trace."},
    {"streams", streams, METH_NOARGS, "How many record streams were accepted."},
    {"stats", stats, METH_NOARGS, "Counters, one dict per worker."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_doc, const_cast<char*>("Splits record streams per worker and counts; one thread at a time.")},
    {0, nullptr},
};

PyType_Spec spec = {"dtorch._scheduler.Scheduler", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "dtorch._scheduler", "The controller's per-record work, in C++.", -1, nullptr, nullptr, nullptr,
    nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__scheduler() {
  Ref self(PyModule_Create(&module));
  Ref type(PyType_FromSpec(&spec));
  if (!self || !type || PyModule_AddObjectRef(self.get(), "Scheduler", type.get()) < 0) return nullptr;
  return self.release();
}
