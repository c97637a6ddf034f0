// Which line of the client's own code issued an operator: a number per call site, found in nanoseconds.
//
// Operator kernels run on the caller's thread with the GIL released, so that thread's interpreter frames stand still and
// can be read. A frame's instruction pointer says both the code object and the place in it; hashing those of the frames
// from the innermost outwards, up to the first frame of the client's own code and a few beyond, names the call site.
// The first time a hash is seen the GIL is taken once and the stack is kept as (code object, offset) pairs, from which
// the exact lines are computed when somebody asks. "The client's own code" is any file that is not inside the torch or
// dtorch packages (a model library's file counts as own: that is where the op stands).
//
// SITE-1  A site's code objects are kept alive, so a pointer that was hashed is never reused by other code.
// SITE-2  Backward operators run on threads without Python frames; they carry the site of the forward operator that made
//         their autograd node, marked kBackward.
#pragma once

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <cstdint>

namespace dtorch::sites {

constexpr uint32_t kUnknown = 0;
constexpr uint32_t kBackward = 1u << 30;

// The number of the present call site.
uint32_t current();

// New reference: list of (filename, line, function), innermost first; needs the GIL.
PyObject* describe(uint32_t site);

// The package directories whose files are not the client's own code.
void set_library_prefixes(const char* torch_dir, const char* dtorch_dir);

}  // namespace dtorch::sites
