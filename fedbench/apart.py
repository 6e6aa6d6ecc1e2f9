"""A federation whose server and clients share nothing but packed messages: its rounds, whichever way messages go.

The way is a `Link`: by pipes between processes for the checks of methods (`in_processes`), or on Flower for deployed
cells.  What a method gives the server beside its messages, through a global variable or an attribute of its class, does
not arrive.  The numbers of an honest one are those of `federation.rounds`.
"""

import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench import evaluation
from fedbench.engines import Job
from fedbench.engines.loop import Loop
from fedbench.federation import check_evaluated, check_losses, first_server, is_evaluated, merge, participants
from fedbench.method import Message, Method, stack, tree_map
from fedbench.net import Params
from fedbench.options import one_line
from fedbench.setups import Setup
from fedbench.wire import DIRECTIONS, Direction, Diverged, Wire, pack, unpack

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Problem = Callable[[Method], Setup]
"""A function of a module, which every process calls to get the same federation."""

_HEADER = 512
"""Bytes that a message may have beside what is counted and what describes its tensors."""

_HEADER_PER_TENSOR = 64
"""Bytes that may describe one tensor of a message, beside its name."""


class Failed(Exception):
    """What became of a party, in a line that says which."""


# --- rounds, whichever way messages go


class Answer(NamedTuple):
    """What a client sent back: a packed message, if any, metrics, and how many bytes each way took on the wire."""

    packed: bytes
    metrics: Mapping[str, float]
    sent: int
    received: int


class Link(Protocol):
    """The way from the server to the clients and back."""

    def train(self, number: int, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        """Let clients train on what is sent to each, in a round; return their uploads."""
        ...

    def evaluate(self, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        """Let clients evaluate, given what is sent to each; return their metrics."""
        ...


@dataclass(frozen=True)
class Round:
    """What a round came to: arrays (clients,) by name.

    - `metrics`: those of `federation.Outcome` that a client can measure alone, NaN where it did not; see `own`.
    - `traffic`: what the wire counted, see `Wire`.
    - `serialised`: bytes of whole messages, by direction; `headers`: how many of them may be no counted bytes.
    """

    number: int
    metrics: Mapping[str, NDArray[np.float64]]
    traffic: Mapping[str, NDArray[np.int64]]
    serialised: Mapping[str, NDArray[np.int64]]
    headers: Mapping[str, NDArray[np.int64]]

    def counted(self, direction: str) -> NDArray[np.int64]:
        """Return the bytes that the wire counted, labels and buffers too."""
        return sum(
            (self.traffic[f"{direction}/{kind}"] for kind in ("bytes", "index_bytes", "buffer_bytes")),
            np.zeros(len(self.serialised[direction]), np.int64),
        )

    def fits(self, direction: str) -> bool:
        """Return whether what was sent is what is counted, and a header within its bounds."""
        counted, sent = self.counted(direction), self.serialised[direction]
        return bool(((counted <= sent) & (sent <= counted + self.headers[direction])).all())


@dataclass(frozen=True)
class Played:
    """All rounds of a federation; `status` and `message` are those of its `federation.Outcome`."""

    rounds: Sequence[Round]
    status: Literal["completed", "diverged"] = "completed"
    message: str = ""


def play(setup: Setup, link: Link, on_round: Callable[[Round], None]) -> Played:
    """Play the server's side of all rounds; divergence ends them early."""
    played = []
    try:
        for one in rounds(setup, link):
            played.append(one)
            on_round(one)
    except Diverged as divergence:
        return Played(played, "diverged", f"round {len(played) + 1}: {divergence}")
    return Played(played)


def rounds(setup: Setup, link: Link) -> Iterator[Round]:
    """Play the server's side of all rounds; of the samples it needs to know only how many each client trains on.

    Raises `Diverged` as `federation.rounds` does.
    """
    wire, server = Wire(setup.data.clients, setup.buffers), first_server(setup)
    for number in range(1, setup.training.rounds + 1):
        notes = _Notes(setup.data.clients)
        server = _trained(setup, server, number, link, wire, notes)
        if is_evaluated(setup, number):
            _evaluate(setup, server, link, wire, notes)
        yield Round(number, notes.metrics, wire.take(), notes.serialised, notes.headers)


def own(names: Collection[str]) -> set[str]:
    """Return those of a federation's metrics that a client can measure alone, which leaves out a method's summaries.

    These are what is known of a participant, "train/" and "local/", and the same of the samples of other splits.
    """
    alone = ("train", "local")
    return {name for name in names if name.split("/")[0] in alone or f"local/{name.partition('/')[2]}" in names}


def _trained(setup: Setup, server: Message, number: int, link: Link, wire: Wire, notes: "_Notes") -> Message:
    """Return the server's state after clients have trained in a round."""
    chosen = participants(setup, number)
    answers = link.train(number, _sent(setup, server, "down", chosen, wire, notes))
    uploads: list[Message] = []
    for group in setup.groups:
        clients = [client for client in group.clients if client in answers]
        if clients:
            upload = stack([unpack(answers[client].packed) for client in clients])
            notes.message("up", clients, upload)
            uploads.append(wire.carry("up", clients, upload))
    for client, answer in answers.items():
        notes.serialised["down"][client], notes.serialised["up"][client] = answer.sent, answer.received
        notes.measured(client, answer.metrics)
    check_losses({c: {n: v for n, v in a.metrics.items() if n.startswith("train/")} for c, a in answers.items()})
    return merge(setup, server, uploads, chosen)


def _evaluate(setup: Setup, server: Message, link: Link, wire: Wire, notes: "_Notes") -> None:
    """Let all clients evaluate."""
    everybody = range(setup.data.clients)
    answers = link.evaluate(_sent(setup, server, "evaluation", everybody, wire, notes))
    for client, answer in answers.items():
        notes.serialised["evaluation"][client] = answer.sent
        notes.measured(client, answer.metrics)
    for split in ("test", "validation"):
        found = {c: {n: v for n, v in a.metrics.items() if n.startswith(f"{split}/")} for c, a in answers.items()}
        check_evaluated(split, {client: metrics for client, metrics in found.items() if metrics})


def _sent(
    setup: Setup, server: Message, direction: Direction, clients: Sequence[int], wire: Wire, notes: "_Notes"
) -> dict[int, bytes]:
    """Return what the server sends to each client, packed once it has passed the wire."""
    packed = {}
    for client in clients:
        message = wire.carry_one(direction, client, setup.method.send(server, client))
        notes.message(direction, [client], message)
        packed[client] = pack(message)
    return packed


@final
class _Notes:
    """What is noted in a round, client by client."""

    def __init__(self, clients: int) -> None:
        self._clients = clients
        self.metrics: dict[str, NDArray[np.float64]] = {}
        self.serialised: dict[str, NDArray[np.int64]] = {name: np.zeros(clients, np.int64) for name in DIRECTIONS}
        self.headers: dict[str, NDArray[np.int64]] = {name: np.zeros(clients, np.int64) for name in DIRECTIONS}

    def message(self, direction: Direction, clients: Sequence[int], message: Message) -> None:
        self.headers[direction][list(clients)] = _HEADER + sum(_HEADER_PER_TENSOR + len(name) for name in message)

    def measured(self, client: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, np.full(self._clients, np.nan))[client] = value


@final
class ClientHalf:
    """The functions of a method that run at one client, which needs no samples but its own."""

    def __init__(self, setup: Setup, client: int) -> None:
        """Begin before round 1."""
        self._setup, self._client = setup, client
        self._net = next(group.net for group in setup.groups if client in group.clients)
        self._kept = setup.method.init_client(self._net, setup.initial(client))

    def train(self, number: int, packed: bytes) -> tuple[bytes, dict[str, float]]:
        """Train in a round on what was sent; return the packed upload, and "train/" and "local/" metrics."""
        setup = self._setup
        kept = {name: tensor[None] for name, tensor in self._kept.items()}
        down = tree_map(lambda tensor: tensor[None], unpack(packed))
        about = (setup.method, self._net, setup.data, setup.training, setup.seed, number)
        (part,) = Loop().train(Job(*about, [self._client], [0], kept, down, setup.probe))
        self._kept = {name: tensor[0] for name, tensor in part.kept.items()}
        metrics = {f"train/{name}": loss for name, loss in part.work[0].losses.items()}
        if is_evaluated(setup, number):
            params = {name: tensor[0] for name, tensor in part.params.items()}
            metrics |= self._measured("local", params, tree_map(itemgetter(0), down), setup.data.test)
        return pack(tree_map(itemgetter(0), part.uploads)), metrics

    def evaluate(self, packed: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
        """Return the model from which the client would train next, given what was sent, and its metrics."""
        setup, down = self._setup, unpack(packed)
        params = setup.method.start(self._net, self._kept, down)
        metrics = {
            **self._measured("test", params, down, setup.data.test),
            **self._measured("validation", params, down, setup.data.validation),
        }
        return {name: tensor.detach().numpy().copy() for name, tensor in params.items()}, metrics

    def _measured(self, word: str, params: Params, down: Message, split: Sequence[Tensor]) -> dict[str, float]:
        data = self._setup.data
        own = data.own[self._client]
        examples = evaluation.examine(self._setup.method, self._net, params, down, data, split[self._client], own)
        return {f"{word}/{name}": float(values[0]) for name, values in evaluation.client_metrics([examples]).items()}


# --- by pipes, for the checks of a method


Models = Mapping[int, Mapping[str, NDArray[Any]]]
"""The model of each client that was evaluated, which is the one from which it would train next."""


def in_processes(method: Method, problem: Problem) -> Iterator[tuple[Round, Models]]:
    """Yield what every round comes to if the server and each client are processes of their own.

    Raises `Failed` for what a process raises, and if other processes cannot find the method's class.
    """
    setup, where = problem(method), _Where.of(method)
    with ExitStack() as opened:
        server = opened.enter_context(_process("the server", _serve, where, problem))
        clients = [
            opened.enter_context(_process(f"client {client}", _answer, where, problem, client))
            for client in range(setup.data.clients)
        ]
        models: dict[int, Mapping[str, NDArray[Any]]] = {}
        for _ in range(setup.training.rounds):
            told = server.receive()
            while isinstance(told, _Question):
                server.send(_passed_on(told, clients, models))
                told = server.receive()
            yield told, dict(models)


class _Question(NamedTuple):
    """What the server's process asks clients, by the names of functions of `ClientHalf`; `before`: first arguments."""

    function: Literal["train", "evaluate"]
    before: tuple[int, ...]
    packed: Mapping[int, bytes]


def _passed_on(
    question: _Question, clients: "Sequence[_Party]", models: dict[int, Mapping[str, NDArray[Any]]]
) -> dict[int, Answer]:
    """Return the clients' answers to a question; models that were evaluated are noted, and not told to the server."""
    answers = {}
    for client, down in question.packed.items():
        clients[client].send((question.function, *question.before, down))
        given, metrics = clients[client].receive()
        if question.function == "evaluate":
            models[client], given = given, b""
        answers[client] = Answer(given, metrics, len(down), len(given))
    return answers


@final
class _Relay:
    """The server's `Link`: asks whoever started its process to ask the clients."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe

    def train(self, number: int, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        self._pipe.send(_Question("train", (number,), packed))
        answers: Mapping[int, Answer] = self._pipe.recv()
        return answers

    def evaluate(self, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        self._pipe.send(_Question("evaluate", (), packed))
        answers: Mapping[int, Answer] = self._pipe.recv()
        return answers


def _serve(pipe: "Connection[Any, Any]", where: "_Where", problem: Problem) -> None:
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # the other side is done
        try:
            for one in rounds(problem(where.method()), _Relay(pipe)):
                pipe.send(one)
        except Exception as error:
            pipe.send(Failed(one_line(error)))


def _answer(pipe: "Connection[Any, Any]", where: "_Where", problem: Problem, client: int) -> None:
    torch.set_num_threads(1)
    half: ClientHalf | None = None
    with suppress(EOFError, OSError):
        while True:
            function, *arguments = pipe.recv()
            try:
                half = half or ClientHalf(problem(where.method()), client)
                answer = getattr(half, function)(*arguments)
            except Exception as error:
                answer = Failed(one_line(error))
            pipe.send(answer)


@dataclass(frozen=True)
class _Where:
    """Where another process finds a method: the file is for modules that it cannot import by name."""

    module: str
    file: str
    name: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, method: Method) -> "_Where":
        kind = type(method)
        if "<locals>" in kind.__qualname__:
            raise Failed(f"{kind.__name__} is defined inside of a function, where no other process finds it")
        options = {field.name: getattr(method, field.name) for field in fields(method) if field.init}  # type: ignore[arg-type]  # methods are dataclasses
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        return cls(kind.__module__, file, kind.__qualname__, options)

    def method(self) -> Method:
        found: Any = self._imported()
        for name in self.name.split("."):
            found = getattr(found, name)
        made: Method = found(**self.options)
        return made

    def _imported(self) -> Any:
        with suppress(ImportError):
            return importlib.import_module(self.module)
        spec = spec_from_file_location(self.module, self.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"no module {self.module}")
        module = module_from_spec(spec)
        sys.modules[self.module] = module  # dataclasses look their module up while they are made
        spec.loader.exec_module(module)
        return module


@final
class _Party:
    """A process, at the other end of a pipe."""

    def __init__(self, name: str, process: Any, pipe: "Connection[Any, Any]") -> None:
        self._name, self._process, self._pipe = name, process, pipe

    def send(self, message: object) -> None:
        with suppress(OSError):  # a dead one shows when it is to answer
            self._pipe.send(message)

    def receive(self) -> Any:
        """Return what it says; raises `Failed` if that is what it says, or if it has died."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise Failed(f"the process of {self._name} died (exit code {self._process.exitcode})") from None
        if isinstance(message, Failed):
            raise Failed(f"{self._name}, in a process of its own, raised {message}")
        return message


@contextmanager
def _process(name: str, work: Callable[..., None], *arguments: Any) -> Iterator[_Party]:
    """Give a process that runs `work(pipe, *arguments)`, and ends with the context."""
    context: Any = _context()
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the process's death closes the last one
    try:
        yield _Party(name, process, ours)
    finally:
        ours.close()
        process.join()


@cache
def _context() -> BaseContext:
    """Return how processes are started: forked from one that has torch and none of this one's memory, or afresh."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
