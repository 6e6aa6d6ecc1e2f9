"""Options of methods, data sets, partitions and models, and the settings of a training: checked, resolved, explained.

Options come as plain JSON values (null, booleans, numbers, text, lists, mappings).  They are checked strictly against
the annotations of the class that takes them: text is no boolean, `true` is no 1, a range is the field's
`annotated_types` mark; marks of other libraries are ignored.
"""

import copy
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedbench.errors import InputError, unknown

T = TypeVar("T")

# pydantic's words for programmers, in the words of somebody who writes YAML.
_WORDS = {
    "bool_type": "should be true or false",
    "int_type": "should be a whole number",
    "float_type": "should be a number",
    "string_type": "should be text",
    "list_type": "should be a list",
    "tuple_type": "should be a list",
    "dict_type": "should be a mapping",
    "model_type": "should be a mapping",
    "dataclass_type": "should be a mapping",
}
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


def resolve(cls: type, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return every option of a class, defaults included, as plain JSON values that mean the same however written.

    InputError, with `where` ("suite.yaml: methods.fedprox") and the option's name, for one that is unknown, of the
    wrong type or out of range.
    """
    form, names = _form(cls), set(option_names(cls))

    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        dumped = form.dump_python(_checked(cls, values, where), mode="json", warnings=False)
        return {name: value for name, value in dumped.items() if name in names}

    # Defaults are only checked, and an integer default of a float option only made 1.0, when they come from outside.
    return plain(plain(options))


def make(cls: type[T], options: Mapping[str, Any], where: str) -> T:
    """Return the dataclass made from checked options; InputError as `resolve` does."""
    checked: T = _checked(cls, options, where)
    return checked


def factory(cls: type[T], options: Mapping[str, Any], where: str) -> Callable[[tuple[int, ...], int], T]:
    """Return `(shape, classes) -> cls(shape, classes, **options)`, options checked; InputError as `resolve` does."""
    kind: type = cls
    checked = _checked(kind, options, where)
    return functools.partial(cls, **{name: getattr(checked, name) for name in option_names(kind)})


@functools.cache
def option_names(cls: type) -> tuple[str, ...]:
    """Return the names of a class's options: a dataclass's fields, or what a constructor takes besides its subject."""
    return tuple(field.name for field in dataclasses.fields(_dataclass(cls)) if field.init)


@functools.cache
def schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of a class's options."""
    return _form(cls).json_schema()


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values laid over others, mapping by mapping."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def places(cls: type, place: str) -> dict[str, str]:
    """Return for each option of a class, and of the dataclasses in it, in words where it stands."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(cls).items() if dataclasses.is_dataclass(cls) else ():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found |= places(hint, f"{place}.{name}")
    return found | dict.fromkeys(option_names(cls), f"in {place}")


def explain(
    error: ValidationError,
    data: Any,
    prefix: str,
    known: Callable[[tuple[str, ...]], Iterable[str]],
    elsewhere: Callable[[tuple[str, ...]], Mapping[str, str]],
) -> InputError:
    """Return the first thing that pydantic found wrong with `data` as one line behind `prefix`.

    `known` gives the right names at a place in the data, and `elsewhere` those of other places, for the hint.
    """
    errors = error.errors(include_url=False)
    errors.sort(key=lambda one: one["type"] == "missing")  # which an unknown key beside it explains
    path = _path(errors[0]["loc"], data)
    where = (prefix + ".".join(path)).rstrip(".: ")
    if errors[0]["type"] in _UNKNOWN:
        name = str(errors[0]["loc"][-1])
        where = (prefix + ".".join(path[:-1])).rstrip(".: ")
        return InputError(f"{where}: {unknown('key', name, known(path[:-1]), elsewhere(path[:-1]))}")
    # A union has one error per member, all at the same place.
    said = dict.fromkeys(_say(e["type"], e["msg"]) for e in errors if _path(e["loc"], data) == path)
    text = " or ".join(said).replace(" or should be ", " or ")
    if errors[0]["type"] == "missing":
        return InputError(f"{prefix}{'.'.join([*path, str(errors[0]['loc'][-1])])}: is missing")
    if errors[0]["type"] in ("value_error", "assertion_error"):
        return InputError(f"{where}: {text}")
    return InputError(f"{where}: {text}, not {_show(errors[0]['input'])}")


def one_line(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _say(kind: str, message: str) -> str:
    message = " ".join(message.removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
    return _WORDS.get(kind, message.replace("Input should be", "should be"))


def _show(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(loc: Iterable[str | int], data: Any) -> tuple[str, ...]:
    """Return the part of pydantic's location that is in the data: it also names the members of unions."""
    path = []
    for part in loc:
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list) and isinstance(part, int)
        if inside:
            data = data[part]
            path.append(str(part))
    return tuple(path)


def _checked(cls: type, options: Mapping[str, Any], where: str) -> Any:
    try:
        text = json.dumps(options, allow_nan=False)
    except ValueError:
        raise InputError(f"{where}: every number must be finite: {_show(options)}") from None
    except TypeError as error:
        raise InputError(f"{where}: want plain numbers, text, lists and mappings: {one_line(error)}") from None
    try:
        return _form(cls).validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        inside = places(cls, where.rpartition(": ")[2])
        raise explain(error, options, f"{where}.", lambda path: _names_at(cls, path), lambda _: inside) from None
    except InputError as error:  # from a class's own __post_init__
        raise InputError(f"{where}: {error}") from None
    except Exception as error:  # a fault in somebody's plugin
        raise InputError(f"{where}: {cls.__name__} cannot be made: {one_line(error)}") from error


def _names_at(cls: type, path: Iterable[str]) -> Iterable[str]:
    """Return the option names of the dataclass that stands at a path of options, none if there is not one."""
    for part in path:
        cls = get_type_hints(cls).get(part, object)
    return option_names(cls) if dataclasses.is_dataclass(cls) or not path else ()


@functools.cache
def _form(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(_dataclass(cls))


@functools.cache
def _dataclass(cls: type) -> type:
    """Return the class itself if it is a dataclass, else one with its constructor's options as fields."""
    if dataclasses.is_dataclass(cls):
        return cls
    hints = get_type_hints(inspect.getattr_static(cls, "__init__"), include_extras=True)
    fields = []
    for name, parameter in list(inspect.signature(cls).parameters.items())[2:]:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        hint = hints.get(name, Any)
        if parameter.default is inspect.Parameter.empty:
            fields.append((name, hint, dataclasses.field(kw_only=True)))
        else:
            default = functools.partial(copy.copy, parameter.default)
            fields.append((name, hint, dataclasses.field(default_factory=default, kw_only=True)))
    return dataclasses.make_dataclass(cls.__name__, fields, frozen=True)
