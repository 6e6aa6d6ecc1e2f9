"""Rounds: the flow of one federation, from data and a method to an outcome."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbench import arguments, cuda, evaluation, keys, samples
from fedbench.checkpoint import Checkpoint
from fedbench.contract import is_own
from fedbench.data import Arrays
from fedbench.engines import Engine, Job, Part, Probe
from fedbench.engines.choice import EngineName
from fedbench.errors import InputError
from fedbench.evaluation import FloatTable
from fedbench.kept import Kind, Last, silhouettes
from fedbench.method import Message, Method, Rows, parameters, put, stack
from fedbench.net import ModelFactory, Params
from fedbench.newcomers import NOBODY, Newcomers, joined, welcome
from fedbench.partition import Partition
from fedbench.samples import ClientArrays
from fedbench.settings import Training
from fedbench.setups import Setup, make_setup, no_probe, no_watch
from fedbench.trainer import Work
from fedbench.wire import Direction, Diverged, Wire

__all__ = ["ClientArrays", "Outcome", "run", "simulate"]

_DOWNLOADS = 64  # in memory together when clients are evaluated


@dataclass(frozen=True)
class Outcome:
    """What a federation did: a value of numpy arrays only.

    - `metrics`: (rounds, clients) float64 each, NaN where not measured: "test/accuracy" (the method's headline, of the
      model from which the client would train next), "test/accuracy/<score>", "test/loss", the same under "validation/"
      where there are such samples and under "local/" (the participant's model right after its local training), and
      "train/loss".
    - `traffic`: (rounds, clients) int64 each, see `Wire`; `work`: (rounds, clients): "steps", "samples", "seconds".
    - `sizes`: (clients,) int64: "train", "validation", "test".
    - `seconds`: "total", "training" and "evaluation" of the whole run.
    - `initial`: (clients,) float64 each, the "test/" and "validation/" metrics before round 1.
    - `kept`: what was asked to be kept beside, see `fedbench.kept`.
    - `newcomers`: what became of clients that took no part, see `fedbench.newcomers.joined`; empty if all did.  In
      `metrics` such clients are NaN, in `traffic` and `work` zero.

    A diverged outcome says where in `message` and keeps the rounds measured before; so does one that was stopped.
    """

    status: Literal["completed", "diverged", "stopped"]
    message: str
    metrics: FloatTable
    traffic: dict[str, NDArray[np.int64]]
    work: FloatTable
    sizes: dict[str, NDArray[np.int64]]
    seconds: dict[str, float]
    initial: FloatTable = field(default_factory=dict)
    kept: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    newcomers: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """All that a federation carries from one round to the next; `kept` holds each group's, stacked over its clients."""

    round_number: int
    server: Message
    kept: list[Params]


@dataclass(frozen=True)
class Record:
    """What was measured in one round: arrays (clients,) by name."""

    metrics: FloatTable = field(default_factory=dict)
    traffic: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    work: FloatTable = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


Stop = Callable[[int, Mapping[str, NDArray[np.float64]]], bool]
"""Asked after a round, given its number and its metrics (clients,), whether to leave out the rounds after it."""


# --- the two ways in


def run(
    method: Method,
    models: Sequence[ModelFactory],
    arrays: Arrays,
    partition: Partition,
    training: Training,
    *,
    seed: int,
    device: str = "cpu",
    engine: EngineName | Engine = "auto",
    threads: int = 1,
    on_round: Callable[[int, int], None] | None = None,
    stop: Stop | None = None,
    keep: Sequence[Kind] = (),
    newcomers: Newcomers = NOBODY,
    checkpoint: Checkpoint | None = None,
) -> Outcome:
    """Train a method on a partition of a data set.

    Several models make mixed architectures: clients get them in contiguous blocks of nearly equal size.  `on_round` is
    called with (rounds done, rounds in all).  `keep` says what the outcome keeps beside its numbers (see
    `fedbench.kept`): embeddings come with their silhouettes, in the last round.  `newcomers` come after that.  With a
    `checkpoint` it goes on from there, if it can, and ends the same.
    Raises `InputError` if method, models and data do not fit together.
    """
    data = samples.from_arrays(arrays, partition, getattr(torch, training.dtype), torch.device(device))
    setup = make_setup(method, models, data, training, seed, engine, threads)
    setup = replace(setup, newcomers=newcomers)
    if not keep:
        return play(setup, on_round, stop, checkpoint)
    last = Last(method, {client: group.net for group in setup.groups for client in group.clients}, data)
    outcome = play(replace(setup, probe=last.look, watch_merge=last.watch), on_round, stop, checkpoint)
    return _with(outcome, last.arrays(keep)) if outcome.status == "completed" else outcome


def _with(outcome: Outcome, arrays: dict[str, NDArray[np.generic]]) -> Outcome:
    """Return an outcome with what was kept, and the silhouettes of embeddings among it."""
    metrics = dict(outcome.metrics)
    if "embeddings" in arrays:
        clients = len(outcome.sizes["test"])
        for name, values in silhouettes(arrays, clients).items():
            before = np.full((len(outcome.work["steps"]) - 1, clients), np.nan)
            metrics[name] = np.concatenate([before, values[None]])
    return replace(outcome, metrics=metrics, kept=arrays)


def simulate(
    method: Method,
    model: nn.Module | ModelFactory | Sequence[ModelFactory],
    clients: Sequence[ClientArrays],
    *,
    training: Training | None = None,
    seed: int = 0,
    classes: int | None = None,
    initial: Params | Sequence[Params] | None = None,
    participants: Sequence[Sequence[int]] | None = None,
    probe: Probe = no_probe,
    watch_merge: Callable[[Message, Message], None] = no_watch,
    device: str = "cpu",
    engine: EngineName | Engine = "auto",
    threads: int = 1,
    **settings: Any,
) -> Outcome:
    """Train a method on arrays, without a suite file: the Python door.

    - `model`: an `nn.Module` with submodules `body` and `head`, whose weights are then everybody's initial model; or a
      callable (input shape, classes) -> module; or several callables for mixed architectures.
    - `clients`: each client's arrays; `classes` defaults to the largest label plus one.
    - `training`, or its fields as keywords: `simulate(FedAvg(), net, clients, rounds=10, batch_size=8)`.
    - `initial`: one `state_dict` for all clients, or one each.
    - `participants`: client numbers, round by round; `probe`, `watch_merge`: see `Setup`.
    - `engine`, `threads`: how the clients are computed; the numbers are the same.

    Raises `InputError` for arrays, models and settings that are not such, or do not fit together.
    """
    arguments.check_method(method)
    training = arguments.checked_training(training, settings)
    arguments.check_numbers(seed, classes, threads)
    seed, threads = int(seed), int(threads)  # of numpy's numbers no keys can be derived
    arguments.check_engine(engine)
    data = samples.from_clients(clients, classes, getattr(torch, training.dtype), arguments.checked_device(device))
    if isinstance(model, nn.Module):
        models: Sequence[ModelFactory] = [_copies(model)]
    else:
        models = arguments.checked_models(model)
    setup = make_setup(method, models, data, training, seed, engine, threads)
    if initial is not None:
        given = arguments.check_states(initial, data.clients)
        fitted = [_fitted(setup, number, params) for number, params in enumerate(given)]
        setup = replace(setup, initial=fitted.__getitem__)
    if participants is not None:
        arguments.check_participants(participants, training.rounds, data.clients)
    setup = replace(setup, participants=participants, probe=probe, watch_merge=watch_merge)
    with cuda.exactly() if data.x.is_cuda else nullcontext():
        return play(setup)


def _copies(model: nn.Module) -> ModelFactory:
    return lambda shape, classes: copy.deepcopy(model)


def _fitted(setup: Setup, number: int, params: Params) -> Params:
    """Return given initial parameters of one client in the federation's dtype; they must fit its model."""
    net = next(group.net for group in setup.groups if number in group.clients)
    found = {name: tuple(tensor.shape) for name, tensor in params.items()}
    if found != net.shapes:
        wrong = sorted(set(found.items()) ^ set(net.shapes.items()))
        raise InputError(f"initial: tensors do not fit the model of client {number}: {wrong}")
    return {n: params[n].to(net.device, net.dtype if params[n].is_floating_point() else None) for n in net.shapes}


# --- rounds


def play(
    setup: Setup,
    on_round: Callable[[int, int], None] | None = None,
    stop: Stop | None = None,
    checkpoint: Checkpoint | None = None,
) -> Outcome:
    """Return the outcome of all rounds; divergence ends them early, and so may `stop`.

    Of what a `checkpoint` holds, `on_round` is told the rounds done, and `stop` every round, as if it were played.
    """
    began = time.perf_counter()
    state, records, initial, spent = _resumed(setup, checkpoint) or _begun(setup)
    if records and on_round:
        on_round(len(records), setup.training.rounds)
    for number, record in enumerate(records, 1):
        if stop:
            stop(number, record.metrics)
    status: Literal["completed", "diverged", "stopped"] = "completed"
    message = ""

    def outcome() -> Outcome:
        total = spent + time.perf_counter() - began
        return replace(_outcome(setup, records, status, message, total), initial=initial)

    later = state
    try:
        for later, record in rounds(setup, state):
            records.append(record)
            if on_round:
                on_round(len(records), setup.training.rounds)
            if len(records) == setup.training.rounds:
                break
            if stop and stop(len(records), record.metrics):
                status, message = "stopped", f"round {len(records)}"
                break
            if checkpoint and checkpoint.due:
                checkpoint.save(lambda: _progress(later, outcome()))  # noqa: B023 (called at once)
    except Diverged as divergence:
        status, message = "diverged", f"round {len(records) + 1}: {divergence}"
    newcomers = _welcome(setup, later) if status == "completed" and setup.newcomers.clients else {}
    return replace(outcome(), newcomers=newcomers)


def _welcome(setup: Setup, state: State) -> dict[str, NDArray[Any]]:
    """Return what the newcomers come to after the last round."""
    wire = Wire(setup.data.clients, setup.buffers)
    tables = []
    for place in range(len(setup.groups)):
        job = _job(replace(setup, probe=no_probe), state, place, set(setup.newcomers.clients))
        if job.clients:
            tables.append((job.clients, welcome(job, state.server, setup.engine, setup.newcomers.epochs, wire)))
    return joined(tables, setup.newcomers, wire.take())


def _begun(setup: Setup) -> tuple[State, list[Record], FloatTable, float]:
    """Return a federation before round 1: state, records, what was measured, and seconds spent."""
    state = first_state(setup)
    return state, [], evaluate(setup, state, Wire(setup.data.clients, setup.buffers)), 0.0


def _progress(state: State, outcome: Outcome) -> dict[str, Any]:
    """Return a state and what came out so far as tensors and plain values."""
    tables = {name: _each(torch.from_numpy, getattr(outcome, name)) for name in _TABLES}
    where = {"round": state.round_number, "server": state.server, "kept": state.kept}
    return {**where, "tables": tables, "seconds": outcome.seconds}


def _resumed(setup: Setup, checkpoint: Checkpoint | None) -> tuple[State, list[Record], FloatTable, float] | None:
    """Return what `_begun` does, as it was when the checkpoint was saved; None if there is none."""
    held = checkpoint.load() if checkpoint else None
    if held is None:
        return None
    state = State(held["round"], held["server"], held["kept"])
    setup.watch_merge({}, state.server)
    tables = {name: _each(torch.Tensor.numpy, table) for name, table in held["tables"].items()}
    initial, seconds = tables.pop("initial"), held["seconds"]
    records = [
        Record(
            **{name: _each(itemgetter(row), table) for name, table in tables.items()}, seconds=dict.fromkeys(seconds, 0)
        )
        for row in range(state.round_number)
    ]
    return state, [replace(records[0], seconds=seconds), *records[1:]], initial, seconds["total"]


_TABLES = ("metrics", "traffic", "work", "initial")


def _each(change: Callable[[Any], Any], table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: change(values) for name, values in table.items()}


def first_state(setup: Setup) -> State:
    """Return the state before round 1."""
    kept = []
    for group in setup.groups:
        stacked: dict[str, Tensor | Rows] = {}
        for place, client in enumerate(group.clients):
            mine = setup.method.init_client(group.net, setup.initial(client))
            put(stacked, torch.tensor(place), stack([mine]), len(group.clients))
        kept.append(parameters(stacked))
    return State(0, first_server(setup), kept)


def first_server(setup: Setup) -> Message:
    """Return the server's state before round 1."""
    seed = keys.derive(setup.seed, "server")
    return setup.method.init_server(setup.groups[0].net, setup.initial(0), setup.data.clients, seed)


def rounds(setup: Setup, state: State) -> Iterator[tuple[State, Record]]:
    """Play the rounds that are left after a state, and give each one's state and record."""
    wire = Wire(setup.data.clients, setup.buffers)
    while state.round_number < setup.training.rounds:
        state, record = play_round(setup, state, wire)
        yield state, record


def play_round(setup: Setup, state: State, wire: Wire) -> tuple[State, Record]:
    """Return the state after one more round, and what was measured."""
    number = state.round_number + 1
    chosen = participants(setup, number)
    local = _LocalExaminer(setup) if is_evaluated(setup, number) else None
    began = time.perf_counter()
    kept = list(state.kept)
    uploads: list[Message] = []
    work: dict[int, Work] = {}
    for place in range(len(setup.groups)):
        job = _job(setup, state, place, set(chosen))
        if job.clients:
            kept[place], sent, done = _train(setup, _with_downloads(job, state.server, wire, "down"), local)
            uploads.append(wire.carry("up", job.clients, sent))
            work |= done
    check_losses({client: done.losses for client, done in work.items()})
    server = merge(setup, state.server, uploads, chosen)
    state = State(number, server, kept)
    return state, _record(setup, state, wire, work, local, began)


def _job(setup: Setup, state: State, place: int, chosen: Set[int]) -> Job:
    """Return the job of those of a group's clients that are chosen, to whom nothing has been sent yet."""
    group = setup.groups[place]
    rows = [row for row, client in enumerate(group.clients) if client in chosen]
    clients = [group.clients[row] for row in rows]
    about = (setup.method, group.net, setup.data, setup.training, setup.seed, state.round_number + 1)
    return Job(*about, clients, rows, state.kept[place], {}, setup.probe)


def _with_downloads(job: Job, server: Message, wire: Wire, direction: Direction) -> Job:
    """Return the job after a download to each of its clients, of whom there is one at least."""
    sent = stack([job.method.send(server, client) for client in job.clients])
    return replace(job, down=wire.carry(direction, job.clients, sent))


def _train(setup: Setup, job: Job, local: "_LocalExaminer | None") -> tuple[Params, Message, dict[int, Work]]:
    """Return what the clients of the job's group keep now, and the participants' uploads and work.

    Every part of the job is let go of before the next one comes.
    """
    kept = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in job.kept.items()}
    uploads: dict[str, Tensor | Rows] = {}
    work: dict[int, Work] = {}
    for part in setup.engine.train(job):
        clients = [job.clients[place] for place in part.places]
        for row, client in enumerate(clients):
            params = {name: tensor[row] for name, tensor in part.params.items()}
            setup.probe("trained", client, params)
        if local:
            local.examine(job, part)
        places = torch.tensor(part.places, device=job.net.device)
        rows = torch.tensor([job.rows[place] for place in part.places], device=job.net.device)
        for name, tensor in part.kept.items():
            kept[name][rows] = tensor
        put(uploads, places, part.uploads, len(job.clients))
        work |= dict(zip(clients, part.work, strict=True))
    return kept, uploads, work


def is_evaluated(setup: Setup, round_number: int) -> bool:
    """Return whether clients are evaluated after a round."""
    return round_number % setup.training.evaluate_every == 0 or round_number == setup.training.rounds


def participants(setup: Setup, round_number: int) -> list[int]:
    """Return the clients of a round, ascending; newcomers, and clients without training samples, never take part."""
    if setup.participants is not None:
        chosen = sorted(setup.participants[round_number - 1])
    else:
        count = max(1, round(setup.training.participation * (setup.data.clients - len(setup.newcomers.clients))))
        order = keys.permutation(keys.derive(setup.seed, "participants", round_number), setup.data.clients).tolist()
        chosen = sorted([client for client in order if client not in setup.newcomers.clients][:count])
    return [client for client in chosen if len(setup.data.train[client])]


def merge(setup: Setup, server: Message, uploads: list[Message], chosen: list[int]) -> Message:
    """Return the server's state after the round; a round without participants changes nothing."""
    if not uploads:
        return server
    device = setup.data.x.device
    sizes = torch.tensor([len(setup.data.train[client]) for client in chosen], dtype=setup.data.x.dtype, device=device)
    with torch.no_grad():
        joined = _joined(uploads)
        merged = setup.method.merge(setup.groups[0].net, server, joined, torch.tensor(chosen, device=device), sizes)
    setup.watch_merge(joined, merged)
    return merged


def _joined(uploads: list[Message]) -> Message:
    """Return the groups' uploads as one, along the clients."""
    if len(uploads) == 1:
        return uploads[0]
    joined: dict[str, Tensor | Rows] = {}
    for name in uploads[0]:
        entries: list[Any] = [upload[name] for upload in uploads]
        if isinstance(entries[0], Rows):
            joined[name] = Rows(torch.cat([e.values for e in entries]), torch.cat([e.present for e in entries]))
        else:
            joined[name] = torch.cat(entries)
    return joined


def check_losses(losses: Mapping[int, Mapping[str, float]]) -> None:
    """Raise `Diverged` for a training loss, by client and name, that is not finite."""
    for client, found in losses.items():
        bad = [name for name, value in found.items() if not np.isfinite(value)]
        if bad:
            raise Diverged(f"client {client}'s training {bad[0].removeprefix('train/')} is {found[bad[0]]}")


# --- measuring


class _LocalExaminer:
    """Examines participants on their test samples right after local training, before anything is merged."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.examples: list[evaluation.Examples] = [{} for _ in range(setup.data.clients)]
        self.seconds = 0.0

    def examine(self, job: Job, part: Part) -> None:
        """Examine some of a job's clients."""
        began = time.perf_counter()
        rows = {place: row for row, place in enumerate(part.places)}

        def model(job: Job, place: int) -> Params:
            return {name: tensor[rows[place]] for name, tensor in part.params.items()}

        for client, found in self._setup.engine.examine(job, part.places, model, self._setup.data.test).items():
            self.examples[client] = found
        self.seconds += time.perf_counter() - began


def _record(
    setup: Setup, state: State, wire: Wire, work: Mapping[int, Work], local: _LocalExaminer | None, began: float
) -> Record:
    clients = setup.data.clients
    losses = sorted({name for done in work.values() for name in done.losses})
    metrics = {f"train/{n}": _spread({c: d.losses.get(n, np.nan) for c, d in work.items()}, clients) for n in losses}
    done = {
        name: _spread({c: float(getattr(d, name)) for c, d in work.items()}, clients, missing=0.0)
        for name in ("steps", "samples", "seconds")
    }
    trained = time.perf_counter()
    if local:
        metrics |= evaluate(setup, state, wire)
        _check_evaluated(setup, metrics)
        metrics |= {f"local/{name}": values for name, values in evaluation.client_metrics(local.examples).items()}
    evaluating = time.perf_counter() - trained + (local.seconds if local else 0.0)
    training = trained - began - (local.seconds if local else 0.0)
    return Record(metrics, wire.take(), done, {"training": training, "evaluation": evaluating})


def evaluate(setup: Setup, state: State, wire: Wire) -> FloatTable:
    """Return the metrics (clients,) of the models from which the clients would train next.

    What that takes to download is counted apart.  All clients are evaluated, also those that did not take part, but
    newcomers.
    """
    splits = {"test": setup.data.test, "validation": setup.data.validation}
    examples: dict[str, list[evaluation.Examples]] = {name: [{} for _ in range(setup.data.clients)] for name in splits}
    for place, some in _examined(setup):
        job = _with_downloads(_job(setup, state, place, some), state.server, wire, "evaluation")
        for row, client in enumerate(job.clients):
            setup.probe("evaluated", client, job.start(row))
        for name, split in splits.items():
            for client, found in setup.engine.examine(job, range(len(job.clients)), Job.start, split).items():
                examples[name][client] = found
    metrics = {
        f"{split}/{name}": values
        for split, clients in examples.items()
        for name, values in evaluation.all_metrics(setup.method, clients).items()
    }
    for values in metrics.values():  # a summary may have a value for clients without an example
        values[list(setup.newcomers.clients)] = np.nan
    return metrics


def _examined(setup: Setup) -> Iterator[tuple[int, set[int]]]:
    """Yield all clients but newcomers, so many of a group at a time, whose downloads are in memory together."""
    for place, group in enumerate(setup.groups):
        clients = [client for client in group.clients if client not in setup.newcomers.clients]
        for first in range(0, len(clients), _DOWNLOADS):
            yield place, set(clients[first : first + _DOWNLOADS])


def _check_evaluated(setup: Setup, metrics: FloatTable) -> None:
    """Raise `Diverged` as `check_evaluated` does.  Before round 1 nothing has diverged yet, so nobody asks then."""
    for split, held in (("test", setup.data.test), ("validation", setup.data.validation)):
        own = {name: values for name, values in metrics.items() if is_own(name.removeprefix(f"{split}/"))}
        there = [client for client, index in enumerate(held) if client not in setup.newcomers.clients and len(index)]
        check_evaluated(split, {client: {name: float(own[name][client]) for name in own} for client in there})


def check_evaluated(split: str, metrics: Mapping[int, Mapping[str, float]]) -> None:
    """Raise `Diverged` for a client with samples in the split whose loss is not finite, or else one without an answer.

    `metrics` are those of each client, as `evaluation.client_metrics` names them, behind the split's name.
    """
    for client, found in metrics.items():
        if not np.isfinite(found[f"{split}/loss"]):
            raise Diverged(f"the {split} loss is not finite for client {client}")
    for client, found in metrics.items():
        if undefined := evaluation.without_answer(
            {name.removeprefix(f"{split}/"): value for name, value in found.items()}
        ):
            raise Diverged(f"the scores '{undefined}' of client {client}'s {split} samples are NaN")


def _spread(values: Mapping[int, float], clients: int, missing: float = np.nan) -> NDArray[np.float64]:
    spread = np.full(clients, missing)
    spread[list(values)] = list(values.values())
    return spread


def _outcome(
    setup: Setup, records: list[Record], status: Literal["completed", "diverged", "stopped"], message: str, total: float
) -> Outcome:
    clients = setup.data.clients
    metrics = {
        name: np.stack([record.metrics.get(name, np.full(clients, np.nan)) for record in records])
        for name in sorted({name for record in records for name in record.metrics})
    }
    traffic = {n: np.stack([record.traffic[n] for record in records]) for n in (records[0].traffic if records else ())}
    work = {n: np.stack([record.work[n] for record in records]) for n in (records[0].work if records else ())}
    sizes = {
        name: np.array([len(index) for index in split], np.int64)
        for name, split in (
            ("train", setup.data.train),
            ("validation", setup.data.validation),
            ("test", setup.data.test),
        )
    }
    seconds = {name: sum(record.seconds[name] for record in records) for name in ("training", "evaluation")}
    return Outcome(status, message, metrics, traffic, work, sizes, {"total": total, **seconds})
