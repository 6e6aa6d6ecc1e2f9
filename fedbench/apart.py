"""A federation whose server and clients are processes of their own, which exchange packed messages and nothing else.

What a method gives the server beside its messages, through a global variable or an attribute of its class, does not
arrive here.  The numbers of an honest one are those of `federation.rounds`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, final

import torch
from numpy.typing import NDArray

from fedbench import evaluation, keys
from fedbench.engines import Job
from fedbench.engines.loop import Loop
from fedbench.federation import Setup, participants
from fedbench.method import Method, stack, tree_map
from fedbench.options import one_line
from fedbench.wire import pack, payload, unpack

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Problem = Callable[[Method], Setup]
"""A function of a module, which every process calls to get the same federation."""


class Failed(Exception):
    """What one of the processes raised, in a line that says which."""


@dataclass(frozen=True)
class Client:
    """What is known about a client after a round.

    - `params`: the model that is evaluated, which is the one from which it would train next.
    - `metrics`: "test/" metrics of that model, and "train/" losses if it took part.
    - `traffic`: bytes "up", "down" and "evaluation" that were packed.
    """

    params: Mapping[str, NDArray[Any]]
    metrics: Mapping[str, float]
    traffic: Mapping[str, int]


def play(method: Method, problem: Problem) -> Iterator[list[Client]]:
    """Yield what every round comes to for every client.

    Raises `Failed` for what a process raises, and if other processes cannot find the method's class.
    """
    setup, where = problem(method), _Where.of(method)
    clients = range(setup.data.clients)
    with ExitStack() as stack:
        server = stack.enter_context(_process(where, problem, None))
        parties = [stack.enter_context(_process(where, problem, client)) for client in clients]
        for number in range(1, setup.training.rounds + 1):
            traffic = [dict.fromkeys(("up", "down", "evaluation"), 0) for _ in clients]
            losses: dict[int, dict[str, float]] = {}
            uploads: dict[int, bytes] = {}
            for client in participants(setup, number):
                down = server("send", client)
                uploads[client], losses[client] = parties[client]("train", number, down)
                traffic[client] |= {"down": payload(down), "up": payload(uploads[client])}
            server("merge", uploads)
            found = []
            for client in clients:
                down = server("send", client)
                params, metrics = parties[client]("evaluate", down)
                traffic[client]["evaluation"] = payload(down)
                found.append(Client(params, {**metrics, **losses.get(client, {})}, traffic[client]))
            yield found


@final
class ServerHalf:
    """The functions of a method that run at the server; of the samples it needs to know only how many there are."""

    def __init__(self, setup: Setup) -> None:
        """Begin before round 1."""
        self._setup, self._method, self._net = setup, setup.method, setup.groups[0].net
        first = setup.initial(0)
        seed = keys.derive(setup.seed, "server")
        self._state = self._method.init_server(self._net, first, setup.data.clients, seed)

    def send(self, client: int) -> bytes:
        """Return the packed message to one client."""
        return pack(self._method.send(self._state, client))

    def merge(self, packed: Mapping[int, bytes]) -> None:
        """Take the packed uploads of a round, by client, ascending."""
        uploads = stack([unpack(data) for data in packed.values()])
        data = self._setup.data
        sizes = torch.tensor([len(data.train[client]) for client in packed], dtype=data.x.dtype)
        with torch.no_grad():
            self._state = self._method.merge(self._net, self._state, uploads, torch.tensor(list(packed)), sizes)


@final
class ClientHalf:
    """The functions of a method that run at one client, which needs no samples but its own."""

    def __init__(self, setup: Setup, client: int) -> None:
        """Begin before round 1."""
        self._setup, self._client = setup, client
        self._net = next(group.net for group in setup.groups if client in group.clients)
        self._kept = setup.method.init_client(self._net, setup.initial(client))

    def train(self, number: int, packed: bytes) -> tuple[bytes, dict[str, float]]:
        """Train in a round on what was sent; return the packed upload, and "train/" losses."""
        setup = self._setup
        kept, down = (
            {n: t[None] for n, t in self._kept.items()},
            tree_map(lambda tensor: tensor[None], unpack(packed)),
        )
        about = (setup.method, self._net, setup.data, setup.training, setup.seed, number)
        (part,) = Loop().train(Job(*about, [self._client], [0], kept, down, setup.probe))
        self._kept = {name: tensor[0] for name, tensor in part.kept.items()}
        losses = {f"train/{name}": loss for name, loss in part.work[0].losses.items()}
        return pack(tree_map(lambda tensor: tensor[0], part.uploads)), losses

    def evaluate(self, packed: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, float]]:
        """Return the model from which the client would train next, given what was sent, and its "test/" metrics."""
        setup, down = self._setup, unpack(packed)
        params = setup.method.start(self._net, self._kept, down)
        own, test = setup.data.own[self._client], setup.data.test[self._client]
        examples = evaluation.examine(setup.method, self._net, params, down, setup.data, test, own)
        metrics = {f"test/{name}": float(values[0]) for name, values in evaluation.client_metrics([examples]).items()}
        return {name: tensor.detach().numpy().copy() for name, tensor in params.items()}, metrics


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


Ask = Callable[..., Any]
"""Calls a party's function by its name in the party's process."""


@contextmanager
def _process(where: _Where, problem: Problem, client: int | None) -> Iterator[Ask]:
    """Give the way to ask the server (None) or a client in a process of its own, which ends with the context."""
    context: Any = _context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, where, problem, client), daemon=True)
    process.start()
    theirs.close()  # so that the process's death closes the last one
    name = "the server" if client is None else f"client {client}"

    def ask(function: str, *arguments: Any) -> Any:
        try:
            ours.send((function, *arguments))
            answer = ours.recv()
        except (EOFError, OSError):
            process.join()
            raise Failed(f"the process of {name} died (exit code {process.exitcode})") from None
        if isinstance(answer, Failed):
            raise Failed(f"{name}, in a process of its own, raised {answer}")
        return answer

    try:
        yield ask
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


def _work(pipe: "Connection[Any, Any]", where: _Where, problem: Problem, client: int | None) -> None:
    torch.set_num_threads(1)
    party: ServerHalf | ClientHalf | Failed
    try:
        setup = problem(where.method())
        party = ServerHalf(setup) if client is None else ClientHalf(setup, client)
    except Exception as error:
        party = Failed(one_line(error))
    with suppress(EOFError, OSError):  # the other side is done
        while True:
            function, *arguments = pipe.recv()
            pipe.send(party if isinstance(party, Failed) else _answer(party, function, arguments))


def _answer(party: "ServerHalf | ClientHalf", function: str, arguments: list[Any]) -> Any:
    try:
        return getattr(party, function)(*arguments)
    except Exception as error:
        return Failed(one_line(error))
