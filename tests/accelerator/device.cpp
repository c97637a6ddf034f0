// An accelerator for tests of the worker: its memory is the host's, its streams are queues that a test may hold.
//
// It registers PrivateUse1. A kernel is the CPU's (the boxed fallback), run at once; what is asynchronous is all that the
// executor could get wrong. A copy that does not block is queued on the current stream, and happens when a thread, "the device",
// or a later kernel of that stream gets to it; an event is reached when everything before it in its stream was, and nothing
// is while the test holds the stream. So a kernel's results are there early, but nobody is told.
//
// It is strict where CUDA is: a copy to host memory that is not page-locked blocks, one from it is snapped when it is issued; a
// block that another stream uses is reused when that is done; freed memory is overwritten at once.
//
// What a test holds, sees and breaks are numbers in a file that both map (DTORCH_TEST_ACCELERATOR): kSlots for each worker,
// `Slot` in order, which __init__.py repeats. The functions at the end are called through ctypes by worker.py.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "device.h"

namespace accelerator {

thread_local bool InKernel::now = false;

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// --- what the test sees -----------------------------------------------------------------------------------------------

enum Slot {
  HoldCompute,  // set by the test: the default stream does nothing
  HoldFetch,    // the same for all others
  Fail,         // 1: the device has failed for good; 2: the next kernel fails, and only that
  Limit,        // bytes that may be allocated; 0: any number
  Lends,        // memory is lent to other workers
  Kernels,      // launched
  Waits,        // times that the executor's thread waited for the device
  Fetched,      // copies to the host that happened behind
  Uploaded,     // copies from the host, queued
  Pageable,     // of these, from memory that is not page-locked
  Locked,       // ranges that are page-locked
  Reached,      // the last event for another worker that was reached
  Lent,         // tensors lent to another worker
  Taken,        // copies of what another one lent, queued
  Refuse,       // set by the test: what the executor asks of Python raises
};
constexpr int kSlots = 32;

int me = 0;
std::atomic<int64_t>* board = [] {
  const char* path = std::getenv("DTORCH_TEST_ACCELERATOR");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) std::abort();
  void* p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (p == MAP_FAILED) std::abort();
  return static_cast<std::atomic<int64_t>*>(p);
}();
std::atomic<int64_t>& slot(Slot s, int worker = -1) { return board[(worker < 0 ? me : worker) * kSlots + s]; }

[[noreturn]] void report() {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "accelerator error: device-side assert triggered");
}
void check() {
  if (slot(Fail) == 1) report();
}

// --- streams ----------------------------------------------------------------------------------------------------------

struct Queue;
struct Point {
  Queue* queue = nullptr;
  uint64_t at = 0;
  bool reached() const;
};
struct Work {
  std::function<void()> run;  // a copy, or none
  Point after{};              // waits for that
  int peer = -1, pid = 0;     // or for another worker's event of that number, while that lives
  int64_t number = 0;
  int64_t signal = 0;         // tells other workers that it is reached
  bool ran = false;

  bool may_run() const { return (!after.queue || after.reached()) && (peer < 0 || slot(Reached, peer) >= number || kill(pid, 0)); }
  void do_it() {
    if (std::exchange(ran, true)) return;
    if (run) run();
    run = nullptr;
  }
};
struct Queue {
  std::deque<Work> work;
  uint64_t issued = 0, done = 0;
};
bool Point::reached() const { return !queue || queue->done >= at; }

constexpr int kStreams = 4;
std::mutex mu;  // guards queues and the allocator; no kernel runs with it
std::condition_variable_any issued_some;
Queue queues[kStreams];
thread_local int64_t current = 0;

Queue& queue_of(const c10::Stream& s) { return queues[s.id()]; }
bool is_held(const Queue& q) { return slot(&q == queues ? HoldCompute : HoldFetch) != 0 || slot(Fail) == 1; }

void issue(Queue& q, Work w) {
  q.work.push_back(std::move(w));
  ++q.issued;
  issued_some.notify_one();
}

// Does what can be done; true while some is left.
bool advance() {
  bool some = true, left = false;
  while (some) {
    some = left = false;
    for (auto& q : queues) {
      while (!q.work.empty() && !is_held(q) && q.work.front().may_run()) {
        auto w = std::move(q.work.front());
        q.work.pop_front();
        w.do_it();
        if (w.signal) slot(Reached) = w.signal;
        ++q.done;
        some = true;
      }
      left |= !q.work.empty();
    }
  }
  return left;
}

void pause(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  lock.lock();
}

void wait_for(const Point& p, std::unique_lock<std::mutex>& lock) {
  for (advance(); !p.reached(); advance()) {
    check();
    pause(lock);
  }
}
void block_on(const Point& p, std::unique_lock<std::mutex>& lock) {
  ++slot(Waits);
  wait_for(p, lock);
}

// A kernel sees what was copied before it.
void copies_first(Queue& q, std::unique_lock<std::mutex>& lock) {
  for (size_t i = 0; i < q.work.size(); ++i) {
    while (i < q.work.size() && !q.work[i].ran && !q.work[i].may_run()) {
      check();
      pause(lock);
      i = 0;  // some may be gone
    }
    if (i < q.work.size()) q.work[i].do_it();
  }
}

void device_thread() {
  c10::InferenceMode inference;
  std::unique_lock lock(mu);
  for (;;) {
    if (advance()) issued_some.wait_for(lock, std::chrono::microseconds(200));
    else issued_some.wait(lock);
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device d) const override { TORCH_CHECK(d.index() == 0, "there is one accelerator"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool high) const override { return stream(high ? 1 : 2); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(3); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(std::exchange(current, s.id())); }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard lock(mu);
    check();
    if (!*event) *event = new Point;
    *static_cast<Point*>(*event) = {&queue_of(s), queue_of(s).issued};
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
  void block(void* event, const c10::Stream& s) const override {
    std::lock_guard lock(mu);
    check();
    issue(queue_of(s), {.run = nullptr, .after = *static_cast<Point*>(event)});
  }
  bool queryEvent(void* event) const override {
    std::lock_guard lock(mu);
    check();
    advance();
    return !event || static_cast<Point*>(event)->reached();
  }
  void synchronizeEvent(void* event) const override {
    std::unique_lock lock(mu);
    check();
    block_on(*static_cast<Point*>(event), lock);
  }
  bool queryStream(const c10::Stream& s) const override {
    std::lock_guard lock(mu);
    check();
    advance();
    return queue_of(s).work.empty();
  }
  void synchronizeStream(const c10::Stream& s) const override {
    std::unique_lock lock(mu);
    check();
    block_on({&queue_of(s), queue_of(s).issued}, lock);
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    std::unique_lock lock(mu);
    check();
    for (auto& q : queues) block_on({&q, q.issued}, lock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory -----------------------------------------------------------------------------------------------------------

constexpr size_t kArena = size_t{16} << 30, kUnit = 512, kPage = 4096;

struct Block {
  char* data;
  size_t asked, size;
  std::set<Queue*> used_on;
};
struct Freed {
  Block block;
  std::vector<Point> until;
};

struct Allocator final : c10::DeviceAllocator {
  c10::CachingDeviceAllocator::DeviceStats stats;
  int fd = -1;
  char *arena = nullptr, *end = nullptr;
  std::multimap<size_t, char*> kept, given_back;  // by size
  std::vector<Freed> waiting;                     // for other streams

  void start() {
    if (arena) return;
    fd = memfd_create("test-accelerator", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, kArena) == 0, "no memory for the test's accelerator");
    void* p = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK(p != MAP_FAILED, "no memory for the test's accelerator");
    arena = end = static_cast<char*>(p);
  }
  static void more(c10::CachingDeviceAllocator::StatArray& s, size_t n) { s[0].increase(n); }
  static void less(c10::CachingDeviceAllocator::StatArray& s, size_t n) { s[0].decrease(n); }

  void collect() {
    advance();
    for (auto f = waiting.begin(); f != waiting.end();) {
      if (!std::all_of(f->until.begin(), f->until.end(), [](auto& p) { return p.reached(); })) {
        ++f;
        continue;
      }
      wipe(f->block);
      kept.emplace(f->block.size, f->block.data);
      f = waiting.erase(f);
    }
  }
  static void wipe(const Block& b) { std::memset(b.data, 0xDD, std::min<size_t>(b.size, 1 << 20)); }

  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, kDevice};
    std::unique_lock lock(mu);
    check();
    start();
    collect();
    size_t size = (n + kUnit - 1) / kUnit * kUnit;
    if (size >= kPage) size = (size + kPage - 1) / kPage * kPage;
    auto limit = slot(Limit).load();
    int64_t waiting_bytes = 0;
    for (auto& f : waiting) waiting_bytes += static_cast<int64_t>(f.block.size);
    if (limit && stats.allocated_bytes[0].current + waiting_bytes + static_cast<int64_t>(size) > limit) {
      ++stats.num_alloc_retries, ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "accelerator out of memory: ", n, " bytes do not fit into ", limit);
    }
    char* data = nullptr;
    if (auto found = kept.find(size); found != kept.end()) {
      data = found->second;
      kept.erase(found);
    } else if (auto old = given_back.find(size); old != given_back.end()) {
      data = old->second;
      given_back.erase(old);
      more(stats.reserved_bytes, size);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, end + size <= arena + kArena, "accelerator out of memory");
      data = std::exchange(end, end + size);
      more(stats.reserved_bytes, size);
    }
    more(stats.allocated_bytes, size), more(stats.allocation, 1);
    auto* b = new Block{data, n, size, {}};
    return {data, b, &release, kDevice};
  }
  static void release(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }

  bool initialized() override { return arena != nullptr; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mu);
    collect();
    for (auto& [size, data] : kept) {
      if (size >= kPage) fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, data - arena, static_cast<off_t>(size));
      less(stats.reserved_bytes, size);
    }
    given_back.merge(kept);
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    std::lock_guard lock(mu);
    if (p.get_context()) static_cast<Block*>(p.get_context())->used_on.insert(&queue_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(mu);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard lock(mu);
    for (auto* s : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes}) (*s)[0].reset_accumulated();
    stats.num_ooms = stats.num_alloc_retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(mu);
    for (auto* s : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes}) (*s)[0].reset_peak();
  }
};
Allocator& allocator = *new Allocator;
const bool allocator_is_set = [] {
  c10::SetAllocator(kType, &allocator);
  return true;
}();

void Allocator::release(void* p) {
  std::unique_ptr<Block> b(static_cast<Block*>(p));
  std::lock_guard lock(mu);
  auto& a = allocator;
  less(a.stats.allocated_bytes, b->size), less(a.stats.allocation, 1);
  Freed f{*b, {}};
  for (auto* q : b->used_on)
    if (q != queues) f.until.push_back({q, q->issued});
  // In the default stream whoever gets it next comes behind, as with CUDA's allocator.
  if (!f.until.empty()) return a.waiting.push_back(std::move(f));
  wipe(*b);
  a.kept.emplace(b->size, b->data);
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const { allocator.recordStream(p, s); }

// --- copies -----------------------------------------------------------------------------------------------------------

std::map<const char*, size_t> locked;  // guarded by mu
bool is_locked(const void* p, size_t n) {
  auto at = locked.upper_bound(static_cast<const char*>(p));
  if (at == locked.begin()) return false;
  --at;
  return static_cast<const char*>(p) + n <= at->first + at->second;
}

}  // namespace

void launch() {
  std::unique_lock lock(mu);
  check();
  int64_t once = 2;
  if (slot(Fail).compare_exchange_strong(once, 0)) report();
  auto& q = queues[current];
  copies_first(q, lock);
  issue(q, {});
  ++slot(Kernels);
}

namespace {

// The same memory, as a tensor of the CPU's that owns nothing.
at::Tensor alias(const at::Tensor& t) {
  auto out = at::from_blob(t.storage().mutable_data() ? t.mutable_data_ptr() : nullptr, t.sizes(), t.strides(),
                           at::TensorOptions(t.scalar_type()).device(at::kCPU));
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto source = alias(from).expand(to.sizes()), target = alias(to);
  if (InKernel::now || (!from.is_cpu() && !to.is_cpu())) {
    if (!InKernel::now) launch();
    target.copy_(source);
    return to;
  }
  bool plain = from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.strides() == to.strides() &&
               from.is_non_overlapping_and_dense() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  if (!plain) {  // a kernel makes it plain, on the device's side
    if (from.is_cpu()) source = at::empty_like(target).copy_(source);
    else launch(), source = at::empty_like(target).copy_(source);
  }
  std::unique_lock lock(mu);
  check();
  auto& q = queues[current];
  if (from.is_cpu()) {
    ++slot(Uploaded);
    if (!is_locked(source.const_data_ptr(), from.nbytes())) {
      ++slot(Pageable);
      source = source.clone();
    }
    issue(q, {.run = [source, target] { target.copy_(source); }});
    return to;
  }
  bool blocks = !non_blocking || !is_locked(to.const_data_ptr(), to.nbytes());
  issue(q, {.run = [source, target] {
              target.copy_(source);
              ++slot(Fetched);
            }});
  if (blocks) block_on({&q, q.issued}, lock);
  return to;
}

// The operator itself, and not only what its kernel asks of an unknown device: that never comes to an end for conjugate views.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  copy_from(from, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& t) {
  {
    std::unique_lock lock(mu);
    check();
    copies_first(queues[current], lock);
    block_on({&queues[current], queues[current].issued}, lock);
  }
  return at::_local_scalar_dense(alias(t));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& t, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, sizes, strides, offset);
}
const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  launch();
  return at::native::resize_(t, sizes, format);
}

// --- generators and kernels -------------------------------------------------------------------------------------------

// A CPU generator under the device's name.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator g)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(cpu.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    // The CPU's own: kernels that are given none draw from that.
    static const auto g = at::make_generator<Generator>(at::detail::getDefaultCPUGenerator());
    return g;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
};
const bool hooks_are_set = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launch();
  size_t n = op.schema().arguments().size();
  for (size_t i = stack->size() - n; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isGenerator() && v.toGenerator().defined() && v.toGenerator().device().type() == kType)
      v = static_cast<Generator*>(v.toGenerator().unsafeGetGeneratorImpl())->cpu;
  }
  InKernel in;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  // PyTorch has another kernel for unknown devices, of other bits.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

}  // namespace

}  // namespace accelerator

// --- for worker.py ----------------------------------------------------------------------------------------------------

using namespace accelerator;

#pragma GCC visibility push(default)
extern "C" {

void accelerator_start(int worker) {
  me = worker;
  std::thread(device_thread).detach();
}

int accelerator_refuses() { return slot(Refuse) != 0; }

void accelerator_lock(const void* p, size_t n) {
  std::lock_guard lock(mu);
  locked[static_cast<const char*>(p)] = n;
  slot(Locked) = static_cast<int64_t>(locked.size());
}

int accelerator_unlock(const void* p) {
  std::lock_guard lock(mu);
  bool known = locked.erase(static_cast<const char*>(p)) != 0;
  slot(Locked) = static_cast<int64_t>(locked.size());
  return known;
}

// Where other processes find memory of the device, behind which event; the event's number, or 0: it is not lent.
int64_t accelerator_lend(const void* p, int* fd, uint64_t* offset) {
  std::lock_guard lock(mu);
  static int64_t number = 0;
  if (!slot(Lends)) return 0;
  ++slot(Lent);
  *fd = allocator.fd;
  *offset = static_cast<uint64_t>(static_cast<const char*>(p) - allocator.arena);
  issue(queues[current], {.run = nullptr, .signal = ++number});
  return number;
}

// Has the current stream copy what `accelerator_lend` told another worker; 0: that one is gone.
int accelerator_take(int worker, int pid, int fd, uint64_t offset, int64_t number, void* target, size_t n) {
  static std::map<std::pair<int, int>, char*> open_ones;
  auto& from = open_ones[{pid, fd}];
  if (!from) {
    auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0) return 0;
    void* p = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, own, 0);
    close(own);
    if (p == MAP_FAILED) return 0;
    from = static_cast<char*>(p);
  }
  std::lock_guard lock(mu);
  ++slot(Taken);
  issue(queues[current], {.run = [=, source = from + offset] { std::memcpy(target, source, n); }, .peer = worker, .pid = pid, .number = number});
  return 1;
}

}  // extern "C"

// What this file uses of templates is compiled at its end, and shall not be seen by other libraries: where one of torch's has the
// same (2.11 with CUDA has libtorch_nvshmem.so) the two would share half of a static variable, its guard but not its value.
#pragma GCC visibility pop
