"""How many threads torch computes with."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def thread_limit(count: int) -> Iterator[None]:
    """Let torch compute with so many threads in this block, and with as many as before after it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
