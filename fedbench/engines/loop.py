"""One client after the other."""

import time
from typing import final

import torch
from torch import Tensor

from fedbench.engines import Engine, Job, Trained
from fedbench.method import Batch, Message, parameters, stack, tree_map
from fedbench.net import Net, Params
from fedbench.samples import batch_inputs
from fedbench.trainer import Step, Updater, Work, begin, mean_losses, objective, plan, whole_set


@final
class Loop(Engine):
    """The plain engine: any model, any method, the reference for every other engine."""

    def train(self, job: Job) -> Trained:
        """Return the clients' replies."""
        replies = [_train_client(job, place, client) for place, client in enumerate(job.clients)]
        kept, uploads, work = zip(*replies, strict=True)
        return Trained(parameters(stack(kept)), stack(uploads), list(work))


def _train_client(job: Job, place: int, client: int) -> tuple[Params, Message, Work]:
    began = time.perf_counter()
    kept = {name: tensor[place] for name, tensor in job.kept.items()}
    down = tree_map(lambda tensor: tensor[place], job.down)
    params = {name: _fast(tensor) for name, tensor in begin(job.method, job.net, kept, down).items()}
    bound = job.net.bound(params)
    steps = plan(job.method, job.net, job.data, job.training, job.seed, job.round_number, client)
    masks = job.net.masks(torch.tensor([step.key for step in steps], device=job.net.device), job.training.batch_size)
    losses: dict[str, list[Tensor]] = {}
    memory: dict[str, Tensor] = {}
    phases = job.method.phases(job.net, job.training.epochs)
    for number, phase in enumerate(phases):
        names = [name for name in job.net.parameters if phase.trains(name)]
        updater = Updater(job.training.optimizer, names)
        epoch = -1
        for place_in_round, step in enumerate(steps):
            if step.phase != number:
                continue
            if step.epoch != epoch:
                epoch, memory = step.epoch, job.method.init_memory(job.net)
            net = bound.training([mask[place_in_round, : len(step.samples)] for mask in masks])
            memory = _take_step(job, net, step, params, updater, down, memory, losses)
        job.probe(f"phase/{phase.name}", client, params)
    job.probe("trained", client, params)
    with torch.no_grad():
        reply = job.method.reply(job.net, params, kept, down, lambda: whole_set(job.data, client), memory)
    means = mean_losses(
        job.method, job.net, job.training, steps, {name: torch.stack(values) for name, values in losses.items()}
    )
    samples = sum(len(step.samples) for step in steps)
    return *reply, Work(means, len(steps), samples, time.perf_counter() - began)


def _fast(tensor: Tensor) -> Tensor:
    """Return images and convolution weights in channels-last memory, where pooling takes a tenth of the time.

    A clone, because `contiguous` leaves a single channel in strides that the next layer takes for channels-first.
    """
    return tensor.clone(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _take_step(
    job: Job,
    net: Net,
    step: Step,
    params: Params,
    updater: Updater,
    down: Message,
    memory: dict[str, Tensor],
    losses: dict[str, list[Tensor]],
) -> dict[str, Tensor]:
    """Take one optimiser step on `params` in place, note its losses, and return the method's memory."""
    x, y = batch_inputs(job.data, step.samples[None], [step.key])[0], job.data.y[step.samples]
    batch = Batch(_fast(x), y, torch.ones(len(y), dtype=x.dtype, device=x.device))
    trained = [params[name].requires_grad_() for name in updater.names]
    goal = objective(job.method, net, params, batch, down)
    if trained:
        slopes = torch.autograd.grad(goal.mean, trained, allow_unused=True, materialize_grads=True)
        for tensor in trained:
            tensor.requires_grad_(False)
        updater.update(params, dict(zip(updater.names, slopes, strict=True)))
    for name, value in {"loss": goal.mean.detach(), **{f"loss/{n}": v for n, v in goal.parts.items()}}.items():
        losses.setdefault(name, []).append(value)
    return memory if goal.seen is None else job.method.observe(memory, batch, goal.seen)
