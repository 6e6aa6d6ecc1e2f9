"""One client after the other."""

import time
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from fedbench.engines import Engine, Job, Part
from fedbench.method import Batch, Message, parameters, tree_map
from fedbench.net import Net, Params
from fedbench.samples import batch_inputs
from fedbench.trainer import Step, Updater, Work, begin, mean_losses, objective, plan, step_masks, whole_set


@final
class Loop(Engine):
    """The plain engine: any model, any method, the reference for every other engine."""

    def train(self, job: Job) -> Iterator[Part]:
        """Yield one client at a time."""
        for place, client in enumerate(job.clients):
            params, kept, uploads, work = _train_client(job, place, client)
            stacked = [tree_map(lambda tensor: tensor[None], message) for message in (params, kept, uploads)]
            yield Part([place], parameters(stacked[0]), parameters(stacked[1]), stacked[2], [work])


def _train_client(job: Job, place: int, client: int) -> tuple[Params, Params, Message, Work]:
    began = time.perf_counter()
    kept, down = job.held(place), job.received(place)
    params = {name: job.net.laid_out(t) for name, t in begin(job.method, job.net, kept, down).items()}
    bound = job.net.bound(params)
    steps = plan(job.phases, job.data, job.training, job.seed, job.round_number, client)
    masks = step_masks(job.net, [steps])
    losses: dict[str, list[Tensor]] = {}
    memory: dict[str, Tensor] = {}
    for number, phase in enumerate(job.phases):
        updater = Updater(job.training.optimizer, params, [name for name in job.net.parameters if phase.trains(name)])
        trained = [params[name].requires_grad_() for name in updater.names]
        epoch = -1
        for taken, step in enumerate(step for step in steps if step.phase == number):
            if step.epoch != epoch:
                epoch, memory = step.epoch, job.method.init_memory(job.net)
            net = bound.training([mask[0, : len(step.samples)] for mask in next(masks)])
            memory = _take_step(job, net, step, params, trained, updater, taken, down, memory, losses)
        for tensor in trained:
            tensor.requires_grad_(False)
        job.probe(f"phase/{phase.name}", client, params)
    with torch.no_grad():
        reply = job.method.reply(job.net, params, kept, down, lambda: whole_set(job.data, client), memory)
    means = mean_losses(job.phases, steps, {name: torch.stack(values) for name, values in losses.items()})
    samples = sum(len(step.samples) for step in steps)
    return params, *reply, Work(means, len(steps), samples, time.perf_counter() - began)


def _take_step(
    job: Job,
    net: Net,
    step: Step,
    params: Params,
    trained: list[Tensor],
    updater: Updater,
    taken: int,
    down: Message,
    memory: dict[str, Tensor],
    losses: dict[str, list[Tensor]],
) -> dict[str, Tensor]:
    """Take one optimiser step after `taken` others, in place, note its losses, and return the method's memory."""
    x, y = batch_inputs(job.data, step.samples[None], [step.key])[0], job.data.y[step.samples]
    batch = Batch(net.laid_out(x), y, torch.ones(len(y), dtype=x.dtype, device=x.device))
    goal = objective(job.method, net, params, batch, down, padded=False)
    if trained:
        slopes = torch.autograd.grad(goal.mean, trained, allow_unused=True, materialize_grads=True)
        updater.update(dict(zip(updater.names, slopes, strict=True)), taken)
    for name, value in {"loss": goal.mean.detach(), **{f"loss/{n}": v for n, v in goal.parts.items()}}.items():
        losses.setdefault(name, []).append(value)
    return memory if goal.seen is None else job.method.observe(memory, batch, goal.seen)
