// Shared segments: memory that two processes map, made by memfd_create so that it has no name to leave behind.
//
// SHM-1  A segment lives as long as a descriptor or a mapping of it does; nothing has to be unlinked.
// SHM-2  An uploaded segment goes over whole: the client keeps its descriptor open until the worker has executed the
//        record that names it, and the worker's mapping then owns it, until its tensor is gone and the worker says
//        RETURNED (where that was asked for: client/spares.h). A worker's value is lent as a part of the worker's pool:
//        from the moment it is handed over until the reader releases the token, when its own mapping goes, the worker
//        neither writes to that memory nor uses it for anything else.
// SHM-3  A reader maps what is lent to it privately: its writes are its own (copy on write).
// A descriptor is opened as /proc/PID/fd/FD, which works for a process of the same user.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace dtorch {

// A process may have some 65,000 mappings (vm.max_map_count). Beyond so many lent ones, further values are copied.
inline std::atomic<int> lent_mappings{0};
constexpr int kMaxLentMappings = 30000;

struct Mapping {
  void* data = nullptr;   // where the bytes meant begin
  size_t size = 0;        // how many
  int fd = -1;            // a descriptor of the segment, or none
  void* pages = nullptr;  // the mapping itself: whole pages around the data; null where the data is a copy from malloc
  size_t length = 0;
  bool lent = false;

  // Ends the mapping and closes the descriptor.
  void end() {
    if (pages) munmap(pages, length);
    else std::free(data);
    if (lent) --lent_mappings;
    if (fd >= 0) close(fd);
    *this = {};
  }
};

inline std::runtime_error segment_error(const char* what, size_t n) {
  return std::runtime_error(std::string(what) + " (" + std::to_string(n) + " bytes): " + std::strerror(errno));
}

// The descriptor of a new segment that holds a copy of n bytes. Written, not mapped: that spares the page faults, which
// take longer than the copy.
inline int make_segment(const char* name, const void* data, size_t n) {
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) throw segment_error("memfd_create failed", n);
  for (size_t done = 0; done < n;) {
    ssize_t wrote = write(fd, static_cast<const char*>(data) + done, n - done);
    if (wrote > 0) {
      done += static_cast<size_t>(wrote);
    } else if (errno != EINTR) {
      auto e = segment_error("the shared segment could not be written", n);
      close(fd);
      throw e;
    }
  }
  return fd;
}

// A descriptor of another process, opened here for the time of a scope.
struct Descriptor {
  Descriptor(int pid, int other, int flags) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, other);
    fd = open(path, flags | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(std::string("cannot open ") + path + ": " + std::strerror(errno));
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  int keep() { return std::exchange(fd, -1); }

  int fd;
};

// Reads n bytes from `offset`, or throws.
inline void read_all(int fd, void* data, size_t n, size_t offset) {
  for (size_t done = 0; done < n;) {
    ssize_t got = pread(fd, static_cast<char*>(data) + done, n - done, static_cast<off_t>(offset + done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0) {
      throw std::runtime_error("the file ends at byte " + std::to_string(offset + done) + ", " + std::to_string(n - done) +
                               " bytes too early");
    } else if (errno != EINTR) {
      throw std::runtime_error(std::string("reading failed: ") + std::strerror(errno));
    }
  }
}

enum class Sharing { Owned = MAP_SHARED, Lent = MAP_PRIVATE | MAP_NORESERVE };

// Maps n bytes from `offset` of another process's segment; `keep` leaves a descriptor of it in the mapping.
inline Mapping open_segment(int pid, int fd, size_t offset, size_t n, Sharing sharing, bool keep = false) {
  Descriptor own(pid, fd, O_RDWR);
  Mapping m;
  m.size = n;
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), begin = offset / page * page;
  m.length = offset - begin + n;
  bool lent = sharing == Sharing::Lent;
  m.pages = lent && lent_mappings.load() >= kMaxLentMappings
                ? MAP_FAILED
                : mmap(nullptr, m.length, PROT_READ | PROT_WRITE, static_cast<int>(sharing), own.fd, static_cast<off_t>(begin));
  int e = errno;
  if (m.pages == MAP_FAILED && lent) {
    std::unique_ptr<void, decltype(&std::free)> copy(std::malloc(n), &std::free);
    if (!copy) throw std::bad_alloc();
    read_all(own.fd, copy.get(), n, offset);
    m.pages = nullptr;
    m.data = copy.release();
    return m;
  }
  if (m.pages == MAP_FAILED) {
    errno = e;
    throw segment_error("cannot map a shared segment", n);
  }
  if (keep) m.fd = own.keep();
  m.data = static_cast<char*>(m.pages) + (offset - begin);
  m.lent = lent;
  if (lent) ++lent_mappings;
  return m;
}

}  // namespace dtorch
