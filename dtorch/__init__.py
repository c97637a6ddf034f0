"""dtorch: one ordinary PyTorch script drives many devices.

Only the client (the user's process) imports torch and registers the device here; the controller and the workers import
the package for its modules and must not.
"""

from dtorch import settings
from dtorch._version import __version__ as __version__

if settings.ROLE.get() == "client":
    from dtorch.client import api as _api
    from dtorch.client.api import *  # noqa: F403

    __all__ = list(_api.__all__)

    def __getattr__(name: str) -> object:
        return _api.fallback(name)
else:

    def __getattr__(name: str) -> object:
        raise AttributeError(
            f"module 'dtorch' has no attribute {name!r} in a {settings.ROLE.get()} process. A module that workers "
            "import (dtorch.import_on_workers) defines its operators with torch.library alone and must not use dtorch"
        )
