"""The header of a safetensors file: read, checked, and turned into where each tensor's bytes lie.

A file is 8 bytes with the header's length, the header (JSON: a tensor's name -> dtype, shape, first and last byte), and
the tensors' bytes, one after the other without gaps. Files come from strangers, so nothing in the header is believed: a
header that passes describes every byte behind it exactly once, and sizes follow from shapes. What the format's own
library refuses is refused here, and so are names that occur twice, which it lets pass.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from dtorch.errors import LoadError

#: The longest header that the format allows, in bytes.
MAX_HEADER: Final = 100_000_000

DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class Part:
    """One tensor of a file: what it is, and its bytes from ``offset`` on (of the file)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class File:
    """An open safetensors file whose header is good. Closes its descriptor with :meth:`close` or as a context."""

    def __init__(self, path: str) -> None:
        """Open and check it; raises OSError when it cannot be opened and LoadError when it is not what it should be."""
        self.path = path
        #: Not blocking, so that a pipe under this name cannot make us wait for its writer.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                refuse(path, "it is not a regular file")
            header, begin = _header(path, self.fd, status.st_size)
            #: The tensors, in the order of their bytes.
            self.parts = _parts(path, header, begin, status.st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse(path: str, why: str) -> NoReturn:
    """Raise the error for a file that is not what it should be."""
    raise LoadError(f"{path} is not a good safetensors file: {why}")


def _header(path: str, fd: int, size: int) -> tuple[dict[str, Any], int]:
    """The header and the position of the first byte behind it."""
    if size < 8:
        refuse(path, f"it has {size} bytes, and the length of the header alone takes 8")
    length = int.from_bytes(_bytes(path, fd, 0, 8), "little")
    if length > MAX_HEADER:
        refuse(path, f"its header would be {length} bytes long, more than the format allows ({MAX_HEADER})")
    if 8 + length > size:
        refuse(path, f"it ends within its header, after {size} bytes of {8 + length}; it may have been cut short")
    raw = _bytes(path, fd, 8, length)
    if not raw.startswith(b"{"):
        refuse(path, "there is no header where one should begin")
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        refuse(path, f"its header is not JSON as it should be: {error}")
    assert isinstance(header, dict), "what begins with a brace is an object"
    return header, 8 + length


def _bytes(path: str, fd: int, offset: int, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = os.pread(fd, n - len(data), offset + len(data))
        if not more:
            refuse(path, "it was cut short while it was read")
        data += more
    return data


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    object_ = dict(pairs)
    if len(object_) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(a for a, b in itertools.pairwise(names) if a == b)
        raise ValueError(f"{twice!r} occurs twice")
    return object_


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _parts(path: str, header: dict[str, Any], begin: int, size: int) -> list[Part]:
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(map(_is_text, itertools.chain(metadata, metadata.values())))
    ):
        refuse(path, "its __metadata__ does not map text to text")
    parts = [_part(path, name, info, begin) for name, info in header.items()]
    parts.sort(key=lambda part: (part.offset, part.offset + part.nbytes))
    end = begin
    for part in parts:
        if part.offset != end:
            what = "overlaps another tensor" if part.offset < end else "leaves a gap before it"
            refuse(path, f"tensor {part.name!r} {what}: it begins at byte {part.offset}, where {end} is next")
        end += part.nbytes
    if end > size:
        refuse(path, f"it has {size} bytes where its header promises {end}; it may have been cut short")
    if end < size:
        refuse(path, f"{size - end} bytes at its end belong to no tensor")
    return parts


def _part(path: str, name: str, info: Any, begin: int) -> Part:
    def bad(why: str) -> NoReturn:
        refuse(path, f"tensor {name!r} {why}")

    if not _is_text(name):
        bad("has a name that is not Unicode")
    if not isinstance(info, dict):
        bad("is not described by an object")
    dtype, shape, offsets = (info.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        bad(f"has the dtype {dtype!r}, which dtorch does not know")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        bad(f"has the shape {shape!r}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_size(n) for n in offsets)):
        bad(f"has the offsets {offsets!r}")
    element = DTYPES[dtype].itemsize
    nbytes, most = element, element  # most: as if no dimension were 0, for strides are computed from those
    for n in shape:
        nbytes *= n
        most *= max(n, 1)
    if most >= 1 << 63:
        bad(f"has the shape {shape}, which no memory can hold")
    first, last = offsets
    if last - first != nbytes:
        bad(f"has {last - first} bytes where {dtype}{shape} takes {nbytes}")
    return Part(name, DTYPES[dtype], tuple(shape), begin + first, nbytes)


def _is_text(s: object) -> bool:
    """JSON's escapes can write half of a character, which is no text."""
    return isinstance(s, str) and not any("\ud800" <= c <= "\udfff" for c in s)


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63
