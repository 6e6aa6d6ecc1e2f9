"""Small problems, and everything that a federation did with one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbench import ClientArrays, Outcome, simulate
from fedbench.method import Message, Method, tree_map
from fedbench.models.mlp import Mlp
from fedbench.net import ModelFactory, Params
from fedbench.testing import TwoParts as TwoParts
from fedbench.testing import convolutional

small_mlp: ModelFactory = partial(Mlp, hidden=(6,), dropout=0.3)
plain_mlp: ModelFactory = partial(Mlp, hidden=(6,))
small_cnn: ModelFactory = convolutional


def blobs(
    sizes: Sequence[int] = (7, 12, 5, 9),
    classes: int = 4,
    shape: tuple[int, ...] = (6,),
    test: int = 6,
    held: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> list[ClientArrays]:
    """Return clients with noisy points round a centre per class; each client holds two classes, or those in `held`."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, *shape))

    def draw(count: int, labels: Sequence[int]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        y = np.resize(np.asarray(labels, np.int64), count)
        return (centres[y] + rng.normal(size=(count, *shape))).astype(np.float32), y

    clients = []
    for number, size in enumerate(sizes):
        labels = held[number] if held else (number % classes, (number + 1) % classes)
        clients.append(ClientArrays(*draw(size, labels), *draw(test, labels)))
    return clients


@dataclass
class Seen:
    """A run's outcome, the models by (round, stage, client), and each round's uploads and new server state."""

    outcome: Outcome
    models: dict[tuple[int, str, int], Params] = field(default_factory=dict)
    uploads: list[Message] = field(default_factory=list)
    servers: list[Message] = field(default_factory=list)

    def stage(self, name: str) -> dict[tuple[int, int], Params]:
        """Return the models of one stage by (round, client)."""
        return {(number, client): params for (number, at, client), params in self.models.items() if at == name}


def watch(
    method: Method,
    model: nn.Module | ModelFactory | Sequence[ModelFactory],
    clients: Sequence[ClientArrays],
    **settings: Any,
) -> Seen:
    """Run `simulate` and note everything that its probes show; every round needs a participant."""
    models: dict[tuple[int, str, int], Params] = {}
    uploads: list[Message] = []
    servers: list[Message] = []

    def probe(stage: str, client: int, params: Params) -> None:
        number = len(servers) + (stage != "evaluated")
        models[number, stage, client] = copied(params)

    def merged(up: Message, server: Message) -> None:
        uploads.append(tree_map(_copy, up))
        servers.append(tree_map(_copy, server))

    outcome = simulate(method, model, clients, probe=probe, watch_merge=merged, **settings)
    return Seen(outcome, models, uploads, servers)


def copied(params: Params) -> Params:
    """Return parameters in memory of their own."""
    return {name: _copy(tensor) for name, tensor in params.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def same(a: Params, b: Params) -> bool:
    """Return whether two models are equal, bit for bit."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def part(params: Params, names: Sequence[str] | frozenset[str]) -> Params:
    """Return some of the tensors."""
    return {name: params[name] for name in params if name in names}


def flat(params: Params) -> Tensor:
    """Return all floating-point tensors as one long vector (float64)."""
    return torch.cat([tensor.double().flatten() for tensor in params.values() if tensor.is_floating_point()])


def results(outcome: Outcome) -> dict[str, NDArray[Any]]:
    """Return all that was measured, except how long it took."""
    work = {f"work/{name}": values for name, values in outcome.work.items() if name != "seconds"}
    return {**outcome.metrics, **outcome.traffic, **work}


def assert_same_results(a: Outcome, b: Outcome, names: Sequence[str] | None = None) -> None:
    """Fail unless both outcomes hold the same numbers, bit for bit; `names` limits which."""
    assert (a.status, a.message) == (b.status, b.message)
    left, right = results(a), results(b)
    if names is None:
        assert left.keys() == right.keys()
    for name in left if names is None else names:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
