"""What tuning searches: a suite's `tune`, and the space that it and the marks on hyperparameters span.

A space maps the place of a setting in a cell's recipe (`method.lam`, `training.optimizer.lr`) to `{low, high, log}` or
to `{values}`; plain JSON values.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, final, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedbench import options
from fedbench.errors import InputError, unknown
from fedbench.settings import LACKS, Count, Training

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("none", "median", "quartile")

Values = Mapping[str, Any]
"""Place of a setting -> its value."""

_RATE = "training.optimizer.lr"
_OPTIMIZER = "training.optimizer.name"
_RATES = {"sgd": (1e-3, 0.3), "adam": (1e-4, 0.1)}
_POINTS = 5  # of a range on a grid


def _check_sampler(value: str) -> str:
    if value not in SAMPLERS:
        raise ValueError(str(unknown("sampler", value, SAMPLERS)))
    return value


def _check_pruner(value: str) -> str:
    if value not in PRUNERS:
        raise ValueError(str(unknown("pruner", value, PRUNERS)))
    return value


def _check_objective(value: str) -> str:
    if not value.startswith("validation/"):
        raise ValueError(f"{value!r} is no metric of the validation samples, such as validation/accuracy")
    return value


def _check_params(value: dict[str, Any]) -> dict[str, Any]:
    for name, said in value.items():
        if isinstance(said, dict):
            _check_range(name, said)
        elif isinstance(said, list):
            if not said:
                raise ValueError(f"{name} has an empty list of values")
            for index, one in enumerate(said):
                if not (one is None or isinstance(one, (bool, int, float, str))):
                    raise ValueError(f"{name}: {one!r} is no plain value")
                if any(one == other and isinstance(one, bool) == isinstance(other, bool) for other in said[:index]):
                    raise ValueError(f"{name} has {one!r} more than once")
    return value


def _check_range(name: str, said: Mapping[str, Any]) -> None:
    strange = [key for key in said if key not in ("low", "high", "log")]
    if strange:
        raise ValueError(f"{name}: {unknown('key', strange[0], ('low', 'high', 'log'))}")
    for key in ("low", "high"):
        if not isinstance(said.get(key), (int, float)) or isinstance(said[key], bool):
            raise ValueError(f"{name}.{key} should be a number; a range is written {{low: 0.01, high: 1, log: true}}")
    if not isinstance(said.get("log", False), bool):
        raise ValueError(f"{name}.log should be true or false")
    if not said["low"] < said["high"]:
        raise ValueError(f"{name}: the range from {said['low']} to {said['high']} is empty")


@final
class Tune(BaseModel):
    """How the hyperparameters of every row are chosen, on validation samples only; the same number of trials for each.

    - `trials`: of each row; the first has the suite's own values, if they are in the space and `sampler` is no grid.
    - `sampler`: `tpe`, `random`, or `grid`, which takes five values of a range and never tries one twice.
    - `pruner`: trials that are given up between rounds: `none`; below the `median` of earlier trials at that round;
      below their best `quartile`.
    - `objective`: a metric of the validation samples, of which the mean over clients in the last round counts.
    - `params`: a hyperparameter (`lam`) or a setting of the training (`optimizer.lr`, or `lr` for short) -> a range
      {low, high, log}, a list of values, one value for all trials, or null: it stays as the rows have it.  Beside
      these, what methods mark (`fedbench.method.Log`, `Choice`) and the learning rate are searched.  What a grid
      varies is not.
    - `validation`: fraction of each client's training samples that trials validate on and do not train on, where the
      partition sets none aside.
    - `batch`: trials that are chosen together, none knowing how another does, so that they can run at the same time.
      Part of the recipe, so that the choice does not depend on the number of workers.
    - `seed`: of the sampler and of every trial's run.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    trials: Count = 20
    sampler: Annotated[str, AfterValidator(_check_sampler), Field(json_schema_extra={"enum": list(SAMPLERS)})] = "tpe"
    pruner: Annotated[str, AfterValidator(_check_pruner), Field(json_schema_extra={"enum": list(PRUNERS)})] = "none"
    objective: Annotated[str, AfterValidator(_check_objective)] = "validation/accuracy"
    params: Annotated[dict[str, Any], AfterValidator(_check_params)] = {}
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2
    batch: Count = 4
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


def at(recipe: Mapping[str, Any], place: str) -> Any:
    """Return the value at a place of a recipe."""
    value: Any = recipe
    for key in _keys(place):
        value = value[key]
    return value


def put(recipe: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a recipe with other values at some places."""
    changed = copy.deepcopy(dict(recipe))
    for place, value in values.items():
        *above, last = _keys(place)
        inner = changed
        for key in above:
            inner = inner[key]
        inner[last] = value
    return changed


def short(place: str) -> str:
    """Return what people call a place: the name of the hyperparameter or the setting."""
    return place.partition(".")[2]


def contains(entry: Mapping[str, Any], value: Any) -> bool:
    """Return whether a value is in one dimension of a space."""
    if "values" in entry:
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in entry["values"])
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and bool(entry["low"] <= value <= entry["high"])


def span(
    tune: Tune, method: type, row: Mapping[str, Any], varied: Collection[str], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row's part of a recipe ("method", "training") with what `tune` fixes, and the space to search.

    `varied` are the places that a grid varies.  InputError for a value that the setting cannot have, and if there is
    nothing to search.
    """
    fixed: dict[str, Any] = {}
    space = {place: mark for place, mark in _marks(method, row) if not _covered(place, varied)}
    known = places(tune, row, varied)
    for name, said in tune.params.items():
        place = find(name, known)
        if place is None or _covered(place, varied):
            continue
        mark = space.pop(place, {})
        setting = _Setting(method, row, place, f"{where}: tune.params")
        if isinstance(said, dict):
            space[place] = setting.range(said["low"], said["high"], said.get("log", mark.get("log", False)))
        elif isinstance(said, list):
            space[place] = {"values": [setting.checked(value) for value in said]}
        elif said is not None:
            fixed[place] = setting.checked(said)
    if not space:
        raise InputError(f"{where}: tune: nothing is left to search; give params a range, or leave lr out of them")
    if tune.sampler == "grid":
        space = {place: {"values": _points(entry)} for place, entry in space.items()}
    return put(row, fixed), space


def trials(tune: Tune, space: Mapping[str, Any]) -> int:
    """Return how many trials there are: on a grid no more than it has points."""
    points = math.prod(len(entry["values"]) for entry in space.values()) if tune.sampler == "grid" else tune.trials
    return min(tune.trials, points)


def places(tune: Tune, row: Mapping[str, Any], varied: Collection[str]) -> list[str]:
    """Return the places that `params` may name in a row.

    Settings are left out that the row's optimiser does not have, nor any that `tune` gives it instead.
    """
    found = [*(f"method.{name}" for name in row["method"]["options"]), *_leaves(row["training"], "training")]
    optimizers = [at(row, _OPTIMIZER)]
    for name, said in tune.params.items():
        if said is not None and find(name, found) == _OPTIMIZER and not _covered(_OPTIMIZER, varied):
            optimizers = said if isinstance(said, list) else [said]
    lacking = set.intersection(*(set(LACKS.get(str(name), ())) for name in optimizers))
    left_out = {f"training.optimizer.{setting}" for setting in lacking}
    return [place for place in found if place not in left_out]


def find(name: str, known: Collection[str]) -> str | None:
    """Return the place that a name in `params` means: a hyperparameter, or else a setting of the training."""
    for full in (f"method.{name}", f"training.{name.removeprefix('training.')}"):
        if full in known:
            return full
    meant = [place for place in known if place.startswith("training.") and place.endswith(f".{name}")]
    return meant[0] if len(meant) == 1 else None


class _Setting:
    """One place of a row, which knows which values it can have."""

    def __init__(self, method: type, row: Mapping[str, Any], place: str, where: str) -> None:
        self._method, self._row, self._place, self._where = method, row, place, where

    def checked(self, value: Any) -> Any:
        """Return a value as it stands in a recipe."""
        given = put(self._row, {self._place: value})
        if self._place.startswith("method."):
            resolved = {"method": {"options": options.resolve(self._method, given["method"]["options"], self._where)}}
        else:
            resolved = {"training": options.resolve(Training, given["training"], self._where)}
        return at(resolved, self._place)

    def range(self, low: float, high: float, log: bool) -> dict[str, Any]:
        ends = [self.checked(low), self.checked(high)]
        if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in ends):
            raise InputError(f"{self._where}.{short(self._place)}: is no number, so give it a list of values")
        if log and ends[0] <= 0:
            raise InputError(f"{self._where}.{short(self._place)}: low should be above 0 on a log scale, not {low}")
        return {"low": ends[0], "high": ends[1], "log": log}


def _marks(method: type, row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is searched unless the suite says otherwise."""
    from fedbench.method import Choice, Log

    low, high = _RATES[row["training"]["optimizer"]["name"]]
    yield _RATE, {"low": low, "high": high, "log": True}
    hints = get_type_hints(method, include_extras=True)
    for name in row["method"]["options"]:
        for mark in getattr(hints[name], "__metadata__", ()):
            if isinstance(mark, Log):
                yield f"method.{name}", {"low": mark.low, "high": mark.high, "log": True}
            elif isinstance(mark, Choice):
                yield f"method.{name}", {"values": list(mark.values)}


def _points(entry: Mapping[str, Any]) -> list[Any]:
    """Return the values of one dimension on a grid; those of a range have equal distances on its scale."""
    if "values" in entry:
        return list(entry["values"])
    low, high = entry["low"], entry["high"]
    shares = [step / (_POINTS - 1) for step in range(1, _POINTS - 1)]
    inner = [low * (high / low) ** share if entry["log"] else low + (high - low) * share for share in shares]
    if isinstance(low, int):
        inner = [round(value) for value in inner]
    return list(dict.fromkeys([low, *inner, high]))


def _covered(place: str, varied: Collection[str]) -> bool:
    return any(f"{place}.".startswith(f"{axis}.") for axis in varied)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}"


def _keys(place: str) -> tuple[str, ...]:
    head, *rest = place.split(".")
    return ("method", "options", *rest) if head == "method" else (head, *rest)
