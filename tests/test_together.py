"""Cells of one kind computed as one program: the numbers of each alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Tiny
from helpers import blobs, small_cnn

from fedbench.cells import draw_partition, kind
from fedbench.engines import Engine
from fedbench.engines.choice import Chosen
from fedbench.engines.together import play_together
from fedbench.executors import EXECUTORS, Job, Setting, inline, load_arrays
from fedbench.federation import ClientArrays, Outcome, simulate
from fedbench.method import Method
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedprox import FedProx
from fedbench.methods.fedrep import FedRep
from fedbench.methods.fesem import FeSEM
from fedbench.settings import Optimizer, Training
from fedbench.store import CellError

TRAINING = Training(rounds=3, epochs=2, batch_size=4, dtype="float64")
CASES: dict[str, list[tuple[Method, int, float, int]]] = {  # method, run seed, learning rate, seed of the samples
    "seeds": [(FedAvg(), seed, 0.1, 0) for seed in range(3)],
    "samples": [(FedAvg(), 0, 0.1, samples) for samples in range(3)],
    "learning rates": [(FedProto(), 0, lr, 0) for lr in (0.01, 0.1, 0.3)],
    "lam": [(FedProto(lam=lam), 1, 0.1, 0) for lam in (0.0, 1.0, 3.0)],
    "everything": [(FedProx(mu=0.1 * seed), seed, 0.1 + 0.05 * seed, seed) for seed in range(3)],
    "phases": [(FedRep(), seed, 0.1, seed) for seed in range(2)],
    "server state": [(FeSEM(), seed, 0.1, 0) for seed in range(2)],
}


def clients(seed: int) -> list[ClientArrays]:
    return blobs((7, 12, 5, 9 + seed), shape=(1, 5, 5), seed=seed)


def run(case: tuple[Method, int, float, int], engine: Engine | None, training: Training) -> Outcome:
    method, seed, lr, samples = case
    settings = replace(training, optimizer=Optimizer(lr=lr, momentum=0.5))
    engine = engine or Chosen(torch.device("cpu"), 1, measured=False)
    return simulate(method, small_cnn, clients(samples), training=settings, seed=seed, engine=engine)


def assert_equal(alone: Sequence[Outcome], together: Sequence[Outcome]) -> None:
    for one, other in zip(alone, together, strict=True):
        assert (one.status, one.message) == (other.status, other.message)
        for name, table in one.metrics.items():
            np.testing.assert_allclose(other.metrics[name], table, rtol=1e-9, atol=1e-9, err_msg=name)
        for name, counts in one.traffic.items():
            np.testing.assert_array_equal(other.traffic[name], counts, err_msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_each_gets_the_numbers_it_gets_alone(name: str, participation: float) -> None:
    training = replace(TRAINING, participation=participation)
    alone = [run(case, None, training) for case in CASES[name]]
    chosen = Chosen(torch.device("cpu"), 1, measured=False)
    plays = [lambda engine, case=case: run(case, engine, training) for case in CASES[name]]
    assert_equal(alone, play_together(plays, chosen))
    assert any(not np.array_equal(alone[0].metrics["train/loss"], o.metrics["train/loss"]) for o in alone[1:])


def test_one_that_diverges_leaves_the_others_alone() -> None:
    cases = [(FedAvg(), 0, lr, 0) for lr in (0.1, 1e200, 0.2)]
    alone = [run(case, None, TRAINING) for case in cases]
    assert [outcome.status for outcome in alone] == ["completed", "diverged", "completed"]
    plays = [lambda engine, case=case: run(case, engine, TRAINING) for case in cases]
    assert_equal(alone, play_together(plays, Chosen(torch.device("cpu"), 1, measured=False)))


def test_cells_of_one_kind_are_stacked_and_recorded_each_for_itself(tiny: Tiny) -> None:
    tiny.change(seeds=[0, 1, 2])
    cells = tiny.cells()
    assert len({kind(cell) for cell in cells}) == 3
    setting = Setting(tiny.data, tiny.file.parent, together=3)
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in cells]
    separate = {result.cell.key: result for result in inline(jobs, setting, lambda *_: None)}
    stacked = {result.cell.key: result for result in EXECUTORS["together"](jobs, setting, lambda *_: None)}
    assert stacked.keys() == separate.keys()
    for key, record in stacked.items():
        other = separate[key]
        assert not isinstance(record, CellError)
        assert not isinstance(other, CellError)
        np.testing.assert_allclose(record.outcome.metrics["train/loss"], other.outcome.metrics["train/loss"], rtol=1e-5)
        assert record.provenance["engine"] == "together"


def test_what_is_not_a_number_makes_another_kind(tiny: Tiny) -> None:
    tiny.change(methods={"fedprox": {"grid": {"mu": [0.1, 0.2], "weights": ["size", "uniform"]}}})
    kinds = [kind(cell) for cell in tiny.cells()]
    assert len(kinds) == 4
    assert len(set(kinds)) == 2
