"""A suite's results as one CSV file, from which the same report can be written again, byte for byte.

    key,label,metric,round,client,value,text
    ,,suite,,,,"{""name"": ...}"
    c0ffee0123456789,fedproto,test/accuracy,100,3,0.95,        client 3 in the last evaluated round
    c0ffee0123456789,fedproto,test/accuracy,40,,0.9125,        mean over clients in round 40; in round 0: before round 1
    c0ffee0123456789,fedproto,up/scalars,1,,3550,              sum over clients in round 1

- With a client: metrics in their last evaluated round, those that the suite asks for and all under "test/".  A client
  without a value has no line.
- Without a client: means, of what the suite asks for; and the sums of traffic ("up/", "down/",
  "evaluation/") and of work ("work/"), where a round without a line has the sums of the round before.
- "newcomers/<metric>" are of a client that took no part, after so many epochs of fine-tuning (in the place of the
  round); "newcomers/down/scalars" and so on what it downloaded.
- "size/<split>" are samples of each client, "time/<name>" seconds, "rounds" counts those that came to their end.
- `text` is JSON, of the lines without a number: "suite", "reference", "partition/<key>" (its card), "source/<content>"
  (of a data set), "study/<key>" (trials of tuning), "cell": recipe, status, provenance, and "confusion" of a cell that
  kept it: the shape, and [client, class, class that it was taken for, samples] where there are some.
"""

import csv
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbench import config, studies
from fedbench.cells import Cell
from fedbench.config import Suite
from fedbench.data import About
from fedbench.errors import InputError
from fedbench.options import one_line
from fedbench.reference import Reference
from fedbench.results import Numbers, Result, Results

VERSION = 1
_HEAD = ("key", "label", "metric", "round", "client", "value", "text")
_SUMS = ("up", "down", "evaluation", "work")
_PRIVATE = ("host",)  # of the provenance: reports do not say it either
_CONFUSION = "confusion"

_Line = tuple[object, ...]


def dumps(results: Results, suite: Suite, reference: Reference | None = None) -> str:
    """Return the file's content."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_HEAD)
    writer.writerow(("", "", "version", "", "", VERSION, ""))
    writer.writerow(_about("suite", suite.model_dump(mode="json", exclude_unset=True)))
    if reference:
        writer.writerow(_about("reference", reference.plain()))
    writer.writerows(_about(f"partition/{key}", card) for key, card in results.cards.items())
    writer.writerows(_about(f"source/{content}", asdict(about)) for content, about in results.sources.items())
    writer.writerows(_about(f"study/{key}", studies.to_plain(study)) for key, study in results.studies.items())
    figure = suite.figure.y if suite.figure else []
    wanted = list(dict.fromkeys([suite.metric, *suite.further_metrics, *figure]))
    for result in results.cells:
        cell = result.cell
        provenance = {word: value for word, value in result.provenance.items() if word not in _PRIVATE}
        about = {
            "suite": cell.suite,
            "recipe": cell.recipe,
            "specs": cell.specs,
            "control": cell.control,
            "status": result.status,
            "message": result.message,
            "provenance": provenance,
        }
        writer.writerow(_about("cell", about, cell.key, cell.label))
        if result.numbers:
            for line in _numbers(result.numbers, wanted):
                writer.writerow((cell.key, cell.label, *line))
            if _CONFUSION in result.numbers.kept:
                writer.writerow(_about(_CONFUSION, _sparse(result.numbers.kept[_CONFUSION]), cell.key, cell.label))
    return stream.getvalue()


def _about(what: str, plain: object, key: str = "", label: str = "") -> _Line:
    return key, label, what, "", "", "", json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _numbers(numbers: Numbers, wanted: Sequence[str]) -> Iterator[_Line]:
    """Yield metric, round, client, value and no text."""
    yield "rounds", "", "", numbers.rounds, ""
    for name, seconds in numbers.seconds.items():
        yield f"time/{name}", "", "", _value(seconds), ""
    for split, sizes in numbers.sizes.items():
        yield from ((f"size/{split}", "", client, size, "") for client, size in enumerate(sizes))
    for name, values in numbers.last.items():
        if name in wanted or name.startswith("test/"):
            yield from ((name, numbers.at[name], client, _value(v), "") for client, v in enumerate(values) if v == v)
    for name in wanted:
        if name in numbers.curves and name not in numbers.last:
            yield name, "", "", "", ""  # known, and never measured
        means = (numbers.initial.get(name, math.nan), *numbers.curves.get(name, ()))
        yield from ((name, number, "", _value(mean), "") for number, mean in enumerate(means) if mean == mean)
    for name, sums in numbers.totals.items():
        changed = np.flatnonzero(np.diff(sums, prepend=math.nan) != 0)
        yield from ((name, i + 1, "", _value(sums[i]), "") for i in changed)
    yield from _newcomers(numbers.newcomers, wanted)


def _newcomers(table: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> Iterator[_Line]:
    for name, values in table.items():
        if name in wanted or name.startswith(("test/", "down/", "work/")):
            rounds = table["epochs"] if values.ndim == 2 else [""]
            for number, row in zip(rounds, np.atleast_2d(values), strict=True):
                there = zip(table["clients"], row, strict=True)
                yield from ((f"newcomers/{name}", number, client, _value(v), "") for client, v in there if v == v)


def _sparse(table: NDArray[np.generic]) -> dict[str, Any]:
    return {"shape": table.shape, "counts": [[*map(int, place), int(table[*place])] for place in np.argwhere(table)]}


def _dense(plain: Mapping[str, Any]) -> NDArray[np.generic]:
    table = np.zeros(plain["shape"], np.int32)
    for *place, count in plain["counts"]:
        table[*place] = count
    return table


def _value(value: float) -> str:
    """Return a number so that reading it gives the very same."""
    return repr(float(value)).removesuffix(".0")


# --- reading


@dataclass
class _Found:
    """A cell while it is read."""

    cell: Cell
    about: Mapping[str, Any]
    rounds: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    clients: dict[str, list[tuple[int, int, float]]] = field(default_factory=lambda: defaultdict(list))
    series: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    kept: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    newcomers: dict[str, dict[tuple[str, int], float]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, metric: str, number: str, client: str, value: str) -> None:
        kind, _, name = metric.partition("/")
        if metric == "rounds":
            self.rounds = int(value)
        elif kind == "time":
            self.seconds[name] = float(value)
        elif kind == "newcomers":
            self.newcomers[name][number, int(client)] = float(value)
        elif client:
            self.clients[metric].append((int(number or 0), int(client), float(value)))
        elif number:
            self.series[metric][int(number)] = float(value)
        else:
            self.series[metric] = {}

    def result(self) -> Result:
        numbers = None if self.rounds is None else self._numbers(self.rounds)
        about = self.about
        return Result(self.cell, about["status"], about["message"], numbers, about["provenance"])

    def _numbers(self, rounds: int) -> Numbers:
        sizes = {
            name.removeprefix("size/"): np.array([value for _, _, value in lines], np.int64)
            for name, lines in self.clients.items()
            if name.startswith("size/")
        }
        measured = {name: lines for name, lines in self.clients.items() if not name.startswith("size/")}
        sums = {name: series for name, series in self.series.items() if name.partition("/")[0] in _SUMS}
        means = {name: series for name, series in self.series.items() if name not in sums}
        return Numbers(
            rounds=rounds,
            last={
                name: _placed(((c, v) for _, c, v in lines), len(sizes["train"])) for name, lines in measured.items()
            },
            at={name: lines[0][0] for name, lines in measured.items()},
            curves={name: _placed(((i - 1, v) for i, v in s.items() if i), rounds) for name, s in means.items()},
            initial={name: series[0] for name, series in means.items() if 0 in series},
            totals={name: _filled(series, rounds) for name, series in sums.items()},
            sizes=sizes,
            seconds=self.seconds,
            kept=self.kept,
            newcomers=self._newcomers() if self.newcomers else {},
        )

    def _newcomers(self) -> dict[str, NDArray[Any]]:
        clients = sorted(client for _, client in self.newcomers["down/scalars"])
        epochs = sorted({int(number) for number, _ in self.newcomers["work/steps"]})
        table: dict[str, NDArray[Any]] = {"clients": np.array(clients), "epochs": np.array(epochs)}
        for name, values in self.newcomers.items():
            if name.startswith("down/"):
                table[name] = np.array([int(values["", client]) for client in clients])
            else:
                table[name] = np.array([[values.get((str(n), c), math.nan) for c in clients] for n in epochs])
        return table


def _placed(values: Iterable[tuple[int, float]], length: int) -> NDArray[np.float64]:
    array = np.full(length, math.nan)
    for place, value in values:
        array[place] = value
    return array


def _filled(series: Mapping[int, float], rounds: int) -> NDArray[np.float64]:
    """Return values by round, those not given being as before."""
    given = np.array(sorted(series))
    values = np.array([series[i] for i in given])
    return values[np.searchsorted(given, np.arange(1, rounds + 1), side="right") - 1]


def load(path: Path) -> tuple[Results, Suite, Reference | None]:
    """Return the results in a file, the suite that they are of, and the published numbers beside them.

    InputError names the file, and the line that is not as `dumps` writes it.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            lines = list(csv.reader(stream, strict=True))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or one_line(error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {one_line(error)}") from None
    if not lines or tuple(lines[0]) != _HEAD or len(lines) < 2 or lines[1][2:3] != ["version"]:
        raise InputError(f"{path}: not a results.csv, which `fedbench report SUITE --format csv` writes")
    if lines[1][5] != str(VERSION):
        raise InputError(
            f"{path}: version {lines[1][5]} of a results.csv, but this fedbench reads version {VERSION}; use the "
            "fedbench that wrote it (the provenance in its report says which)"
        )
    return _read(path, lines)


def _read(path: Path, lines: Sequence[Sequence[str]]) -> tuple[Results, Suite, Reference | None]:
    suite: Suite | None = None
    reference: Reference | None = None
    found: dict[tuple[str, str], _Found] = {}
    cards, sources, tuned = {}, {}, {}
    for place, line in enumerate(lines[2:], 3):
        try:
            key, label, metric, number, client, value, text = line
            kind, _, name = metric.partition("/")
            if metric == "cell":
                about = json.loads(text)
                cell = Cell(about["suite"], label, about["recipe"], about["specs"], about.get("control", False))
                cell.facts()
                if cell.key != key:
                    raise ValueError(f"recipe of cell {cell.key}")
                found[key, label] = _Found(cell, about)
            elif metric == _CONFUSION:
                found[key, label].kept[metric] = _dense(json.loads(text))
            elif key:
                found[key, label].take(metric, number, client, value)
            elif metric == "suite":
                suite = config.restore(json.loads(text), str(path))
            elif metric == "reference":
                reference = Reference.restore(json.loads(text))
            elif kind == "partition":
                cards[name] = json.loads(text)
            elif kind == "source":
                sources[name] = About(**json.loads(text))
            elif kind == "study":
                tuned[name] = studies.from_plain(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(f"{path}: row {place} is not as fedbench wrote it: {one_line(error)}") from None
    if suite is None or not found:
        raise InputError(f"{path}: has no {'suite' if suite is None else 'cells'}; it is not whole")
    try:
        results = Results(tuple(one.result() for one in found.values()), cards, sources, tuned)
    except (KeyError, IndexError) as error:
        raise InputError(f"{path}: is not whole: {one_line(error)}") from None
    return results, suite, reference
