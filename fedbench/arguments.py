"""What `simulate` is given, held to the same rules as a suite file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.engines import Engine
from fedbench.engines.choice import EngineName
from fedbench.errors import InputError, unknown
from fedbench.method import Method
from fedbench.net import ModelFactory, Params
from fedbench.options import make
from fedbench.settings import Optimizer, Training, check_optimizer

ENGINES = get_args(EngineName)


def check_method(method: Method) -> None:
    """Raise InputError unless it is a method with hyperparameters that a suite might have."""
    if not isinstance(method, Method):
        raise InputError(f"method: {method!r} is no instance of a method such as FedAvg()")
    values = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(method).items()}
    make(type(method), values, type(method).__name__)


def checked_training(training: Training | None, settings: Mapping[str, Any]) -> Training:
    """Return the settings with some replaced; InputError if one is wrong, or of another optimiser."""
    if not isinstance(training, Training | None):
        raise InputError(f"training: {training!r}; want fedbench.settings.Training(rounds=10, ...), or such keywords")
    values = {**asdict(training or Training()), **settings}
    made = make(Training, {name: _plain(name, value) for name, value in values.items()}, "simulate")
    given = settings.get("optimizer", made.optimizer)
    if isinstance(given, Optimizer):  # which does not say what was given, and what is the default
        given = {name: value for name, value in asdict(given).items() if value != getattr(Optimizer, name)}
    check_optimizer(made.optimizer.name, given, "simulate.optimizer")
    return made


def checked_models(model: nn.Module | ModelFactory | Sequence[ModelFactory]) -> list[ModelFactory]:
    """Return what makes each of the models that are not given as a module."""
    models = [model] if callable(model) else list(model) if isinstance(model, Sequence) else []
    if not models or not all(callable(one) and not isinstance(one, nn.Module) for one in models):
        raise InputError(
            f"model: {_brief(model)}; want an nn.Module, a callable (input shape, classes) -> nn.Module, or a list of "
            "such callables"
        )
    return models


def check_numbers(seed: int, classes: int | None, threads: int) -> None:
    """Raise InputError for a number that is none, or too small."""
    for name, value, low in (("seed", seed, 0), ("classes", classes, 1), ("threads", threads, 1)):
        if not (is_whole(value) and int(value or 0) >= low) and not (name == "classes" and value is None):
            raise InputError(f"{name}: {_brief(value)}; want a whole number from {low}")


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, of Python or of numpy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_participants(participants: Sequence[Sequence[int]], rounds: int, clients: int) -> None:
    """Raise InputError unless there are different clients for every round."""
    if not _is_list(participants) or len(participants) < rounds:
        many = f"{len(participants)} lists" if _is_list(participants) else _brief(participants)
        raise InputError(f"participants: {many} for {rounds} rounds; want a list of clients for each")
    for number, chosen in enumerate(participants, 1):
        good = _is_list(chosen) and all(is_whole(client) and 0 <= client < clients for client in chosen)
        if not good or len(set(chosen)) < len(chosen):
            raise InputError(
                f"participants: round {number} has {_brief(chosen)}; want different clients from 0 to {clients - 1}"
            )


def check_states(states: Any, clients: int) -> list[Params]:
    """Return each client's initial state; InputError unless there is a mapping of tensors for each."""
    one: list[Any] = [states] * clients if isinstance(states, Mapping) else [None]
    given: list[Any] = list(states) if _is_list(states) else one
    if not all(isinstance(state, Mapping) and _is_tensors(state) for state in given):
        raise InputError(f"initial: {_brief(states)}; want one state_dict for all clients, or a list of one for each")
    if len(given) != clients:
        raise InputError(f"initial: {len(given)} states for {clients} clients")
    return [dict(state) for state in given]


def check_engine(engine: object) -> None:
    """Raise InputError for what is neither an engine nor the name of one."""
    if isinstance(engine, str) and engine not in ENGINES:
        raise InputError(f"engine: {unknown('engine', engine, ENGINES)}")
    if not isinstance(engine, str | Engine):
        raise InputError(f"engine: {_brief(engine)}; want {', '.join(ENGINES)}")


def checked_device(device: str, where: str = "device") -> torch.device:
    """Return a device; InputError, beginning with `where`, if torch does not know it or this machine has none."""
    try:
        return torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError):
        found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        found += ["mps"] * torch.backends.mps.is_available()
        raise InputError(f"{where} {device}: not on this machine, which has {', '.join(found)}") from None


def _plain(name: str, value: Any) -> Any:
    """Return a setting as a suite would have it: mappings, and Python's numbers in the place of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Optimizer):
        return _plain(name, asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(f"{name}.{key}", inner) for key, inner in value.items()}
    if not isinstance(value, str | int | float | bool | None):
        raise InputError(f"simulate.{name}: {_brief(value)}; want a number, text, or a mapping of such")
    return value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


def _is_tensors(state: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Tensor) for value in state.values())


def _brief(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
