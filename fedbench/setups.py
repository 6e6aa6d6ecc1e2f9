"""A federation before its first round: its parts, and whether they fit each other."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fedbench import evaluation, keys
from fedbench.contract import check_phases, check_sent, check_start, is_own
from fedbench.engines import Engine, Probe, choice
from fedbench.engines.choice import EngineName
from fedbench.errors import InputError
from fedbench.evaluation import FloatTable
from fedbench.method import Message, Method, Rows
from fedbench.net import ModelFactory, Net, Params
from fedbench.newcomers import NOBODY, Newcomers
from fedbench.samples import Samples
from fedbench.settings import Training
from fedbench.wire import Wire


def no_probe(stage: str, client: int, params: Params) -> None:
    """Look at nothing."""


def no_watch(uploads: Message, server: Message) -> None:
    """Look at nothing."""


@dataclass(frozen=True)
class Group:
    """Clients with the same architecture."""

    net: Net
    clients: list[int]


@dataclass(frozen=True)
class Setup:
    """Everything that defines a federation before its first round.

    - `initial`: gives a client's initial model; the server's comes from client 0's.
    - `participants`: who takes part, round by round; by default `training.participation` draws them.
    - `probe`: looks at parameters during training, see `engines.Probe`; also called with ("evaluated", client, params)
      for the model that is evaluated.
    - `watch_merge`: looks at the uploads of a round, stacked over its participants, and at the server's new state;
      where a federation goes on from a checkpoint, first at no uploads ({}) and the state in it.
    - `newcomers`: clients that take no part in the rounds and come after them.
    """

    method: Method
    groups: list[Group]
    data: Samples
    training: Training
    seed: int
    initial: Callable[[int], Params]
    engine: Engine
    participants: Sequence[Sequence[int]] | None = None
    probe: Probe = no_probe
    watch_merge: Callable[[Message, Message], None] = no_watch
    newcomers: Newcomers = NOBODY

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the tensors that are not trained."""
        return frozenset(self.groups[0].net.buffers)


def make_setup(
    method: Method,
    models: Sequence[ModelFactory],
    data: Samples,
    training: Training,
    seed: int,
    engine: EngineName | Engine = "auto",
    threads: int = 1,
) -> Setup:
    """Return a federation before its first round; raises `InputError` if method, models and data do not fit."""
    if not 1 <= len(models) <= data.clients:
        raise InputError(f"model: {len(models)} architectures for {data.clients} clients")
    nets = [make_net(model, data.shape, data.classes, training, data.x.device) for model in models]
    check(method, nets, training, [len(index) for index in data.train], data)
    blocks = np.array_split(np.arange(data.clients), len(nets))
    groups = [Group(net, block.tolist()) for net, block in zip(nets, blocks, strict=True)]
    net_of = [group.net for group in groups for _ in group.clients]

    @lru_cache(len(nets))
    def drawn(net: Net, number: int) -> Params:
        return net.init(keys.derive(seed, "client", number))

    def initial(client: int) -> Params:
        return drawn(net_of[client], 0 if training.init == "common" else client)

    return Setup(method, groups, data, training, seed, initial, choice.engine(engine, data.x.device, threads))


def make_net(
    model: ModelFactory,
    shape: tuple[int, ...],
    classes: int,
    training: Training,
    device: torch.device | str = "cpu",
) -> Net:
    """Return a model as it will be trained; raises `InputError` if it does not fit inputs of that shape."""
    net = Net(model, shape, classes, getattr(torch, training.dtype), device)
    return net.keep_private(frozenset(net.buffers)) if training.batch_norm == "local" else net


def check(method: Method, nets: Sequence[Net], training: Training, sizes: Sequence[int], data: Samples) -> None:
    """Raise `InputError` unless method and models fit each other and clients with `sizes` training samples.

    What the method says of the first sample of `data`, if there is any, under each model has to be what it should.
    """
    for net in nets:
        method.check(net)
        if not net.trains_on_one:
            _check_single_batches(training, sizes)
    begun = [_begun_with(method, net, len(sizes)) for net in nets]
    _check_mixture(method, [server for _, server in begun])
    for net, (initial, server) in zip(nets, begun, strict=True) if len(data.x) else ():
        try:
            found = _said(method, net, initial, server, data, len(sizes))
        except InputError:
            raise
        except Exception:  # a fault in somebody's method, which is raised again where it is asked for its numbers
            return
        parts = {name.removeprefix("loss/") for name in found if is_own(name)}
        check_phases(method, method.phases(net, training.epochs), parts)
        undefined = evaluation.without_answer({name: values[0] for name, values in found.items()})
        if undefined and np.isfinite(found["loss"][0]):
            raise InputError(
                f"{type(method).__name__}.scores gives NaN as '{undefined}' before round 1, and loss is finite; want "
                "numbers, and -inf for a class that cannot be chosen"
            )


def measured(
    method: Method, nets: Sequence[Net], training: Training, data: Samples, clients: int, splits: Collection[str]
) -> set[str]:
    """Return the names of all metrics of a federation whose clients have samples in `splits` ("test", "validation").

    Found out before any training, by examining the first sample of `data` under each model.
    """
    phases = method.phases(nets[0], training.epochs)
    names = {f"train/loss/{phase.name}" for phase in phases if phase.epochs and len(phases) > 1}
    for net in nets:
        found = set(_said(method, net, *_begun_with(method, net, clients), data, clients))
        own = {name for name in found if is_own(name)}
        names |= {f"{split}/{name}" for split in splits for name in found}
        names |= {f"train/{name}" for name in own if name.partition("/")[0] == "loss"}
        names |= {f"local/{name}" for name in own if "test" in splits}
    return names


def _begun_with(method: Method, net: Net, clients: int) -> tuple[Params, Message]:
    """Return an initial model, and the server's state that comes of it."""
    initial = net.init(0)
    return initial, method.init_server(net, initial, clients, 0)


def _said(method: Method, net: Net, initial: Params, server: Message, data: Samples, clients: int) -> FloatTable:
    """Return the metrics of three clients who all have the first sample of `data`, before round 1."""
    message = method.send(server, 0)
    check_sent(method, net, message)
    down = Wire(clients, frozenset(net.buffers)).carry_one("evaluation", 0, message)
    params = method.start(net, method.init_client(net, initial), down)
    check_start(method, net, params)
    # Several times, so that shapes tell: neither once nor as often as there are classes.
    index = torch.zeros(3 if data.classes == 2 else 2, dtype=torch.int64, device=data.x.device)
    examples = evaluation.examine(method, net, params, down, data, index, data.own[0])
    return evaluation.all_metrics(method, [examples] * 3)


def _check_single_batches(training: Training, sizes: Sequence[int]) -> None:
    for client, size in enumerate(sizes):
        left = size % training.batch_size
        if size == 1 or training.batch_size == 1 or (left == 1 and training.last_batch == "keep"):
            raise InputError(
                f"training.last_batch: client {client} with {size} samples gets a batch of one, on which this model's "
                "batch norm cannot train; want 'drop' or 'drop_single', and no client with a single sample"
            )


def _check_mixture(method: Method, servers: Sequence[Message]) -> None:
    """Raise `InputError` if what the method shares has other shapes in one architecture than in another."""
    sent = [_shapes(server) for server in servers]
    for number, shapes in enumerate(sent[1:], 1):
        for name in sorted(set(sent[0]) | set(shapes)):
            here, there = sent[0].get(name, "missing"), shapes.get(name, "missing")
            if here != there:
                raise InputError(
                    f"{type(method).__name__} cannot mix these architectures: "
                    f"'{name}' is {here} in model 0 and {there} in model {number}"
                )


def _shapes(message: Message) -> dict[str, tuple[int, ...]]:
    return {n: tuple(e.values.shape if isinstance(e, Rows) else e.shape) for n, e in message.items()}
