"""Addresses of libzmq functions, taken from the very libzmq that pyzmq uses.

Native code sends and receives on sockets that Python made (``socket.underlying`` is libzmq's own pointer). That works
only with functions of the *same* copy of the library, and pyzmq usually carries its own. Its extension module links
that copy, so looking a symbol up through the extension module finds the right one, wherever it lives.

The native modules link no libzmq: they get this table (``_client.attach``, ``_worker.run``).
"""

from __future__ import annotations

import ctypes
from typing import Final

from zmq.backend.cython import _zmq

from dtorch.errors import EngineError

#: Every function that the native modules call; ``native/common/zmq_api.h`` has the same names.
NAMES: Final = (
    "zmq_send",
    "zmq_msg_init",
    "zmq_msg_init_size",
    "zmq_msg_init_data",
    "zmq_msg_data",
    "zmq_msg_size",
    "zmq_msg_send",
    "zmq_msg_recv",
    "zmq_msg_close",
    "zmq_msg_more",
    "zmq_poll",
    "zmq_errno",
    "zmq_strerror",
)


def addresses() -> dict[str, int]:
    """The table {function name: address}, for the native modules.

    Raises :class:`~dtorch.errors.EngineError` when pyzmq is not the CPython build that has libzmq behind it.
    """
    try:
        library = ctypes.CDLL(_zmq.__file__)
        return {name: _address(library, name) for name in NAMES}
    except (OSError, AttributeError) as error:
        raise EngineError(
            f"pyzmq's extension module {_zmq.__file__!r} does not give access to libzmq ({error}); "
            "install pyzmq from its binary wheel: pip install --force-reinstall pyzmq"
        ) from error


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
