"""What a method's functions give, held to the contract: one line that names the class, the function, and what is right.

All of it is about kinds, shapes and names, and takes microseconds; so it is asked of every batch that is examined.
"""

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbench.errors import InputError
from fedbench.method import Loss, Method, Phase
from fedbench.net import Net

_NAME = re.compile(r"\w[\w.-]*")
_PATH = re.compile(rf"{_NAME.pattern}(/{_NAME.pattern})*")
_OWN = re.compile(r"(accuracy|loss)(/[^/]+)?")
_KEPT = re.compile(r"silhouette(/.*)?")
_WANTED = "letters, digits, '_', '-' and '.'"


def is_own(metric: str) -> bool:
    """Return whether a metric's name, without a split, is that of fedbench's mean over a score or a loss."""
    return bool(_OWN.fullmatch(metric))


def check_scores(method: Method, scores: object, samples: int, classes: int) -> None:
    """Raise `InputError` unless `scores` gave named class scores (samples, classes)."""
    where = f"{type(method).__name__}.scores"
    if not isinstance(scores, Mapping) or not scores:
        raise InputError(
            f"{where} gives {_what(scores)}; want a dict of named class scores, such as {{'head': logits}}, the "
            "headline first"
        )
    for name, values in scores.items():
        _check_name(where, "score", name)
        if name == "head_own":
            raise InputError(
                f"{where} names a score 'head_own', which is what fedbench makes of 'head' among the client's own "
                "classes; want another name"
            )
        _check_numbers(where, f"'{name}'", values, [(samples, classes)], f"{samples} samples and {classes} classes")


def check_loss(method: Method, loss: object, samples: int) -> None:
    """Raise `InputError` unless `loss` gave one number per example, and parts that are such or scalars."""
    where = f"{type(method).__name__}.loss"
    if not isinstance(loss, Loss) or not isinstance(loss.parts, Mapping):
        raise InputError(f"{where} gives {_what(loss)}; want Loss(total, parts), where parts is a dict")
    what = f"{samples} examples"
    _check_numbers(where, "the total", loss.total, [(samples,)], what, ": do not average, the engine does")
    for name, values in loss.parts.items():
        _check_name(where, "part", name)
        _check_numbers(where, f"the part '{name}'", values, [(samples,), ()], what)


def check_sent(method: Method, net: Net, message: object) -> None:
    """Raise `InputError` if `send` gives no message, or one with what is to stay with each client."""
    where = f"{type(method).__name__}.send"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} gives {_what(message)}; want a dict of tensors and Rows")
    for name in message:
        if name in net.private:
            raise InputError(
                f"{where} gives '{name}', which is to stay with each client (training.batch_norm: local); leave out "
                "what is in net.private"
            )


def check_start(method: Method, net: Net, params: object) -> None:
    """Raise `InputError` unless `start` gave the complete model and nothing else."""
    where = f"{type(method).__name__}.start"
    if not isinstance(params, Mapping):
        raise InputError(f"{where} gives {_what(params)}; want the model's tensors by their names")
    for name in [*params, *net.shapes]:
        if name not in net.shapes:
            raise InputError(
                f"{where} gives '{name}', which is no tensor of the model; want the model and nothing else"
            )
        if name not in params:
            raise InputError(f"{where} gives no '{name}'; want the complete model")
    for name, values in params.items():
        if not isinstance(values, Tensor) or tuple(values.shape) != net.shapes[name]:
            raise InputError(f"{where} gives {_what(values)} as '{name}'; want a tensor {net.shapes[name]}")


def check_valid(method: Method, valid: Tensor) -> None:
    """Raise `InputError` if `loss` changed `valid` of its batch, which a client's steps share."""
    if valid._version:
        raise InputError(f"{type(method).__name__}.loss changes valid of its batch in place; want a new tensor")


def check_phases(method: Method, phases: Sequence[Phase], parts: Collection[str]) -> None:
    """Raise `InputError` for what is no list of phases, and for losses of phases that would have no name of their own.

    One phase alone has no loss.
    """
    where = f"{type(method).__name__}.phases"
    if not isinstance(phases, Sequence) or not all(isinstance(phase, Phase) for phase in phases):
        raise InputError(f"{where} gives {_what(phases)}; want a list of Phase(name, epochs)")
    for phase in phases:
        if not isinstance(phase.epochs, int | np.integer) or phase.epochs < 0:
            raise InputError(f"{where} gives phase '{phase.name}' {phase.epochs!r} epochs; want a whole number from 0")
    for number, phase in enumerate(phases) if len(phases) > 1 else ():
        _check_name(where, "phase", phase.name)
        if phase.name in [earlier.name for earlier in phases[:number]]:
            raise InputError(f"{where} names two phases '{phase.name}'; want a name for each")
        if phase.name in parts:
            raise InputError(f"{where} names a phase '{phase.name}', as loss does one of its parts; want another name")


def checked_summaries(method: Method, found: object, clients: int) -> dict[str, NDArray[np.float64]]:
    """Return what `summaries` gave as arrays (clients,); `InputError` for others, and for fedbench's own names."""
    where = f"{type(method).__name__}.summaries"
    if not isinstance(found, Mapping):
        raise InputError(f"{where} gives {_what(found)}; want a dict of lists by name")
    checked = {}
    for name, values in found.items():
        if not isinstance(name, str) or not _PATH.fullmatch(name):
            raise InputError(f"{where} names a metric {name!r}; want {_WANTED}, and parts joined by '/'")
        if is_own(name) or _KEPT.fullmatch(name):
            raise InputError(
                f"{where} names a metric '{name}', as fedbench does its own; want another, such as 'my/{name}'"
            )
        try:
            checked[name] = np.array(values, float)
        except (TypeError, ValueError):
            raise InputError(f"{where} gives {_what(values)} under '{name}'; want a number for each client") from None
        if checked[name].shape != (clients,):
            raise InputError(
                f"{where} gives values of shape {checked[name].shape} under '{name}' for {clients} clients; want "
                "one for each"
            )
    return checked


def _check_name(where: str, what: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{where} names a {what} {name!r}; want {_WANTED}")


def _check_numbers(
    where: str, name: str, values: object, shapes: Sequence[tuple[int, ...]], what: str, hint: str = ""
) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point() or tuple(values.shape) not in shapes:
        wanted = " or ".join(map(str, shapes))
        raise InputError(f"{where} gives {_what(values)} as {name} for {what}; want floating point {wanted}{hint}")


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return repr(value) if value is None or value == {} else f"a {type(value).__name__}"
