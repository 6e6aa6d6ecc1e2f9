"""Methods that average what clients share: one abstract class with one question."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from fedbench.errors import InputError
from fedbench.method import Batch, Message, Method, parameters
from fedbench.net import Net, Params

Personal = str | tuple[str, ...]
"""Part of a model that stays with the client: "none", "head", "dense" (all fully connected layers), "all", or paths of
modules such as ("body.fc1", "head")."""


def average(stacked: Mapping[str, Tensor], weights: Tensor) -> Params:
    """Return the weighted mean over clients of tensors (P, ...), with weights (P,) that sum to 1.

    Integers, which are batch norm's counters of batches, become the maximum over clients of positive weight.
    """
    heard = weights > 0
    return {
        name: torch.tensordot(weights.to(tensor.dtype), tensor, 1)
        if tensor.is_floating_point()
        else tensor[heard].amax(0)
        for name, tensor in stacked.items()
    }


def client_weights(rule: Literal["size", "uniform"], sizes: Tensor) -> Tensor:
    """Return weights (P,) that sum to 1: in proportion to the numbers of training samples, or equal."""
    raw = sizes if rule == "size" else torch.ones_like(sizes)
    return raw / raw.sum()


def is_personal(personal: Personal, net: Net, name: str) -> bool:
    """Return whether a tensor belongs to the personal part."""
    if isinstance(personal, tuple):
        return any(name.startswith(f"{path}.") for path in personal)
    return {"none": False, "head": name in net.head, "dense": name in net.dense, "all": True}[personal]


def check_personal(personal: Personal, net: Net) -> None:
    """Raise `InputError` unless the personal part is one of the names or every path is in the model."""
    if isinstance(personal, str):
        if personal not in ("none", "head", "dense", "all"):
            raise InputError(f"personal: '{personal}' is not none, head, dense, all or a list of module paths")
        return
    for path in personal:
        if not any(name.startswith(f"{path}.") for name in net.shapes):
            raise InputError(f"personal: the model has no module '{path}'; its tensors are {', '.join(net.shapes)}")


@dataclass(frozen=True)
class Averaging(Method):
    """The server averages what `shares` says yes to; everything else stays with its client.

    What makes it an average is final: `init_server`, `send`, `merge`, `init_client`, `start` and `reply`.  A method
    that does something else there derives from `Method`.

    - `weights`: clients count in proportion to their training samples (McMahan et al., arXiv 1602.05629), or equally.
    """

    weights: Literal["size", "uniform"] = "size"

    @abstractmethod
    def shares(self, net: Net, name: str) -> bool:
        """Return whether a parameter or buffer is shared."""

    @final
    def _shares(self, net: Net, name: str) -> bool:
        said: object = self.shares(net, name)
        if not isinstance(said, bool):
            raise InputError(f"{type(self).__name__}.shares gives {said!r} for '{name}'; want True or False")
        return said

    @final
    def _split(self, net: Net, params: Mapping[str, Tensor]) -> tuple[Params, Params]:
        """Return the shared and the personal tensors."""
        shared = {n: t for n, t in params.items() if n not in net.private and self._shares(net, n)}
        return shared, {n: t for n, t in params.items() if n not in shared}

    @final
    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:  # noqa: D102
        return self._split(net, initial)[0]

    @final
    def send(self, server: Message, client: int | Tensor) -> Message:  # noqa: D102
        return server

    @final
    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:  # noqa: D102
        return average(parameters(uploads), client_weights(self.weights, sizes))

    @final
    def init_client(self, net: Net, initial: Params) -> Params:  # noqa: D102
        return self._split(net, initial)[1]

    @final
    def start(self, net: Net, kept: Params, down: Message) -> Params:  # noqa: D102
        mine = {**kept, **parameters(down)}
        return {name: mine[name] for name in net.shapes}

    @final
    def reply(  # noqa: D102
        self,
        net: Net,
        params: Params,
        kept: Params,
        down: Message,
        data: Callable[[], Batch],
        memory: dict[str, Tensor],
    ) -> tuple[Params, Message]:
        shared, personal = self._split(net, params)
        return personal, shared
