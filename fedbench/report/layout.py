"""Which cells stand where: what tells the cells of one row apart makes columns and blocks."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from fedbench.cells import Scalar
from fedbench.results import Arrivals, Costs, Numbers, Result, Summary, arrivals, costs, summarise
from fedbench.words import text

SEEDS = ("partition_seed", "seed")

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Member:
    """A result as a table sees it, its facts and numbers worked out once."""

    result: Result
    metric: str

    @property
    def label(self) -> str:
        """The row it is in."""
        return self.result.cell.label

    @cached_property
    def facts(self) -> Mapping[str, Scalar]:
        """The cell's facts, with a plugin in a file under the suite's name for it instead of its hash."""
        specs = self.result.cell.specs
        facts = self.result.cell.facts()
        return {name: specs.get(value, value) if isinstance(value, str) else value for name, value in facts.items()}

    @property
    def seeds(self) -> tuple[Scalar, ...]:
        """Partition seed and run seed."""
        return tuple(self.facts[name] for name in SEEDS)

    @cached_property
    def summary(self) -> Summary | None:
        """The metric's numbers, if the cell completed and measured it."""
        return self.summarised(self.metric)

    def summarised(self, metric: str) -> Summary | None:
        """Return any metric's numbers, if the cell completed and measured it."""
        found = summarise(self._numbers, metric) if self._numbers else None
        return found if found and found.round else None

    @cached_property
    def arrivals(self) -> Arrivals | None:
        """What became of newcomers, if the cell completed and has some."""
        return arrivals(self._numbers, self.metric) if self._numbers and self._numbers.newcomers else None

    @cached_property
    def costs(self) -> Costs | None:
        """What the cell took, if it completed."""
        return costs(self._numbers) if self._numbers else None

    @property
    def _numbers(self) -> Numbers | None:
        return self.result.numbers if self.result.status == "completed" else None

    @property
    def trouble(self) -> str:
        """What is said instead of a number; empty if there is one."""
        if self.summary:
            return ""
        return {"error": "failed", "completed": "not measured"}.get(self.result.status, self.result.status)


@dataclass(frozen=True)
class Layout:
    """Which facts tell the cells of one row apart (up to seeds).

    - `column`: varies fastest in the suite's order; None if there is a single column.
    - `implied`: `column` and the facts that make blocks, each with the further ones that follow from it.
    """

    column: str | None
    implied: Mapping[str, Sequence[str]]

    def heading(self, member: Member) -> str:
        """Return the heading of a member's column."""
        return self._named(self.column, member) if self.column else ""

    def title(self, member: Member) -> str:
        """Return the title of a member's block; empty if there is a single one."""
        return ", ".join(self._named(axis, member) for axis in self.implied if axis != self.column)

    def _named(self, axis: str, member: Member) -> str:
        more = ", ".join(fact(name, member.facts) for name in self.implied[axis] if name in member.facts)
        return fact(axis, member.facts) + (f" ({more})" if more else "")


def arrange(members: Sequence[Member]) -> Layout:
    """Return the layout of a comparison's members."""
    axes = _axes(members)
    column = _fastest(members, axes)
    implied: dict[str, list[str]] = {column: []} if column else {}
    for axis in axes:
        if axis != column:
            said = next((other for other in implied if _follows(axis, other, members)), None)
            if said is None:
                implied[axis] = []
            else:
                implied[said].append(axis)
    return Layout(column, implied)


def _axes(members: Sequence[Member]) -> list[str]:
    """Return the facts that tables need beside a row's label to tell cells apart.

    These are all of the data and the partition that vary, as no row can have its own; and others only as far as two
    cells with the same label would else stand in the same place, since rounds, say, may well be a row's own.
    """
    varying = [name for name in names(members) if name not in ("method", *SEEDS) and len(values(name, members)) > 1]
    options = {name for member in members for name in member.result.cell.recipe["partition"]["options"]}
    axes = [n for n in varying if n in ("dataset", "partition", *options) or n.startswith("dataset.")]
    for name in varying:
        places = grouped(members, lambda one: (one.label, one.seeds, *(one.facts.get(axis) for axis in axes)))
        if name not in axes and any(len(values(name, place)) > 1 for place in places.values()):
            axes.append(name)
    return axes


def _fastest(members: Sequence[Member], axes: Sequence[str]) -> str | None:
    """Return the axis that changes most often along the suite's order; of several, the last."""
    changes = Counter(dict.fromkeys(reversed(axes), 0))
    for row in grouped(members, lambda one: (one.label, one.seeds)).values():
        for before, after in itertools.pairwise(row):
            changes.update(axis for axis in axes if before.facts.get(axis) != after.facts.get(axis))
    return changes.most_common(1)[0][0] if changes else None


def _follows(axis: str, other: str, members: Sequence[Member]) -> bool:
    """Return whether the value of `other` says already what that of `axis` is."""
    return all(len(values(axis, group)) == 1 for group in grouped(members, lambda one: one.facts.get(other)).values())


def names(members: Iterable[Member]) -> list[str]:
    """Return the names of the members' facts, in order."""
    return list(dict.fromkeys(name for member in members for name in member.facts))


def values(name: str, members: Iterable[Member]) -> list[str]:
    """Return the different values of a fact as text, in order."""
    return list(dict.fromkeys(text(member.facts.get(name)) for member in members))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by their key, both in order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def fact(name: str, facts: Mapping[str, Scalar]) -> str:
    """Return "name=value"."""
    return f"{name}={text(facts[name])}" if name in facts else f"no {name}"
