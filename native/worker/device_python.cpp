// See device_python.h.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "worker/device_python.h"

#include <cstdarg>
#include <stdexcept>

#include "worker/python.h"

namespace dtorch::worker {

namespace {

PyObject* hooks = nullptr;

// A reference that is given back with the lock held, which whoever makes one holds.
struct Ref {
  PyObject* p;
  explicit Ref(PyObject* object) : p(object) {
    if (!p) throw std::runtime_error(take_python_error().message);
  }
  Ref(Ref&& other) noexcept : p(std::exchange(other.p, nullptr)) {}
  Ref& operator=(Ref&&) = delete;
  ~Ref() { Py_XDECREF(p); }
};

// Calls a method with arguments in Py_BuildValue's format, a tuple.
Ref call(const char* method, const char* format, ...) {
  std::va_list values;
  va_start(values, format);
  PyObject* tuple = Py_VaBuildValue(format, values);
  va_end(values);
  Ref args(tuple), bound(PyObject_GetAttrString(hooks, method));
  return Ref(PyObject_CallObject(bound.p, args.p));
}

void* address(const void* p) { return const_cast<void*>(p); }
PyObject* integer(const void* p) { return PyLong_FromVoidPtr(address(p)); }

std::string bytes_of(PyObject* o) {
  char* data;
  Py_ssize_t n;
  if (PyBytes_AsStringAndSize(o, &data, &n) < 0) throw std::runtime_error(take_python_error().message);
  return {data, static_cast<size_t>(n)};
}

int64_t number(PyObject* o) {
  int64_t n = PyLong_AsLongLong(o);
  if (PyErr_Occurred()) throw std::runtime_error(take_python_error().message);
  return n;
}

// An element of a tuple or list that is known to be long enough.
PyObject* at(PyObject* sequence, Py_ssize_t i) {
  return PyTuple_Check(sequence) ? PyTuple_GET_ITEM(sequence, i) : PyList_GET_ITEM(sequence, i);
}

Py_ssize_t length(PyObject* sequence, const char* what) {
  if (!PyTuple_Check(sequence) && !PyList_Check(sequence)) throw std::runtime_error(std::string(what) + " is no sequence");
  return PySequence_Size(sequence);
}

void expect(PyObject* tuple, Py_ssize_t n, const char* what) {
  if (length(tuple, what) != n) throw std::runtime_error(std::string(what) + " has another length");
}

HandlesByPeer handles_by_peer(const Ref& found) {
  HandlesByPeer all;
  for (Py_ssize_t i = 0, n = length(found.p, "the list of peers"); i < n; ++i) {
    PyObject* row = at(found.p, i);
    expect(row, 2, "a peer and its handles");
    auto& [peer, handles] = all.emplace_back(static_cast<int>(number(at(row, 0))), std::vector<std::string>());
    for (Py_ssize_t k = 0, m = length(at(row, 1), "a peer's handles"); k < m; ++k)
      handles.push_back(bytes_of(at(at(row, 1), k)));
  }
  return all;
}

}  // namespace

void set_device_hooks(PyObject* object) { hooks = object; }

void page_lock(const void* data, size_t n) {
  Gil gil;
  call("register", "(NK)", integer(data), static_cast<unsigned long long>(n));
}

void page_unlock(const void* data) {
  Gil gil;
  call("unregister", "(N)", integer(data));
}

std::optional<Lent> lend_device_memory(const void* data, size_t n, int dest) {
  Gil gil;
  Ref found = call("export", "(NKi)", integer(data), static_cast<unsigned long long>(n), dest);
  if (found.p == Py_None) return std::nullopt;
  expect(found.p, 4, "what export returned");
  return Lent{static_cast<int>(number(at(found.p, 0))), bytes_of(at(found.p, 1)), static_cast<uint64_t>(number(at(found.p, 2))),
              bytes_of(at(found.p, 3))};
}

void copy_lent(int source, void* target, size_t n, const Lent& lent) {
  Gil gil;
  call("copy", "(iNKiy#Ky#)", source, integer(target), static_cast<unsigned long long>(n), lent.device, lent.handle.data(),
       static_cast<Py_ssize_t>(lent.handle.size()), static_cast<unsigned long long>(lent.offset), lent.event.data(),
       static_cast<Py_ssize_t>(lent.event.size()));
}

HandlesByPeer revoked_allocations(const std::vector<const void*>& lent) {
  Gil gil;
  Ref list(PyList_New(0));
  for (const void* p : lent) {
    Ref pointer(integer(p));
    if (PyList_Append(list.p, pointer.p) < 0) throw std::runtime_error(take_python_error().message);
  }
  return handles_by_peer(call("revoke", "(O)", list.p));
}

HandlesByPeer freed_allocations() {
  Gil gil;
  return handles_by_peer(call("freed", "()"));
}

void close_allocations(int source, const std::vector<std::string>& handles) {
  Gil gil;
  Ref list(PyList_New(0));
  for (const auto& h : handles) {
    Ref handle(PyBytes_FromStringAndSize(h.data(), static_cast<Py_ssize_t>(h.size())));
    if (PyList_Append(list.p, handle.p) < 0) throw std::runtime_error(take_python_error().message);
  }
  call("close_peer", "(iO)", source, list.p);
}

void forget_peer(int worker) {
  Gil gil;
  call("peer_gone", "(i)", worker);
}

std::vector<std::pair<std::string, std::variant<int64_t, std::string>>> device_properties() {
  Gil gil;
  Ref found = call("properties", "()");
  std::vector<std::pair<std::string, std::variant<int64_t, std::string>>> all;
  auto text = [](PyObject* o) {
    const char* utf8 = PyUnicode_AsUTF8(o);
    if (!utf8) throw std::runtime_error(take_python_error().message);
    return std::string(utf8);
  };
  for (Py_ssize_t i = 0, n = length(found.p, "what properties returned"); i < n; ++i) {
    PyObject* row = at(found.p, i);
    expect(row, 2, "a row of what properties returned");
    PyObject* value = at(row, 1);
    if (PyLong_Check(value)) all.emplace_back(text(at(row, 0)), number(value));
    else all.emplace_back(text(at(row, 0)), text(value));
  }
  return all;
}

std::pair<size_t, size_t> device_memory_info() {
  Gil gil;
  Ref found = call("memory_info", "()");
  expect(found.p, 2, "what memory_info returned");
  return {static_cast<size_t>(number(at(found.p, 0))), static_cast<size_t>(number(at(found.p, 1)))};
}

void limit_device_memory(size_t n) {
  Gil gil;
  call("memory_limit", "(K)", static_cast<unsigned long long>(n));
}

}  // namespace dtorch::worker
