// How much memory this process may use: the machine's, or its control group's (version 2) if that is less.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <limits>
#include <string>

namespace dtorch {

namespace machine {

// The number in a file that holds one, or `otherwise` ("max", no such file).
inline size_t number_in(const std::string& path, size_t otherwise) {
  std::ifstream file(path);
  size_t n;
  return file >> n ? n : otherwise;
}

// The number after a word in a file of "word number" lines.
inline size_t entry_in(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  std::string key;
  size_t n;
  while (file >> key)
    if (key == word && file >> n) return n;
  return 0;
}

// This process's control group (version 2), or an empty string.
inline const std::string& control_group() {
  static const std::string path = [] {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);)
      if (line.rfind("0::", 0) == 0) return "/sys/fs/cgroup" + line.substr(3);
    return std::string();
  }();
  return path;
}

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

// A group's limit is the least of its own and those of the groups around it.
inline size_t group_limit() {
  size_t least = kUnlimited;
  for (std::string path = control_group(); path.size() > sizeof "/sys/fs/cgroup"; path.erase(path.rfind('/')))
    least = std::min(least, number_in(path + "/memory.max", kUnlimited));
  return control_group().empty() ? kUnlimited : std::min(least, number_in("/sys/fs/cgroup/memory.max", kUnlimited));
}

}  // namespace machine

// Bytes of memory this process may use at most.
inline size_t machine_memory() {
  using namespace machine;
  static const size_t total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(total, group_limit());
}

// Of those, how many are to be had now without swapping.
inline size_t available_memory() {
  using namespace machine;
  size_t here = entry_in("/proc/meminfo", "MemAvailable:") * 1024;
  size_t limit = group_limit();
  if (limit == kUnlimited) return here;
  size_t used = number_in(control_group() + "/memory.current", 0);
  size_t reclaimable = entry_in(control_group() + "/memory.stat", "inactive_file");
  used -= std::min(used, reclaimable);
  return std::min(here, limit - std::min(limit, used));
}

}  // namespace dtorch
