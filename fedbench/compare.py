"""Two sets of results side by side, cell by cell: two suites, two machines, two versions.

Cells belong together that have the same label, the same seeds, and the same of the facts that tell the cells of that
row apart on either side.  In the other facts they may differ, and it is said in which.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedbench.cells import Scalar
from fedbench.errors import InputError, unknown
from fedbench.metrics import higher_is_better
from fedbench.report import markdown
from fedbench.report.formatted import chance, mean_and_std, named, number, signed
from fedbench.report.layout import SEEDS, Member, fact, grouped
from fedbench.report.provenance import OF_ONE_CELL
from fedbench.report.table import Table
from fedbench.results import Result, Results, numbers
from fedbench.stats import LEVEL, Against, judge, paired, power
from fedbench.store import Store
from fedbench.words import text

_NOTHING = "–"
_DEFAULT = "test/accuracy"


def stored(root: Path) -> Results:
    """Return all that the store in a folder has: finished cells, and failed ones, but no trials of tuning.

    InputError if there is no store, one of another version, or a damaged one.
    """
    if not (root / "version").is_file():
        raise InputError(f"{root}: not the folder of a suite's runs, which has a file named version")
    store = Store(root)
    records = [store.get(key) for key in store.finished()]
    found = [
        Result(one.cell, one.outcome.status, one.outcome.message, numbers(one.outcome), one.provenance)
        for one in sorted(records, key=lambda one: one.provenance["started"])
    ]
    done = {result.cell.key for result in found}
    found += [Result(one.cell, "error", one.line) for one in store.errors() if one.cell.key not in done]
    return Results(tuple(result for result in found if "trial" not in result.cell.recipe))


@dataclass(frozen=True)
class Match:
    """A cell of A and the one of B that belongs to it, or one without the other."""

    a: "_Cell | None"
    b: "_Cell | None"

    @property
    def difference(self) -> float:
        """B minus A, means over clients; NaN if one has none."""
        return self.b.mean - self.a.mean if self.a and self.b else math.nan


@dataclass(frozen=True)
class Group:
    """The cells of one row in one setting, one for each pair of partition and run seed.

    `against` is how B stands against A over the pairs that both have numbers for; None if there are not two.
    """

    label: str
    setting: str
    matches: tuple[Match, ...]
    against: Against | None = None

    @property
    def differs(self) -> dict[str, tuple[str, str]]:
        """The facts in which cells that belong together differ: name -> A's and B's value."""
        both = [(match.a.facts, match.b.facts) for match in self.matches if match.a and match.b]
        found = {}
        for name in dict.fromkeys(name for pair in both for facts in pair for name in facts):
            sides = [" / ".join(dict.fromkeys(_said(pair[side], name) for pair in both)) for side in (0, 1)]
            if sides[0] != sides[1]:
                found[name] = (sides[0], sides[1])
        return found


@dataclass(frozen=True)
class SideBySide:
    """The comparison of two sets of results by one metric."""

    names: tuple[str, str]
    metric: str
    groups: tuple[Group, ...]
    made: tuple[tuple[str, str, str], ...]

    def csv(self) -> str:
        """Return a line for every cell."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow((*_CSV_CELL, *_CSV_GROUP))
        for group in self.groups:
            differs = ", ".join(f"{name}={a} / {b}" for name, (a, b) in group.differs.items())
            for match in group.matches:
                sides = [match.a, match.b]
                seeds = next(side.seeds for side in sides if side)
                cells = [side.member.result if side else None for side in sides]
                writer.writerow(
                    (
                        *(group.label, group.setting, differs, *seeds),
                        *(result.cell.key if result else "" for result in cells),
                        *(result.status if result else "" for result in cells),
                        *(_exact(side.mean if side else math.nan) for side in sides),
                        _exact(match.difference),
                        *_csv_group(group.against),
                    )
                )
        return stream.getvalue()

    def markdown(self) -> str:
        """Return a page."""
        lists = {"How to read this": self.reading, "Notes": self.notes}
        return markdown.page(" and ".join(self.names), self.tables, lists)

    @property
    def tables(self) -> tuple[Table, ...]:
        """What is alike over pairs of seeds, cell by cell, and what differs, as text."""
        found = (self._over_pairs(), self._cell_by_cell(), self._differing())
        return tuple(table for table in found if table.rows)

    @property
    def reading(self) -> tuple[str, ...]:
        """How to read the tables."""
        reading = [
            f"A: {self.names[0]}. B: {self.names[1]}.",
            f"A and B: {self.metric}, mean over clients in the last evaluated round, with the standard deviation over "
            "clients where it is of one cell; difference: B minus A.",
        ]
        tested = [group.against for group in self.groups if group.against]
        if tested:
            reading += [
                "Over pairs of seeds: of the pairs of partition seed and run seed that both have; interval: of 95 %, "
                "by bootstrap over them; p: paired t test; Wilcoxon: exact signed-rank test; both two-sided and "
                f"corrected by Holm's method over the lines. better, worse: B, compared with A; p is at most {LEVEL}.",
            ]
        return tuple(reading)

    @property
    def notes(self) -> tuple[str, ...]:
        """How many cells there are on both sides, and what they can show."""
        matches = [match for group in self.groups for match in group.matches]
        both = [(match.a, match.b) for match in matches if match.a and match.b]
        same = [(a, b) for a, b in both if a.key == b.key]
        equal = sum(_exact(a.mean) == _exact(b.mean) for a, b in same)
        only_a, only_b = sum(not match.b for match in matches), sum(not match.a for match in matches)
        tested = sorted({(group.against.pairs, group.against.family) for group in self.groups if group.against})
        return (
            f"{len(both)} cells in both, {only_a} only in A, {only_b} only in B.",
            f"{len(same)} of them have the same key, so the same numbers are expected: {equal} have them.",
            *(power(pairs, family) for pairs, family in tested or [(1, 1)]),
        )

    def _setting(self, group: Group) -> tuple[str, ...]:
        return (group.label, group.setting) if any(one.setting for one in self.groups) else (group.label,)

    def _table(self, title: str, head: Sequence[str], rows: Iterable[tuple[str, ...]], texts: int = 0) -> Table:
        first = ("row", "setting") if any(one.setting for one in self.groups) else ("row",)
        return Table(title, (*first, *head), tuple(rows), texts=len(first) + texts)

    def _over_pairs(self) -> Table:
        head = ("pairs", f"A: {named(self.metric)}", "B", "difference", "interval", "p", "p (Wilcoxon)", "verdict")
        rows = []
        for group in self.groups:
            if group.against:
                pairs = [(m.a.mean, m.b.mean) for m in group.matches if m.a and m.b and not math.isnan(m.difference)]
                a, b = (math.fsum(side) / len(pairs) for side in zip(*pairs, strict=True))
                low, high = (signed(number(end, self.metric)) for end in group.against.interval)
                rows.append(
                    (
                        *self._setting(group),
                        str(group.against.pairs),
                        number(a, self.metric),
                        number(b, self.metric),
                        signed(number(group.against.difference, self.metric)),
                        f"{low} to {high}",
                        chance(group.against.p),
                        chance(group.against.p_wilcoxon),
                        group.against.verdict,
                    )
                )
        return self._table("Over pairs of seeds", head, rows)

    def _cell_by_cell(self) -> Table:
        head = ("seeds", f"A: {named(self.metric)}", "B", "difference")
        rows = []
        for group in self.groups:
            for match in group.matches:
                seeds = next(side.seeds for side in (match.a, match.b) if side)
                sides = [side.said if side else _NOTHING for side in (match.a, match.b)]
                difference = signed(number(match.difference, self.metric))
                rows.append((*self._setting(group), " / ".join(map(text, seeds)), *sides, difference))
        return self._table("Cell by cell", head, rows, texts=1)

    def _differing(self) -> Table:
        said = [(name, *sides, group.label) for group in self.groups for name, sides in group.differs.items()]
        rows = [
            (*what, ", ".join(dict.fromkeys(label for *_, label in lines)))
            for what, lines in grouped(said, lambda line: line[:3]).items()
        ]
        made = [(*what, "made with") for what in self.made]
        return Table("What differs", ("", "A", "B", "rows"), (*rows, *made), texts=4)


def compare(a: Results, b: Results, names: tuple[str, str], metric: str = "") -> SideBySide:
    """Return two sets of results side by side.

    InputError if no cell of one belongs to any of the other, or none has measured the metric.
    """
    metric = metric or _DEFAULT
    known = sorted({*a.metrics(), *b.metrics()})
    if known and metric not in known:
        raise unknown("metric", metric, known)
    sides = [[_Cell(Member(result, metric)) for result in one.cells] for one in (a, b)]
    groups = [group for label in _labels(sides) for group in _groups(label, sides)]
    if not any(match.a and match.b for group in groups for match in group.matches):
        rows = [", ".join(_labels([side])) for side in sides]
        raise InputError(
            f"{names[0]} and {names[1]} have no cell in common; rows of the first: {rows[0]}; of the second: {rows[1]}"
        )
    return SideBySide(names, metric, tuple(_judged(groups, metric)), tuple(_made(a, b)))


# --- which cells belong together


@dataclass(frozen=True)
class _Cell:
    """A cell with what tells it from others."""

    member: Member

    @property
    def label(self) -> str:
        return self.member.label

    @property
    def key(self) -> str:
        return self.member.result.cell.key

    @property
    def seeds(self) -> tuple[Scalar, ...]:
        return self.member.seeds

    @cached_property
    def facts(self) -> Mapping[str, Scalar]:
        """The facts, seeds and label apart, and what else the key depends on."""
        recipe = self.member.result.cell.recipe
        own = {name: value for name, value in self.member.facts.items() if name not in ("method", *SEEDS)}
        content, revision = recipe["dataset"]["content"][:16], recipe["method"]["revision"]
        return {**own, "content of the data": content, "revision": revision, "protocol": recipe["protocol"]}

    @property
    def mean(self) -> float:
        summary = self.member.summary
        return summary.mean if summary else math.nan

    @property
    def said(self) -> str:
        summary, metric = self.member.summary, self.member.metric
        return mean_and_std(summary.mean, summary.std, metric) if summary else self.member.trouble


def _labels(sides: Sequence[Sequence[_Cell]]) -> list[str]:
    return list(dict.fromkeys(cell.label for side in sides for cell in side))


def _groups(label: str, sides: Sequence[Sequence[_Cell]]) -> Iterator[Group]:
    row = [[cell for cell in side if cell.label == label] for side in sides]
    telling = _telling(row)

    def setting(cell: _Cell) -> str:
        return ", ".join(fact(name, cell.facts) for name in telling if name in cell.facts)

    # Of several cells with the same facts, as a store may hold, the last counts.
    a, b = ({(setting(cell), cell.seeds): cell for cell in side} for side in row)
    for name, places in grouped(dict.fromkeys((*a, *b)), lambda place: place[0]).items():
        yield Group(label, name, tuple(Match(a.get(place), b.get(place)) for place in places))


def _telling(row: Sequence[Sequence[_Cell]]) -> list[str]:
    """Return the facts, as few as it takes, that tell the cells of a row apart on either side."""
    telling: list[str] = []

    def places(names: Sequence[str]) -> list[int]:
        return [len({tuple(_said(cell.facts, name) for name in names) for cell in side}) for side in row]

    found = places(telling)
    for name in dict.fromkeys(name for side in row for cell in side for name in cell.facts):
        more = places([*telling, name])
        if more != found:
            telling, found = [*telling, name], more
    return telling


def _said(facts: Mapping[str, Scalar], name: str) -> str:
    return text(facts[name]) if name in facts else _NOTHING


# --- numbers


def _judged(groups: Sequence[Group], metric: str) -> Iterator[Group]:
    """Yield the groups with how B stands against A, the lines being one family."""
    differences = [
        paired([m.b.mean for m in group.matches if m.a and m.b], [m.a.mean for m in group.matches if m.a and m.b])
        for group in groups
    ]
    tested = [one for one in differences if one.pairs > 1]
    against = dict(zip(map(id, tested), judge(tested, higher_is_better(metric)), strict=True))
    for group, one in zip(groups, differences, strict=True):
        yield Group(group.label, group.setting, group.matches, against.get(id(one)))


def _made(a: Results, b: Results) -> Iterator[tuple[str, str, str]]:
    """Yield what of versions and machines is not the same."""
    sides = [[result.provenance for result in one.cells if result.provenance] for one in (a, b)]
    for word in dict.fromkeys(word for side in sides for record in side for word in record if word not in OF_ONE_CELL):
        found = [", ".join(dict.fromkeys(text(record.get(word)) for record in side)) for side in sides]
        if found[0] != found[1] and all(found):
            yield word, found[0], found[1]


_CSV_CELL = (
    *("row", "setting", "differs", *SEEDS),
    *("key_a", "key_b", "status_a", "status_b", "a", "b", "difference"),
)
_CSV_GROUP = ("pairs", "mean_difference", "low", "high", "p", "p_wilcoxon", "verdict")


def _csv_group(against: Against | None) -> tuple[str, ...]:
    if against is None:
        return ("",) * len(_CSV_GROUP)
    values = (against.difference, *against.interval, against.p, against.p_wilcoxon)
    return (str(against.pairs), *map(_exact, values), against.verdict)


def _exact(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))
