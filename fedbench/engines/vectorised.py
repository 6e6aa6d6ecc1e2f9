"""All clients of a group at once: every step is one program over stacked clients."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedbench.engines import Engine, Job, Trained
from fedbench.engines.lowering import Lowering
from fedbench.method import Batch, Message, parameters, stack, tree_map
from fedbench.net import Net, Params
from fedbench.samples import batch_inputs
from fedbench.trainer import Step, Updater, Work, mean_losses, objective, plan, whole_set

_MASK_ENTRIES = 1 << 22
_Answer = tuple[Tensor, Tensor] | tuple[()]


@final
class Vectorised(Engine):
    """Trains clients in chunks, each chunk as one stacked program: by the lowering if the net has one, else by vmap.

    - `chunk`: clients computed together.  The chunks do not depend on `threads`, so neither do the numbers.
    - `threads`: chunks computed at the same time.
    """

    def __init__(self, chunk: int = 20, threads: int = 1) -> None:
        self._chunk, self._threads = chunk, threads

    def train(self, job: Job) -> Trained:
        """Return the clients' replies."""
        plans = [
            plan(job.method, job.net, job.data, job.training, job.seed, job.round_number, client)
            for client in job.clients
        ]
        # Most samples first: the clients that still have a step are then the first rows of their chunk, and those with
        # equal batches stand together.
        order = sorted(range(len(plans)), key=lambda place: -len(job.data.train[job.clients[place]]))
        chunks = [order[first : first + self._chunk] for first in range(0, len(order), self._chunk)]

        def train_chunk(places: list[int]) -> list[tuple[Params, Message, Work]]:
            return _train_chunk(job, places, [plans[place] for place in places])

        with ThreadPoolExecutor(self._threads) as pool:
            done = list(map(train_chunk, chunks) if self._threads == 1 else pool.map(train_chunk, chunks))
        replies = {
            place: reply
            for places, rows in zip(chunks, done, strict=True)
            for place, reply in zip(places, rows, strict=True)
        }
        kept, uploads, work = zip(*(replies[place] for place in range(len(plans))), strict=True)
        return Trained(parameters(stack(kept)), stack(uploads), list(work))


@dataclass(frozen=True)
class _Chunk:
    """Clients that are trained together; `params` and `down` are stacked over them and `params` moves in place."""

    job: Job
    net: Net
    lowering: Lowering | None
    plans: list[list[Step]]
    params: Params
    down: Message


def _train_chunk(job: Job, places: list[int], plans: list[list[Step]]) -> list[tuple[Params, Message, Work]]:
    began = time.perf_counter()
    chunk = _stacked(job, places, plans)
    losses: dict[str, list[Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for number, phase in enumerate(job.method.phases(job.net, job.training.epochs)):
        updater = Updater(job.training.optimizer, [name for name in job.net.parameters if phase.trains(name)])
        memory = _train_phase(chunk, number, updater, memory, losses)
        for row, place in enumerate(places):
            job.probe(f"phase/{phase.name}", job.clients[place], _row(chunk.params, row))
    seconds = (time.perf_counter() - began) / len(places)
    stacked = {name: torch.stack(values) for name, values in losses.items()}
    return [
        _finish(chunk, row, job.clients[place], _row(memory, row), {n: t[:, row] for n, t in stacked.items()}, seconds)
        for row, place in enumerate(places)
    ]


def _stacked(job: Job, places: list[int], plans: list[list[Step]]) -> _Chunk:
    """Return the chunk before its first step, with modules of its own, since vmap puts tensors into them."""
    net = job.net.with_own_modules()
    lowering = Lowering.of(net)
    down = tree_map(lambda tensor: tensor[places], job.down)
    kept = {name: tensor[places] for name, tensor in job.kept.items()}
    models = [job.method.start(net, _row(kept, row), _message_row(down, row)) for row in range(len(places))]
    params = {name: torch.stack([model[name].detach() for model in models]) for name in models[0]}
    if lowering:
        params = {name: lowering.allocate(name, tensor) for name, tensor in params.items()}
    return _Chunk(job, net, lowering, plans, params, down)


def _train_phase(
    chunk: _Chunk, number: int, updater: Updater, memory: dict[str, Tensor], losses: dict[str, list[Tensor]]
) -> dict[str, Tensor]:
    """Train the chunk through one phase and return the method's memory (clients, ...)."""
    job = chunk.job
    plans = [[step for step in steps if step.phase == number] for steps in chunk.plans]
    fresh = {name: tensor.expand(len(plans), *tensor.shape) for name, tensor in job.method.init_memory(job.net).items()}
    memory = memory or {name: tensor.clone() for name, tensor in fresh.items()}
    masks = _masks(chunk.net, plans, job.training.batch_size)
    for place in range(max(map(len, plans))):
        steps = [steps[place] for steps in plans if len(steps) > place]
        noted: dict[str, Tensor] = {}
        starting = [place == 0 or plans[row][place - 1].epoch != step.epoch for row, step in enumerate(steps)]
        for name, tensor in memory.items():
            tensor[: len(steps)][starting] = fresh[name][: len(steps)][starting]
        drawn = next(masks)
        for rows in _ranges(chunk.net, steps):
            _take_step(chunk, rows, steps[rows], [m[rows] for m in drawn], updater, memory, noted)
        for name, values in noted.items():
            losses.setdefault(name, []).append(values)
    return memory


def _ranges(net: Net, steps: list[Step]) -> Iterator[slice]:
    """Return the rows to compute together: all, padded to the longest batch; or, where padding would enter the
    statistics of batch norm, those that stand together with batches of the same size."""
    if not net.has_batch_norm:
        yield slice(0, len(steps))
        return
    first = 0
    for row in range(1, len(steps) + 1):
        if row == len(steps) or len(steps[row].samples) != len(steps[first].samples):
            yield slice(first, row)
            first = row


def _take_step(
    chunk: _Chunk,
    rows: slice,
    steps: list[Step],
    masks: list[Tensor],
    updater: Updater,
    memory: dict[str, Tensor],
    noted: dict[str, Tensor],
) -> None:
    """Take one step of some rows, in place, and note the losses (clients,)."""
    job = chunk.job
    batch = _padded(chunk, steps)
    masks = [mask[:, : batch.y.shape[1]] for mask in masks]
    views = {name: tensor[rows] for name, tensor in chunk.params.items()}
    trained = {name: views[name].detach().requires_grad_() for name in updater.names}
    frozen = {name: tensor for name, tensor in views.items() if name not in trained}
    down = tree_map(lambda tensor: tensor[rows], chunk.down)

    answer = chunk.lowering.run({**frozen, **trained}, masks, batch.x) if chunk.lowering else ()

    def one(trained: Params, frozen: Params, batch: Batch, down: Message, masks: list[Tensor], answer: _Answer) -> Any:
        params = {**frozen, **trained}
        net = chunk.net.training(masks)
        if answer:
            net = _answering(net, params, batch.x, answer)
        goal = objective(job.method, net, params, batch, down)
        return goal.mean, goal.parts, {} if goal.seen is None else {"seen": goal.seen}

    mean, parts, seen = vmap(one)(trained, frozen, batch, down, masks, answer)
    if trained:
        slopes = torch.autograd.grad(mean.sum(), list(trained.values()), allow_unused=True, materialize_grads=True)
        updater.update(chunk.params, dict(zip(trained, slopes, strict=True)), rows)
    for name, values in {"loss": mean.detach(), **{f"loss/{n}": v for n, v in parts.items()}}.items():
        whole = noted.setdefault(name, torch.zeros(len(chunk.plans), dtype=values.dtype, device=values.device))
        whole[rows] = values
    if seen:
        observed = vmap(job.method.observe)({n: t[rows] for n, t in memory.items()}, batch, seen["seen"])
        for name, tensor in observed.items():
            memory[name][rows] = tensor


def _answering(net: Net, params: Params, x: Tensor, answer: tuple[Tensor, Tensor]) -> Net:
    """Return the net with the answer to its one usual question at hand: the lowering found it for all clients at once,
    outside of vmap.  Any other question, such as that about another model, goes through vmap."""
    return net.calling(lambda p, inputs: answer if p is params and inputs is x else net(p, inputs))


def _padded(chunk: _Chunk, steps: list[Step]) -> Batch:
    """Return the batches of one step (clients, batch, ...), padded with the first sample and marked so."""
    data = chunk.job.data
    index = nn.utils.rnn.pad_sequence([step.samples for step in steps], batch_first=True)
    sizes = [len(step.samples) for step in steps]
    valid = torch.ones(index.shape, dtype=data.x.dtype, device=data.x.device)
    if min(sizes) < max(sizes):
        places = torch.arange(max(sizes), device=data.x.device)
        valid = (places < torch.tensor(sizes, device=data.x.device)[:, None]).to(data.x.dtype)
    return Batch(batch_inputs(data, index, [step.key for step in steps]), data.y[index], valid)


def _masks(net: Net, plans: list[list[Step]], batch: int) -> Iterator[list[Tensor]]:
    """Yield, step by step, the dropout masks (clients with a step, batch, ...), drawn for many steps at once."""
    flat = [step.key for place in range(max(map(len, plans))) for step in (s[place] for s in plans if len(s) > place)]
    counts = [sum(len(s) > place for s in plans) for place in range(max(map(len, plans)))]
    per_key = batch * max(1, net.mask_entries)
    many = max(max(counts, default=1), _MASK_ENTRIES // per_key)
    first = base = block = 0
    drawn: list[Tensor] = []
    for count in counts:
        if not drawn or first + count > block:
            drawn = net.masks(torch.tensor(flat[first : first + many], device=net.device), batch)
            base, block = first, first + many
        yield [mask[first - base : first - base + count] for mask in drawn]
        first += count


def _finish(
    chunk: _Chunk, row: int, client: int, memory: dict[str, Tensor], losses: dict[str, Tensor], seconds: float
) -> tuple[Params, Message, Work]:
    """Return one client's reply and work."""
    job, steps = chunk.job, chunk.plans[row]
    params, down = _row(chunk.params, row), _message_row(chunk.down, row)
    job.probe("trained", client, params)
    place = list(job.clients).index(client)
    kept = {name: tensor[place] for name, tensor in job.kept.items()}
    with torch.no_grad():
        reply = job.method.reply(chunk.net, params, kept, down, lambda: whole_set(job.data, client), memory)
    # Steps of different phases were noted one phase after the other, each up to the longest of the chunk.
    means = mean_losses(
        job.method, job.net, job.training, steps, {n: t[_places(chunk, steps)] for n, t in losses.items()}
    )
    return *reply, Work(means, len(steps), sum(len(step.samples) for step in steps), seconds)


def _places(chunk: _Chunk, steps: list[Step]) -> list[int]:
    """Return where in the chunk's record of all phases a client's steps stand."""
    places: list[int] = []
    first = 0
    for number in range(max((step.phase for step in steps), default=0) + 1):
        places += range(first, first + sum(step.phase == number for step in steps))
        first += max(sum(step.phase == number for step in other) for other in chunk.plans)
    return places


def _row(stacked: Params, row: int) -> Params:
    return {name: tensor[row] for name, tensor in stacked.items()}


def _message_row(stacked: Message, row: int) -> Message:
    return tree_map(lambda tensor: tensor[row], stacked)
