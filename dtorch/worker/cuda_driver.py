"""The CUDA calls by which workers lend each other memory: CuPy's runtime, and three of the driver's that it lacks.

Everything is made of plain numbers: pointers, streams and events are addresses, handles are 64 bytes. A call that CUDA
refuses raises RuntimeError (CuPy's CUDARuntimeError is one) and leaves no error behind for the next kernel to be
blamed for. That is why `is_over` asks the driver: the runtime's cudaEventQuery notes "not ready" as the thread's last
error, which PyTorch looks at after every launch.

Calls act on the thread's current device; `PeerMemory` (``dtorch/worker/cuda.py``) says which thread that is.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final

#: Of the enumeration CUpointer_attribute: a number that no other allocation of the process ever has.
_BUFFER_ID: Final = 7
_INVALID_VALUE: Final = 1
_NOT_READY: Final = 600
_DEVICE_TO_DEVICE: Final = 3
_DISABLE_TIMING, _INTERPROCESS = 2, 4


class Driver:
    """CUDA in this process. Raises ImportError where CuPy is missing, OSError where there is no driver."""

    def __init__(self, device: int) -> None:
        self._runtime: Any = importlib.import_module("cupy.cuda").runtime
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._runtime.setDevice(device)
        self._runtime.free(0)  # makes the context the thread's current one, as the driver's own calls need it

    # -- devices

    def device_count(self) -> int:
        return int(self._runtime.getDeviceCount())

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether ``device`` can map memory of ``peer``; asking makes no context."""
        return bool(self._runtime.deviceCanAccessPeer(device, peer))

    # -- memory

    def address_range(self, pointer: int) -> tuple[int, int]:
        """The base and the bytes of the allocation in which an address lies."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._check(
            "cuMemGetAddressRange",
            self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer)),
        )
        return base.value, size.value

    def buffer_id(self, pointer: int) -> int | None:
        """The number of the allocation in which an address lies; None where there is none (any more)."""
        number = ctypes.c_uint64()
        status = self._cuda.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(pointer))
        if status == _INVALID_VALUE:
            return None
        self._check("cuPointerGetAttribute", status)
        return number.value

    def memory_handle(self, base: int) -> bytes:
        """What another process opens the allocation by."""
        return bytes(self._runtime.ipcGetMemHandle(base))

    def open_memory(self, handle: bytes) -> int:
        """The address of another process's allocation here. No handle may be opened while it is open."""
        return int(self._runtime.ipcOpenMemHandle(handle))

    def close_memory(self, address: int) -> None:
        self._runtime.ipcCloseMemHandle(address)

    # -- events

    def make_event(self, interprocess: bool = False) -> int:
        flags = _DISABLE_TIMING | (_INTERPROCESS if interprocess else 0)
        return int(self._runtime.eventCreateWithFlags(flags))

    def event_handle(self, event: int) -> bytes:
        return bytes(self._runtime.ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        return int(self._runtime.ipcOpenEventHandle(handle))

    def destroy_event(self, event: int) -> None:
        self._runtime.eventDestroy(event)

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Have the stream wait for what the event was last recorded behind. The host does not wait."""
        self._runtime.streamWaitEvent(stream, event, 0)

    def is_over(self, event: int) -> bool:
        """Whether what the event was last recorded behind has been done."""
        status = self._cuda.cuEventQuery(ctypes.c_void_p(event))
        if status != _NOT_READY:
            self._check("cuEventQuery", status)
        return bool(status != _NOT_READY)

    def finish(self, event: int) -> None:
        """Wait, on the host, until then."""
        self._runtime.eventSynchronize(event)

    # -- copies

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Within a device."""
        self._runtime.memcpyAsync(target, source, nbytes, _DEVICE_TO_DEVICE, stream)

    def copy_between(
        self, target: int, target_device: int, source: int, source_device: int, nbytes: int, stream: int
    ) -> None:
        self._runtime.memcpyPeerAsync(target, target_device, source, source_device, nbytes, stream)

    def _check(self, call: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{call}: {(text.value or b'unknown error').decode()} ({status})")
