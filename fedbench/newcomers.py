"""Clients that come when all rounds are over: what a method does for somebody who took no part in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbench import evaluation, keys
from fedbench.engines import Engine, Job, Model
from fedbench.errors import InputError
from fedbench.method import Message, stack
from fedbench.wire import Wire

Table = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Newcomers:
    """Which clients they are, ascending, and after how many epochs of fine-tuning they are evaluated, ascending."""

    clients: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()


NOBODY = Newcomers()


def choose(clients: int | Sequence[int], epochs: Sequence[int], total: int, seed: int) -> Newcomers:
    """Return the newcomers among so many clients in all: those listed, or so many, drawn under the partition's seed.

    InputError if nobody would be left to train, or there is no such client.
    """
    order = keys.permutation(keys.derive(seed, "newcomers"), total).tolist()
    known = sorted(order[:clients] if isinstance(clients, int) else clients)
    if known[0] < 0 or known[-1] >= total:
        raise InputError(f"newcomers.clients: {known}; the partition has the clients 0 to {total - 1}")
    if len(known) >= total:
        raise InputError(f"newcomers.clients: {clients}, and {total} clients in all; one at least has to train")
    return Newcomers(tuple(known), tuple(epochs))


def welcome(job: Job, server: Message, engine: Engine, epochs: Sequence[int], wire: Wire) -> Table:
    """Return what the clients of a job come to, of which nothing has been sent yet.

    Each downloads what the method offers, starts from what it keeps, which is what it began with, and is evaluated;
    then, from the same start, it is fine-tuned for each number of `epochs`, and evaluated.  An epoch is what the method
    does in a round with one local epoch, nothing being sent.  Metrics are (1 + len(epochs), clients), NaN where
    fine-tuning diverged, beside "work/steps" and "work/samples", zero in the first row.
    """
    job = replace(job, training=replace(job.training, epochs=1))
    job = replace(job, down=stack([_download(job, server, place, wire) for place in range(len(job.clients))]))
    rows = [_evaluated(job, engine, Job.start)]
    for count in epochs:
        trained: dict[int, Any] = {}
        work: dict[str, Any] = {"work/steps": np.zeros(len(job.clients)), "work/samples": np.zeros(len(job.clients))}
        for part in engine.train(replace(job, repeats=count)):
            for row, place in enumerate(part.places):
                trained[place] = {name: tensor[row].clone() for name, tensor in part.params.items()}
                work["work/steps"][place], work["work/samples"][place] = part.work[row].steps, part.work[row].samples
        table = _evaluated(job, engine, lambda _, place: trained[place])  # noqa: B023 (called at once)
        rows.append({**_finite(table), **work})
    nothing = np.full(len(job.clients), np.nan)
    names = dict.fromkeys(name for row in rows for name in row)
    missing = {name: np.zeros(len(job.clients)) if name.startswith("work/") else nothing for name in names}
    return {name: np.stack([row.get(name, missing[name]) for row in rows]) for name in names}


def _download(job: Job, server: Message, place: int, wire: Wire) -> Message:
    """Return what a newcomer keeps of all that it is offered: that with the lowest loss on its training samples."""
    client = job.clients[place]
    offers = job.method.offers(server, client)
    received = [wire.carry_one("down", client, offer) for offer in offers]
    if len(received) == 1:
        return received[0]
    losses = []
    for down in received:
        alone = replace(job, clients=[client], rows=[job.rows[place]], down=stack([down]))
        losses.append(float(alone.examine(0, alone.start(0), job.data.train)["loss"].mean()))
    return received[int(np.nanargmin(losses))] if np.isfinite(losses).any() else received[0]


def _evaluated(job: Job, engine: Engine, model: Model) -> Table:
    """Return the metrics (clients,) of the models, on each client's own test and validation samples."""
    table: Table = {}
    for split, held in (("test", job.data.test), ("validation", job.data.validation)):
        found = engine.examine(job, range(len(job.clients)), model, held)
        examples = [found[client] for client in job.clients]
        table |= {f"{split}/{name}": values for name, values in evaluation.client_metrics(examples).items()}
    return table


def _finite(table: Table) -> Table:
    """Return metrics (clients,) without those of clients whose loss on the same samples is not finite."""
    lost = {split: ~np.isfinite(table[f"{split}/loss"]) for split in ("test", "validation") if f"{split}/loss" in table}
    return {name: np.where(lost[name.partition("/")[0]], np.nan, values) for name, values in table.items()}


def joined(tables: Sequence[tuple[Sequence[int], Table]], chosen: Newcomers, traffic: Mapping[str, Any]) -> Table:
    """Return the tables of several groups of clients as one, over all newcomers, with what they downloaded.

    - "clients" (M,) and "epochs" (E,) int64; the first is 0, before fine-tuning.
    - metrics, "work/steps" and "work/samples": (E, M) float64.
    - "down/scalars" and so on, as in `Wire`: (M,) int64.
    """
    epochs = np.array([0, *chosen.epochs], np.int64)
    clients = np.array(chosen.clients, np.int64)
    names = dict.fromkeys(name for _, table in tables for name in table)
    whole = {name: np.full((len(epochs), len(clients)), np.nan) for name in names}
    for members, table in tables:
        for name, values in table.items():
            whole[name][:, np.searchsorted(clients, members)] = values
    down = {name: counts[clients] for name, counts in traffic.items() if name.startswith("down/")}
    return {"clients": clients, "epochs": epochs, **whole, **down}
