// Where the worker meets Python: importing modules with custom operators, and the exceptions that their kernels raise. What
// a GPU needs of Python is in device_python.h.
//
// The executor runs without the GIL; everything here takes it for as long as it needs it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

struct _object;  // PyObject

namespace dtorch::worker {

struct PythonError {
  std::string type, message;
};

// Holds the interpreter's lock.
class Gil {
 public:
  Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil();

 private:
  int state_;
};

// Takes Python's error indicator, which is set.
PythonError take_python_error();

// The Python exception that the C++ exception being handled stands for, if it does; Python's own error indicator is clear
// afterwards.
std::optional<PythonError> python_error_of(const std::exception& e);

// What imports a module, called as f(module, file, paths): dtorch.worker.imports.import_module. A borrowed reference.
void set_importer(_object* f);
// Calls it; an error is what it raised.
std::optional<PythonError> import_module(std::string_view module, std::string_view file, const std::vector<std::string_view>& paths);

}  // namespace dtorch::worker
