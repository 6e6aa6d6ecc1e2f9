"""Which figures a report has, as data: pure functions of the results."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbench.asked import figure_axis
from fedbench.cells import Scalar
from fedbench.config import Axes, Suite
from fedbench.metrics import higher_is_better, is_percentage
from fedbench.report import embeddings
from fedbench.report.formatted import named
from fedbench.report.layout import SEEDS, Layout, Member, arrange, fact, grouped, names, values
from fedbench.report.plots import CONTROL_LOOK, Figure, Heat, Level, Line, Lines, Ranges, Ranks, Strip, compact
from fedbench.report.standing import over_data_sets
from fedbench.report.tuning import Choice, choices
from fedbench.results import Numbers, Results
from fedbench.stats import Ranking
from fedbench.words import text

_WORST = 12  # clients shown among the worst
_APART = 20.0  # how far budgets of methods must be apart for a logarithmic axis
_FAR = 50.0  # how far values of a setting must be apart for the same


def figures(results: Results, suite: Suite) -> tuple[Figure, ...]:
    """Return the suite's own figures, then those of each setting, each of which has a name of its own."""
    members = [Member(result, suite.metric) for result in results.cells]
    layout = arrange(members)
    looks = _looks(members)
    found = [*_embeddings(members, layout)]
    found += list(_asked(suite.figure, members, looks)) if suite.figure else []
    for title, group in grouped(members, lambda member: _setting(layout, member)).items():
        setting = _Setting(title, group, looks, suite, results.cards)
        found += setting.figures()
    found += [
        _tuning(place, group, looks)
        for place, group in grouped(choices(members, layout, results.studies), lambda choice: choice.place).items()
    ]
    ranking = over_data_sets(members, layout, higher_is_better(suite.metric))
    return (*found, *([_ranks(ranking)] if ranking else []))


def _setting(layout: Layout, member: Member) -> str:
    return ", ".join(part for part in (layout.title(member), layout.heading(member)) if part)


def _looks(members: Sequence[Member]) -> dict[str, int]:
    """Return a number for each row, which it keeps in all figures."""
    rows = grouped(members, lambda member: member.label)
    others = [label for label, row in rows.items() if not row[0].result.cell.control]
    control = [label for label in rows if label not in others]
    return {label: number for number, label in enumerate(others + control[1:])} | dict.fromkeys(
        control[:1], CONTROL_LOOK
    )


# --- words and numbers


def _scaled(values: Any, metric: str) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = np.asarray(values, np.float64) * (100 if is_percentage(metric) else 1)
    return scaled


def _written(value: float, metric: str) -> str:
    return f"{100 * value:.1f} %" if is_percentage(metric) else f"{value:.4f}"


def _ranked(numbers: Mapping[str, float], metric: str) -> list[tuple[str, float]]:
    """Return labels and numbers, the best first."""
    sign = -1 if higher_is_better(metric) else 1
    return sorted(numbers.items(), key=lambda item: sign * item[1])


def _all(numbers: Mapping[str, float], metric: str) -> str:
    return ", ".join(f"{label} {_written(value, metric)}" for label, value in _ranked(numbers, metric))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _embeddings(members: Sequence[Member], layout: Layout) -> Iterator[Figure]:
    """Yield the embeddings of each row's first pair that kept some, in each setting."""
    for title, group in grouped(members, lambda member: _setting(layout, member)).items():
        for number, (label, row) in enumerate(grouped(group, lambda member: member.label).items()):
            pairs = (member for member in row if member.result.numbers and "embeddings" in member.result.numbers.kept)
            if (member := next(pairs, None)) is None:
                continue
            found = _numbers(member)
            plot = embeddings.scatter(found.kept)
            how = {
                kind: f"{float(np.nanmean(found.last[f'test/silhouette/{kind}'])):.2f}" for kind in ("class", "client")
            }
            said = f"Mean silhouette by class {how['class']}, by client {how['client']}."
            yield Figure(
                "-".join(part for part in (_slug(title), "embeddings", str(number), _slug(label)) if part),
                title,
                f"Embeddings under {label}",
                "Each point is a test sample of some client, embedded by that client's own model and placed by t-SNE, "
                f"which keeps neighbours together and means nothing else by distances; colours are classes"
                f"{', large points what the server has for a class, such as its prototype' * bool(plot.large)}. One "
                f"cluster to a class says that clients agree on it. {said}",
                f"Test samples of all clients under {label} in the plane. {said}",
                plot,
            )


def _ranks(ranking: Ranking) -> Figure:
    said = ", ".join(f"{label} {rank:.2f}" for label, rank in zip(ranking.labels, ranking.ranks, strict=True))
    apart = f"{ranking.critical_difference:.2f}"
    return Figure(
        "ranks",
        "Over all data sets",
        "Mean ranks",
        f"Critical-difference diagram: the mean rank of each row over {ranking.data_sets} data sets, the best on top. "
        "Rows that a thick line beneath joins are not distinguishable by Nemenyi's test: their mean ranks differ by "
        f"less than {apart}.",
        f"Mean ranks over {ranking.data_sets} data sets: {said}; critical difference {apart}.",
        Ranks(tuple(zip(ranking.labels, ranking.ranks, strict=True)), ranking.groups),
    )


def _tuning(place: str, found: Sequence[Choice], looks: Mapping[str, int]) -> Figure:
    metric = found[0].study.objective
    lines = []
    for choice in found:
        steps = dict(choice.so_far)
        after = range(min(steps), len(choice.study.trials)) if steps else range(0)
        best = [max(number for number in steps if number <= trial) for trial in after]
        y = _scaled([steps[number] for number in best], metric)
        lines.append(Line(choice.label, looks[choice.label], _floats(after), _floats(y)))
    said = _all({choice.label: choice.so_far[-1][1] for choice in found if choice.so_far}, metric)
    return Figure(
        "-".join(part for part in (_slug(place), "tuning") if part),
        "Tuning",
        f"Best {metric} so far" + (f" ({place})" if place else ""),
        f"The best {metric}, mean over clients in the last round, of the trials up to each number. A curve that still "
        f"rises at the end says that more trials may find better values. In the end: {said}.",
        f"Best {metric} by number of trials. In the end: {said}.",
        Lines("trial", named(metric), tuple(lines), dots=True),
    )


# --- the figures of one setting


@dataclass(frozen=True)
class _Setting:
    """All rows in one column of one block."""

    title: str
    members: Sequence[Member]
    looks: Mapping[str, int]
    suite: Suite
    cards: Mapping[str, Mapping[str, Any]]

    @property
    def metric(self) -> str:
        """The suite's metric."""
        return self.suite.metric

    def figures(self) -> Iterator[Figure]:
        """Yield those for which there are numbers."""
        if self.curves:
            yield from self._curves()
            yield self._strip()
            yield self._worst()
            if confusion := self._confusion():
                yield confusion
            yield self._traffic()
        for key in dict.fromkeys(member.result.cell.partition_key for member in self.members):
            if key in self.cards:
                yield self._partition(key)

    def _figure(self, kind: str, title: str, caption: str, alt: str, plot: Any) -> Figure:
        where = f" ({self.title})" if self.title else ""
        name = "-".join(part for part in (_slug(self.title), kind) if part)
        return Figure(name, self.title, title, caption, f"{title}{where}. {alt}", plot)

    @cached_property
    def rows(self) -> dict[str, list[Member]]:
        """Rows with the pairs that completed; for a row without any, those that diverged, as far as they came."""
        rows = {}
        for label, row in grouped(self.members, lambda member: member.label).items():
            measured = [m for m in row if m.result.numbers and self.metric in m.result.numbers.last]
            rows[label] = [m for m in measured if m.result.status == "completed"] or measured
        return {label: row for label, row in rows.items() if row}

    @cached_property
    def completed(self) -> dict[str, list[Member]]:
        """Rows with the pairs that completed."""
        rows = {label: [m for m in row if m.result.status == "completed"] for label, row in self.rows.items()}
        return {label: row for label, row in rows.items() if row}

    @cached_property
    def curves(self) -> dict[str, "_Curve"]:
        """Each row's metric in its measured rounds."""
        return {label: _curve(row, self.metric) for label, row in self.rows.items()}

    @cached_property
    def ends(self) -> dict[str, float]:
        """Each row's metric at the end, of the rows that completed."""
        return {label: float(self.curves[label].mean[-1]) for label in self.completed}

    def _name(self, label: str) -> str:
        return label if label in self.completed else f"{label} (diverged)"

    def _band(self) -> str:
        pairs = max(len(row) for row in self.rows.values())
        if pairs == 1:
            return (
                "Lines are means over clients; there is a single pair of partition and run seed, so there is no band."
            )
        return (
            f"Lines are means over clients and over pairs of partition and run seed; bands go from the lowest to the "
            f"highest of {pairs} pairs."
        )

    def _ending(self) -> str:
        """Return a sentence about the ends of curves."""
        if not self.ends:
            return "No row came to its end."
        (best, value), *others = _ranked(self.ends, self.metric)
        said = f"At the end {best} is {'highest' if higher_is_better(self.metric) else 'lowest'}"
        said += f" ({_written(value, self.metric)})"
        return said + (f", {others[-1][0]} last ({_written(others[-1][1], self.metric)})." if others else ".")

    def _curves(self) -> Iterator[Figure]:
        alt = f"Lines for {len(self.curves)} rows. At the end: {_all(self.ends, self.metric)}."
        lines = [self._line(label, curve.rounds, curve) for label, curve in self.curves.items()]
        yield self._figure(
            "rounds",
            f"{self.metric} against rounds",
            f"How fast each row learns, and whether it still rises when it is measured for the table. "
            f"{self._ending()} {self._band()}",
            alt,
            Lines("round", named(self.metric), tuple(lines)),
        )
        sending = {label: curve for label, curve in self.curves.items() if curve.sent[-1] > 0}
        silent = {label: curve for label, curve in self.curves.items() if label not in sending}
        if sending:
            levels = [
                Level(
                    f"{self._name(label)} (sends nothing)",
                    self.looks[label],
                    float(_scaled(curve.mean[-1], self.metric)),
                )
                for label, curve in silent.items()
            ]
            yield self._figure(
                "scalars",
                f"{self.metric} against scalars sent",
                "What a row has reached by the time its clients have uploaded so many scalars, all together, on a "
                f"logarithmic axis: further left and higher up is better. {self._cheapest(sending)} {self._band()}",
                f"{alt} Uploaded by then: {_ends({label: curve.sent for label, curve in sending.items()})}.",
                Lines(
                    "scalars uploaded by all clients so far",
                    named(self.metric),
                    tuple(self._line(label, curve.sent, curve) for label, curve in sending.items()),
                    tuple(levels),
                    log=True,
                ),
            )
        ends = [float(curve.steps[-1]) for curve in self.curves.values()]
        log = min(ends) > 0 and max(ends) > _APART * min(ends)
        lines = [self._line(label, curve.steps, curve) for label, curve in self.curves.items()]
        yield self._figure(
            "steps",
            f"{self.metric} against client-steps",
            "The same against work: optimiser steps of all clients so far, so that methods which train longer in a "
            f"round gain nothing by it. {self._band()}",
            f"{alt} Steps by then: {_ends({label: curve.steps for label, curve in self.curves.items()})}.",
            Lines("client-steps so far", named(self.metric), tuple(lines), log=log),
        )

    def _line(self, label: str, x: NDArray[np.float64], curve: "_Curve") -> Line:
        there = (x > 0) | (x is curve.rounds) | (x is curve.steps)
        band = (curve.low, curve.high) if curve.pairs > 1 else (np.empty(0), np.empty(0))
        low, high = (_floats(_scaled(side, self.metric)[there] if len(side) else side) for side in band)
        y = _scaled(curve.mean, self.metric)
        return Line(self._name(label), self.looks[label], _floats(x[there]), _floats(y[there]), low, high)

    def _cheapest(self, sending: Mapping[str, "_Curve"]) -> str:
        sent = {label: float(curve.sent[-1]) for label, curve in sending.items()}
        least, most = min(sent, key=lambda label: sent[label]), max(sent, key=lambda label: sent[label])
        if sent[most] < 1.5 * sent[least]:
            return "All send about the same."
        return f"In all, {least} sends {compact(sent[most] / sent[least])} times less than {most}."

    def _clients(self, row: Sequence[Member]) -> list[float]:
        """Return every client's number of every pair, those without one left out."""
        return [float(value) for member in row for value in _last(member, self.metric) if not math.isnan(value)]

    def _strip(self) -> Figure:
        rows = {label: self._clients(row) for label, row in self.rows.items()}
        spans = {label: max(numbers) - min(numbers) for label, numbers in rows.items()}
        widest = max(spans, key=lambda label: spans[label])
        said = "; ".join(
            f"{label}: mean {_written(float(np.mean(numbers)), self.metric)}, from "
            f"{_written(min(numbers), self.metric)} to {_written(max(numbers), self.metric)}"
            for label, numbers in rows.items()
        )
        shown = tuple((self._name(label), _floats(_scaled(numbers, self.metric))) for label, numbers in rows.items())
        return self._figure(
            "clients",
            f"{self.metric} of every client",
            "Each point is a client in one pair of seeds, in the last evaluated round; the tick is the mean, the grey "
            f"bar the middle half of clients. A long left tail is clients whom the method leaves behind. Clients are "
            f"furthest apart under {widest}.",
            said + ".",
            Strip(named(self.metric), shown),
        )

    @cached_property
    def first(self) -> dict[str, list[Member]]:
        """Rows with the pairs that have the first partition."""
        key = self.rows[next(iter(self.rows))][0].result.cell.partition_key
        rows = {label: [m for m in row if m.result.cell.partition_key == key] for label, row in self.rows.items()}
        return {label: row for label, row in rows.items() if row}

    @cached_property
    def clients(self) -> NDArray[np.float64]:
        """Every row's metric of every client of the first partition, on average over run seeds (rows, clients)."""
        return np.stack([np.mean([_last(m, self.metric) for m in row], axis=0) for row in self.first.values()])

    @cached_property
    def worst(self) -> NDArray[np.int64]:
        """Those clients that have some, the worst on average over rows first."""
        there = np.flatnonzero(~np.isnan(self.clients).all(axis=0))
        means = np.nanmean(self.clients[:, there], axis=0)
        return there[np.argsort(means if higher_is_better(self.metric) else -means, kind="stable")]

    def _worst(self) -> Figure:
        order = self.worst[:_WORST]
        shown = _scaled(self.clients[:, order], self.metric)
        worst = ", ".join(str(client) for client in order[:3])
        return self._figure(
            "worst",
            "Worst clients",
            f"The {len(order)} clients with the worst {self.metric} on average over all rows, from left to right. A "
            "column that is dark throughout is a client that is hard for everybody; one dark place is a client whom "
            f"that row fails.",
            f"The worst clients are {worst}.",
            Heat(
                "client",
                "",
                tuple(str(client) for client in order),
                tuple(self._name(label) for label in self.first),
                tuple(_floats(row) for row in shown),
                named(self.metric),
                digits=0 if is_percentage(self.metric) else 2,
            ),
        )

    def _confusion(self) -> Figure | None:
        """Return what each row takes the samples of one client for, if rows have kept it."""
        asked = self.suite.confusion_of
        client = int(self.worst[0]) if asked == "worst" else asked
        counts = {label: table for label, row in self.first.items() if (table := _confused(row, client)) is not None}
        total = np.sum(list(counts.values()), axis=0)
        if not np.any(total):  # also of a client without test samples under this partition
            return None
        held, given = np.flatnonzero(total.any(axis=1)), np.flatnonzero(total.any(axis=0))
        right = {label: table.trace() / max(1, table.sum()) for label, table in counts.items()}
        return self._figure(
            "confusion",
            f"Confusion of client {client}",
            f"What each row takes the test samples of client {client} for{' (the worst)' * (asked == 'worst')}, by the "
            "models of the last evaluated round: a line for each class that the client has, adding up to 100 %. "
            "Other classes it knows from others alone.",
            "Right: " + "; ".join(f"{label} {100 * share:.0f} %" for label, share in right.items()) + ".",
            Heat(
                "taken for class",
                "",
                tuple(str(answer) if answer < len(total) else "none" for answer in given),
                tuple(f"{self._name(label)}: {true}" for label in counts for true in held),
                tuple(
                    _floats(np.where(table[true, given], 100 * table[true, given] / max(1, table[true].sum()), np.nan))
                    for table in counts.values()
                    for true in held
                ),
                "of the class (%)",
                start=0.0,
            ),
        )

    def _traffic(self) -> Figure:
        found = {
            label: tuple(
                float(np.mean([_per_round(_numbers(member), f"{way}/scalars") for member in row]))
                for way in ("up", "down")
            )
            for label, row in self.rows.items()
        }
        said = "; ".join(f"{label}: {compact(up)} up, {compact(down)} down" for label, (up, down) in found.items())
        return self._figure(
            "traffic",
            "Communication",
            "Scalars that pass the wire in a round, all clients together, counted where they pass and on a logarithmic "
            "axis: uploads (upward triangles) and downloads (downward ones).",
            said + ".",
            Ranges(
                "scalars per round",
                ("up: clients to server", "down: server to clients"),
                tuple((self._name(label), up, down) for label, (up, down) in found.items()),
            ),
        )

    def _partition(self, key: str) -> Figure:
        sharing = [member for member in self.members if member.result.cell.partition_key == key]
        seed = sharing[0].facts[SEEDS[0]]
        heat, said = partition_heat(self.cards[key])
        return self._figure(
            f"partition-{seed}",
            f"Partition, seed {seed}",
            "Training samples of every client (rows) in every class (columns); blank is none. Rows with few and bright "
            f"places are clients that know little but that well; a column with one place is a class that nobody else "
            f"can teach. {said}",
            said,
            heat,
        )


def partition_heat(card: Mapping[str, Any]) -> tuple[Heat, str]:
    """Return the training samples of every client in every class, and what there is to see in words."""
    columns = card["per_client"]
    classes = sorted({name for held in columns["classes"] for name in held})
    table = np.full((len(columns["classes"]), len(classes)), np.nan)
    for client, (held, counts) in enumerate(zip(columns["classes"], columns["samples"], strict=True)):
        for name, count in zip(held, counts, strict=True):
            table[client, classes.index(name)] = count
    totals = card["totals"]
    held = [len(held) for held in columns["classes"]]
    alone = int((np.sum(~np.isnan(table), axis=0) == 1).sum())
    said = (
        f"{len(held)} clients hold {min(held)} to {max(held)} of {len(classes)} classes; "
        f"{alone} {'class is' if alone == 1 else 'classes are'} with one client alone; labels have "
        f"{totals['entropy_bits']:.2f} bits of entropy within a client on average."
    )
    rows = tuple(str(client) for client in range(len(held)))
    names = tuple(str(name) for name in classes)
    return Heat("class", "client", names, rows, tuple(map(_floats, table)), "training samples", start=0.0), said


def _numbers(member: Member) -> Numbers:
    """Return the numbers of a member that has some."""
    if member.result.numbers is None:
        raise ValueError(f"cell {member.result.cell.key} has no numbers")
    return member.result.numbers


def _last(member: Member, metric: str) -> NDArray[np.float64]:
    return _numbers(member).last[metric]


def _confused(row: Sequence[Member], client: int) -> NDArray[np.int64] | None:
    """Return a client's test samples by class (rows) and answer (columns, none last), of all pairs that kept them."""
    tables = [numbers.kept["confusion"] for m in row if (numbers := m.result.numbers) and "confusion" in numbers.kept]
    return np.sum([table[client] for table in tables], axis=0, dtype=np.int64) if tables else None


def _per_round(numbers: Numbers, name: str) -> float:
    return float(numbers.totals[name].mean()) if name in numbers.totals and numbers.rounds else 0.0


# --- curves


@dataclass(frozen=True)
class _Curve:
    """A row's metric in the rounds that all of its pairs have measured: mean, lowest and highest of the pairs.

    `rounds`, `sent` (scalars) and `steps` are what it had come to by then, on average over the pairs.
    """

    pairs: int
    rounds: NDArray[np.float64]
    sent: NDArray[np.float64]
    steps: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def _curve(row: Sequence[Member], metric: str) -> _Curve:
    found = [_numbers(member) for member in row]
    length = min(numbers.rounds for numbers in found)
    curves = np.array([[numbers.initial.get(metric, math.nan), *numbers.curves[metric][:length]] for numbers in found])
    there: NDArray[np.bool_] = ~np.isnan(curves).any(axis=0)
    shown = curves[:, there]

    def by_then(name: str) -> NDArray[np.float64]:
        spent = [np.cumsum([0.0, *numbers.totals.get(name, np.zeros(length))[:length]]) for numbers in found]
        mean: NDArray[np.float64] = np.mean(spent, axis=0)
        return mean[there]

    return _Curve(
        pairs=len(row),
        rounds=np.arange(length + 1, dtype=np.float64)[there],
        sent=by_then("up/scalars"),
        steps=by_then("work/steps"),
        mean=shown.mean(axis=0),
        low=shown.min(axis=0),
        high=shown.max(axis=0),
    )


def _ends(columns: Mapping[str, NDArray[np.float64]]) -> str:
    return ", ".join(f"{label} {compact(float(column[-1]))}" for label, column in columns.items())


# --- the figures that a suite asks for


def _asked(axes: Axes, members: Sequence[Member], looks: Mapping[str, int]) -> Iterator[Figure]:
    """Yield a figure of each metric against a fact, as far as there are cells with both."""
    axis = figure_axis(axes.x, names(members))
    for metric in axes.y:
        measured = [member for member in members if member.summarised(metric)]
        if axis and any(axis in member.facts for member in measured):
            yield _Sweep(axis, metric, measured, looks).figure()


@dataclass(frozen=True)
class _Sweep:
    """A metric against a fact `x`: a line for each row that has it, a level for each of the others."""

    x: str
    metric: str
    members: Sequence[Member]
    looks: Mapping[str, int]

    @cached_property
    def series(self) -> dict[str, list[Member]]:
        """What differs in nothing but x and seeds, by what it is called."""
        varying = [name for name in names(self.members) if len(values(name, self.members)) > 1]
        apart = [name for name in varying if name not in ("method", self.x, *SEEDS)]
        series: dict[str, list[Member]] = {}
        for label, row in grouped(self.members, lambda member: _base(member.label)).items():
            own = [name for name in apart if len(values(name, row)) > 1]
            for told, group in grouped(row, lambda m: ", ".join(fact(name, m.facts) for name in own)).items():  # noqa: B023
                series[f"{label}, {told}" if told else label] = group
        return series

    @cached_property
    def ticks(self) -> tuple[str, ...]:
        """The values of x as text, if they are not all numbers."""
        found = [member.facts[self.x] for member in self.members if self.x in member.facts]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in found):
            return ()
        return tuple(dict.fromkeys(map(text, found)))

    def figure(self) -> Figure:
        """Return the figure."""
        short = self.x.removeprefix("method.")
        lines = {label: self._line(label, row) for label, row in self.series.items() if self.x in row[0].facts}
        levels = tuple(
            Level(label, self._look(label, row), float(np.mean(self._values(row))))
            for label, row in self.series.items()
            if label not in lines
        )
        pairs = len({member.seeds for member in self.members})
        said = "; ".join(self._best(line) for line in lines.values())
        band = f"bands go from the lowest to the highest of {pairs} pairs" if pairs > 1 else "a single pair"
        return Figure(
            f"figure-{_slug(self.metric)}",
            "",
            f"{self.metric} against {short}",
            f"In the last evaluated round, mean over clients; {band} of partition and run seed. {said}."
            + (" Level lines are rows that do not have this setting." if levels else ""),
            f"{self.metric} against {short}. {said}.",
            Lines(short, named(self.metric), tuple(lines.values()), levels, self._far_apart(lines), True, self.ticks),
        )

    def _far_apart(self, lines: Mapping[str, Line]) -> bool:
        """Return whether x asks for a logarithmic axis."""
        found = [x for line in lines.values() for x in line.x]
        return not self.ticks and min(found) > 0 and max(found) > _FAR * min(found)

    def _look(self, label: str, row: Sequence[Member]) -> int:
        """Return the row's look, or one that nobody has for a further line of it."""
        look = self.looks[row[0].label]
        twins = [other for other, found in self.series.items() if self.looks[found[0].label] == look]
        return look if label == twins[0] else len(self.looks) * twins.index(label) + abs(look)

    def _values(self, row: Sequence[Member]) -> NDArray[np.float64]:
        return _scaled([s.mean for member in row if (s := member.summarised(self.metric))], self.metric)

    def _line(self, label: str, row: Sequence[Member]) -> Line:
        places = sorted((self._position(x), self._values(group)) for x, group in grouped(row, self._at).items())
        several = max(len(found) for _, found in places) > 1
        return Line(
            label,
            self._look(label, row),
            tuple(x for x, _ in places),
            tuple(float(found.mean()) for _, found in places),
            tuple(float(found.min()) for _, found in places) if several else (),
            tuple(float(found.max()) for _, found in places) if several else (),
        )

    def _at(self, member: Member) -> Scalar:
        return member.facts[self.x]

    def _position(self, value: Scalar) -> float:
        return float(self.ticks.index(text(value)) if self.ticks else value or 0)

    def _best(self, line: Line) -> str:
        extreme, word = (max, "highest") if higher_is_better(self.metric) else (min, "lowest")
        y = extreme(line.y)
        x = line.x[line.y.index(y)]
        where = self.ticks[int(x)] if self.ticks else f"{x:g}"
        return f"{line.label} is {word} at {where} ({_written(y / float(_scaled(1, self.metric)), self.metric)})"


def _base(label: str) -> str:
    """Return a row's label without what its grid made of it."""
    return re.sub(r" \([^()]*=[^()]*\)$", "", label)
