"""What every method keeps, as checks that say in words what is wrong: for the authors of methods.

A test of your own:

    @pytest.mark.parametrize("check", testing.CHECKS, ids=str)
    def test_it_keeps_what_every_method_keeps(check):
        check(Mine(mu=0.1))

`fedbench check ./mine.py:Mine` does the same from the command line.  All checks run a few clients with a few samples
through small models on the CPU.
"""

import copy
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast, final, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbench import apart
from fedbench.averaging import Averaging
from fedbench.checkpoint import Checkpoint
from fedbench.contract import check_loss, check_phases, check_scores
from fedbench.engines import Engine, Job, Part
from fedbench.engines.choice import Chosen
from fedbench.engines.loop import Loop
from fedbench.engines.vectorised import Vectorised
from fedbench.errors import InputError
from fedbench.federation import State, first_state, participants, play, play_round, rounds
from fedbench.method import Batch, Choice, Log, Message, Method, Rows, stack, tree_map
from fedbench.net import ModelFactory, Net, Params
from fedbench.options import make, one_line
from fedbench.samples import ClientArrays, Samples, from_clients
from fedbench.settings import Optimizer, Training
from fedbench.setups import Group, Setup, make_net, make_setup
from fedbench.threads import thread_limit
from fedbench.wire import Wire, pack, payload

__all__ = ["CHECKS", "Broken", "Check", "Verdict", "verdicts"]


class Broken(AssertionError):
    """A promise that a method does not keep: what is wrong, and what to do, in words."""


@final
@dataclass(frozen=True)
class Check:
    """One thing that every method keeps; called with a method, or the class of one that has defaults for everything.

    Returns a remark, mostly none.  Raises `Broken` if the method does not keep it.
    """

    name: str
    promise: str
    function: Callable[[Method], str | None]

    def __call__(self, method: Method | type[Method]) -> str:  # noqa: D102
        cls = method if isinstance(method, type) else type(method)
        try:
            made = make(cls, {}, cls.__name__) if isinstance(method, type) else method
            with thread_limit(1):  # on clients this small, several only wait for each other
                return self.function(made) or ""
        except Broken:
            raise
        except InputError as error:
            raise Broken(str(error)) from error
        except Exception as error:
            hint = "; make tensors with dtype=net.dtype" if "dtype" in str(error) else ""
            raise Broken(f"{one_line(error)}{_place(error, cls)}{hint}") from error

    def __str__(self) -> str:
        return self.name


class Verdict(NamedTuple):
    """What a check came to: `broken` says what is wrong, else it is empty; `remark` is worth knowing either way."""

    check: Check
    broken: str = ""
    remark: str = ""


def verdicts(method: Method | type[Method]) -> Iterator[Verdict]:
    """Yield what every check comes to."""
    for check in CHECKS:
        try:
            yield Verdict(check, remark=check(method))
        except Broken as broken:
            yield Verdict(check, broken=str(broken))


def _place(error: BaseException, cls: type) -> str:
    """Return where in the method's own file an exception came from."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


# --- small federations


_SHAPE, _CLASSES = (1, 5, 5), 4
_BYTES = ("bytes", "index_bytes", "buffer_bytes")
_FEDBENCH_KEYS = "draw from fedbench.keys, with a key made of what the draw is for"


class TwoParts(nn.Module):
    """A model made of any body and any head."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head


def convolutional(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model of common layers, of which all clients' are computed at once."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 3, 3),
        nn.BatchNorm2d(3),
        nn.Dropout2d(0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * (shape[1] - 2) * (shape[2] - 2), 5),
        nn.ReLU(),
    )
    return TwoParts(body, nn.Sequential(nn.Dropout(0.3), nn.Linear(5, classes)))


def _normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model without batch norm, whose layers are not all of the common ones."""
    inputs = int(np.prod(shape))
    body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 5), nn.LayerNorm(5), nn.Tanh())
    return TwoParts(body, nn.Linear(5, classes))


class _Undefined(nn.Module):
    """A body whose every output is NaN."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x.flatten(1))
        return h * torch.nan


def _undefined(shape: tuple[int, ...], classes: int) -> nn.Module:
    return TwoParts(_Undefined(int(np.prod(shape))), nn.Linear(5, classes))


def _clients(train: Sequence[int] = (7, 12, 5, 9), test: Sequence[int] = (6, 4, 6, 5)) -> list[ClientArrays]:
    """Return clients with so many noisy points round a centre for each class, of which each client holds two."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(_CLASSES, *_SHAPE))

    def draw(client: int, count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        y = (client + np.arange(count) % 2) % _CLASSES
        return centres[y] + rng.normal(size=(count, *_SHAPE)), y

    return [ClientArrays(*draw(number, size), *draw(number, test[number])) for number, size in enumerate(train)]


def _federation(
    method: Method,
    model: ModelFactory = convolutional,
    clients: Sequence[ClientArrays] | None = None,
    classes: int = _CLASSES,
    seed: int = 3,
    **settings: Any,
) -> Setup:
    """Return a federation that is computed client by client, by default in float64."""
    chosen: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64"} | settings
    training = Training(**chosen)
    data = from_clients(clients or _clients(), classes, getattr(torch, training.dtype), torch.device("cpu"))
    net = make_net(model, data.shape, data.classes, training)
    initial = cache(net.init)
    group = Group(net, list(range(data.clients)))
    return Setup(method, [group], data, training, seed, initial, Loop())


_Played = dict[str, NDArray[Any]]
"""What a federation came to, by words for it, the earliest first."""


def _played(setup: Setup) -> _Played:
    """Return everything that a federation comes to; it must not diverge."""
    found: _Played = {}
    number = 1

    def note(what: str, tensors: Message) -> None:
        for name, entry in tensors.items():
            values = entry.values if isinstance(entry, Rows) else _tensor(what, name, entry)
            found[f"round {number}, {what}, '{name}'"] = values.detach().numpy().copy()

    def probe(stage: str, client: int, params: Params) -> None:
        if stage in ("trained", "evaluated"):
            note(f"client {client}'s model when it is {stage}", params)

    def merged(uploads: Message, server: Message) -> None:
        note("the uploads", uploads)
        note("the server's state", server)

    for state, record in rounds(replace(setup, probe=probe, watch_merge=merged), first_state(setup)):
        measured = {**record.metrics, **record.traffic, **{n: v for n, v in record.work.items() if n != "seconds"}}
        found |= {f"round {number}, {name}": values for name, values in measured.items()}
        number = state.round_number + 1
    return found


def _tensor(what: str, name: str, entry: object) -> Tensor:
    if not isinstance(entry, Tensor):
        raise Broken(f"{what}: {type(entry).__name__} under '{name}', want a tensor, or Rows")
    return entry


def _difference(wanted: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]], tolerance: float = 0.0) -> str:
    """Return the first difference in words, or nothing; integers are compared exactly."""
    for name, values in wanted.items():
        other = found.get(name)
        if other is None or other.shape != values.shape or other.dtype != values.dtype:
            return f"{name}: {_kind(other)} in place of {_kind(values)}"
        allowed = tolerance if values.dtype.kind in "fc" else 0.0
        if not np.allclose(other, values, rtol=allowed, atol=allowed, equal_nan=True):
            return f"{name}: off by {np.nanmax(np.abs(np.subtract(other, values, dtype=complex))):.1e}"
    return next((f"{name}: there for the first time" for name in found if name not in wanted), "")


def _kind(values: NDArray[Any] | None) -> str:
    return "nothing" if values is None else f"{values.dtype} {values.shape}"


# --- the checks


def _contract(method: Method) -> None:
    cls = type(method)
    marks = vars(cls).get("__dataclass_params__")
    if not (marks and marks.frozen):
        raise Broken(f"{cls.__name__} is not a frozen dataclass: put @dataclass(frozen=True) above it")
    for name in dir(cls):
        owners = [base for base in cls.__mro__ if name in vars(base)]
        for base in owners[1:]:
            if getattr(vars(base)[name], "__final__", False):
                raise Broken(f"{cls.__name__} overrides {name}, which is final in {base.__name__}: derive from Method")
    given = _values(method)
    for preset, values in cls.presets.items():
        make(cls, {**given, **values}, f"preset {preset}")
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for value in _marked(hint):
            make(cls, {**given, name: value}, f"the range of {name}")
    construct: Callable[..., Method] = cls
    for takes in (partial(make, cls, {**given, "no_such_thing": 1}, ""), partial(construct, no_such_thing=1)):
        try:
            takes()
        except (InputError, TypeError):
            continue
        raise Broken(f"{cls.__name__} takes a hyperparameter that it does not have: leave __init__ to the dataclass")


def _values(method: Method) -> dict[str, Any]:
    """Return the hyperparameters of a method as plain values."""
    values = {field.name: getattr(method, field.name) for field in fields(cast(Any, method)) if field.init}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _marked(hint: Any) -> Iterator[Any]:
    """Yield the ends of the range, and the choices, that tuning would search."""
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, Log):
            yield from (mark.low, mark.high)
        elif isinstance(mark, Choice):
            yield from mark.values


def _loss(method: Method) -> None:
    setup = _federation(method, _normalised)
    net, data = setup.groups[0].net, setup.data
    for state in _states(setup):
        down = method.send(state.server, 1)
        params = method.start(net, {name: tensor[1] for name, tensor in state.kept[0].items()}, down)
        batch = _whole(data, 1)
        alone, padded = method.loss(net, params, batch, down), method.loss(net, params, _padded(data, batch), down)
        count = len(batch.y)
        check_loss(method, alone, count)
        check_loss(method, padded, count + 3)
        check_phases(method, method.phases(net, 1), alone.parts)
        for name, part in alone.parts.items():
            other = padded.parts[name]
            if not torch.allclose(part, other[:count] if part.dim() else other):
                raise Broken(f"padding changes the part '{name}' of the loss: weigh examples by batch.valid")
        if not torch.allclose(alone.total, padded.total[:count]):
            raise Broken("padding changes the loss of other examples: weigh examples by batch.valid")
        if alone.seen is not None and padded.seen is not None:
            memory = [
                method.observe(method.init_memory(net), seen, loss.seen.detach())
                for seen, loss in ((batch, alone), (_padded(data, batch), padded))
                if loss.seen is not None
            ]
            for name, tensor in memory[0].items():
                if not torch.allclose(tensor, memory[1][name]):
                    raise Broken(f"padding changes '{name}' in the memory: observe should weigh by batch.valid")


def _scores(method: Method) -> None:
    setup = _federation(method, _normalised)
    net, data = setup.groups[0].net, setup.data
    for state in _states(setup):
        down = method.send(state.server, 1)
        params = method.start(net, {name: tensor[1] for name, tensor in state.kept[0].items()}, down)
        x = data.x[data.test[1]]
        more = torch.cat([x, 10 * data.x[data.train[3][:3]]])
        with torch.no_grad():
            alone, together = (method.scores(net, params, down, given, data.own[1]) for given in (x, more))
        check_scores(method, alone, len(x), data.classes)
        check_scores(method, together, len(more), data.classes)
        for name, scores in alone.items():
            if bool(scores.isnan().any()):
                raise Broken(f"scores '{name}' are NaN: want numbers, and -inf for a class that cannot be chosen")
            if not torch.allclose(scores, together[name][: len(x)]):
                raise Broken(f"scores '{name}' of a sample depend on the samples beside it, which may be padding")


def _states(setup: Setup) -> Iterator[State]:
    """Yield the states before round 1 and after every round."""
    first = first_state(setup)
    yield first
    yield from (state for state, _ in rounds(setup, first))


def _whole(data: Samples, client: int) -> Batch:
    index = data.train[client]
    return Batch(*data.at(index), torch.ones(len(index), dtype=data.x.dtype))


def _padded(data: Samples, batch: Batch) -> Batch:
    """Return the batch with three more examples that are marked as padding; they are another client's."""
    index = data.train[3][:3]
    return Batch(
        torch.cat([batch.x, 10 * data.x[index]]),
        torch.cat([batch.y, data.y[index]]),
        torch.cat([batch.valid, torch.zeros(3, dtype=batch.valid.dtype)]),
    )


def _inputs(method: Method) -> None:
    setup = _federation(method)
    net, data = setup.groups[0].net, setup.data
    server = _untouched(method.init_server, net=net, initial=setup.initial(0), clients=4, seed=9)
    who, sizes = torch.tensor([0, 1, 3]), torch.tensor([7.0, 12.0, 9.0], dtype=data.x.dtype)
    kept = {client: _untouched(method.init_client, net=net, initial=setup.initial(client)) for client in who.tolist()}
    for _ in range(2):
        uploads = []
        for client in who.tolist():
            batch = _whole(data, client)
            down = _untouched(method.send, server=server, client=client)
            params = _untouched(method.start, net=net, kept=kept[client], down=down)
            params = {name: tensor.clone() for name, tensor in params.items()}
            loss = _untouched(method.loss, net=net, params=params, batch=batch, down=down)
            memory = method.init_memory(net)
            if loss.seen is not None:
                memory = _untouched(method.observe, memory=memory, batch=batch, seen=loss.seen.detach())
            with torch.no_grad():
                kept[client], upload = _untouched(
                    method.reply,
                    net=net,
                    params=params,
                    kept=kept[client],
                    down=down,
                    data=partial(_whole, data, client),
                    memory=memory,
                )
                scores = {"net": net, "params": params, "down": down, "x": batch.x, "own": data.own[client]}
                _untouched(method.scores, **scores)
            uploads.append(upload)
        given = {"net": net, "server": server, "uploads": stack(uploads), "clients": who, "sizes": sizes}
        server = _untouched(method.merge, **given)
    state = first_state(setup)
    held = {"data": [data.x, data.y], "state": [state.server, state.kept], "initial": [setup.initial(0)]}
    before = copy.deepcopy(held)
    wire = Wire(data.clients, setup.buffers)
    for _ in range(2):
        play_round(setup, state, wire)
        for name, what in held.items():
            if not _same(before[name], what):
                raise Broken(
                    f"a round changes the {name} from before it in place: make new tensors, without `_` methods"
                )


def _untouched(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of a method; it must not change its arguments."""
    before = {name: copy.deepcopy(list(_tensors(value))) for name, value in arguments.items()}
    result = function(**arguments)
    for name, value in arguments.items():
        if not _same(before[name], list(_tensors(value))):
            raise Broken(f"{function.__name__} changes its argument {name} in place: make a new tensor or dict instead")
    return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach()
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)


def _same(a: Any, b: Any) -> bool:
    left, right = list(_tensors(a)), list(_tensors(b))
    return len(left) == len(right) and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(torch.equal(x.nan_to_num(), y.nan_to_num()))
        for x, y in zip(left, right, strict=True)
    )


def _repeats(method: Method) -> None:
    before = _remembered(method)
    runs = []
    for number in (1, 2):
        generators = _generators(number)
        runs.append(_played(_federation(method)))
        if _generators() != generators:
            raise Broken(f"the method draws from a global generator of torch, NumPy or Python: {_FEDBENCH_KEYS}")
    if _remembered(method) != before:
        raise Broken(
            "the method keeps something on itself or on its class: what lasts belongs into the server's state, "
            "or into what reply returns as kept"
        )
    if difference := _difference(runs[0], runs[1]):
        raise Broken(f"the same run again gives other numbers ({difference}): {_FEDBENCH_KEYS}, and keep no state")
    other = _played(_federation(method, seed=4))
    if all(np.array_equal(other[name], values) for name, values in runs[0].items() if "when it is trained" in name):
        raise Broken("another seed gives the same models: something is done with the model that was trained")


def _generators(seed: int | None = None) -> list[str]:
    """Return the states of the global generators, set first if there is a seed."""
    if seed is not None:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the global generator is what must not matter)
        random.seed(seed)
    return [str(torch.get_rng_state().tolist()), repr(np.random.get_state()), repr(random.getstate())]  # noqa: NPY002


def _remembered(method: Method) -> dict[str, str]:
    """Return what a method and its class hold, as text."""
    held = {
        f"{cls.__name__}.{name}": value
        for cls in type(method).__mro__
        if issubclass(cls, Method)
        for name, value in vars(cls).items()
        if isinstance(value, Mapping | list | set | Tensor | int | float | str | None)
    }
    return {name: repr(value) for name, value in {**held, **vars(method)}.items()}


def _engines(method: Method) -> str:
    remark = ""
    other: dict[str, Any] = {"epochs": 2, "optimizer": Optimizer("adam", lr=0.01, weight_decay=0.1)}
    for model in (convolutional, _normalised):
        for settings in ({}, other):
            setup = _federation(method, model, **settings)
            engine = _at_once()
            difference = _difference(_played(setup), _played(replace(setup, engine=engine)), 1e-9)
            if difference:
                raise Broken(
                    f"client by client and all clients at once differ ({difference}): a function of one client looks "
                    "at something else than its arguments, or at padding, where batch.valid is 0"
                )
            remark = _remark(engine) or remark
    return remark


def _at_once() -> Chosen:
    """Return an engine that takes all clients at once, where the method can be computed so."""
    return Chosen(torch.device("cpu"), 1, measured=False)


def _remark(engine: Chosen) -> str:
    for what, error in engine.refused.items():
        return f"its clients are {what} one by one, which is slower: {one_line(error)}"
    return ""


def _order(method: Method) -> None:
    setup = _federation(method)
    wanted = _played(setup)
    if difference := _difference(wanted, _played(replace(setup, engine=_Backwards()))):
        raise Broken(
            f"the last client first gives other numbers ({difference}): something passes from one client to the next, "
            "such as a global variable, or an attribute of the class or of `self`"
        )
    chosen = _at_once()
    _played(replace(setup, engine=chosen))
    alone = {"samples": 0} if "examined" in chosen.refused else {}
    for chunk, threads in () if "trained" in chosen.refused else ((1, 1), (2, 1), (20, 2)):
        difference = _difference(wanted, _played(replace(setup, engine=Vectorised(chunk, threads, **alone))), 1e-9)
        if difference:
            raise Broken(
                f"{chunk} clients at a time in {threads} threads give other numbers ({difference}): something passes "
                "from one client to another"
            )


@final
class _Backwards(Engine):
    """Trains one client at a time, the last one first."""

    def train(self, job: Job) -> Iterator[Part]:
        for place in reversed(range(len(job.clients))):
            down = tree_map(itemgetter(slice(place, place + 1)), job.down)
            alone = replace(job, clients=[job.clients[place]], rows=[job.rows[place]], down=down)
            yield from (part._replace(places=[place]) for part in Loop().train(alone))


def _precision(method: Method) -> None:
    played = {dtype: _played(_federation(method, dtype=dtype)) for dtype in ("float32", "float64")}
    for name, values in played["float64"].items():
        if values.dtype == np.float32:
            raise Broken(f"{name}: is float32 where the model is float64: make tensors with dtype=net.dtype")
    for name, values in played["float32"].items():
        other = played["float64"][name]
        if "model" in name and not np.allclose(values, other, rtol=1e-3, atol=1e-3):
            raise Broken(f"{name}: float32 and float64 are {np.abs(values - other).max():.1e} apart")


def _resume(method: Method) -> None:
    setup = _federation(method)
    state, _ = next(rounds(setup, first_state(setup)))
    for what, message in (("the server's state", state.server), ("what a client keeps", state.kept[0])):
        for name, entry in message.items():
            if not isinstance(entry, Rows):
                _tensor(what, name, entry)
    servers: list[Message] = []
    setup = replace(setup, watch_merge=lambda _, server: servers.append(server))
    whole, wanted = play(setup), servers[-1]
    with TemporaryDirectory() as folder:
        first, second = (Checkpoint(Path(folder, "checkpoint.pt"), {}, seconds=0) for _ in range(2))
        with suppress(_Killed):
            play(setup, on_round=_kill, checkpoint=first)
        resumed = play(setup, checkpoint=second)
    if not second.resumed:
        raise Broken("its state cannot be saved and loaded: want nothing but tensors in it")
    difference = _difference({**whole.metrics, **whole.traffic}, {**resumed.metrics, **resumed.traffic})
    if difference or not _same(wanted, servers[-1]):
        raise Broken(
            f"a run that goes on from the saved state ends otherwise ({difference or 'the state of the server'}): "
            "what lasts belongs into the server's state, or into what reply returns as kept"
        )


class _Killed(Exception):
    """The end of a run, as far as the next one can tell."""


def _kill(done: int, total: int) -> None:
    if done == total:
        raise _Killed


def _participation(method: Method) -> None:
    chosen = [[1], [0, 3], [2]]
    setup = replace(_federation(method, rounds=3), participants=chosen)
    state = first_state(setup)
    for number, (later, record) in enumerate(rounds(setup, state)):
        others = [client for client in range(4) if client not in chosen[number]]
        for name, kept in later.kept[0].items():
            if not torch.equal(kept[others], state.kept[0][name][others]):
                raise Broken(f"'{name}' that a client keeps has changed in a round without it")
        for kind, counts in record.traffic.items():
            if not kind.startswith("evaluation") and counts[others].any():
                raise Broken(f"{kind} is counted for clients that sit out")
        if not np.isfinite(record.metrics["test/accuracy"]).all():
            raise Broken(f"not every client can be evaluated in round {later.round_number}, in which some sit out")
        state = later


def _odd_clients(method: Method) -> None:
    clients = _clients((7, 12, 1, 9, 0), (6, 6, 6, 0, 6))
    for engine in (Loop(), _at_once()):
        setup = replace(_federation(method, clients=clients, classes=6), engine=engine)  # nobody holds classes 4 and 5
        outcome = play(setup)
        if outcome.status != "completed":
            raise Broken(f"a federation of odd clients has {outcome.status}: {outcome.message}")
        trained = np.isfinite(outcome.metrics["train/loss"])
        if not trained[:, :4].all():
            raise Broken("the loss of a client with few samples or classes is not a number")
        measured = np.isfinite(outcome.metrics["test/loss"])
        if not measured[:, [0, 1, 2, 4]].all():
            raise Broken("the test loss of a client with few samples or classes, or without training, is not a number")


def _divergence(method: Method) -> None:
    for engine in (Loop(), _at_once()):
        outcome = play(replace(_federation(method, _undefined), engine=engine))
        if outcome.status != "diverged":
            raise Broken(
                "the model's outputs are NaN, and the run goes on: do not hide that, with nan_to_num or a mask"
            )


def _messages(method: Method) -> None:
    for batch_norm in ("average", "local"):
        setup = _federation(method, dtype="float32", batch_norm=batch_norm)
        net, listening = setup.groups[0].net, _Listening()
        for state in _states(replace(setup, engine=listening)):
            for client in range(4):
                _check_message(method, net, f"the server sends client {client}", method.send(state.server, client))
            offers = method.offers(state.server, 0)
            if not offers:
                raise Broken("offers gives a client that comes after the last round nothing: want one message at least")
            for offer in offers:
                _check_message(method, net, "the server offers a newcomer", offer)
        for client, upload in listening.heard:
            _check_message(method, net, f"client {client} sends", upload)


@final
class _Listening(Engine):
    """Trains client by client and notes what each replies, before it is carried to the server."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Message]] = []

    def train(self, job: Job) -> Iterator[Part]:
        for part in Loop().train(job):
            self.heard.append((job.clients[part.places[0]], tree_map(itemgetter(0), part.uploads)))
            yield part


def _check_message(method: Method, net: Net, who: str, message: Message) -> None:
    if isinstance(method, Averaging):
        shared = {name for name in net.shapes if name not in net.private and method.shares(net, name)}
        if more := sorted(set(message) - shared):
            raise Broken(f"{who} '{more[0]}', of which shares() says no: say yes, or do not send it")
    for name, entry in message.items():
        what = f"{who} '{name}'"
        if isinstance(entry, Rows):
            values, present = entry
            if present.dtype != torch.bool or present.shape != values.shape[:1]:
                raise Broken(
                    f"{what} with present {_kind(present.numpy())}: want bool ({len(values)},), one for each row"
                )
            if bool((values[~present] != 0).any()):
                raise Broken(
                    f"{what} with numbers in rows that are not marked present, which are neither counted nor carried: "
                    "mark them present, or set them to zero"
                )
        else:
            values = _tensor(who, name, entry)
        if name in net.private:
            raise Broken(f"{what}, which is to stay with each client (batch_norm: local): leave out net.private")
        if name in net.buffers and (values.shape != net.shapes[name] or values.is_complex()):
            raise Broken(
                f"{what} of shape {tuple(values.shape)}, counted apart as the model's buffer of that name, which has "
                f"shape {net.shapes[name]}: give it a name of its own"
            )
        if name not in net.buffers:
            _check_numbers(what, net, values)


def _check_numbers(what: str, net: Net, values: Tensor) -> None:
    """Fail for a scalar in which there is room for several."""
    if values.is_complex() or (values.is_floating_point() and values.element_size() > net.dtype.itemsize):
        raise Broken(f"{what} as {values.dtype}, where a scalar of the model is {net.dtype}: send it as net.dtype")
    whole = not values.is_floating_point() and not values.is_complex() and values.dtype != torch.bool
    if whole and values.numel() and int(values.abs().max()) >= 2**31:
        raise Broken(
            f"{what} with integers beyond 32 bits, as if several numbers were packed into one: send them as such"
        )


def _traffic(method: Method) -> None:
    setup = replace(_federation(method, rounds=3, dtype="float32"), participants=[[0, 2], [0, 1, 2, 3], [1, 3]])
    listening = _Listening()
    state = first_state(setup)
    for number, (later, record) in enumerate(rounds(replace(setup, engine=listening), state)):
        who = participants(setup, number + 1)
        sent = {
            "down": {client: method.send(state.server, client) for client in who},
            "up": dict(listening.heard[-len(who) :]),
            "evaluation": {client: method.send(later.server, client) for client in range(4)},
        }
        for way, messages in sent.items():
            for client in range(4):
                message = messages.get(client, {})
                held = _held(message, setup.buffers)
                counted = {kind: int(record.traffic[f"{way}/{kind}"][client]) for kind in held}
                packed = payload(pack(message))
                in_all = sum(counted[kind] for kind in _BYTES)
                if counted != held or packed != in_all:
                    raise Broken(
                        f"round {number + 1}, {way}, client {client}: counted {counted}, but its message holds {held}, "
                        f"packed {packed} bytes: send should give the same message whenever it is asked"
                    )
        state = later


def _held(message: Message, buffers: frozenset[str]) -> dict[str, int]:
    """Count by hand what one client's message holds."""
    held = dict.fromkeys(("scalars", "bytes", "index_bytes", "buffers", "buffer_bytes"), 0)
    for name, entry in message.items():
        values = entry.values[entry.present] if isinstance(entry, Rows) else entry
        held["index_bytes"] += 4 * len(values) if isinstance(entry, Rows) else 0
        held["buffers" if name in buffers else "scalars"] += values.numel()
        held["buffer_bytes" if name in buffers else "bytes"] += values.numel() * values.element_size()
    return held


def _processes(method: Method) -> None:
    said = (
        "something passes between them beside the messages, such as a global variable, an attribute of the class or of "
        "`self`, or a file; put it into the messages"
    )
    wanted = _parties(method)  # first, so that what fails here too is not blamed on the processes
    try:
        for (found, models), here in zip(apart.in_processes(method, _federation), wanted, strict=True):
            for client, model in models.items():
                there = {f"'{name}' of its model": values for name, values in model.items()}
                told = {**found.metrics, **found.traffic}
                there |= {name: np.array(values[client]) for name, values in told.items()}
                if difference := _difference(here[client], there, 1e-9):
                    raise Broken(
                        f"with server and clients as processes of their own, client {client} is another in round "
                        f"{found.number} ({difference}): {said}"
                    )
    except apart.Failed as failed:
        raise Broken(f"{failed}; with all in one process it works: {said}") from failed


def _parties(method: Method) -> list[list[_Played]]:
    """Return, by round and client, what `apart.in_processes` tells, of a federation in this process."""
    setup = _federation(method)
    found: list[list[_Played]] = []
    models: list[_Played] = [{} for _ in range(setup.data.clients)]

    def probe(stage: str, client: int, params: Params) -> None:
        if stage == "evaluated":
            models[client] = {f"'{name}' of its model": t.detach().numpy().copy() for name, t in params.items()}

    for _, record in rounds(replace(setup, probe=probe), first_state(setup)):
        own = apart.own(record.metrics)
        measured: _Played = {**{n: v for n, v in record.metrics.items() if n in own}, **record.traffic}
        found.append([{**m, **{n: np.array(v[i]) for n, v in measured.items()}} for i, m in enumerate(models)])
    return found


def _mixed_models(method: Method) -> str:
    if not method.mixed_models:
        return "mixed_models is not set: all clients have the same model"
    data = from_clients(_clients(), _CLASSES, torch.float64, torch.device("cpu"))
    training = Training(rounds=2, batch_size=4, dtype="float64")
    setup = make_setup(method, [convolutional, _normalised], data, training, 3)
    difference = _difference(_played(replace(setup, engine=Loop())), _played(replace(setup, engine=_at_once())), 1e-9)
    if difference:
        raise Broken(f"the engines differ: {difference}")
    return ""


CHECKS: tuple[Check, ...] = (
    Check("contract", "it is a frozen dataclass, and its hyperparameters, presets and ranges are valid", _contract),
    Check("loss", "the loss is one number per example, and padded examples count for nothing", _loss),
    Check("scores", "scores are numbers (samples, classes) by name, and those of a sample depend on no other", _scores),
    Check("inputs", "no function changes what it is given", _inputs),
    Check("repeats", "equal seeds give equal numbers, whatever ran before, and other seeds give others", _repeats),
    Check("engines", "both engines give the same numbers, in float64 to 1e-9", _engines),
    Check(
        "order",
        "neither the order of clients, nor how many are computed at a time, nor threads change a number",
        _order,
    ),
    Check("precision", "single and double precision agree", _precision),
    Check(
        "resume",
        "its state can be saved and loaded, and a run that was killed goes on as if nothing had happened",
        _resume,
    ),
    Check("participation", "clients that sit out a round send nothing and stay as they are", _participation),
    Check(
        "odd_clients",
        "clients without some classes, with one sample, without training or test samples are taken as they are",
        _odd_clients,
    ),
    Check("divergence", "a loss that is not a number ends the run as diverged, not in a crash", _divergence),
    Check(
        "messages",
        "messages hold tensors that are what they say: nothing is sent that is not counted as what it is",
        _messages,
    ),
    Check("traffic", "traffic is what the messages hold, to the byte", _traffic),
    Check(
        "processes",
        "nothing passes between server and clients but messages: each of them is a process of its own",
        _processes,
    ),
    Check("mixed_models", "clients of different architectures, if the method says mixed_models", _mixed_models),
)
"""All checks, the simplest first."""
