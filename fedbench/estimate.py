"""What a suite will take: parameters, optimiser steps, and time, from a few steps of each model on this machine."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedbench import plugins
from fedbench.cells import Cell, draw_partition, parts, run_cell
from fedbench.data import Arrays
from fedbench.executors import Setting, load_arrays
from fedbench.method import Method
from fedbench.net import Net
from fedbench.options import make
from fedbench.partition import Partition
from fedbench.settings import Training
from fedbench.threads import thread_limit
from fedbench.trainer import batches
from fedbench.words import counted

# What a round of calibration has: as many clients as are computed together on a CPU, batches and test samples of each.
_CLIENTS, _BATCHES, _SAMPLES = 10, 2, 8


@dataclass(frozen=True)
class Estimate:
    """What one cell takes.

    - `parameters`: trainable scalars of each of its models.
    - `steps`: optimiser steps of all clients in all rounds.
    - `seconds`: on one core, or on the device; NaN if nothing was measured.
    """

    cell: Cell
    parameters: tuple[int, ...]
    steps: float
    seconds: float

    @property
    def model(self) -> str:
        """The data set, and the models with their parameters."""
        names = dict.fromkeys(model["name"] for model in self.cell.recipe["models"])
        sizes = " / ".join(f"{count:,}" for count in self.parameters)
        return f"{self.cell.recipe['dataset']['name']}, {' / '.join(names)} with {sizes} parameters"


@dataclass(frozen=True)
class _Work:
    """How much a cell has of everything that takes time: optimiser steps, messages merged, examined samples."""

    steps: float
    messages: float
    samples: float


@dataclass(frozen=True)
class _Pace:
    """Seconds that a step takes, all else in a round per client, and examining a sample."""

    step: float
    message: float
    sample: float

    def seconds(self, work: _Work) -> float:
        return self.step * work.steps + self.message * work.messages + self.sample * work.samples


def estimate(cells: Iterable[Cell], setting: Setting, calibrate: bool = True) -> Iterator[Estimate]:
    """Yield what each cell takes, whose data must be there; with `calibrate` false without times.

    Time is measured once for each combination of data set, models, batch size and optimiser, with the method of the
    first cell that has it: three rounds of two batches a client, of ten clients on the CPU.  Start-up is not in it.
    """
    partitions: dict[str, Partition] = {}
    nets: dict[str, list[Net]] = {}
    paces: dict[str, _Pace] = {}
    for cell in cells:
        arrays = load_arrays(cell, setting)
        if cell.partition_key not in partitions:
            partitions[cell.partition_key] = draw_partition(cell, arrays, setting.base)
        partition = partitions[cell.partition_key]
        key = _key(cell, "dataset", "models")
        if key not in nets:
            nets[key] = _nets(cell, arrays, setting)
        work = _work(cell, nets[key], partition, setting)
        pace = _key(cell, "dataset", "models", "training")
        if calibrate and pace not in paces:
            paces[pace] = _measure(cell, arrays, partition, setting)
        seconds = paces[pace].seconds(work) if calibrate else math.nan
        yield Estimate(cell, tuple(_parameters(net) for net in nets[key]), work.steps, seconds)


def in_words(estimates: Sequence[Estimate], workers: int = 1) -> str:
    """Return what some cells take together; `workers` compute one each at a time."""
    steps, seconds = (math.fsum(getattr(found, name) for found in estimates) for name in ("steps", "seconds"))
    said = [counted(len(estimates), "cell"), f"{steps:,.0f} client-steps"]
    if estimates and math.isfinite(seconds):
        company = f" with {workers} at a time" if workers > 1 else " one after the other"
        said.append(f"about {_duration(seconds / workers)}{company}")
    return ", ".join(said)


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def _key(cell: Cell, *names: str) -> str:
    recipe = {name: cell.recipe[name] for name in names}
    if "training" in recipe:
        recipe["training"] = {name: recipe["training"][name] for name in ("batch_size", "optimizer", "dtype")}
    return json.dumps(recipe, sort_keys=True)


def _nets(cell: Cell, arrays: Arrays, setting: Setting) -> list[Net]:
    return [Net(model, arrays.shape, arrays.classes) for model in parts(cell, setting.base)[1]]


def _parameters(net: Net) -> int:
    return sum(math.prod(net.shapes[name]) for name in net.parameters)


def _work(cell: Cell, nets: Sequence[Net], partition: Partition, setting: Setting) -> _Work:
    training = make(Training, cell.recipe["training"], "training")
    spec = cell.specs.get(cell.recipe["method"]["name"], cell.recipe["method"]["name"])
    method: Method = plugins.build("methods", spec, cell.recipe["method"]["options"], setting.base, spec)
    epochs = sum(phase.epochs for phase in method.phases(nets[0], training.epochs))
    steps = epochs * sum(len(batches(torch.arange(len(rows)), training)) for rows in partition.train)
    evaluations = math.ceil(training.rounds / training.evaluate_every)
    test, validation = (sum(map(len, lists)) for lists in (partition.test, partition.validation))
    # Participants are examined on their test samples before the merge too.
    examined = test * (1 + training.participation) + validation
    taking_part = training.participation * training.rounds
    return _Work(taking_part * steps, taking_part * partition.clients, evaluations * examined)


def _measure(cell: Cell, arrays: Arrays, partition: Partition, setting: Setting) -> _Pace:
    """Run the cell for three short rounds: the first warms up, the second only trains, the third is also evaluated."""
    training = {**cell.recipe["training"], "rounds": 3, "evaluate_every": 3, "participation": 1.0}
    recipe = {name: value for name, value in cell.recipe.items() if name != "newcomers"}
    short = replace(cell, recipe={**recipe, "training": training})
    clients = max(_CLIENTS, len(cell.recipe["models"])) if setting.device == "cpu" else partition.clients
    few = replace(
        partition,
        train=_cut(partition.train[:clients], _BATCHES * training["batch_size"]),
        validation=_cut(partition.validation[:clients], 0),
        test=_cut(partition.test[:clients], _SAMPLES),
    )
    times: list[float] = []

    def note(done: int, total: int) -> None:
        times.append(time.perf_counter())

    with thread_limit(setting.threads):
        outcome = run_cell(short, arrays, few, device=setting.device, base=setting.base, on_round=note)
    if len(times) < 3:  # diverged
        return _Pace(math.nan, math.nan, math.nan)
    trained = float(outcome.work["seconds"][1].sum())
    plain, examined = times[1] - times[0], 2 * sum(map(len, few.test))
    return _Pace(
        step=trained / float(outcome.work["steps"][1].sum()),
        message=max(0.0, plain - trained) / few.clients,
        sample=max(0.0, times[2] - times[1] - plain) / max(examined, 1),
    )


def _cut(lists: Sequence[Any], most: int) -> tuple[Any, ...]:
    return tuple(rows[:most] for rows in lists)
