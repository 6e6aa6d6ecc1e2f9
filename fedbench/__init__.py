"""fedbench: compare federated-learning methods fairly.

`simulate` is the Python door; everything else is reached through the command line (`fedbench --help`).
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbench.federation import ClientArrays, Outcome, simulate

__all__ = ["ClientArrays", "Outcome", "__version__", "simulate"]

try:
    __version__ = version("fedbench-suite")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import the Python door on first use: torch takes seconds, and `fedbench --help` needs none of it."""
    if name in __all__:
        return getattr(import_module("fedbench.federation"), name)
    raise AttributeError(f"module 'fedbench' has no attribute '{name}'")
