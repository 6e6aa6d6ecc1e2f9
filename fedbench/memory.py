"""How much memory there is for a stack of clients, and how the C library keeps what was freed."""

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4  # malloc.h


def share(device: "torch.device") -> int:
    """Return the bytes that a stack of clients may take: half of a GPU, or half of one core's part of the machine.

    Of all memory, not of what is free, so that it is the same every time.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory // 2
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * (os.cpu_count() or 1))


def keep_freed() -> None:
    """Let this process keep the memory that it frees, where the C library is glibc; elsewhere do nothing.

    Every step of training frees tensors of several MB and asks for the same again.  glibc gives such blocks back to the
    system, which costs a page fault for every 4 KiB: a tenth of the time of cnn_mnist, half of that of a stack of
    ResNet-18 (benchmarks/README.md).  The most memory that the process ever takes grows little, but it stays taken, so
    this is for processes of fedbench's own.
    """
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
        libc.mallopt(_M_MXFAST, 0)  # or every large block that is freed goes through the bins of small ones
