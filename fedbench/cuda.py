"""How CUDA computes: in full precision and the same every time, unless speed is worth more."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


def set_up(fast: bool) -> None:
    """Choose for this process; call it before CUDA is used first.

    By default products of float32 are not rounded to TensorFloat-32, as torch lets cuDNN do, and operations take the
    algorithm that gives the same number every time; where there is none, torch warns.  `fast` undoes both.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may sum in another order
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast
    torch.backends.cudnn.benchmark = fast
    torch.use_deterministic_algorithms(not fast, warn_only=True)


@contextmanager
def exactly() -> Iterator[None]:
    """Compute in full precision and the same every time, for a while, in a process that is somebody else's."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    level = torch.get_deterministic_debug_mode()
    set_up(fast=False)
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before
        torch.set_deterministic_debug_mode(level)
