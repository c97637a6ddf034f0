// See python.h.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/Exceptions.h>

#include "worker/python.h"

namespace dtorch::worker {

namespace {

PyObject* importer = nullptr;

std::string text_of(PyObject* value) {
  PyObject* text = value ? PyObject_Str(value) : nullptr;
  const char* utf8 = text ? PyUnicode_AsUTF8(text) : nullptr;
  std::string found = utf8 ? utf8 : "an exception that has no text";
  Py_XDECREF(text);
  PyErr_Clear();
  return found;
}

// A type's name without its module.
std::string name_of(PyObject* type) {
  std::string name = type ? reinterpret_cast<PyTypeObject*>(type)->tp_name : "RuntimeError";
  return name.substr(name.rfind('.') + 1);
}

}  // namespace

PythonError take_python_error() {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PythonError error{name_of(type), text_of(value)};
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return error;
}

std::optional<PythonError> python_error_of(const std::exception& e) {
  // What a kernel written in Python throws: torch's exception, or pybind11's.
  if (auto* caught = dynamic_cast<const pybind11::error_already_set*>(&e)) {
    Gil gil;
    return PythonError{name_of(caught->type().ptr()), text_of(caught->value().ptr())};
  }
  auto* raised = dynamic_cast<const python_error*>(&e);
  if (!raised) return std::nullopt;
  Gil gil;
  if (raised->type) python_error(*raised).restore();  // it was carried here from another thread
  if (!PyErr_Occurred()) return PythonError{"RuntimeError", e.what()};
  return take_python_error();
}

Gil::Gil() : state_(PyGILState_Ensure()) {}
Gil::~Gil() { PyGILState_Release(static_cast<PyGILState_STATE>(state_)); }

void set_importer(PyObject* f) { importer = f; }

std::optional<PythonError> import_module(std::string_view module, std::string_view file,
                                         const std::vector<std::string_view>& paths) {
  Gil gil;
  auto str = [](std::string_view s) { return PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "surrogateescape"); };
  PyObject* list = PyList_New(0);
  bool good = list != nullptr;
  for (auto path : paths) {
    PyObject* item = good ? str(path) : nullptr;
    good = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
  }
  PyObject* args = good ? Py_BuildValue("(NNO)", str(module), str(file), list) : nullptr;
  PyObject* done = args ? PyObject_CallObject(importer, args) : nullptr;
  Py_XDECREF(args);
  Py_XDECREF(list);
  if (!done) return take_python_error();
  Py_DECREF(done);
  return std::nullopt;
}

}  // namespace dtorch::worker
