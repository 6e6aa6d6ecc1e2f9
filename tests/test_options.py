import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Interval, Le

from fedbench import options
from fedbench.errors import InputError
from fedbench.settings import Optimizer, Training


@dataclass(frozen=True)
class Log:
    """A mark that pydantic does not know, as methods have them for tuning ranges."""

    low: float
    high: float


@dataclass(frozen=True)
class Plain:
    presets: ClassVar[dict[str, Any]] = {}

    mu: Annotated[float, Ge(0), Le(10), Log(1e-4, 1)] = 1
    steps: Annotated[int, Interval(ge=1, lt=5)] = 2
    nesterov: bool = False
    mode: Literal["paper", "official"] = "paper"
    personal: str | tuple[str, ...] = "head"
    path: Path | None = None
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps == 4:
            raise InputError("steps: four is not allowed")
        if self.steps == 3:
            raise ValueError("three is\nnot allowed")


@dataclass(frozen=True)
class Needy:
    path: str


class Model:
    def __init__(
        self, shape: tuple[int, ...], classes: int, *, width: Annotated[int, Ge(1)] = 8, sizes: tuple[int, ...] = (3,)
    ) -> None:
        self.made = (shape, classes, width, sizes)


def test_every_option_is_resolved_to_plain_values() -> None:
    assert options.resolve(Plain, {}, "x") == {
        "mu": 1.0,
        "steps": 2,
        "nesterov": False,
        "mode": "paper",
        "personal": "head",
        "path": None,
        "rates": [],
    }
    given = {"personal": ["body.fc1", "head"], "path": "a/b", "rates": [1]}
    assert options.resolve(Plain, given, "x") == options.resolve(Plain, {}, "x") | given


@pytest.mark.parametrize("given", [{}, {"mu": 1}, {"mu": 1.0}])
def test_a_number_means_the_same_however_it_is_written(given: dict[str, Any]) -> None:
    resolved = options.resolve(Plain, given, "x")["mu"]
    assert resolved == 1.0
    assert isinstance(resolved, float)


def test_make_gives_the_class_its_own_types() -> None:
    made = options.make(Plain, {"personal": ["a", "b"], "path": "c"}, "x")
    assert made == Plain(personal=("a", "b"), path=Path("c"))
    assert options.make(Training, {"rounds": 3, "optimizer": {"lr": 1}}, "x") == Training(
        3, optimizer=Optimizer(lr=1.0)
    )


def test_a_factory_passes_the_options_on() -> None:
    build = options.factory(Model, {"width": 4}, "x")
    assert build((1, 2), 10).made == ((1, 2), 10, 4, (3,))
    assert options.resolve(Model, {"sizes": [5, 6]}, "x") == {"width": 8, "sizes": [5, 6]}


@pytest.mark.parametrize(
    ("cls", "given", "line"),
    [
        (Plain, {"mu": -0.5}, "s.yaml: m.mu: should be greater than or equal to 0, not -0.5"),
        (Plain, {"mu": 11}, "s.yaml: m.mu: should be less than or equal to 10, not 11"),
        (Plain, {"mu": "1"}, 's.yaml: m.mu: should be a number, not "1"'),
        (Plain, {"mu": True}, "s.yaml: m.mu: should be a number, not true"),
        (Plain, {"mu": None}, "s.yaml: m.mu: should be a number, not null"),
        (Plain, {"steps": 0}, "s.yaml: m.steps: should be greater than or equal to 1, not 0"),
        (Plain, {"steps": 2.5}, "s.yaml: m.steps: should be a whole number, not 2.5"),
        (Plain, {"steps": True}, "s.yaml: m.steps: should be a whole number, not true"),
        (Plain, {"steps": 3}, "s.yaml: m: three is not allowed"),
        (Plain, {"steps": 4}, "s.yaml: m: steps: four is not allowed"),
        (Plain, {"nesterov": "False"}, 's.yaml: m.nesterov: should be true or false, not "False"'),
        (Plain, {"nesterov": 0}, "s.yaml: m.nesterov: should be true or false, not 0"),
        (Plain, {"mode": "papr"}, "s.yaml: m.mode: should be 'paper' or 'official', not \"papr\""),
        (Plain, {"personal": 3}, "s.yaml: m.personal: should be text or a list, not 3"),
        (Plain, {"rates": [1, "x"]}, 's.yaml: m.rates.1: should be a number, not "x"'),
        (Plain, {"nestrov": True}, "s.yaml: m: unknown key 'nestrov'; did you mean 'nesterov'?"),
        (Needy, {}, "s.yaml: m.path: is missing"),
        (Model, {"width": 0}, "s.yaml: m.width: should be greater than or equal to 1, not 0"),
        (Model, {"widht": 1}, "s.yaml: m: unknown key 'widht'; did you mean 'width'?"),
        (Training, {"participation": 5.0}, "s.yaml: m.participation: should be less than or equal to 1, not 5.0"),
        (Training, {"optimizer": {"lr": 0}}, "s.yaml: m.optimizer.lr: should be greater than 0, not 0"),
        (Training, {"optimizer": {"lrr": 1}}, "s.yaml: m.optimizer: unknown key 'lrr'; did you mean 'lr'?"),
        (Training, {"optimizer": 3}, "s.yaml: m.optimizer: should be a mapping, not 3"),
        (Training, {"optimizer": {"weight_decay_bias": "no"}}, "s.yaml: m.optimizer.weight_decay_bias: should be a"),
    ],
)
def test_a_wrong_option_is_one_line(cls: type, given: dict[str, Any], line: str) -> None:
    for check in (options.resolve, options.make):
        with pytest.raises(InputError) as caught:
            check(cls, given, "s.yaml: m")
        assert str(caught.value).startswith(line)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_is_finite(value: float) -> None:
    with pytest.raises(InputError, match="must be finite"):
        options.resolve(Plain, {"mu": value}, "x")


def test_merge_goes_into_mappings() -> None:
    under = {"a": {"b": 1, "c": 2}, "d": [1], "e": 1}
    assert options.merge(under, {"a": {"c": 3}, "d": [2]}) == {"a": {"b": 1, "c": 3}, "d": [2], "e": 1}
    assert under == {"a": {"b": 1, "c": 2}, "d": [1], "e": 1}
