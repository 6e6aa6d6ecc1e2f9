"""Cells of one kind computed as one program: the numbers of each alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event

import numpy as np
import pytest
import torch
from conftest import Run, Tiny
from helpers import blobs, small_cnn
from torch import Tensor

from fedbench import engines
from fedbench.averaging import average, client_weights
from fedbench.cells import draw_partition, kind
from fedbench.engines import Engine, together
from fedbench.engines.choice import Chosen
from fedbench.engines.together import play_together
from fedbench.engines.vectorised import Vectorised
from fedbench.executors import EXECUTORS, Job, Setting, inline, load_arrays
from fedbench.federation import ClientArrays, Outcome, simulate
from fedbench.method import Batch, Loss, Message, Method, cross_entropy, parameters
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedprox import FedProx
from fedbench.methods.fedrep import FedRep
from fedbench.methods.fesem import FeSEM
from fedbench.models.mlp import Mlp
from fedbench.net import Net, Params
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


def test_it_makes_no_difference_which_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    second_is_here = Event()
    seeds: list[list[int]] = []
    arrive, train = together._Meeting._compute_if_all_are_here, Vectorised.train_together

    def arrived(meeting: together._Meeting) -> None:
        second_is_here.set()
        arrive(meeting)

    def trained(engine: Vectorised, jobs: Sequence[engines.Job]) -> Iterator[dict[int, engines.Part]]:
        seeds.append([job.seed for job in jobs])
        return train(engine, jobs)

    def first(engine: Engine) -> Outcome:
        second_is_here.wait()
        return run((FedAvg(), 0, 0.1, 0), engine, replace(TRAINING, rounds=1))

    monkeypatch.setattr(together._Meeting, "_compute_if_all_are_here", arrived)
    monkeypatch.setattr(Vectorised, "train_together", trained)
    second = partial(run, (FedAvg(), 1, 0.1, 0), training=replace(TRAINING, rounds=1))
    play_together([first, lambda engine: second(engine=engine)], Chosen(torch.device("cpu"), 1, measured=False))
    assert seeds == [[0, 1]]


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
    setting = Setting(tiny.data, tiny.file.parent, together=3, engine="vectorised")
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in cells]
    separate = {result.cell.key: result for result in inline(jobs, setting, lambda *_: None)}
    stacked = {result.cell.key: result for result in EXECUTORS["together"](jobs, setting, lambda *_: None)}
    assert stacked.keys() == separate.keys()
    for key, record in stacked.items():
        other = separate[key]
        assert not isinstance(record, CellError)
        assert not isinstance(other, CellError)
        np.testing.assert_allclose(record.outcome.metrics["train/loss"], other.outcome.metrics["train/loss"], rtol=1e-5)
        assert (record.provenance["engine"], record.provenance["executor"]) == ("vectorised", "together")
        assert record.provenance["engine asked for"] == "vectorised"


def test_the_loop_is_not_for_cells_that_are_computed_together(tiny: Tiny, fedbench: Run) -> None:
    _, _, said = fedbench("run", "tiny.yaml", "--together", "2", "--workers", "1", "--engine", "loop")
    assert "--engine loop: takes clients one by one; want auto or vectorised with --together 2" in said
    assert not (tiny.out / "tiny" / "cells").exists()


def test_what_is_not_a_number_makes_another_kind(tiny: Tiny) -> None:
    tiny.change(methods={"fedprox": {"grid": {"mu": [0.1, 0.2], "weights": ["size", "uniform"]}}})
    kinds = [kind(cell) for cell in tiny.cells()]
    assert len(kinds) == 4
    assert len(set(kinds)) == 2


@dataclass(frozen=True)
class Remembering(Method):
    """Sends a memory that a number of the method shapes, and takes another way through Python for another number."""

    beta: float = 0.5
    branches: bool = False

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return initial

    def send(self, server: Message, client: int | Tensor) -> Message:
        return server

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        return average(parameters(uploads), client_weights("uniform", sizes))

    def init_client(self, net: Net, initial: Params) -> Params:
        return {}

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        ce, embedding = cross_entropy(net, params, batch)
        if self.branches and self.beta > 0.3:
            ce = ce * 2
        return Loss(ce, {}, embedding)

    def init_memory(self, net: Net) -> dict[str, Tensor]:
        return {"mean": torch.full((net.width,), self.beta, dtype=net.dtype)}

    def observe(self, memory: dict[str, Tensor], batch: Batch, seen: Tensor) -> dict[str, Tensor]:
        return {"mean": self.beta * memory["mean"] + (1 - self.beta) * seen.mean(0)}

    def reply(
        self,
        net: Net,
        params: Params,
        kept: Params,
        down: Message,
        data: Callable[[], Batch],
        memory: dict[str, Tensor],
    ) -> tuple[Params, Message]:
        return {}, {
            name: t + memory["mean"].sum() * (t.dim() == 1) for name, t in params.items() if t.is_floating_point()
        }

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        return parameters(down)


@pytest.mark.parametrize("branches", [False, True], ids=["memory", "branches"])
def test_a_number_reaches_every_part_of_a_method_or_they_are_computed_apart(branches: bool) -> None:
    cases = [(Remembering(beta, branches), 0, 0.1, 0) for beta in (0.1, 0.9)]
    batches = [blobs((8, 8), shape=(5,), seed=1)] * 2
    training = replace(TRAINING, last_batch="drop")

    def one(method: Method, engine: Engine) -> Outcome:
        return simulate(method, partial(Mlp, hidden=(4,)), batches[0], training=training, engine=engine)

    def chosen() -> Chosen:
        return Chosen(torch.device("cpu"), 1, measured=False)

    alone = [one(method, chosen()) for method, *_ in cases]
    plays = [lambda engine, method=case[0]: one(method, engine) for case in cases]
    assert_equal(alone, play_together(plays, chosen()))


def test_an_interrupt_ends_all_of_them_after_the_round_under_way() -> None:
    done: list[int] = []

    def play(engine: Engine) -> Outcome:
        simulate(FedAvg(), small_cnn, clients(0), training=replace(TRAINING, rounds=10_000), engine=engine)
        raise AssertionError("it was to be interrupted")

    def interrupted(engine: Engine) -> Outcome:
        done.append(simulate(FedAvg(), small_cnn, clients(0), training=TRAINING, engine=engine).work["steps"].shape[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_together([interrupted, play], Chosen(torch.device("cpu"), 1, measured=False))
    assert done == [3]
