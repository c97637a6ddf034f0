// Random generators of the dtorch device (generator.h). A handle's state is that of a CPU generator on its worker, so
// one worker draws the very numbers that eager PyTorch draws on the CPU with the same seed.
//
// RNG-1  A generator is announced to its worker (SEED) before the first record that names it.
#include "client/generator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <atomic>
#include <deque>
#include <mutex>

#include "client/python_error.h"
#include "client/storage.h"
#include "client/value.h"

namespace dtorch {

namespace {

std::atomic<uint32_t> next_number{1};

struct Handle final : c10::GeneratorImpl {
  Handle(c10::DeviceIndex index, uint32_t n)
      : GeneratorImpl(c10::Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), number(n) {}

  const uint32_t number;
  uint64_t last_seed = c10::default_rng_seed_val;
  uint32_t announced_in = 0;  // the session that knows it

  int worker() const { return device().index(); }

  void announce() {
    ensure_running();
    auto& session = Session::get();
    int w_index = worker_of(device());
    session.admit(w_index);
    Session::Writer w(session);
    w.begin(Record::SEED, w_index, 2);
    mp::put_uint(w.buf(), number);
    mp::put_uint(w.buf(), last_seed);
    w.end();
    announced_in = session.generation();
  }
  void ensure_announced() {
    ensure_running();
    if (number != 0 && announced_in != Session::get().generation()) announce();
  }

  void set_current_seed(uint64_t s) override {
    last_seed = s;
    announce();
  }
  uint64_t current_seed() const override { return last_seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return last_seed;
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "dtorch: its generators have no offset, as CPU generators have none; use manual_seed or set_state");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "dtorch: its generators have no offset, as CPU generators have none; use get_state");
  }
  void set_state(const c10::TensorImpl& state) override {
    ensure_announced();
    auto& session = Session::get();
    session.admit(worker());
    Session::Writer w(session);
    w.begin(Record::RNG_SET, worker(), 2);
    mp::put_uint(w.buf(), number);
    mp::put_bin(w.buf(), state.data(), static_cast<size_t>(state.numel()));
    w.end();
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const_cast<Handle*>(this)->ensure_announced();
    auto& session = Session::get();
    session.admit(worker());
    auto r = session.new_request(worker(), 0);
    {
      Session::Writer w(session);
      w.begin(Record::RNG_GET, r, 2);
      mp::put_uint(w.buf(), number);
      w.end();
    }
    auto reply = ask_done(r);
    auto in = reply_body(reply);
    auto bytes = in.bin();
    auto t = at::detail::empty_cpu({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
    return t.getIntrusivePtr();
  }
  Handle* clone_impl() const override {
    auto* copy = new Handle(device().index(), next_number++);
    copy->last_seed = last_seed;
    copy->announce();
    copy->set_state(*get_state());
    return copy;
  }
};

Handle* handle_of(const at::Generator& g) { return static_cast<Handle*>(g.unsafeGetGeneratorImpl()); }

}  // namespace

uint32_t generator_number(const at::Generator& g, const std::string& op) {
  TORCH_CHECK(g.device().type() == kDevice, "Expected a 'dtorch' device type for generator but found '", g.device().type(),
              "' (", op, ")");
  auto* h = handle_of(g);
  h->ensure_announced();
  return h->number;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::mutex mu;
  static auto* all = new std::deque<at::Generator>;
  int i = index < 0 ? current_worker() : index;
  std::lock_guard lock(mu);
  while (all->size() <= static_cast<size_t>(i))
    all->push_back(at::make_generator<Handle>(static_cast<c10::DeviceIndex>(all->size()), 0));
  return (*all)[static_cast<size_t>(i)];
}

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<Handle>(static_cast<c10::DeviceIndex>(index < 0 ? current_worker() : index), next_number++);
}

void seed_all(uint64_t seed) {
  auto& session = Session::get();
  if (!session.active()) return;
  for (int i = 0; i < session.workers(); ++i) {
    auto g = default_generator(static_cast<c10::DeviceIndex>(i));
    g.set_current_seed(seed);
  }
}

}  // namespace dtorch
