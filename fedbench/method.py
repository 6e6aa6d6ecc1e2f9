"""The contract of a method: the only file that the author of one needs to read.

A method is a handful of pure functions about one client and about the server.  It holds no data, no model and no
reference to another client; it is a frozen dataclass whose fields are its hyperparameters.  The engine owns the data
order, the optimiser, the random keys, the evaluation and the counting, so two methods differ in nothing but the method.

A round, for every participating client:

    down   = send(server, client)                                      # counted
    params = start(net, kept, down)
    for every phase, epoch and batch:  one optimiser step on the mean of loss(...);  memory = observe(memory, ...)
    kept, up = reply(net, params, kept, down, data, memory)            # `up` is counted, `kept` stays with the client
    server = merge(net, server, uploads, clients, sizes)               # once, with all uploads stacked

and to evaluate, each client does `scores(net, start(net, kept, send(server, client)), ...)`: the state from which it
would train next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedbench.net import Net, Params


class Rows(NamedTuple):
    """A table of which only the present rows are sent; the others travel as zeros and count as nothing.

    `values` (rows, ...) and `present` (rows,) bool.  The labels of the rows sent are counted apart, as an index.
    """

    values: Tensor
    present: Tensor


Message = Mapping[str, Tensor | Rows]
"""What crosses the wire, and what the server keeps between rounds."""


class Batch(NamedTuple):
    """Inputs (B, ...), labels (B,) int64, and `valid` (B,): 1 for data, 0 for padding."""

    x: Tensor
    y: Tensor
    valid: Tensor


class Loss(NamedTuple):
    """What a method wants minimised and watched.

    - `total` (B,): the objective per example, floating point; the engine takes its mean over valid examples.
    - `parts`: terms of it to log, each per example (B,) or a scalar, floating point.  Names are letters, digits, "_",
      "-" and ".", and none is that of a phase.
    - `seen` (B, ...): what `observe` wants to see of the batch, or None.
    """

    total: Tensor
    parts: Mapping[str, Tensor]
    seen: Tensor | None = None


@dataclass(frozen=True)
class Phase:
    """A stretch of local training that moves only the parameters `trains` says yes to, with a fresh optimiser."""

    name: str
    epochs: int
    trains: Callable[[str], bool] = lambda _: True


@dataclass(frozen=True)
class Log:
    """Mark of a tuning range, searched on a log scale: `lam: Annotated[float, Ge(0), Log(0.01, 10)]`."""

    low: float
    high: float


@dataclass(frozen=True)
class Choice:
    """Mark of a tuning range: one of these values."""

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)


class Method(ABC):
    """A federated-learning method; concrete classes are frozen dataclasses and nothing concrete is overridden twice.

    - `presets`: named values of the hyperparameters, such as those of a paper and of its code.
    - `revision`: raised by the author when the numbers change; part of every result's key.
    - `mixed_models`: whether clients may have different architectures.
    - `control`: whether a report holds every other method against it: what clients come to without sending anything.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    revision: ClassVar[int] = 1
    mixed_models: ClassVar[bool] = False
    control: ClassVar[bool] = False

    def check(self, net: Net) -> None:  # noqa: B027 (most methods fit every model)
        """Raise `InputError` if a hyperparameter does not fit the model."""

    def phases(self, net: Net, epochs: int) -> Sequence[Phase]:
        """Return the phases of local training; by default one that trains everything for the suite's local epochs."""
        return (Phase("all", epochs),)

    # --- server

    @abstractmethod
    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        """Return the server's state before round 1, given the initial model of the first client."""

    @abstractmethod
    def send(self, server: Message, client: int | Tensor) -> Message:
        """Return what the server sends to one client at the start of a round."""

    def offers(self, server: Message, client: int) -> Sequence[Message]:
        """Return what a client may download that comes after the last round; by default what `send` gives.

        Of several it keeps the one under which its model has the lowest loss on its training samples.
        """
        return [self.send(server, client)]

    @abstractmethod
    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        """Return the server's state after a round.

        `uploads` holds the replies stacked over the P participants, so each tensor is (P, ...); `clients` (P,) int64
        are their numbers, ascending, and `sizes` (P,) float their numbers of training samples.
        """

    # --- client, written for one client

    @abstractmethod
    def init_client(self, net: Net, initial: Params) -> Params:
        """Return what a client keeps between rounds, given its initial model."""

    @abstractmethod
    def start(self, net: Net, kept: Params, down: Message) -> Params:
        """Return the client's complete model at the start of local training, from what it kept and what arrived."""

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        """Return the objective on one batch; by default the cross-entropy.

        `net` is in training mode while the client trains: dropout is on, and each call moves batch norm's statistics in
        `params`.  To evaluate, and in all other functions, it is in evaluation mode.
        """
        return Loss(cross_entropy(net, params, batch)[0], {})

    def init_memory(self, net: Net) -> dict[str, Tensor]:
        """Return what `observe` starts from in every epoch."""
        return {}

    def observe(self, memory: dict[str, Tensor], batch: Batch, seen: Tensor) -> dict[str, Tensor]:
        """Return the memory after one more training batch; called only if `loss` gave something to see."""
        return memory

    @abstractmethod
    def reply(
        self,
        net: Net,
        params: Params,
        kept: Params,
        down: Message,
        data: Callable[[], Batch],
        memory: dict[str, Tensor],
    ) -> tuple[Params, Message]:
        """Return what the client keeps and what it uploads after local training.

        `data()` is the client's whole training set (without augmentation or padding); `memory` is that of the last
        local epoch.  `net(params, data().x)` evaluates the trained model: without gradients or dropout, by batch norm's
        running statistics, which stay as they are.
        """

    # --- evaluation

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        """Return named class scores (B, classes), floating point, the headline first; by default the head's logits.

        `own` (classes,) bool marks the classes in the client's training set.  The answer is the class with the highest
        score.  A class with -inf cannot be chosen, and a row of -inf is a refusal to answer, which counts as wrong; NaN
        is no score: before round 1 it is refused, and later the run ends as diverged.
        A row depends on no other sample: clients are examined together, and `x` may end in padding.

        Names are letters, digits, "_", "-" and ".".  "head" should be the head's logits, of which fedbench makes
        "head_own", among the client's own classes; so no score may be called that.
        """
        return {"head": net(params, x)[1]}

    def summaries(self, examples: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, list[float]]:
        """Return further metrics, one value per client, of every client's test examples in order.

        `examples[i]` holds arrays over client i's test examples: `correct/<name of a score>` (bool) and
        `loss/<part>` (float64).  Names may be paths, such as "accuracy/cumulative/head": with "accuracy" in it a
        metric is in percent, and with "loss" less is better.  "accuracy", "loss", "accuracy/<name>", "loss/<name>" and
        "silhouette/..." are fedbench's own.
        """
        return {}


def cross_entropy(net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy per example (B,) and the embeddings (B, width)."""
    embedding, logits = net(params, batch.x)
    if net.alone:
        return F.cross_entropy(logits, batch.y, reduction="none"), embedding
    # The same numbers: under vmap F.cross_entropy takes longer, and the first time most of a second.
    return -F.log_softmax(logits, 1).gather(1, batch.y[:, None]).squeeze(1), embedding


def tree_map(function: Callable[[Tensor], Tensor], message: Message) -> dict[str, Tensor | Rows]:
    """Return the message with a function applied to every tensor in it."""
    return {
        name: Rows(function(entry.values), function(entry.present)) if isinstance(entry, Rows) else function(entry)
        for name, entry in message.items()
    }


def stack(messages: Sequence[Message]) -> dict[str, Tensor | Rows]:
    """Return messages of equal shapes as one, with a new leading dimension; a tensor common to all is not copied."""
    stacked: dict[str, Tensor | Rows] = {}
    for name, first in messages[0].items():
        entries: list[Any] = [message[name] for message in messages]
        if isinstance(first, Rows):
            stacked[name] = Rows(_stacked([e.values for e in entries]), _stacked([e.present for e in entries]))
        else:
            stacked[name] = _stacked(entries)
    return stacked


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if all(tensor is first for tensor in tensors):
        return first.expand(len(tensors), *first.shape)
    return torch.stack(list(tensors))


def put(whole: dict[str, Tensor | Rows], places: Tensor, part: Message, count: int) -> None:
    """Write stacked messages into places (int64) of a stack of `count`, which is made when it is empty."""
    if not whole:
        whole |= tree_map(lambda tensor: tensor.new_empty(count, *tensor.shape[1:]), part)
    for name, entry in part.items():
        for into, tensor in zip(_tensors(whole[name]), _tensors(entry), strict=True):
            into[places] = tensor


def _tensors(entry: Tensor | Rows) -> tuple[Tensor, ...]:
    return tuple(entry) if isinstance(entry, Rows) else (entry,)


def rows(message: Message, name: str) -> Rows:
    """Return an entry of a message that is a table."""
    entry = message[name]
    assert isinstance(entry, Rows)
    return entry


def parameters(message: Message) -> Params:
    """Return a message that consists of plain tensors, as a model's parameters."""
    return {name: entry for name, entry in message.items() if not isinstance(entry, Rows)}
