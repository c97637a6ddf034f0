// Reads the dict of libzmq addresses that dtorch/zmq_api.py makes into a zmq::Api.
#pragma once

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include "common/zmq_api.h"

namespace dtorch {

// Sets a Python error and returns false when a name is missing.
inline bool read_zmq_api(PyObject* dict, zmq::Api* api) {
  struct { const char* name; void** slot; } table[] = {
      {"zmq_send", reinterpret_cast<void**>(&api->send)},
      {"zmq_msg_init", reinterpret_cast<void**>(&api->msg_init)},
      {"zmq_msg_init_size", reinterpret_cast<void**>(&api->msg_init_size)},
      {"zmq_msg_data", reinterpret_cast<void**>(&api->msg_data)},
      {"zmq_msg_size", reinterpret_cast<void**>(&api->msg_size)},
      {"zmq_msg_send", reinterpret_cast<void**>(&api->msg_send)},
      {"zmq_msg_recv", reinterpret_cast<void**>(&api->msg_recv)},
      {"zmq_msg_close", reinterpret_cast<void**>(&api->msg_close)},
      {"zmq_msg_more", reinterpret_cast<void**>(&api->msg_more)},
      {"zmq_poll", reinterpret_cast<void**>(&api->poll)},
      {"zmq_errno", reinterpret_cast<void**>(&api->error)},
      {"zmq_strerror", reinterpret_cast<void**>(&api->strerror)},
  };
  for (auto& row : table) {
    PyObject* value = PyDict_GetItemString(dict, row.name);  // borrowed
    if (!value) {
      PyErr_Format(PyExc_KeyError, "the zmq api lacks %s", row.name);
      return false;
    }
    *row.slot = PyLong_AsVoidPtr(value);
    if (!*row.slot) return false;
  }
  return true;
}

}  // namespace dtorch
