"""One client after the other."""

import time
from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from fedbench.engines import Engine, Job, Part
from fedbench.method import Batch, Message, parameters, tree_map
from fedbench.net import Net, Params
from fedbench.samples import training_batch
from fedbench.trainer import (
    Step,
    Updater,
    Work,
    begin,
    client_masks,
    example_weights,
    mean_losses,
    objective,
    plan,
    whole_set,
)


@final
class Loop(Engine):
    """The plain engine: any model, any method, the reference for every other engine."""

    def train(self, job: Job) -> Iterator[Part]:
        """Yield one client at a time."""
        for place, client in enumerate(job.clients):
            params, kept, uploads, work = _train_client(job, place, client)
            stacked = [tree_map(lambda tensor: tensor[None], message) for message in (params, kept, uploads)]
            yield Part([place], parameters(stacked[0]), parameters(stacked[1]), stacked[2], [work])


class _Client(NamedTuple):
    """A client during its local training.

    - `params`: its model, which moves in place; `down`: what it received; `losses`: those of its steps, by name.
    - `whole`: for batches of each size, `valid` and the weights of the examples.
    """

    job: Job
    params: Params
    down: Message
    losses: dict[str, list[Tensor]]
    whole: dict[int, tuple[Tensor, Tensor]]


def _train_client(job: Job, place: int, number: int) -> tuple[Params, Params, Message, Work]:
    began = time.perf_counter()
    kept, down = job.held(place), job.received(place)
    params = {name: job.net.laid_out(t) for name, t in begin(job.method, job.net, kept, down).items()}
    bound = job.net.bound(params)
    steps = plan(job.phases, job.data, job.training, job.seed, job.round_number, number)
    masks = client_masks(job.net, steps)
    ones = {size: job.data.x.new_ones(size) for size in {len(step.samples) for step in steps}}
    client = _Client(job, params, down, {}, {size: (valid, example_weights(valid)) for size, valid in ones.items()})
    memory: dict[str, Tensor] = {}
    for stage, phase in enumerate(job.phases):
        updater = Updater(job.training.optimizer, params, [name for name in job.net.parameters if phase.trains(name)])
        trained = [params[name].requires_grad_() for name in updater.names]
        epoch = -1
        for taken, step in enumerate(step for step in steps if step.phase == stage):
            if step.epoch != epoch:
                epoch, memory = step.epoch, job.method.init_memory(job.net)
            memory = _take_step(client, bound.training(next(masks)), step, trained, updater, taken, memory)
        for tensor in trained:
            tensor.requires_grad_(False)
        job.probe(f"phase/{phase.name}", number, params)
    with torch.no_grad():
        reply = job.method.reply(job.net, params, kept, down, lambda: whole_set(job.data, number), memory)
    means = mean_losses(job.phases, steps, {name: torch.stack(values) for name, values in client.losses.items()})
    samples = sum(len(step.samples) for step in steps)
    return params, *reply, Work(means, len(steps), samples, time.perf_counter() - began)


def _take_step(
    client: _Client,
    net: Net,
    step: Step,
    trained: list[Tensor],
    updater: Updater,
    taken: int,
    memory: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Take one optimiser step after `taken` others, in place, note its losses, and return the method's memory."""
    job = client.job
    x, y = training_batch(job.data, step.samples, [step.key])
    valid, share = client.whole[len(y)]
    batch = Batch(net.laid_out(x), y, valid)
    goal = objective(job.method, net, client.params, batch, client.down, padded=False)
    if trained:
        slopes = torch.autograd.grad(goal.total, trained, share, allow_unused=True, materialize_grads=True)
        updater.update(slopes, taken)
    for name, value in goal.means.items():
        client.losses.setdefault(name, []).append(value)
    return memory if goal.seen is None else job.method.observe(memory, batch, goal.seen)
