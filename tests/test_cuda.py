"""Precision and determinism on CUDA: the choices themselves, which need no GPU to be made."""

from collections.abc import Iterator

import pytest
import torch
from conftest import Run, Tiny

from fedbench import cuda
from fedbench.executors import Setting, own_process


def choices() -> tuple[bool, bool, bool, int]:
    backends = torch.backends
    return (
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
        backends.cudnn.benchmark,
        torch.get_deterministic_debug_mode(),
    )


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with cuda.exactly():  # puts back what was
        yield


def test_a_process_of_its_own_is_exact_unless_it_is_to_be_fast(tiny: Tiny) -> None:
    setting = Setting(tiny.data, tiny.file.parent, "cuda")
    own_process(setting)
    assert choices() == (False, False, False, 1)
    own_process(Setting(tiny.data, tiny.file.parent, "cuda", fast=True))
    assert choices() == (True, True, True, 0)
    own_process(Setting(tiny.data, tiny.file.parent, "cpu"))
    assert choices() == (True, True, True, 0), "of no concern on the CPU"


def test_somebody_elses_process_is_exact_for_a_while() -> None:
    cuda.set_up(fast=True)
    with cuda.exactly():
        assert choices() == (False, False, False, 1)
    assert choices() == (True, True, True, 0)


def test_fast_is_for_cuda(fedbench: Run, tiny: Tiny) -> None:
    code, _, err = fedbench("run", str(tiny.file), "--fast")
    assert (code, err) == (2, "fedbench: --fast: is for --device cuda, not for cpu\n")
