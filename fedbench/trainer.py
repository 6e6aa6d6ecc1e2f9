"""Local training of one client: begin, step, end.  Nothing else trains; every engine is made of these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedbench import keys
from fedbench.method import Batch, Loss, Message, Method
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.settings import Optimizer, Training


class Step(NamedTuple):
    """One planned optimiser step: the samples of its batch, its phase and epoch, and the key of its dropout masks."""

    samples: Tensor
    phase: int
    epoch: int
    key: int


def plan(
    method: Method, net: Net, data: Samples, training: Training, seed: int, round_number: int, client: int
) -> list[Step]:
    """Return all steps of one client in one round; they depend on nothing but these arguments."""
    samples = data.train[client]
    steps: list[Step] = []
    epoch = 0
    for number, phase in enumerate(method.phases(net, training.epochs)):
        for _ in range(phase.epochs):
            order = samples
            if training.shuffle:
                key = keys.derive(seed, "order", round_number, client, epoch)
                order = samples[keys.permutation(key, len(samples), samples.device)]
            for index in batches(order, training):
                key = keys.derive(seed, "step", round_number, client, len(steps))
                steps.append(Step(index, number, epoch, key))
            epoch += 1
    return steps


def batches(order: Tensor, training: Training) -> Sequence[Tensor]:
    """Return the batches of an epoch; a client too small for any trains on one batch of all it has."""
    batches = torch.split(order, training.batch_size)
    shortest = {"keep": 1, "drop": training.batch_size, "drop_single": min(2, training.batch_size)}[training.last_batch]
    kept = batches if len(batches[-1]) >= shortest else batches[:-1]
    return kept or batches


def begin(method: Method, net: Net, kept: Params, down: Message) -> Params:
    """Return a client's model at the start of local training, in memory of its own."""
    return {name: tensor.detach().clone() for name, tensor in method.start(net, kept, down).items()}


class Objective(NamedTuple):
    """The mean loss of a batch to differentiate, the means of its parts, and what the method observes."""

    mean: Tensor
    parts: dict[str, Tensor]
    seen: Tensor | None


def objective(method: Method, net: Net, params: Params, batch: Batch, down: Message) -> Objective:
    """Return the loss of one batch, averaged over its valid examples; `net` is in training mode."""
    loss: Loss = method.loss(net, params, batch, down)
    parts = {name: _mean(part.detach(), batch.valid) for name, part in loss.parts.items()}
    return Objective(_mean(loss.total, batch.valid), parts, None if loss.seen is None else loss.seen.detach())


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return (values * valid).sum() / valid.sum() if values.dim() else values


class Updater:
    """torch's own optimiser functions on plain tensors, with state that starts empty.

    `update` changes the parameters in place.  All operations are elementwise, so tensors stacked over clients take the
    same step as each client's alone.
    """

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer = optimizer
        self.names = list(names)
        bias_decay = optimizer.weight_decay if optimizer.weight_decay_bias is None else optimizer.weight_decay_bias
        biases = [name for name in names if "bias" in name.rpartition(".")[2]]
        others = [name for name in names if name not in biases]
        self._groups = [(g, decay) for g, decay in ((others, optimizer.weight_decay), (biases, bias_decay)) if g]
        if len({decay for _, decay in self._groups}) == 1:
            self._groups = [(list(names), self._groups[0][1])]
        self._state: list[dict[str, list[Tensor]]] = [{} for _ in self._groups]
        self._taken: dict[int, int] = {}

    def update(self, params: Params, gradients: Params, rows: slice = slice(None)) -> None:
        """Take one step; with `rows`, of those rows of stacked parameters, whose number of steps so far is the same."""
        for (names, decay), state in zip(self._groups, self._state, strict=True):
            if not state:
                kinds = ("velocity",) if self._optimizer.name == "sgd" else ("mean", "square")
                state |= {kind: [torch.zeros_like(params[name]) for name in names] for kind in kinds}
            tensors = [params[name].detach() for name in names]
            held = state
            if rows != slice(None):
                tensors = [tensor[rows] for tensor in tensors]
                held = {kind: [tensor[rows] for tensor in kept] for kind, kept in state.items()}
            slopes = [_laid_out_as(gradients[n], t) for n, t in zip(names, tensors, strict=True)]
            if self._optimizer.name == "sgd":
                self._sgd(tensors, slopes, decay, held["velocity"])
            else:
                self._adam(tensors, slopes, decay, held["mean"], held["square"], self._taken.get(rows.start or 0, 0))
        for row in range(rows.start or 0, rows.stop or 1):
            self._taken[row] = self._taken.get(row, 0) + 1

    def _sgd(self, tensors: list[Tensor], slopes: list[Tensor], decay: float, velocity: list[Tensor]) -> None:
        sgd(
            tensors,
            slopes,
            list(velocity),  # torch's type is a list whose entries may be missing
            fused=True,
            lr=self._optimizer.lr,
            momentum=self._optimizer.momentum,
            dampening=0,
            nesterov=self._optimizer.nesterov,
            weight_decay=decay,
            maximize=False,
        )

    def _adam(
        self,
        tensors: list[Tensor],
        slopes: list[Tensor],
        decay: float,
        mean: list[Tensor],
        square: list[Tensor],
        taken: int,
    ) -> None:
        adam(
            tensors,
            slopes,
            mean,
            square,
            [],
            [torch.tensor(float(taken), device=tensor.device) for tensor in tensors],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._optimizer.lr,
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
        )


def _laid_out_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient in the parameter's memory layout: the fused optimisers look at memory alone."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def whole_set(data: Samples, client: int) -> Batch:
    """Return a client's training set as one batch, without augmentation."""
    index = data.train[client]
    return Batch(data.x[index], data.y[index], torch.ones(len(index), dtype=data.x.dtype, device=index.device))


@dataclass(frozen=True)
class Work:
    """What one client did in a round: mean losses by name, optimiser steps, samples seen, seconds."""

    losses: dict[str, float]
    steps: int
    samples: int
    seconds: float


def mean_losses(
    method: Method, net: Net, training: Training, steps: Sequence[Step], values: dict[str, Tensor]
) -> dict[str, float]:
    """Return the mean over epochs of the mean over batches of every loss, given one value per step (steps,).

    Every batch counts equally, a shorter one too.  A method with several phases also gets one "loss/<phase>" each.
    """
    epochs = torch.tensor([step.epoch for step in steps])
    means = {name: _epoch_means(loss.cpu().double(), epochs) for name, loss in values.items()}
    losses = {name: float(mean.mean()) for name, mean in means.items()}
    phases = method.phases(net, training.epochs)
    if len(phases) > 1:
        phase_of_epoch = torch.tensor([n for n, phase in enumerate(phases) for _ in range(phase.epochs)])
        for number, phase in enumerate(phases):
            if phase.epochs:
                losses[f"loss/{phase.name}"] = float(means["loss"][phase_of_epoch == number].mean())
    return losses


def _epoch_means(values: Tensor, epochs: Tensor) -> Tensor:
    counts = torch.bincount(epochs)
    return torch.zeros(len(counts), dtype=values.dtype).index_add(0, epochs, values) / counts
