"""All clients of a group at once: every step is one program over stacked clients."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedbench.engines import Engine, Job, Part
from fedbench.engines.lowering import Lowering
from fedbench.method import Batch, Message, parameters, stack, tree_map
from fedbench.net import Net, Params
from fedbench.samples import batch_inputs
from fedbench.trainer import Step, Updater, Work, mean_losses, objective, plan, step_masks, whole_set

_Answer = tuple[Tensor, Tensor] | tuple[()]


@final
class Vectorised(Engine):
    """Trains clients in chunks, each chunk as one stacked program: by the lowering if the net has one, else by vmap.

    - `chunk`: the most clients that are computed together.
    - `threads`: chunks that are computed at the same time; fewer clients make smaller chunks, so that all have one.
    """

    def __init__(self, chunk: int = 20, threads: int = 1) -> None:
        self._chunk, self._threads = chunk, threads

    def train(self, job: Job) -> Iterator[Part]:
        """Yield one chunk of clients at a time."""
        # Most samples first: the clients that still have a step are then the first rows of their chunk, and those with
        # equal batches stand together.
        order = sorted(range(len(job.clients)), key=lambda place: -len(job.data.train[job.clients[place]]))
        size = min(self._chunk, -(-len(order) // self._threads))
        chunks = [order[first : first + size] for first in range(0, len(order), size)]
        if self._threads == 1:
            yield from (_train_chunk(job, job.net, places) for places in chunks)
            return
        nets: SimpleQueue[Net] = SimpleQueue()  # one for each thread, since vmap puts tensors into modules
        for _ in range(self._threads):
            nets.put(job.net.with_own_modules())

        def train_chunk(places: list[int]) -> Part:
            net = nets.get()
            try:
                return _train_chunk(job, net, places)
            finally:
                nets.put(net)

        # One thread each: torch would start as many again in every one of them.
        with ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(train_chunk, chunks)


def trial(job: Job) -> int:
    """Train the job's first client for one step on copies, and return how many bytes it takes of what a chunk stacks.

    That is parameters, gradients and optimiser state, and twice what autograd saves of a batch of the usual size.
    Raises whatever model and method raise under vmap.
    """
    samples = torch.arange(min(job.training.batch_size, max(map(len, job.data.train))), device=job.data.x.device)
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    chunk = _stacked(job, job.net, [0], [[Step(samples, 0, 0, 0)]])
    memory = {name: tensor[None].clone() for name, tensor in job.method.init_memory(job.net).items()}
    updater = Updater(job.training.optimizer, chunk.params, job.net.parameters)
    masks = next(step_masks(chunk.net, chunk.plans, len(samples)))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _take_step(chunk, slice(0, 1), [chunk.plans[0][0]], masks, updater, 0, memory, {})
    model = sum(tensor.nbytes for tensor in chunk.params.values())
    return (2 + updater.moments) * model + 2 * sum(seen.values())


@dataclass(frozen=True)
class _Chunk:
    """Clients that are trained together: `params` and `down` are stacked over them, and `params` moves in place."""

    job: Job
    net: Net
    lowering: Lowering | None
    clients: list[int]
    plans: list[list[Step]]
    params: Params
    kept: list[Params]
    down: Message


def _train_chunk(job: Job, net: Net, places: list[int]) -> Part:
    began = time.perf_counter()
    plans = [
        plan(job.method, net, job.data, job.training, job.seed, job.round_number, job.clients[place])
        for place in places
    ]
    chunk = _stacked(job, net, places, plans)
    losses: dict[str, list[Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for number, phase in enumerate(job.method.phases(net, job.training.epochs)):
        updater = Updater(job.training.optimizer, chunk.params, [name for name in net.parameters if phase.trains(name)])
        memory = _train_phase(chunk, number, updater, memory, losses)
        for row, place in enumerate(places):
            job.probe(f"phase/{phase.name}", job.clients[place], _row(chunk.params, row))
    replies = [_reply(chunk, row, _row(memory, row)) for row in range(len(places))]
    kept, uploads = (stack(list(messages)) for messages in zip(*replies, strict=True))
    # Steps of different phases were noted one phase after the other, each up to the longest of the chunk.
    noted = {name: torch.stack(values).cpu() for name, values in losses.items()}
    seconds = (time.perf_counter() - began) / len(places)
    work = [
        Work(
            mean_losses(
                job.method, net, job.training, steps, {n: t[_noted(plans, steps), row] for n, t in noted.items()}
            ),
            len(steps),
            sum(len(step.samples) for step in steps),
            seconds,
        )
        for row, steps in enumerate(plans)
    ]
    return Part(places, chunk.params, parameters(kept), uploads, work)


def _stacked(job: Job, net: Net, places: list[int], plans: list[list[Step]]) -> _Chunk:
    """Return the chunk before its first step."""
    lowering = Lowering.of(net)
    kept = [{name: tensor[job.rows[place]] for name, tensor in job.kept.items()} for place in places]
    down = tree_map(lambda tensor: tensor[places], job.down)
    models = [job.method.start(net, mine, _message_row(down, row)) for row, mine in enumerate(kept)]
    params = {name: torch.stack([model[name].detach() for model in models]) for name in models[0]}
    if lowering:
        params = {name: lowering.allocate(name, tensor) for name, tensor in params.items()}
    return _Chunk(job, net, lowering, [job.clients[place] for place in places], plans, params, kept, down)


def _train_phase(
    chunk: _Chunk, number: int, updater: Updater, memory: dict[str, Tensor], losses: dict[str, list[Tensor]]
) -> dict[str, Tensor]:
    """Train the chunk through one phase and return the method's memory (clients, ...)."""
    job = chunk.job
    plans = [[step for step in steps if step.phase == number] for steps in chunk.plans]
    fresh = {name: tensor.expand(len(plans), *tensor.shape) for name, tensor in job.method.init_memory(job.net).items()}
    memory = memory or {name: tensor.clone() for name, tensor in fresh.items()}
    masks = step_masks(chunk.net, plans, job.training.batch_size)
    for place in range(max(map(len, plans))):
        steps = [steps[place] for steps in plans if len(steps) > place]
        noted: dict[str, Tensor] = {}
        starting = [place == 0 or plans[row][place - 1].epoch != step.epoch for row, step in enumerate(steps)]
        for name, tensor in memory.items():
            tensor[: len(steps)][starting] = fresh[name][: len(steps)][starting]
        drawn = next(masks)
        for rows in _ranges(chunk.net, steps):
            _take_step(chunk, rows, steps[rows], [m[rows] for m in drawn], updater, place, memory, noted)
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
    taken: int,
    memory: dict[str, Tensor],
    noted: dict[str, Tensor],
) -> None:
    """Take one step of some rows after `taken` others, in place, and note the losses (clients,)."""
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
        updater.update(dict(zip(trained, slopes, strict=True)), taken, rows)
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


def _reply(chunk: _Chunk, row: int, memory: dict[str, Tensor]) -> tuple[Params, Message]:
    """Return what one client keeps and uploads."""
    job, client = chunk.job, chunk.clients[row]
    params, down = _row(chunk.params, row), _message_row(chunk.down, row)
    with torch.no_grad():
        return job.method.reply(chunk.net, params, chunk.kept[row], down, lambda: whole_set(job.data, client), memory)


def _noted(plans: list[list[Step]], steps: list[Step]) -> list[int]:
    """Return where in the record of a chunk's phases, each as long as its longest plan, the steps of one plan stand."""
    places: list[int] = []
    first = 0
    for number in range(max((step.phase for step in steps), default=0) + 1):
        places += range(first, first + sum(step.phase == number for step in steps))
        first += max(sum(step.phase == number for step in other) for other in plans)
    return places


def _row(stacked: Params, row: int) -> Params:
    return {name: tensor[row] for name, tensor in stacked.items()}


def _message_row(stacked: Message, row: int) -> Message:
    return tree_map(lambda tensor: tensor[row], stacked)
