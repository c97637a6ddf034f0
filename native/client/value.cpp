// See value.h. Values up to kInlineBytes travel in records and replies; larger ones as segments (SHM-1, SHM-2).
#include "client/value.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MapAllocator.h>
#include <ATen/ops/empty_strided.h>

#include "client/issue.h"
#include "client/pinned.h"
#include "client/python_error.h"
#include "client/sites.h"
#include "client/spares.h"
#include "common/machine.h"

namespace dtorch {

namespace {

bool dense(const at::Tensor& t) { return t.is_non_overlapping_and_dense(); }

at::Tensor resolved(const at::Tensor& t) {
  auto r = t;
  if (r.is_conj()) r = r.resolve_conj();
  if (r.is_neg()) r = r.resolve_neg();
  return r;
}

// Where a CPU tensor lies in shared memory that has a descriptor, as pinned tensors and a DataLoader's batches do: fd and
// offset.
std::optional<std::pair<int, size_t>> shared_part(const at::Tensor& cpu) {
  if (auto pinned = pinned_part(cpu.const_data_ptr())) return pinned;
  auto* segment = at::MapAllocator::fromDataPtr(cpu.storage().data_ptr());
  if (!segment || segment->fd() < 0 || !(segment->flags() & at::ALLOCATOR_MAPPED_SHAREDMEM)) return {};
  auto offset = static_cast<const char*>(cpu.const_data_ptr()) - static_cast<const char*>(segment->data());
  return std::pair(segment->fd(), static_cast<size_t>(offset));
}

// Puts a dense CPU tensor's memory into a lazy storage of the same geometry. Large values go over in a segment that is
// copied here; `non_blocking`, as everywhere in PyTorch, promises that nobody writes to the tensor before the device has
// been synchronised: then the worker copies what lies in shared memory already.
void put(const at::Tensor& cpu, StorageCtx* ctx, bool non_blocking) {
  auto& session = Session::get();
  session.admit(ctx->worker);
  uint32_t site = sites::current();
  size_t n = static_cast<size_t>(cpu.numel()) * cpu.element_size();
  if (n <= kInlineBytes) {
    auto given = contents::given(cpu);
    Session::Writer w(session);
    ctx->last_seq = w.begin(Record::PUT, ctx->worker, 4);
    w.about(0, site);
    mp::put_uint(w.buf(), ctx->id);
    put_geometry(w.buf(), ctx->first.dtype, ctx->first.sizes, ctx->first.strides, 0, 0);
    mp::put_bin(w.buf(), cpu.const_data_ptr(), n);
    mp::put_uint(w.buf(), site);
    ctx->lazy = false;
    w.end();
    ctx->contents = std::move(given);
    return;
  }
  WorkerState::Upload upload{0, n, nullptr, false};
  int fd;
  size_t offset = 0;
  uint64_t spare = 0;
  auto shared = non_blocking ? shared_part(cpu) : std::nullopt;
  if (shared) {
    std::tie(fd, offset) = *shared;
    upload.kept = std::make_shared<c10::Storage>(cpu.storage());
  } else {
    constexpr size_t kLarge = size_t{32} << 20;
    if (n >= kLarge && n > available_memory()) throw_too_large(n, available_memory());
    auto segment = spares().fill(cpu.const_data_ptr(), n, ctx->worker);
    fd = segment->fd;
    spare = segment->id;
    upload.ours = true;
    upload.kept = std::move(segment);
  }
  Session::Writer w(session);
  ctx->last_seq = upload.seq = w.begin(Record::MAP, ctx->worker, 9);
  w.about(0, site);
  mp::put_uint(w.buf(), ctx->id);
  put_geometry(w.buf(), ctx->first.dtype, ctx->first.sizes, ctx->first.strides, 0, 0);
  mp::put_int(w.buf(), session.owner());
  mp::put_int(w.buf(), fd);
  mp::put_uint(w.buf(), offset);
  mp::put_uint(w.buf(), n);
  mp::put_bool(w.buf(), shared.has_value());
  mp::put_uint(w.buf(), spare);
  mp::put_uint(w.buf(), site);
  ctx->lazy = false;
  session.add_upload(w, ctx->worker, std::move(upload));
  w.end();
}

// True when writing all of `dst` at once may give its lazy storage its first contents.
bool fresh(const at::Tensor& dst) {
  auto* ctx = ctx_of(dst);
  return ctx->lazy && is_first(dst.unsafeGetTensorImpl(), ctx) && dense(dst) &&
         ctx->nbytes == static_cast<size_t>(dst.numel()) * dst.element_size();
}

void copy_on_worker(const at::Tensor& dst, const at::Tensor& src) {
  static const OpInfo& info = op_info("aten::copy_", "");
  torch::jit::Stack stack{dst, src, false};
  issue_boxed(info, &stack);
}

void upload_into(const at::Tensor& src0, const at::Tensor& dst, bool non_blocking) {
  auto src = resolved(src0);
  if (fresh(dst) && src.scalar_type() == dst.scalar_type() && src.sizes() == dst.sizes()) {
    if (src.strides() != dst.strides() || !dense(src)) {
      auto packed = at::empty_strided(dst.sizes(), dst.strides(), src.options());
      packed.copy_(src);
      src = packed;
    }
    return put(src, ctx_of(dst), non_blocking);
  }
  copy_on_worker(dst, upload(src, ctx_of(dst)->worker));
}

// SEND on the source's worker, RECV on the destination's: each in its own stream's order.
void transfer(const at::Tensor& src, const at::Tensor& dst) {
  auto& session = Session::get();
  auto* from = ctx_of(src);
  int target = ctx_of(dst)->worker;
  check_alive(from);
  // The worker sends a dense tensor's memory as it is and packs any other row-major.
  bool as_is = dense(src) && !src.is_conj() && !src.is_neg();
  Dims strides = as_is ? Dims(src.strides().begin(), src.strides().end()) : row_major(src.sizes());
  bool direct = fresh(dst) && src.scalar_type() == dst.scalar_type() && src.sizes() == dst.sizes() &&
                dst.strides() == c10::IntArrayRef(strides);
  at::Tensor landing = direct ? dst : make_tensor(target, src.scalar_type(), src.sizes(), strides);
  auto* to = ctx_of(landing);
  uint32_t site = sites::current();
  uint64_t id = session.new_transfer();
  session.admit(from->worker);
  session.admit(target);
  {
    Session::Writer w(session);
    if (from->lazy) materialise(w, from);
    from->last_seq = w.begin(Record::SEND, from->worker, 4);
    w.about(0, site);
    mp::put_uint(w.buf(), id);
    mp::put_uint(w.buf(), static_cast<uint64_t>(target));
    mp::put_uint(w.buf(), site);
    put_tensor(w.buf(), src.unsafeGetTensorImpl(), from);
    w.end();
    to->last_seq = w.begin(Record::RECV, target, 5);
    w.about(0, site);
    mp::put_uint(w.buf(), id);
    mp::put_uint(w.buf(), static_cast<uint64_t>(from->worker));
    mp::put_uint(w.buf(), site);
    mp::put_uint(w.buf(), to->id);
    put_geometry(w.buf(), to->first.dtype, to->first.sizes, to->first.strides, 0, 0);
    to->lazy = false;
    w.end();
  }
  if (!direct) copy_on_worker(dst, landing);
}

}  // namespace

RequestPtr fetch(const at::Tensor& t) {
  auto& session = Session::get();
  auto* ctx = ctx_of(t);
  check_alive(ctx);
  uint32_t site = sites::current();
  session.admit(ctx->worker);
  auto r = session.new_request(ctx->worker, site);
  Session::Writer w(session);
  if (ctx->lazy) materialise(w, ctx);
  ctx->last_seq = w.begin(Record::FETCH, r, 3);
  mp::put_uint(w.buf(), site);
  put_tensor(w.buf(), t.unsafeGetTensorImpl(), ctx);
  w.end();
  return r;
}

at::Tensor value_of(const RequestPtr& r) {
  if (r->state.load() == Request::State::Failed) throw_failure(r->reply, r->failure, r->worker);
  auto in = reply_body(r->reply);
  auto g = read_geometry(in);
  if (r->loan) {  // lives as long as the request, and that as long as the tensor
    auto* held = new RequestPtr(r);
    const Mapping& map = r->loan->map;
    return adopt({map.data, held, [](void* p) { delete static_cast<RequestPtr*>(p); }, c10::Device(c10::DeviceType::CPU)},
                 map.size, g);
  }
  at::Tensor out = at::detail::empty_strided_cpu(g.sizes, g.strides, g.dtype);
  auto bytes = in.bin();
  size_t n = static_cast<size_t>(out.numel()) * out.element_size();
  TORCH_CHECK(bytes.size() == n, "dtorch: a value of ", n, " bytes came with ", bytes.size());
  std::memcpy(out.mutable_data_ptr(), bytes.data(), n);
  return out;
}

at::Tensor fetch_now(const at::Tensor& t) {
  auto r = fetch(t);
  ForgetAtEnd forget{r};
  Session::get().wait(r);
  return value_of(r);
}

at::Tensor upload(const at::Tensor& cpu, int worker) {
  auto src = resolved(cpu);
  if (!dense(src)) src = src.contiguous();
  auto dst = make_tensor(worker, src.scalar_type(), src.sizes(), src.strides());
  if (src.numel() > 0) put(src, ctx_of(dst), false);
  return dst;
}

std::pair<at::Tensor, RequestPtr> read_file(int worker, at::ScalarType dtype, c10::IntArrayRef sizes, int fd, size_t offset) {
  auto& session = Session::get();
  auto t = make_tensor(worker, dtype, sizes);
  auto* ctx = ctx_of(t);
  uint32_t site = sites::current();
  session.admit(worker);
  auto r = session.new_request(worker, site);
  Session::Writer w(session);
  ctx->last_seq = w.begin(Record::READ, r, 8);
  mp::put_uint(w.buf(), ctx->id);
  put_geometry(w.buf(), ctx->first.dtype, ctx->first.sizes, ctx->first.strides, 0, 0);
  mp::put_int(w.buf(), session.owner());
  mp::put_int(w.buf(), fd);
  mp::put_uint(w.buf(), offset);
  mp::put_uint(w.buf(), ctx->nbytes);
  mp::put_uint(w.buf(), site);
  ctx->lazy = false;
  w.end();
  return {t, r};
}

void copy(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0 && src.numel() == 0) return;
  if (!is_ours(dst)) {
    auto value = fetch_now(src);
    dst.copy_(value);
  } else if (!is_ours(src)) {
    TORCH_CHECK(src.device().is_cpu() && src.layout() == at::kStrided, "dtorch: cannot copy a ", src.layout(),
                " tensor on ", src.device(), " to ", dst.device(), "; bring it to a dense CPU tensor first");
    check_alive(ctx_of(dst));
    upload_into(src, dst, non_blocking);
  } else if (ctx_of(src)->worker == ctx_of(dst)->worker) {
    copy_on_worker(dst, src);
  } else {
    transfer(src, dst);
  }
}

std::string ask_done(const RequestPtr& r) {
  ForgetAtEnd forget{r};
  Session::get().wait(r);
  if (r->state.load() == Request::State::Failed) throw_failure(r->reply, r->failure, r->worker);
  return r->reply;
}

std::string stats_of(int worker, const std::string& what) {
  auto& session = Session::get();
  session.admit(worker);
  auto r = session.new_request(worker, 0);
  {
    Session::Writer w(session);
    w.begin(Record::STATS, r, 2);
    mp::put_str(w.buf(), what);
    w.end();
  }
  return ask_done(r);
}

void synchronize(int worker) {
  auto& session = Session::get();
  if (!session.active()) return;
  session.admit(worker);
  auto r = session.new_request(worker, 0);
  {
    Session::Writer w(session);
    w.begin(Record::SYNC, r, 1);
    w.end();
  }
  ask_done(r);
}

}  // namespace dtorch
