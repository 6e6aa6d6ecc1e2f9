"""What people read: one comparison of a suite's results, written in every format.

`compare` makes the comparison, and a format renders it: the same results give the same bytes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedbench.report import markdown, terminal
from fedbench.report.table import Comparison, compare

__all__ = ["FORMATS", "Comparison", "compare", "markdown", "terminal"]

FORMATS: Mapping[str, Callable[[Comparison], str]] = MappingProxyType({"md": markdown.render})
"""File suffix -> what writes a comparison in that format."""
