"""Published numbers to show beside a suite's own, from the CSV file that the suite names.

    table,dataset,stdev,n,method,accuracy_mean,accuracy_std,rounds,params_thousands
    1,mnist,2,3,fedproto,97.13,0.30,100,4

- Columns before the first that ends in `_mean` are settings: facts of cells (see `fedbench.cells.Cell.facts`; `method`
  is the row's label).  A line belongs to the cells with all of its settings.
- `<name>_mean`, `<name>_std`: over clients, for metrics with <name> among their parts; accuracies in percent.
- `rounds`: trained for; `params_thousands`: scalars uploaded per round by all clients together, in thousands.
- `table` and all further columns are not read; an empty field is an unknown number.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench.cells import Cell, Scalar
from fedbench.config import SUITES, Suite
from fedbench.errors import InputError, unknown
from fedbench.options import one_line


@dataclass(frozen=True)
class Reference:
    """The lines of one file: the values of their settings -> column -> number."""

    name: str
    settings: tuple[str, ...]
    lines: Mapping[tuple[str | float, ...], Mapping[str, float]]

    def find(self, facts: Mapping[str, Scalar], metric: str) -> "Published | None":
        """Return what was published for a cell with these facts, if anything."""
        line = self.lines.get(tuple(_value(facts.get(name)) for name in self.settings))
        if line is None:
            return None
        parts = metric.split("/")
        mean, std = (
            next((line[f"{part}_{kind}"] for part in parts if f"{part}_{kind}" in line), math.nan)
            for kind in ("mean", "std")
        )
        scale = 0.01 if "accuracy" in parts else 1.0
        return Published(
            mean=scale * mean,
            std=scale * std,
            rounds=line.get("rounds", math.nan),
            up_scalars=1000 * line.get("params_thousands", math.nan),
        )

    def plain(self) -> dict[str, Any]:
        """Return the same as plain JSON values, for `restore`."""
        lines = [
            [list(key), {name: None if math.isnan(value) else value for name, value in line.items()}]
            for key, line in self.lines.items()
        ]
        return {"name": self.name, "settings": list(self.settings), "lines": lines}

    @classmethod
    def restore(cls, plain: Mapping[str, Any]) -> "Reference":
        """Return what `plain` was made of."""
        lines = {
            tuple(key): {name: math.nan if value is None else value for name, value in line.items()}
            for key, line in plain["lines"]
        }
        return cls(plain["name"], tuple(plain["settings"]), lines)


@dataclass(frozen=True)
class Published:
    """One line's numbers in the units of `fedbench.results`; NaN where the file has none."""

    mean: float
    std: float
    rounds: float
    up_scalars: float


def read(suite: Suite, cells: Iterable[Cell]) -> Reference | None:
    """Return the reference that a suite names, a file beside it or one that comes with fedbench; None if it names none.

    `cells` are all of the suite's.  InputError if there is no such file, or it is not as described above.
    """
    if not suite.reference:
        return None
    places = [suite.base / suite.reference, SUITES / suite.reference]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InputError(f"{suite.file}: reference: no file {places[0]}, and none of that name comes with fedbench")
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            head, *rows = list(csv.reader(stream, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {one_line(error)}") from None
    known = {name for cell in cells for name in cell.facts()}
    settings = _settings(head, known, path)
    lines: dict[tuple[str | float, ...], Mapping[str, float]] = {}
    for number, row in enumerate(rows, 2):
        where = f"{path}: line {number}"
        if len(row) != len(head):
            raise InputError(f"{where}: {len(row)} fields under {len(head)} headings")
        fields = dict(zip(head, row, strict=True))
        key = tuple(_value(fields[name]) for name in settings)
        if key in lines:
            raise InputError(f"{where}: {', '.join(map(str, key))} comes twice")
        lines[key] = {name: _number(fields[name], f"{where}: {name}") for name in head if _is_number(name)}
    return Reference(path.name, settings, lines)


def _settings(head: Sequence[str], known: Iterable[str], path: Path) -> tuple[str, ...]:
    first = next((place for place, name in enumerate(head) if name.endswith("_mean")), None)
    if first is None:
        raise InputError(f"{path}: no column ends in _mean, such as accuracy_mean; see `fedbench.reference`")
    settings = tuple(name for name in head[:first] if name != "table")
    for name in settings:
        if name not in known:
            raise InputError(f"{path}: {unknown('fact', name, known)}")
    return settings


def _is_number(column: str) -> bool:
    return column in ("rounds", "params_thousands") or column.endswith(("_mean", "_std"))


def _value(value: Scalar) -> str | float:
    """Return a setting so that 2, 2.0 and "2" are equal."""
    try:
        return float(str(value))
    except ValueError:
        return str(value)


def _number(text: str, where: str) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        raise InputError(f"{where}: should be a number or empty, not '{text}'") from None
