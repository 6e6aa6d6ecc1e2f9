"""How the C library keeps what was freed."""

import os
import subprocess
import sys

import pytest
import torch

from fedbench import memory

FAULTS = """
import resource, sys, torch
from fedbench import memory
if sys.argv[1] == "keep":
    memory.keep_freed()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for number in range(15):
    if number == 10:
        before = faults()
    torch.ones(16 << 20)
print(faults() - before)
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the C library is not glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    def faults(word: str) -> int:
        command = [sys.executable, "-c", FAULTS, word]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 5 * (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults("keep") < pages / 10 < faults("leave")


def test_a_stack_may_take_part_of_the_machine() -> None:
    share, whole = memory.share(torch.device("cpu")), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < share * 2 * (os.cpu_count() or 1) <= whole
