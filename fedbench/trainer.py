"""Local training of one client: begin, step, end.  Nothing else trains; every engine is made of these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedbench import keys
from fedbench.method import Batch, Loss, Message, Method, Phase
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.settings import Optimizer, Training

_MASK_ENTRIES = 1 << 22  # drawn at once


class Step(NamedTuple):
    """One planned optimiser step: the samples of its batch, its phase and epoch, and the key of its dropout masks."""

    samples: Tensor
    phase: int
    epoch: int
    key: int


def plan(
    phases: Sequence[Phase], data: Samples, training: Training, seed: int, round_number: int, client: int
) -> list[Step]:
    """Return all steps of one client in one round; they depend on nothing but these arguments."""
    samples = data.train[client]
    own = keys.derive(seed, "step", round_number, client)
    steps: list[Step] = []
    epoch = 0
    for number, phase in enumerate(phases):
        for _ in range(phase.epochs):
            order = samples
            if training.shuffle:
                key = keys.derive(seed, "order", round_number, client, epoch)
                order = samples[keys.permutation(key, len(samples), samples.device)]
            for index in batches(order, training):
                steps.append(Step(index, number, epoch, keys.extend(own, len(steps))))
            epoch += 1
    return steps


def batches(order: Tensor, training: Training) -> Sequence[Tensor]:
    """Return the batches of an epoch; a client too small for any trains on one batch of all it has."""
    batches = torch.split(order, training.batch_size)
    shortest = {"keep": 1, "drop": training.batch_size, "drop_single": min(2, training.batch_size)}[training.last_batch]
    kept = batches if len(batches[-1]) >= shortest else batches[:-1]
    return kept or batches


def step_masks(net: Net, plans: Sequence[Sequence[Step]]) -> Iterator[list[Tensor]]:
    """Yield, for one step after the other, the dropout masks of all clients that have it.

    The masks are (clients, batch, *unit) each, as long as the largest batch; `plans` are the steps of clients, the
    longest plan first.  Many steps' masks are drawn at once.
    """
    batch = max((len(step.samples) for steps in plans for step in steps), default=1)
    counts = [sum(len(steps) > place for steps in plans) for place in range(max(map(len, plans)))]
    flat = [plans[row][place].key for place, count in enumerate(counts) for row in range(count)]
    many = max(max(counts, default=1), _MASK_ENTRIES // (batch * max(1, net.mask_entries)))
    first = 0
    for block in _blocks(counts, many):
        keys_drawn = torch.tensor(flat[first : first + sum(block)], device=net.device)
        drawn = [torch.split(mask, block) for mask in net.masks(keys_drawn, batch)]
        for place in range(len(block)):
            yield [of_layer[place] for of_layer in drawn]
        first += sum(block)


def _blocks(counts: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the counts one after the other, so many at a time that they add up to `most` or less."""
    block: list[int] = []
    total = 0
    for count in counts:
        if block and total + count > most:
            yield block
            block, total = [], 0
        block.append(count)
        total += count
    if block:
        yield block


def client_masks(net: Net, steps: Sequence[Step]) -> Iterator[list[Tensor]]:
    """Yield the dropout masks (batch, *unit) of one client's steps, each as long as its batch."""
    for step, masks in zip(steps, step_masks(net, [steps]), strict=True):
        size = len(step.samples)
        yield [mask[0] if mask.shape[1] == size else mask[0, :size] for mask in masks]


def begin(method: Method, net: Net, kept: Params, down: Message) -> Params:
    """Return a client's model at the start of local training, in memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in method.start(net, kept, down).items()}


class Objective(NamedTuple):
    """What training minimises the weighted sum of (B,), the means to log, and what the method observes."""

    total: Tensor
    means: dict[str, Tensor]
    seen: Tensor | None


def objective(method: Method, net: Net, params: Params, batch: Batch, down: Message, padded: bool = True) -> Objective:
    """Return the loss of a batch, averaged over its valid examples (all if not `padded`); `net` is in training mode."""
    loss: Loss = method.loss(net, params, batch, down)
    mean = partial(_mean, valid=batch.valid) if padded else torch.mean
    values = {"loss": loss.total, **{f"loss/{name}": part for name, part in loss.parts.items()}}
    means = {name: mean(value.detach()) for name, value in values.items()}
    return Objective(loss.total, means, None if loss.seen is None else loss.seen.detach())


def example_weights(valid: Tensor) -> Tensor:
    """Return the weights (..., B) with which the examples of a batch make its mean loss, given `valid` (..., B)."""
    return valid / valid.sum(-1, keepdim=True)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return (values * valid).sum() / valid.sum() if values.dim() else values


@dataclass(frozen=True)
class _Moved:
    """Tensors with one weight decay, and the optimiser's state of each; dimensions stand in the order of memory.

    torch's fused optimisers copy every tensor whose dimensions stand in another order.

    - `places`: where they stand among all that move; `orders`: their dimensions in the order of memory, None where
      that is the usual one.
    """

    places: list[int]
    orders: list[list[int] | None]
    decay: float
    tensors: list[Tensor]
    moments: list[list[Tensor]]

    def of_rows(self, rows: slice) -> "_Moved":
        """Return the same of some rows of stacked tensors."""
        tensors = [tensor[rows] for tensor in self.tensors]
        return replace(self, tensors=tensors, moments=[[moment[rows] for moment in kind] for kind in self.moments])


class Updater:
    """torch's own optimiser functions on some of a model's tensors, in place, with state that starts empty.

    All operations are elementwise, so tensors stacked over clients take the same step as each client's alone.
    """

    def __init__(self, optimizer: Optimizer, params: Params, names: Sequence[str]) -> None:
        self.names = list(names)
        self._optimizer = optimizer
        self.moments = {"sgd": 1, "adam": 2}[optimizer.name]  # tensors of state for each parameter
        bias_decay = optimizer.weight_decay if optimizer.weight_decay_bias is None else optimizer.weight_decay_bias
        decays = [bias_decay if "bias" in n.rpartition(".")[2] else optimizer.weight_decay for n in names]
        orders = [_order_in_memory(params[name]) for name in names]
        self._of_rows: dict[tuple[int | None, int | None], list[_Moved]] = {(None, None): []}
        for decay in dict.fromkeys(decays):
            places = [place for place in range(len(names)) if decays[place] == decay]
            tensors = [_ordered(params[names[place]].detach(), orders[place]) for place in places]
            moments = [[torch.zeros_like(t) for t in tensors] for _ in range(self.moments)]
            self._of_rows[None, None].append(
                _Moved(places, [orders[place] for place in places], decay, tensors, moments)
            )

    def update(self, gradients: Sequence[Tensor], taken: int, rows: slice = slice(None)) -> None:
        """Take one step by the gradients of `names` after `taken` others; with `rows`, of those rows of stacks."""
        key = (rows.start, rows.stop)
        if key not in self._of_rows:
            self._of_rows[key] = [moved.of_rows(rows) for moved in self._of_rows[None, None]]
        for moved in self._of_rows[key]:
            slopes = [
                _laid_out_as(_ordered(gradients[place], order), tensor)
                for place, order, tensor in zip(moved.places, moved.orders, moved.tensors, strict=True)
            ]
            if self._optimizer.name == "sgd":
                self._sgd(moved, slopes)
            else:
                self._adam(moved, slopes, taken)

    def _sgd(self, moved: _Moved, slopes: list[Tensor]) -> None:
        sgd(
            moved.tensors,
            slopes,
            list(moved.moments[0]),  # torch's type is a list whose entries may be missing
            fused=True,
            lr=self._optimizer.lr,
            momentum=self._optimizer.momentum,
            dampening=0,
            nesterov=self._optimizer.nesterov,
            weight_decay=moved.decay,
            maximize=False,
        )

    def _adam(self, moved: _Moved, slopes: list[Tensor], taken: int) -> None:
        mean, square = moved.moments
        adam(
            moved.tensors,
            slopes,
            mean,
            square,
            [],
            [torch.tensor(float(taken), device=tensor.device) for tensor in moved.tensors],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._optimizer.lr,
            weight_decay=moved.decay,
            eps=1e-8,
            maximize=False,
        )


def _order_in_memory(tensor: Tensor) -> list[int] | None:
    """Return the dimensions of a tensor as they stand in memory, None if that is the usual order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return None if order == sorted(order) else order


def _ordered(tensor: Tensor, order: list[int] | None) -> Tensor:
    return tensor if order is None else tensor.permute(order)


def _laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the parameter's memory layout: the fused optimisers look at memory alone."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def whole_set(data: Samples, client: int) -> Batch:
    """Return a client's training set as one batch, without augmentation."""
    index = data.train[client]
    return Batch(*data.at(index), torch.ones(len(index), dtype=data.x.dtype, device=index.device))


@dataclass(frozen=True)
class Work:
    """What one client did in a round: mean losses by name, optimiser steps, samples seen, seconds."""

    losses: dict[str, float]
    steps: int
    samples: int
    seconds: float


def mean_losses(phases: Sequence[Phase], steps: Sequence[Step], values: dict[str, Tensor]) -> dict[str, float]:
    """Return the mean over epochs of the mean over batches of every loss, given one value per step (steps,).

    Every batch counts equally, a shorter one too.  A method with several phases also gets one "loss/<phase>" each.
    """
    epochs = torch.tensor([step.epoch for step in steps])
    means = {name: _epoch_means(loss.cpu().double(), epochs) for name, loss in values.items()}
    losses = {name: float(mean.mean()) for name, mean in means.items()}
    if len(phases) > 1:
        phase_of_epoch = torch.tensor([n for n, phase in enumerate(phases) for _ in range(phase.epochs)])
        for number, phase in enumerate(phases):
            if phase.epochs:
                losses[f"loss/{phase.name}"] = float(means["loss"][phase_of_epoch == number].mean())
    return losses


def _epoch_means(values: Tensor, epochs: Tensor) -> Tensor:
    counts = torch.bincount(epochs)
    return torch.zeros(len(counts), dtype=values.dtype).index_add(0, epochs, values) / counts
