"""Methods that break one promise each, as their authors might."""

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbench.averaging import Averaging, average, client_weights
from fedbench.method import Batch, Log, Loss, Message, Method, Rows, cross_entropy, parameters, rows
from fedbench.net import Net, Params

STASH: dict[str, Any] = {}
Data = Callable[[], Batch]
Memory = dict[str, Tensor]


@dataclass(frozen=True)
class Plain(Method):
    """FedAvg, written out; keeps every promise."""

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return {name: tensor for name, tensor in initial.items() if name not in net.private}

    def send(self, server: Message, client: int | Tensor) -> Message:
        return server

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        return average(parameters(uploads), client_weights("size", sizes))

    def init_client(self, net: Net, initial: Params) -> Params:
        return {name: tensor for name, tensor in initial.items() if name in net.private}

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        mine = {**kept, **parameters(down)}
        return {name: mine[name] for name in net.shapes}

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        return self.init_client(net, params), self.init_server(net, params, 0, 0)


# --- beside the wire


@dataclass(frozen=True)
class SmugglesUp(Plain):
    """Uploads nothing: the server finds the models in a global variable."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        models = [STASH[f"{client}"] for client in clients.tolist()]
        stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
        return average(stacked, client_weights("size", sizes))

    def init_client(self, net: Net, initial: Params) -> Params:
        number = STASH["next"] = (STASH.get("next", -1) + 1) % 4  # by the order in which clients are made
        return {**super().init_client(net, initial), "number": torch.tensor(number)}

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        mine, upload = super().reply(net, params, kept, down, data, memory)
        STASH[f"{int(kept['number'])}"] = upload
        return {**mine, "number": kept["number"]}, {"nothing": torch.zeros((), dtype=net.dtype)}


@dataclass(frozen=True)
class SmugglesDown(Plain):
    """Sends nothing: clients find the server's model in an attribute of the class, if there is one."""

    held: ClassVar[dict[str, Tensor]] = {}

    def send(self, server: Message, client: int | Tensor) -> Message:
        self.held.update(parameters(server))
        return {"nothing": torch.zeros(())}

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        return {name: self.held[name] for name in net.shapes}

    def init_client(self, net: Net, initial: Params) -> Params:
        return initial


# --- other things than what they say


@dataclass(frozen=True)
class SaysAbsent(Method):
    """Sends the head's weights in a table of which it marks no row as present."""

    def _table(self, net: Net, params: Params) -> Message:
        head = next(name for name in net.shapes if name in net.head)
        return {"head": Rows(params[head], torch.zeros(net.classes, dtype=torch.bool))}

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return self._table(net, {name: torch.zeros_like(tensor) for name, tensor in initial.items()})

    def send(self, server: Message, client: int | Tensor) -> Message:
        return server

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        heads = rows(uploads, "head")
        return {"head": Rows(heads.values.mean(0), heads.present.any(0))}

    def init_client(self, net: Net, initial: Params) -> Params:
        return initial

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        return kept

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        return params, self._table(net, params)


@dataclass(frozen=True)
class SaysBuffer(Plain):
    """Sends all weights as one tensor under the name of a buffer, which the table does not count."""

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        floats = [t.flatten() for n, t in initial.items() if n in net.parameters]
        return {(net.buffers or ("weights",))[0]: torch.cat(floats)}

    def init_client(self, net: Net, initial: Params) -> Params:
        return initial

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        (flat,) = parameters(down).values()
        pieces = torch.split(flat, [kept[name].numel() for name in net.parameters])
        return kept | {name: piece.view(net.shapes[name]) for name, piece in zip(net.parameters, pieces, strict=True)}

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        return params, self.init_server(net, params, 0, 0)


@dataclass(frozen=True)
class SaysNoAndSends(Averaging):
    """Shares the head, it says, and sends the body too."""

    def shares(self, net: Net, name: str) -> bool:
        return name in net.head

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:  # type: ignore[misc]  # it is final
        return {name: tensor for name, tensor in initial.items() if name not in net.private}

    def reply(  # type: ignore[misc]  # it is final
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        return kept, self.init_server(net, params, 0, 0)


@dataclass(frozen=True)
class Packs(Plain):
    """Sends two numbers in each one."""

    def _packed(self, params: Mapping[str, Tensor]) -> Message:
        return {
            name: torch.complex(tensor, torch.zeros_like(tensor)) if tensor.is_floating_point() else tensor
            for name, tensor in params.items()
        }

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return self._packed(parameters(super().init_server(net, initial, clients, seed)))

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        real = {name: tensor.real if tensor.is_complex() else tensor for name, tensor in parameters(uploads).items()}
        return self._packed(average(real, client_weights("size", sizes)))

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        real = {name: tensor.real if tensor.is_complex() else tensor for name, tensor in parameters(down).items()}
        return super().start(net, kept, real)


@dataclass(frozen=True)
class PacksIntegers(Packs):
    """Sends the bits of two single numbers in each integer."""

    def _packed(self, params: Mapping[str, Tensor]) -> Message:
        return {n: t.double().view(torch.int64) if t.is_floating_point() else t for n, t in params.items()}

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        real = {n: self._real(net, n, t) for n, t in parameters(uploads).items()}
        return self._packed(average(real, client_weights("size", sizes)))

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        real = {n: self._real(net, n, t) for n, t in parameters(down).items()}
        return Plain.start(self, net, kept, real)

    def _real(self, net: Net, name: str, tensor: Tensor) -> Tensor:
        return tensor if name.endswith("num_batches_tracked") else tensor.view(torch.float64).to(net.dtype)


@dataclass(frozen=True)
class IgnoresPrivate(Plain):
    """Sends running statistics that are to stay with the clients."""

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return initial


@dataclass(frozen=True)
class OffersNothing(Plain):
    """Leaves a client that comes later without a model."""

    def offers(self, server: Message, client: int) -> Sequence[Message]:
        return []


# --- no pure functions


@dataclass(frozen=True)
class ChangesParams(Plain):
    """Halves the trained model in place."""

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        for tensor in params.values():
            if tensor.is_floating_point():
                tensor.mul_(0.5)
        return super().reply(net, params, kept, down, data, memory)


@dataclass(frozen=True)
class ChangesServer(Plain):
    """Adds to the server's state in place."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        new = parameters(super().merge(net, server, uploads, clients, sizes))
        for name, tensor in parameters(server).items():
            tensor.copy_(new[name])
        return server


@dataclass(frozen=True)
class DrawsFromTorch(Plain):
    """Adds noise from torch's generator."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        new = parameters(super().merge(net, server, uploads, clients, sizes))
        return {n: t + 0.01 * torch.randn(t.shape) if t.is_floating_point() else t for n, t in new.items()}


@dataclass(frozen=True)
class DrawsAfresh(Plain):
    """Adds noise from a generator of its own that nobody seeds."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        new = parameters(super().merge(net, server, uploads, clients, sizes))
        noise = float(np.random.default_rng().normal())
        return {n: t + 0.01 * noise if t.is_floating_point() else t for n, t in new.items()}


@dataclass(frozen=True)
class KeepsOnSelf(Plain):
    """Counts the rounds on itself, and moves slower with every one."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        object.__setattr__(self, "seen", getattr(self, "seen", 0) + 1)
        new = parameters(super().merge(net, server, uploads, clients, sizes))
        old = parameters(server)
        step = 1 / vars(self)["seen"]
        return {n: old[n] + step * (t - old[n]) if t.is_floating_point() else t for n, t in new.items()}


@dataclass(frozen=True)
class LooksAtTheLast(Plain):
    """Every client leaves its model to the next one, through a global variable."""

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        mine, upload = super().reply(net, params, kept, down, data, memory)
        last = STASH.get("last")
        STASH["last"] = parameters(upload)
        if (
            last is None
            or last.keys() != upload.keys()
            or any(last[n].dtype != t.dtype for n, t in STASH["last"].items())
        ):
            return mine, upload
        return mine, {n: (t + last[n]) / 2 if t.is_floating_point() else t for n, t in STASH["last"].items()}


# --- losses


@dataclass(frozen=True)
class MeanLoss(Plain):
    """Averages the loss itself."""

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        return Loss(cross_entropy(net, params, batch)[0].mean(), {})


@dataclass(frozen=True)
class Embeds(Plain):
    """Gives embeddings in place of class scores."""

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        return {"head": net(params, x)[0]}


@dataclass(frozen=True)
class ScoresNan(Plain):
    """Gives NaN for classes that a client does not have."""

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        return {"head": torch.where(own, net(params, x)[1], torch.nan)}


@dataclass(frozen=True)
class SeesPadding(Plain):
    """Pulls embeddings to their mean over the batch, padding included."""

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        ce, embedding = cross_entropy(net, params, batch)
        return Loss(ce + (embedding - embedding.mean(0)).square().sum(1), {"ce": ce})


@dataclass(frozen=True)
class ObservesPadding(Plain):
    """Counts examples, padding included, and scales its upload by the count."""

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        ce, embedding = cross_entropy(net, params, batch)
        return Loss(ce, {}, embedding)

    def init_memory(self, net: Net) -> Memory:
        return {"seen": torch.zeros((), dtype=net.dtype)}

    def observe(self, memory: Memory, batch: Batch, seen: Tensor) -> Memory:
        return {"seen": memory["seen"] + seen.shape[0]}


@dataclass(frozen=True)
class HidesNan(Plain):
    """Replaces what is not a number."""

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        return Loss(cross_entropy(net, params, batch)[0].nan_to_num(), {})

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        return {"head": net(params, x)[1].nan_to_num()}

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        mine, upload = super().reply(net, params, kept, down, data, memory)
        return mine, {name: tensor.nan_to_num() for name, tensor in parameters(upload).items()}


@dataclass(frozen=True)
class CrashesOnNan(Plain):
    """Asserts that its loss is finite."""

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        with torch.no_grad():
            mean = cross_entropy(net, params, data())[0].mean()
        if not mean.isfinite():
            raise ValueError("the loss is not finite")
        return super().reply(net, params, kept, down, data, memory)


# --- clients and state


@dataclass(frozen=True)
class WantsEverybody(Plain):
    """Takes the first upload for that of client 0, and expects four."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=sizes.dtype)
        return average(parameters(uploads), weights)


@dataclass(frozen=True)
class DividesByZero(Plain):
    """Divides by the spread of the labels, which is that of a single sample at times."""

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        y = data().y.to(net.dtype)
        scale = (y - y.mean()).square().sum() / (len(y) - 1)
        mine, upload = super().reply(net, params, kept, down, data, memory)
        return mine, {
            n: t * (scale + 1) / (scale + 1) if t.is_floating_point() else t for n, t in parameters(upload).items()
        }


@dataclass(frozen=True)
class KeepsNumbers(Plain):
    """Has a number in the server's state."""

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return {**super().init_server(net, initial, clients, seed), "round": 0}  # type: ignore[dict-item]  # which is what is broken

    def send(self, server: Message, client: int | Tensor) -> Message:
        return {name: entry for name, entry in server.items() if name != "round"}

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        count: Any = server["round"]
        return {**super().merge(net, server, uploads, clients, sizes), "round": count + 1}

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        return self.init_client(net, params), Plain.init_server(self, net, params, 0, 0)


@dataclass(frozen=True)
class SinglePrecision(Plain):
    """Makes a table in torch's default dtype."""

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        new = parameters(super().merge(net, server, uploads, clients, sizes))
        return {n: t + torch.zeros(t.shape) if t.is_floating_point() else t for n, t in new.items()} | {
            "head.1.bias" if "head.1.bias" in new else "head.bias": torch.zeros(net.classes)
        }


@dataclass(frozen=True)
class Dies(Plain):
    """Ends its process, unless that is the one of the tests."""

    def reply(
        self, net: Net, params: Params, kept: Params, down: Message, data: Data, memory: Memory
    ) -> tuple[Params, Message]:
        if multiprocessing.parent_process():
            os._exit(9)
        return super().reply(net, params, kept, down, data, memory)


@dataclass(frozen=True)
class Branches(Plain):
    """Looks at the value of a tensor, which cannot be computed for all clients at once; no promise is broken."""

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        ce, _ = cross_entropy(net, params, batch)
        return Loss(2 * ce if bool(ce.mean() > 100) else ce, {})


# --- hyperparameters


@dataclass(frozen=True)
class WrongPreset(Averaging):
    """Has a preset for a hyperparameter that was renamed."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"mu": 0.5}}
    pull: float = 0.1

    def shares(self, net: Net, name: str) -> bool:
        return True


@dataclass(frozen=True)
class WrongRange(Averaging):
    """Has a range of words for a number."""

    pull: Annotated[int, Log(0.5, 2.5)] = 1

    def shares(self, net: Net, name: str) -> bool:
        return True


class Undecorated(Plain):
    """Has a hyperparameter that would be ignored."""

    pull: float = 0.1


@dataclass(frozen=True)
class TakesAnything(Plain):
    """Takes hyperparameters that it does not have."""

    def __init__(self, **anything: Any) -> None:
        pass
