"""One client after the other."""

import time
from collections.abc import Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor

from fedbench.engines import Engine, Job, Part, spread
from fedbench.method import Batch, Message, parameters, tree_map
from fedbench.net import Net, Params
from fedbench.samples import batch_inputs
from fedbench.trainer import Step, Updater, Work, begin, mean_losses, objective, plan, step_masks, whole_set


@final
class Loop(Engine):
    """The plain engine: any model, any method, the reference for every other engine.

    - `threads`: clients that are computed at the same time.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def train(self, job: Job) -> Iterator[Part]:
        """Yield one client at a time."""
        yield from spread(partial(_train_client, job), range(len(job.clients)), job.net, self._threads)


def _train_client(job: Job, net: Net, place: int) -> Part:
    began, client = time.perf_counter(), job.clients[place]
    kept = {name: tensor[job.rows[place]] for name, tensor in job.kept.items()}
    down = tree_map(lambda tensor: tensor[place], job.down)
    params = {name: net.laid_out(t) for name, t in begin(job.method, net, kept, down).items()}
    bound = net.bound(params)
    steps = plan(job.method, net, job.data, job.training, job.seed, job.round_number, client)
    masks = step_masks(net, [steps], job.training.batch_size)
    losses: dict[str, list[Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for number, phase in enumerate(job.method.phases(net, job.training.epochs)):
        updater = Updater(job.training.optimizer, params, [name for name in net.parameters if phase.trains(name)])
        epoch = -1
        for taken, step in enumerate(step for step in steps if step.phase == number):
            if step.epoch != epoch:
                epoch, memory = step.epoch, job.method.init_memory(net)
            bound.training([mask[0, : len(step.samples)] for mask in next(masks)])
            memory = _take_step(job, bound, step, params, updater, taken, down, memory, losses)
        job.probe(f"phase/{phase.name}", client, params)
    with torch.no_grad():
        reply = job.method.reply(net, params, kept, down, lambda: whole_set(job.data, client), memory)
    means = mean_losses(
        job.method, net, job.training, steps, {name: torch.stack(values) for name, values in losses.items()}
    )
    samples = sum(len(step.samples) for step in steps)
    work = Work(means, len(steps), samples, time.perf_counter() - began)
    stacked = [tree_map(lambda tensor: tensor[None], message) for message in (params, *reply)]
    return Part([place], parameters(stacked[0]), parameters(stacked[1]), stacked[2], [work])


def _take_step(
    job: Job,
    net: Net,
    step: Step,
    params: Params,
    updater: Updater,
    taken: int,
    down: Message,
    memory: dict[str, Tensor],
    losses: dict[str, list[Tensor]],
) -> dict[str, Tensor]:
    """Take one optimiser step after `taken` others, in place, note its losses, and return the method's memory."""
    x, y = batch_inputs(job.data, step.samples[None], [step.key])[0], job.data.y[step.samples]
    batch = Batch(net.laid_out(x), y, torch.ones(len(y), dtype=x.dtype, device=x.device))
    trained = [params[name].requires_grad_() for name in updater.names]
    goal = objective(job.method, net, params, batch, down)
    if trained:
        slopes = torch.autograd.grad(goal.mean, trained, allow_unused=True, materialize_grads=True)
        for tensor in trained:
            tensor.requires_grad_(False)
        updater.update(dict(zip(updater.names, slopes, strict=True)), taken)
    for name, value in {"loss": goal.mean.detach(), **{f"loss/{n}": v for n, v in goal.parts.items()}}.items():
        losses.setdefault(name, []).append(value)
    return memory if goal.seen is None else job.method.observe(memory, batch, goal.seen)
