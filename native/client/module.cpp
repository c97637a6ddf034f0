// dtorch._client: the thin binding of the client's native part (stub: dtorch/_client.pyi). No logic lives here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include "client/device.h"
#include "client/generator.h"
#include "client/geometry.h"
#include "client/issue.h"
#include "client/python_error.h"
#include "client/session.h"
#include "client/sites.h"
#include "client/spares.h"
#include "client/streams.h"
#include "client/trace.h"
#include "client/value.h"
#include "common/py_api.h"

namespace dtorch {
namespace {

const at::Tensor* tensor_arg(PyObject* o) {
  if (!THPVariable_Check(o)) {
    PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, not %s", Py_TYPE(o)->tp_name);
    return nullptr;
  }
  const at::Tensor& t = THPVariable_Unpack(o);
  if (!is_ours(t)) {
    PyErr_Format(PyExc_ValueError, "expected a tensor on a dtorch device, not on %s", t.device().str().c_str());
    return nullptr;
  }
  return &t;
}

RequestPtr request_arg(unsigned long long id) {
  auto r = Session::get().find(id);
  if (!r) PyErr_Format(PyExc_KeyError, "no request %llu: its value was dropped", id);
  return r;
}

PyObject* ids_list(const std::vector<uint64_t>& ids) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(ids.size()));
  for (size_t i = 0; list && i < ids.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), PyLong_FromUnsignedLongLong(ids[i]));
  return list;
}

PyObject* py_register(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *torch_dir, *dtorch_dir;
  if (!PyArg_ParseTuple(args, "ss", &torch_dir, &dtorch_dir)) return nullptr;
  sites::set_library_prefixes(torch_dir, dtorch_dir);
  register_device();
  register_kernels();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_attach(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* api;
  unsigned long long push, inflight, upload;
  int replies, workers, accelerated;
  long flush_us;
  if (!PyArg_ParseTuple(args, "OKiipKKl", &api, &push, &replies, &workers, &accelerated, &inflight, &upload, &flush_us))
    return nullptr;
  SessionConfig c;
  if (!read_zmq_api(api, &c.api)) return nullptr;
  c.push = reinterpret_cast<void*>(push);
  c.replies = replies;
  c.workers = workers;
  c.accelerated = accelerated;
  c.inflight_bytes = inflight;
  c.upload_bytes = upload;
  c.flush_us = flush_us;
  Session::get().attach(c);
  serve_accelerators(c.accelerated);
  set_current_worker(0);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_receive(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long pull;
  PyObject* list;
  if (!PyArg_ParseTuple(args, "KO!", &pull, &PyList_Type, &list)) return nullptr;
  std::vector<int> fds;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    long fd = PyLong_AsLong(PyList_GET_ITEM(list, i));
    if (fd == -1 && PyErr_Occurred()) return nullptr;
    fds.push_back(static_cast<int>(fd));
  }
  Session::Received got;
  {
    GilReleased released;
    got = Session::get().receive(reinterpret_cast<void*>(pull), fds);
  }
  switch (got.what) {
    case Session::Received::What::Fd: return Py_BuildValue("(si)", "fd", got.fd);
    case Session::Received::What::Message:
      return Py_BuildValue("(sy#)", "message", got.message.data(), static_cast<Py_ssize_t>(got.message.size()));
    default: return Py_BuildValue("(sN)", "completed", ids_list(got.completed));
  }
  END_HANDLE_TH_ERRORS
}

PyObject* py_worker_died(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int worker;
  const char* why;
  if (!PyArg_ParseTuple(args, "is", &worker, &why)) return nullptr;
  std::vector<uint64_t> completed;
  {
    std::string reason = why;
    GilReleased released;
    Session::get().worker_died(worker, reason, &completed);
  }
  return ids_list(completed);
  END_HANDLE_TH_ERRORS
}

PyObject* py_detach(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* why;
  if (!PyArg_ParseTuple(args, "s", &why)) return nullptr;
  std::string reason = why;
  std::vector<uint64_t> completed;
  {
    GilReleased released;
    Session::get().detach(reason);
    completed = Session::get().take_completed();
  }
  return ids_list(completed);
  END_HANDLE_TH_ERRORS
}

PyObject* py_flush(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  GilReleased released;
  Session::get().flush();
  END_HANDLE_TH_ERRORS_RET(nullptr)
  Py_RETURN_NONE;
}

PyObject* py_active(PyObject*, PyObject*) { return PyBool_FromLong(Session::get().active()); }

PyObject* py_site(PyObject*, PyObject* args) {
  unsigned int site;
  if (!PyArg_ParseTuple(args, "I", &site)) return nullptr;
  return sites::describe(site);
}

PyObject* py_fetch(PyObject*, PyObject* arg) {
  HANDLE_TH_ERRORS
  const at::Tensor* t = tensor_arg(arg);
  if (!t) return nullptr;
  RequestPtr r;
  {
    at::Tensor held = *t;
    GilReleased released;
    r = fetch(held);
  }
  return PyLong_FromUnsignedLongLong(r->id);
  END_HANDLE_TH_ERRORS
}

PyObject* py_ready(PyObject*, PyObject* args) {
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
  auto r = request_arg(id);
  if (!r) return nullptr;
  return PyBool_FromLong(r->state.load() != Request::State::Pending);
}

PyObject* py_wait(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long id;
  double timeout;
  if (!PyArg_ParseTuple(args, "Kd", &id, &timeout)) return nullptr;
  auto r = request_arg(id);
  if (!r) return nullptr;
  return PyBool_FromLong(Session::get().wait(r, timeout));
  END_HANDLE_TH_ERRORS
}

PyObject* py_value(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
  auto r = request_arg(id);
  if (!r) return nullptr;
  return THPVariable_Wrap(value_of(r));
  END_HANDLE_TH_ERRORS
}

PyObject* py_watch(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
  auto r = request_arg(id);
  if (!r) return nullptr;
  bool answered;
  {
    GilReleased released;
    answered = Session::get().want_callback(r);
    if (!answered) Session::get().flush();
  }
  return PyBool_FromLong(answered);
  END_HANDLE_TH_ERRORS
}

PyObject* py_done(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
  auto r = request_arg(id);
  if (!r) return nullptr;
  ask_done(r);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_read_file(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int worker, fd;
  unsigned long long offset;
  PyObject *dtype, *shape;
  if (!PyArg_ParseTuple(args, "iiKO!O!", &worker, &fd, &offset, &THPDtypeType, &dtype, &PyTuple_Type, &shape)) return nullptr;
  Dims sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
    long long n = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    if (n == -1 && PyErr_Occurred()) return nullptr;
    sizes.push_back(n);
  }
  worker = worker_of(c10::Device(kDevice, static_cast<c10::DeviceIndex>(worker)));
  auto [t, r] = read_file(worker, reinterpret_cast<THPDtype*>(dtype)->scalar_type, sizes, fd, offset);
  return Py_BuildValue("(NK)", THPVariable_Wrap(t), static_cast<unsigned long long>(r->id));
  END_HANDLE_TH_ERRORS
}

PyObject* py_forget(PyObject*, PyObject* args) {
  unsigned long long id;
  if (!PyArg_ParseTuple(args, "K", &id)) return nullptr;
  Session::get().forget(id);
  Py_RETURN_NONE;
}

PyObject* py_synchronize(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int worker;
  if (!PyArg_ParseTuple(args, "i", &worker)) return nullptr;
  synchronize_stream(c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, static_cast<c10::DeviceIndex>(worker))));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_seed_all(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long seed;
  if (!PyArg_ParseTuple(args, "K", &seed)) return nullptr;
  seed_all(seed);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_default_generator(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int worker;
  if (!PyArg_ParseTuple(args, "i", &worker)) return nullptr;
  return THPGenerator_Wrap(default_generator(static_cast<c10::DeviceIndex>(worker)));
  END_HANDLE_TH_ERRORS
}

PyObject* py_current_device(PyObject*, PyObject*) { return PyLong_FromLong(current_worker()); }

PyObject* py_set_device(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int index;
  if (!PyArg_ParseTuple(args, "i", &index)) return nullptr;
  set_current_worker(worker_of(c10::Device(kDevice, static_cast<c10::DeviceIndex>(index))));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_stats(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int worker;
  const char* what;
  if (!PyArg_ParseTuple(args, "is", &worker, &what)) return nullptr;
  std::string reply;
  {
    std::string topic = what;
    GilReleased released;
    reply = stats_of(worker_of(c10::Device(kDevice, static_cast<c10::DeviceIndex>(worker))), topic);
  }
  return PyBytes_FromStringAndSize(reply.data(), static_cast<Py_ssize_t>(reply.size()));
  END_HANDLE_TH_ERRORS
}

PyObject* py_option(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  int worker;
  const char* name;
  long long value;
  if (!PyArg_ParseTuple(args, "isL", &worker, &name, &value)) return nullptr;
  auto& session = Session::get();
  worker = worker_of(c10::Device(kDevice, static_cast<c10::DeviceIndex>(worker)));
  session.admit(worker);
  Session::Writer w(session);
  w.begin(Record::OPTION, worker, 2);
  mp::put_str(w.buf(), name);
  mp::put_int(w.buf(), value);
  w.end();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_tell_controller(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* frame;
  Py_ssize_t n;
  if (!PyArg_ParseTuple(args, "y#", &frame, &n)) return nullptr;
  GilReleased released;
  Session::get().tell_controller(frame, static_cast<size_t>(n));
  END_HANDLE_TH_ERRORS_RET(nullptr)
  Py_RETURN_NONE;
}

PyObject* py_trace_start(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long limit;
  if (!PyArg_ParseTuple(args, "K", &limit)) return nullptr;
  trace::start(limit);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_trace_stop(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  trace::stop();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_trace_begin(PyObject*, PyObject* arg) {
  Py_ssize_t n;
  const char* name = PyUnicode_AsUTF8AndSize(arg, &n);
  if (!name) return nullptr;
  trace::begin({name, static_cast<size_t>(n)});
  Py_RETURN_NONE;
}

PyObject* py_trace_end(PyObject*, PyObject*) {
  trace::end();
  Py_RETURN_NONE;
}

PyObject* py_trace_take(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  auto taken = trace::take();
  PyObject* texts = PyList_New(0);
  PyObject* threads = PyList_New(0);
  auto append = [](PyObject* list, PyObject* item) {
    if (list && item) PyList_Append(list, item);
    Py_XDECREF(item);
  };
  for (const auto& t : taken.texts) append(texts, PyUnicode_DecodeUTF8(t.data(), static_cast<Py_ssize_t>(t.size()), "replace"));
  for (int tid : taken.threads) append(threads, PyLong_FromLong(tid));
  const char* data = taken.events.empty() ? "" : reinterpret_cast<const char*>(taken.events.data());
  return Py_BuildValue("(y#KNN)", data, static_cast<Py_ssize_t>(taken.events.size() * sizeof(TraceEvent)),
                       static_cast<unsigned long long>(taken.dropped), texts, threads);
  END_HANDLE_TH_ERRORS
}

PyObject* py_op_name(PyObject*, PyObject* args) {
  unsigned int number;
  if (!PyArg_ParseTuple(args, "I", &number)) return nullptr;
  auto name = op_name(number);
  return PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size()));
}

// All workers import at once; the answers come in the order of `workers`.
PyObject* py_import_on(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *workers, *paths;
  const char *module, *file;
  if (!PyArg_ParseTuple(args, "O!ssO!", &PyList_Type, &workers, &module, &file, &PyList_Type, &paths)) return nullptr;
  std::vector<std::string> entries;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(paths); ++i) {
    PyObject* bytes = PyUnicode_EncodeFSDefault(PyList_GET_ITEM(paths, i));
    if (!bytes) return nullptr;
    entries.emplace_back(PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes)));
    Py_DECREF(bytes);
  }
  std::vector<int> where;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(workers); ++i) {
    long index = PyLong_AsLong(PyList_GET_ITEM(workers, i));
    if (index == -1 && PyErr_Occurred()) return nullptr;
    where.push_back(static_cast<int>(index));
  }
  uint32_t site = sites::current();
  std::vector<std::string> replies;
  {
    std::string name = module, origin = file;
    GilReleased released;
    auto& session = Session::get();
    struct Requests : std::vector<RequestPtr> {
      ~Requests() {
        for (auto& request : *this) Session::get().forget(request->id);
      }
    } requests;
    for (int worker : where) {
      session.admit(worker);
      requests.push_back(session.new_request(worker, site));
      Session::Writer w(session);
      w.begin(Record::IMPORT, worker, 5);
      mp::put_uint(w.buf(), requests.back()->id);
      mp::put_uint(w.buf(), site);
      mp::put_str(w.buf(), name);
      mp::put_str(w.buf(), origin);
      mp::put_array(w.buf(), entries.size());
      for (const auto& entry : entries) mp::put_str(w.buf(), entry);
      w.end();
    }
    for (const auto& request : requests) session.wait(request);  // all of them, although one may have failed
    for (const auto& request : requests) replies.push_back(ask_done(request));
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(replies.size()));
  for (size_t i = 0; list && i < replies.size(); ++i)
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i),
                    PyBytes_FromStringAndSize(replies[i].data(), static_cast<Py_ssize_t>(replies[i].size())));
  return list;
  END_HANDLE_TH_ERRORS
}

PyObject* py_run_on_workers(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  if (!PyArg_ParseTuple(args, "ss", &name, &overload)) return nullptr;
  run_on_workers(name, overload);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_counters(PyObject*, PyObject*) {
  auto c = Session::get().counters();
  auto g = geometry_stats();
  auto s = spares().stats();
  return Py_BuildValue("{sKsKsKsKsKsKsKsKsKsKsKsKsn}", "records", c.records, "releases", c.releases, "batches", c.batches, "bytes",
                       c.bytes, "waits", c.waits, "upload_bytes", c.upload_bytes, "geometry_misses", g.misses,
                       "geometry_asks", g.asks, "geometry_miss_ns", g.miss_ns, "geometry_entries", g.entries, "recycled_uploads",
                       s.recycled, "items_told", contents::told(), "spare_bytes", static_cast<Py_ssize_t>(s.bytes));
}

PyObject* py_drop_spares(PyObject*, PyObject*) {
  spares().clear();
  Py_RETURN_NONE;
}

PyObject* py_progress(PyObject*, PyObject*) {
  auto rows = Session::get().progress();
  PyObject* list = PyList_New(0);
  for (auto& [issued, executed] : rows) {
    PyObject* row = Py_BuildValue("(KK)", issued, executed);
    if (!row || PyList_Append(list, row) < 0) {
      Py_XDECREF(row);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(row);
  }
  return list;
}

PyObject* py_storage_of(PyObject*, PyObject* arg) {
  HANDLE_TH_ERRORS
  const at::Tensor* t = tensor_arg(arg);
  if (!t) return nullptr;
  auto* ctx = ctx_of(*t);
  return Py_BuildValue("{sKsisOsO}", "id", ctx->id, "worker", static_cast<int>(ctx->worker), "lazy",
                       ctx->lazy ? Py_True : Py_False, "first",
                       is_first(t->unsafeGetTensorImpl(), ctx) ? Py_True : Py_False);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"register", py_register, METH_VARARGS, nullptr},
    {"attach", py_attach, METH_VARARGS, nullptr},
    {"receive", py_receive, METH_VARARGS, nullptr},
    {"worker_died", py_worker_died, METH_VARARGS, nullptr},
    {"detach", py_detach, METH_VARARGS, nullptr},
    {"flush", py_flush, METH_NOARGS, nullptr},
    {"active", py_active, METH_NOARGS, nullptr},
    {"site", py_site, METH_VARARGS, nullptr},
    {"fetch", py_fetch, METH_O, nullptr},
    {"ready", py_ready, METH_VARARGS, nullptr},
    {"wait", py_wait, METH_VARARGS, nullptr},
    {"value", py_value, METH_VARARGS, nullptr},
    {"watch", py_watch, METH_VARARGS, nullptr},
    {"done", py_done, METH_VARARGS, nullptr},
    {"read_file", py_read_file, METH_VARARGS, nullptr},
    {"forget", py_forget, METH_VARARGS, nullptr},
    {"synchronize", py_synchronize, METH_VARARGS, nullptr},
    {"seed_all", py_seed_all, METH_VARARGS, nullptr},
    {"default_generator", py_default_generator, METH_VARARGS, nullptr},
    {"current_device", py_current_device, METH_NOARGS, nullptr},
    {"set_device", py_set_device, METH_VARARGS, nullptr},
    {"stats", py_stats, METH_VARARGS, nullptr},
    {"option", py_option, METH_VARARGS, nullptr},
    {"import_on", py_import_on, METH_VARARGS, nullptr},
    {"run_on_workers", py_run_on_workers, METH_VARARGS, nullptr},
    {"tell_controller", py_tell_controller, METH_VARARGS, nullptr},
    {"trace_start", py_trace_start, METH_VARARGS, nullptr},
    {"trace_stop", py_trace_stop, METH_NOARGS, nullptr},
    {"trace_begin", py_trace_begin, METH_O, nullptr},
    {"trace_end", py_trace_end, METH_NOARGS, nullptr},
    {"trace_take", py_trace_take, METH_NOARGS, nullptr},
    {"op_name", py_op_name, METH_VARARGS, nullptr},
    {"counters", py_counters, METH_NOARGS, nullptr},
    {"drop_spares", py_drop_spares, METH_NOARGS, nullptr},
    {"progress", py_progress, METH_NOARGS, nullptr},
    {"storage_of", py_storage_of, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "dtorch._client", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace dtorch

PyMODINIT_FUNC PyInit__client() { return PyModule_Create(&dtorch::module); }
