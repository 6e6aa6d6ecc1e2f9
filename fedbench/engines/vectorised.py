"""All clients of a group at once: every step is one program over stacked clients."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.func import vmap

from fedbench.engines import Engine, Job, Model, Part
from fedbench.engines.exam import chunks, examine_together, saved_bytes
from fedbench.engines.lowering import Answer, Lowering
from fedbench.evaluation import Examples
from fedbench.method import Batch, Message, Method, parameters, stack, tree_map
from fedbench.net import Net, Params
from fedbench.samples import padded, training_batch
from fedbench.trainer import (
    Objective,
    Step,
    Updater,
    Work,
    example_weights,
    mean_losses,
    objective,
    plan,
    step_masks,
    whole_set,
)

C = TypeVar("C")
T = TypeVar("T")


@final
class Vectorised(Engine):
    """Trains clients in chunks, each chunk as one stacked program: by the lowering if the net has one, else by vmap.

    - `chunk`: the most clients that are computed together.
    - `samples`: the most samples of theirs that are examined together; 0: each client alone.
    - `threads`: chunks that are computed at the same time; fewer clients make smaller chunks, so that all have one.
    """

    def __init__(self, chunk: int = 20, threads: int = 1, samples: int = 2048) -> None:
        self._chunk, self._threads, self._samples = chunk, threads, samples

    def train(self, job: Job) -> Iterator[Part]:
        """Yield one chunk of clients at a time."""
        for parts in self.train_together([job]):
            yield from parts.values()

    def train_together(self, jobs: Sequence[Job]) -> Iterator[dict[int, Part]]:
        """Yield one chunk at a time of the clients of all jobs, as one part for each job in it (by its number).

        The jobs may differ in their clients, samples and seeds, in the method's numbers and in the learning rate.
        """
        # Most samples first: the clients that still have a step are then the first rows of their chunk, and those with
        # equal batches stand together.
        order = sorted(
            (_Row(job, number, place) for number, job in enumerate(jobs) for place in range(len(job.clients))),
            key=lambda row: -len(row.job.data.train[row.client]),
        )
        size = min(self._chunk, -(-len(order) // self._threads))
        rows = [order[first : first + size] for first in range(0, len(order), size)]
        yield from self._spread(jobs[0].net, _train_chunk, rows)

    def examine(self, job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
        """Return what the models answer, some clients at a time."""
        if not self._samples or job.net.mixes_examples:  # padding would enter what is mixed
            return super().examine(job, places, model, split)
        found: dict[int, Examples] = {job.clients[place]: {} for place in places}
        sizes = [len(split[job.clients[place]]) for place in places]

        def examine_chunk(net: Net, held: Sequence[int]) -> dict[int, Examples]:
            return examine_together(replace(job, net=net), held, model, split)

        size = min(self._chunk, -(-len(places) // self._threads))
        groups = [[places[number] for number in chunk] for chunk in chunks(sizes, size, self._samples)]
        for examined in self._spread(job.net, examine_chunk, groups):
            found |= examined
        return found

    def _spread(self, net: Net, work: Callable[[Net, C], T], pieces: Sequence[C]) -> Iterator[T]:
        """Yield what is made of each piece of the work, some at the same time, each with a net of its own."""
        threads = min(self._threads, len(pieces))
        if threads < 2:
            yield from (work(net, piece) for piece in pieces)
            return
        nets: SimpleQueue[Net] = SimpleQueue()  # one for each thread, since vmap puts tensors into modules
        for _ in range(threads):
            nets.put(net.with_own_modules())

        def one(piece: C) -> T:
            net = nets.get()
            try:
                return work(net, piece)
            finally:
                nets.put(net)

        # One thread each: torch would start as many again in every one of them.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(one, pieces)


def trial(jobs: Sequence[Job]) -> int:
    """Train each job's first client for one step on copies, and return how many bytes a client takes of the stack.

    That is parameters, gradients and optimiser state, and twice what autograd saves of a batch of the usual size.
    Raises whatever model and method raise under vmap.
    """
    job = jobs[0]
    longest = min(max(map(len, job.data.train)) for job in jobs)
    samples = torch.arange(min(job.training.batch_size, longest), device=job.data.x.device)
    chunk = _stacked(
        job.net, [_Row(job, number, 0) for number, job in enumerate(jobs)], [[Step(samples, 0, 0, 0)]] * len(jobs)
    )
    memory = _fresh_memory(chunk)
    updater = Updater(job.training.optimizer, chunk.params, job.net.parameters)
    masks = next(step_masks(chunk.net, chunk.plans))
    first = [plan[0] for plan in chunk.plans]
    saved = saved_bytes(lambda: _take_step(chunk, slice(0, len(jobs)), first, masks, updater, 0, memory, {}))
    model = sum(tensor.nbytes for tensor in chunk.params.values())
    return ((2 + updater.moments) * model + 2 * saved) // len(jobs)


@dataclass(frozen=True)
class _Row:
    """A client of one of the jobs, by the job's number and the client's place in it."""

    job: Job
    number: int
    place: int

    @property
    def client(self) -> int:
        return self.job.clients[self.place]


@dataclass(frozen=True)
class _Chunk:
    """Clients that are trained together: `params` and `down` are stacked over them, and `params` moves in place.

    - `numbers`: hyperparameters in which the clients' methods differ (clients,), by name; `lr`: their learning rates if
      those differ.
    """

    net: Net
    lowering: Lowering | None
    rows: list[_Row]
    plans: list[list[Step]]
    params: Params
    kept: list[Params]
    down: Message
    numbers: dict[str, Tensor]
    lr: Tensor | None

    @property
    def job(self) -> Job:
        """The first client's job, for everything in which the jobs are equal."""
        return self.rows[0].job


def _train_chunk(net: Net, rows: list[_Row]) -> dict[int, Part]:
    began = time.perf_counter()
    plans = [plan(r.job.phases, r.job.data, r.job.training, r.job.seed, r.job.round_number, r.client) for r in rows]
    chunk = _stacked(net, rows, plans)
    job = chunk.job
    optimizer = job.training.optimizer if chunk.lr is None else replace(job.training.optimizer, lr=1.0)
    losses: dict[str, list[Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for number, phase in enumerate(job.phases):
        updater = Updater(optimizer, chunk.params, [name for name in net.parameters if phase.trains(name)])
        memory = _train_phase(chunk, number, updater, memory, losses)
        for place, row in enumerate(rows):
            row.job.probe(f"phase/{phase.name}", row.client, _row(chunk.params, place))
    replies = [_reply(chunk, place, _row(memory, place)) for place in range(len(rows))]
    noted = {name: torch.stack(values).cpu() for name, values in losses.items()}
    seconds = (time.perf_counter() - began) / len(rows)
    work = [
        Work(
            mean_losses(job.phases, steps, {n: t[places, row] for n, t in noted.items()}),
            len(steps),
            sum(len(step.samples) for step in steps),
            seconds,
        )
        for row, (steps, places) in enumerate(zip(plans, _noted(plans), strict=True))
    ]
    parts = {}
    for number in sorted({row.number for row in rows}):
        held = [place for place, row in enumerate(rows) if row.number == number]
        params = chunk.params if len(held) == len(rows) else {name: t[held] for name, t in chunk.params.items()}
        kept, uploads = (stack(list(messages)) for messages in zip(*(replies[place] for place in held), strict=True))
        places = [rows[place].place for place in held]
        parts[number] = Part(places, params, parameters(kept), uploads, [work[place] for place in held])
    return parts


def _stacked(net: Net, rows: list[_Row], plans: list[list[Step]]) -> _Chunk:
    """Return the chunk before its first step."""
    lowering = Lowering.of(net)
    kept = [row.job.held(row.place) for row in rows]
    downs = [row.job.received(row.place) for row in rows]
    models = [row.job.method.start(net, mine, down) for row, mine, down in zip(rows, kept, downs, strict=True)]
    params = {name: torch.stack([model[name].detach() for model in models]) for name in models[0]}
    if lowering:
        params = {name: lowering.allocate(name, tensor) for name, tensor in params.items()}
    rates = [row.job.training.optimizer.lr for row in rows]
    lr = None if len(set(rates)) == 1 else torch.tensor(rates, dtype=net.dtype, device=net.device)
    return _Chunk(net, lowering, rows, plans, params, kept, stack(downs), _numbers(net, rows), lr)


def _numbers(net: Net, rows: list[_Row]) -> dict[str, Tensor]:
    """Return the hyperparameters in which the rows' methods differ (clients,); all of them are numbers."""
    names = [field.name for field in fields(rows[0].job.method)]  # type: ignore[arg-type]  # methods are dataclasses
    values = {name: [getattr(row.job.method, name) for row in rows] for name in names}
    return {
        name: torch.tensor(numbers, dtype=net.dtype, device=net.device)
        for name, numbers in values.items()
        if any(number != numbers[0] for number in numbers)
    }


def _train_phase(
    chunk: _Chunk, number: int, updater: Updater, memory: dict[str, Tensor], losses: dict[str, list[Tensor]]
) -> dict[str, Tensor]:
    """Train the chunk through one phase and return the method's memory (clients, ...)."""
    plans = [[step for step in steps if step.phase == number] for steps in chunk.plans]
    fresh = _fresh_memory(chunk)
    memory = memory or {name: tensor.clone() for name, tensor in fresh.items()}
    masks = step_masks(chunk.net, plans)
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


def _fresh_memory(chunk: _Chunk) -> dict[str, Tensor]:
    """Return what every client's method starts an epoch with (clients, ...)."""
    return parameters(stack([row.job.method.init_memory(chunk.net) for row in chunk.rows]))


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
    batch = _padded(chunk.rows[rows], steps)
    trained = {name: chunk.params[name][rows].detach().requires_grad_() for name in updater.names}
    goal = _objectives(chunk, rows, batch, [mask[:, : batch.y.shape[1]] for mask in masks], trained)
    if trained:
        slopes = torch.autograd.grad(
            goal.total, list(trained.values()), example_weights(batch.valid), allow_unused=True, materialize_grads=True
        )
        if chunk.lr is not None:  # momentum of scaled slopes is scaled momentum
            slopes = tuple(slope * chunk.lr[rows].view(-1, *(1 for _ in slope.shape[1:])) for slope in slopes)
        updater.update(slopes, taken, rows)
    for name, values in goal.means.items():
        whole = noted.setdefault(name, torch.zeros(len(chunk.plans), dtype=values.dtype, device=values.device))
        whole[rows] = values
    if goal.seen is not None:
        _observe(chunk, rows, batch, goal.seen, memory)


def _objectives(chunk: _Chunk, rows: slice, batch: Batch, masks: list[Tensor], trained: Params) -> Objective:
    """Return the objectives of some rows, stacked; `trained` are their parameters that move."""
    frozen = {name: tensor[rows] for name, tensor in chunk.params.items() if name not in trained}
    down = tree_map(lambda tensor: tensor[rows], chunk.down)
    # Found for all clients at once, outside of vmap; any question but this, such as one about another model, goes
    # through vmap.
    answer = chunk.lowering.run({**frozen, **trained}, masks, batch.x) if chunk.lowering else ()

    def one(
        trained: Params,
        frozen: Params,
        batch: Batch,
        down: Message,
        masks: list[Tensor],
        answer: Answer,
        numbers: dict[str, Tensor],
    ) -> Any:
        params = {**frozen, **trained}
        net = chunk.net.training(masks)
        if answer:
            net = net.knowing(params, batch.x, answer)
        goal = objective(_with_numbers(chunk.job.method, numbers), net, params, batch, down)
        return goal.total, goal.means, {} if goal.seen is None else {"seen": goal.seen}  # vmap takes no None

    numbers = {name: tensor[rows] for name, tensor in chunk.numbers.items()}
    total, means, seen = vmap(one)(trained, frozen, batch, down, masks, answer, numbers)
    return Objective(total, means, seen.get("seen"))


def _observe(chunk: _Chunk, rows: slice, batch: Batch, seen: Tensor, memory: dict[str, Tensor]) -> None:
    """Let the methods of some rows observe a batch; their memory (clients, ...) changes in place."""

    def one(memory: dict[str, Tensor], batch: Batch, seen: Tensor, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        return _with_numbers(chunk.job.method, numbers).observe(memory, batch, seen)

    numbers = {name: tensor[rows] for name, tensor in chunk.numbers.items()}
    for name, tensor in vmap(one)({n: t[rows] for n, t in memory.items()}, batch, seen, numbers).items():
        memory[name][rows] = tensor


def _with_numbers(method: Method, numbers: dict[str, Tensor]) -> Method:
    """Return a method with the hyperparameters of one client's in which the chunk's differ."""
    return replace(method, **numbers) if numbers else method  # type: ignore[type-var]  # methods are dataclasses


def _padded(rows: list[_Row], steps: list[Step]) -> Batch:
    """Return the batches of one step (clients, batch, ...), padded with the first sample and marked so."""
    data = rows[0].job.data
    index, valid = padded([step.samples for step in steps], data.x.dtype)
    pools = {id(row.job.data): row.job.data for row in rows}
    if len(pools) == 1:
        return Batch(*training_batch(data, index, [step.key for step in steps]), valid)
    x, y = data.x.new_empty(*index.shape, *data.shape), torch.empty_like(index)
    for pool in pools.values():
        mine = [place for place, row in enumerate(rows) if row.job.data is pool]
        x[mine], y[mine] = training_batch(pool, index[mine], [steps[place].key for place in mine])
    return Batch(x, y, valid)


def _reply(chunk: _Chunk, row: int, memory: dict[str, Tensor]) -> tuple[Params, Message]:
    """Return what one client keeps and uploads."""
    job, client = chunk.rows[row].job, chunk.rows[row].client
    params, down = _row(chunk.params, row), tree_map(itemgetter(row), chunk.down)
    with torch.no_grad():
        return job.method.reply(chunk.net, params, chunk.kept[row], down, lambda: whole_set(job.data, client), memory)


def _noted(plans: list[list[Step]]) -> list[list[int]]:
    """Return where each client's steps stand in the record: one phase after the other, each up to its longest plan."""
    counts = [Counter(step.phase for step in steps) for steps in plans]
    starts = [0]
    for phase in range(max((phase for count in counts for phase in count), default=0) + 1):
        starts.append(starts[-1] + max(count[phase] for count in counts))
    return [[starts[phase] + place for phase in sorted(count) for place in range(count[phase])] for count in counts]


def _row(stacked: Params, row: int) -> Params:
    return {name: tensor[row] for name, tensor in stacked.items()}
