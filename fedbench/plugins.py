"""Plugins: methods, data sets and models, found by name, in a file, or in a package; all through the same door.

A plugin is written as a registered name (`fedprox`: an entry point, the built-in ones too), as a class in a file
(`./mine.py:Mine`, relative to the suite's folder) or as a class in an installed package (`my_package.mine:Mine`).
"""

import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from fedbench import options as _options
from fedbench.errors import InputError, unknown

Kind = Literal["methods", "datasets", "models"]
KINDS: Mapping[Kind, str] = MappingProxyType(
    {"methods": "fedbench.methods", "datasets": "fedbench.datasets", "models": "fedbench.models"}
)
"""Each kind of plugin and its entry-point group."""

ROW_KEYS = ("method", "preset", "models", "training", "grid")
"""Keys of a suite's row that are not hyperparameters."""

_WORD: Mapping[Kind, str] = {"methods": "method", "datasets": "data set", "models": "model"}
_RESERVED: Mapping[Kind, tuple[str, ...]] = {"methods": ROW_KEYS, "datasets": ("name",), "models": ("name",)}


def names(kind: Kind) -> list[str]:
    """Return the registered names, sorted, without importing anything they stand for."""
    return sorted(_registered(KINDS[kind], tuple(sys.path)))


def load(kind: Kind, spec: str, base: Path | None = None, where: str = "") -> type[Any]:
    """Return a plugin's class; a file in `spec` is relative to `base`.

    InputError, behind `where`, for a name nobody registered, a plugin that fails to import, and a class that does not
    keep the contract of its kind.
    """
    place = f"{where}: " if where else ""
    try:
        return _load(kind, spec, base)
    except InputError as error:
        raise InputError(f"{place}{error}") from error.__cause__


def build(kind: Kind, spec: str, options: Mapping[str, Any], base: Path | None = None, where: str = "") -> Any:
    """Return a method or data source with its options set, or a model factory `(shape, classes) -> module`.

    InputError for a bad plugin or option; `where` says whose ("suite.yaml: methods.fedprox").
    """
    cls = load(kind, spec, base, where)
    if kind == "models":
        return _options.factory(cls, options, where or spec)
    return _options.make(cls, options, where or spec)


def located(
    kind: Kind, spec: str, options: Mapping[str, Any], base: Path | None = None, where: str = ""
) -> tuple[dict[str, Any], str | None]:
    """Return options under which a file they name relative to `base` is found, and the sha256 of that file.

    A model or method that reads a file says so in a static method `located(options, base)`; others get their options
    back and None.  InputError, behind `where`, if the file is not there.
    """
    place = f"{where}: " if where else ""
    hook = getattr(load(kind, spec, base, where), "located", None)
    try:
        return hook(options, base or Path()) if hook else (dict(options), None)
    except InputError as error:
        raise InputError(f"{place}{error}") from error.__cause__


def identity(spec: str, base: Path | None = None) -> str:
    """Return what identifies a plugin in a recipe: for one in a file its class and the file's sha256, else its name.

    InputError if the file cannot be read.
    """
    place, _, name = spec.rpartition(":")
    return f"{name}@{_digest(_read(_file(place, base)))}" if place.endswith(".py") else spec


def _load(kind: Kind, spec: str, base: Path | None) -> type[Any]:
    word = f"{_WORD[kind]} '{spec}'"
    if spec.endswith(".py"):
        raise InputError(f"{word}: name the class too, as in '{spec}:Mine'")
    value = spec
    if ":" not in spec:
        found = _registered(KINDS[kind], tuple(sys.path)).get(spec)
        if found is None:
            raise unknown(_WORD[kind], spec, names(kind))
        if len(found) > 1:
            raise InputError(f"{word}: registered more than once, as {' and '.join(sorted(found))}")
        (value,) = found
    place, _, name = value.rpartition(":")
    if not place.endswith(".py") and (place.startswith(".") or "/" in place):
        raise InputError(f"{word}: '{place}' is no module; a class in a file is written '{place}.py:{name}'")
    module = _import_file(_file(place, base), word) if place.endswith(".py") else _import_package(place, word)
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        classes = [n for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__]
        raise InputError(f"{word}: {unknown('class', name, classes)}")
    _check(kind, cls, word)
    return cls


@cache
def _registered(group: str, path: tuple[str, ...]) -> Mapping[str, set[str]]:
    """Return name -> "module:Class" of everybody who registered it; another `path` is looked through anew."""
    found: dict[str, set[str]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, set()).add(entry.value)
    return found


def _file(place: str, base: Path | None) -> Path:
    return (base or Path()) / Path(place).expanduser()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"plugin file {path}: {error.strerror}") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _import_package(name: str, word: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _broken(word, error) from error


def _import_file(path: Path, word: str) -> ModuleType:
    """Run a file as a module of its own, once for each content: an edited file is a new module."""
    content = _read(path)
    name = f"fedbench_plugin_{_digest(str(path.resolve()).encode() + content)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up while they are made
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(word, error, str(path)) from error
    return module


def _broken(word: str, error: BaseException, file: str = "") -> InputError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" (line {lines[-1]})" if lines else ""
    return InputError(f"{word} cannot be imported: {_options.one_line(error)}{place}")


def _check(kind: Kind, cls: type[Any], word: str) -> None:
    """Raise InputError unless the class keeps what its kind promises and its options can be checked."""
    contract = _contract(kind)
    if not issubclass(cls, contract):
        raise InputError(f"{word}: {cls.__name__} is not a subclass of {contract.__module__}.{contract.__qualname__}")
    if inspect.isabstract(cls):
        raise InputError(f"{word}: {cls.__name__} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    # A class without the decorator inherits its parent's fields, and its own would be silently ignored.
    parameters = vars(cls).get("__dataclass_params__")
    if kind != "models" and not (parameters and parameters.frozen):
        raise InputError(f"{word}: {cls.__name__} is not a frozen dataclass; put @dataclass(frozen=True) above it")
    if kind == "models" and list(inspect.signature(cls).parameters)[:2] != ["shape", "classes"]:
        raise InputError(f"{word}: the constructor should be {cls.__name__}(shape, classes, *, option=default, ...)")
    if kind == "datasets" and not hasattr(cls, "about"):
        raise InputError(f"{word}: {cls.__name__} does not say what it is; give it `about = About(...)`")
    try:
        owner: type = cls
        options = _options.option_names(owner)
        _options.schema(owner)
    except Exception as error:
        raise InputError(f"{word}: its options cannot be understood: {_options.one_line(error)}") from error
    reserved = sorted(set(options) & set(_RESERVED[kind]))
    if reserved:
        raise InputError(f"{word}: option '{reserved[0]}' has a name that suites use for something else; rename it")


def _contract(kind: Kind) -> type[Any]:
    """Return the class that plugins of a kind derive from; imported late, since it may bring torch along."""
    if kind == "methods":
        from fedbench.method import Method

        return Method
    if kind == "datasets":
        from fedbench.data import DataSource

        return DataSource
    from torch.nn import Module

    return Module
