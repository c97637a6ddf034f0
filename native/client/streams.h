// Streams and events. A worker runs its records in the order in which they were issued, whichever stream was current: a
// stream has an identity of its own, so that programs can make, choose and compare them, and no queue. An event is a point
// in its worker's order.
//
// STR-1  An event has happened when all that was issued to its worker before it was recorded has been executed. Its time is
//        the worker's clock at that moment.
// STR-2  What a worker's streams were told to wait for, whoever waits for one of them, or for an event recorded later, waits
//        for too. The worker itself does not wait: its own order and that of copies between workers do all that a program
//        can see.
#pragma once

#include <c10/core/Stream.h>

namespace dtorch {

// This thread's current stream of a device; `exchange_stream` gives the one before.
c10::Stream current_stream(c10::Device device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::Device device);

// The event of c10::impl::DeviceGuardImplInterface: made by the first record(), changed by the next.
void record_event(void** event, const c10::Stream& stream);
void destroy_event(void* event);
void wait_for_event(void* event, const c10::Stream& stream);  // returns at once
bool event_happened(void* event);
void synchronize_event(void* event);
double milliseconds_between(void* first, void* second);  // both have happened

// Whether everything issued to the stream's worker has been executed.
bool stream_is_idle(const c10::Stream& stream);
// Waits for that; raises the first failure not yet reported, as dtorch.synchronize does.
void synchronize_stream(const c10::Stream& stream);

}  // namespace dtorch
