// Contents that follow from what the program itself said, so that a branch on them need not wait for a worker.
//
// Libraries branch on integers that no device has to compute: positions that arange made, a mask or lengths that were
// uploaded. item() of such a value would wait until everything issued before it has run. So a storage whose contents follow
// from numbers of the client's has a recipe: the record that wrote it, and the recipes of what that record reads. item()
// follows the recipe here, on the CPU. The only other use is to see a wrong index at the call (geometry.cpp: points_outside).
//
// CON-1  Only integers and booleans, by PyTorch's own operators that draw no random numbers: exact on every device.
// CON-2  Whatever may write a storage prolongs its recipe or ends it, in the critical section of its record.
// CON-3  Bounded: kInlineBytes a storage, kMostDepth a recipe, kMostCalls an answer, kMostBytes and kMostAllCalls all. A
//        recipe that was followed is a value from then on.
// CON-4  Operators' records are the same with it and without; only the question is not sent, nor the buffer for its sake. What
//        cannot be followed, for whatever reason, the worker is asked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace dtorch {

struct Contents;
struct Entry;
struct OpInfo;
struct Scratch;
struct StorageCtx;
using ContentsPtr = std::shared_ptr<const Contents>;

namespace contents {

// Of a dense CPU tensor that a storage is given; null where it is not to be kept.
ContentsPtr given(const at::Tensor& cpu);
// These two are called while Session::mu_ is held.
// A lazy storage that an operator is about to overwrite.
void blank(StorageCtx* ctx);
// After an operator's record, if any storage it names has contents. May throw: then what it writes has none.
void after(const OpInfo& info, const Scratch& s, const Entry& entry, at::ArrayRef<at::Tensor> outs);

// These take it. A tensor's elements on the CPU if they can be told here, else an undefined tensor.
at::Tensor of(const at::Tensor& t);
// The same for item(), counted.
at::Tensor tell(const at::Tensor& t);
uint64_t told();

}  // namespace contents
}  // namespace dtorch
