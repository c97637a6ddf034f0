// A shared segment: memory that two processes map, made by memfd_create so that it has no name to leave behind.
//
// SHM-1  A segment lives as long as a descriptor or a mapping of it does; nothing has to be unlinked.
// SHM-2  The maker keeps its descriptor open until the reader says it has mapped it (a token's release, or progress past
//        the record that named it). The reader opens /proc/PID/fd/FD, which works for a process of the same user.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace dtorch {

struct Mapping {
  void* data = nullptr;
  size_t size = 0;
  int fd = -1;  // owned by the maker; a reader closes it once it has mapped

  void unmap() {
    if (data) munmap(data, size);
    data = nullptr;
  }
};

inline std::runtime_error segment_error(const char* what, size_t n) {
  return std::runtime_error(std::string(what) + " (" + std::to_string(n) + " bytes): " + std::strerror(errno));
}

// A new segment of n bytes, mapped for reading and writing.
inline Mapping make_segment(const char* name, size_t n) {
  Mapping m;
  m.size = n;
  m.fd = memfd_create(name, MFD_CLOEXEC);
  if (m.fd < 0) throw segment_error("memfd_create failed", n);
  if (ftruncate(m.fd, static_cast<off_t>(n)) != 0) {
    auto e = segment_error("the shared segment could not be sized", n);
    close(m.fd);
    throw e;
  }
  m.data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, m.fd, 0);
  if (m.data == MAP_FAILED) {
    auto e = segment_error("mmap of a shared segment failed", n);
    close(m.fd);
    throw e;
  }
  return m;
}

// Maps another process's segment; its descriptor is not kept.
inline Mapping open_segment(int pid, int fd, size_t n) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  int own = open(path, O_RDWR | O_CLOEXEC);
  if (own < 0) throw segment_error((std::string("cannot open the shared segment ") + path).c_str(), n);
  Mapping m;
  m.size = n;
  m.data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
  int e = errno;
  close(own);
  if (m.data == MAP_FAILED) {
    errno = e;
    throw segment_error((std::string("cannot map the shared segment ") + path).c_str(), n);
  }
  return m;
}

}  // namespace dtorch
