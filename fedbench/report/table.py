"""The comparison as data: rows, columns and formatted numbers, made once and written by every format.

All text here is plain: whoever renders it escapes it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fedbench.config import Newcomers, Suite
from fedbench.metrics import higher_is_better
from fedbench.reference import Published, Reference
from fedbench.report import tuning
from fedbench.report.formatted import chance, mean_and_std, named, number, plain, signed
from fedbench.report.layout import SEEDS, Layout, Member, arrange, fact, grouped
from fedbench.report.provenance import PARTITION_HEAD, partition_rows, provenance, row_settings
from fedbench.report.standing import Standing, over_data_sets, standings
from fedbench.results import Arrivals, Results, newcomers_metric
from fedbench.stats import LEVEL, Against, Ranking, power
from fedbench.words import counted

FLAG = "†"
BEST = "●"
NEAR_BEST = "○"
_NOTHING = "–"


@dataclass(frozen=True)
class Entry:
    """One row in one column, over its pairs of partition and run seed; NaN where there is no number.

    - `mean`, `std`, `pooled`, `worst`, `worst_decile`, `gini`, `jain`: of `Summary`, averaged over the pairs that have
      one.
    - `spread`: sample deviation (ddof 1) of the means over clients from pair to pair; NaN for a single one.
    - `rounds`, `up_scalars`, `steps`, `seconds`: of `Costs`, averaged over the pairs that completed.
    - `done`, `planned`: pairs.  `trouble` says what became of the others.
    - `further`: mean and deviation over clients of each further metric, averaged over the pairs that have one.
    - `arrivals`: what became of newcomers, averaged over the pairs that completed.
    - `published`: what the suite's reference says about it.
    - `beats_control`: whether it is better than the control, on average over the pairs that both have; None if it is
      the control, or there is no such pair.
    - `standing`: what tests say of it against the control and against the best.
    """

    mean: float
    std: float
    pooled: float
    worst: float
    worst_decile: float
    gini: float
    jain: float
    spread: float
    rounds: float
    up_scalars: float
    steps: float
    seconds: float
    done: int
    planned: int
    trouble: str
    further: tuple[tuple[float, float], ...]
    arrivals: Arrivals
    published: Published | None
    beats_control: bool | None
    standing: Standing


@dataclass(frozen=True)
class Row:
    """A row's label and its entries, one per column; None where the suite has no such cell."""

    label: str
    entries: tuple[Entry | None, ...]


@dataclass(frozen=True)
class Block:
    """The rows of one setting; `title` says which, and is empty if there is only one."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """Formatted cells under their headings; the first `texts` columns are text, the others numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1


@dataclass(frozen=True)
class Comparison:
    """All that a report says.

    - `blocks`: the numbers; `tables`: the same, formatted.
    - `reading`: how to read the tables; `notes`: what to know about these ones; a sentence each.
    - `ranking`: how the rows rank over the data sets, if there are two and three rows are complete.
    - `rows`: what each row is; `partitions`: what the clients hold.
    - `provenance`: pairs of a word and a text.
    - `choices`: the studies of rows whose values were chosen by tuning; `tuning`: the same, as tables.
    """

    title: str
    description: str
    metric: str
    blocks: tuple[Block, ...]
    tables: tuple[Table, ...]
    reading: tuple[str, ...]
    notes: tuple[str, ...]
    ranking: Ranking | None
    rows: Table
    partitions: Table
    provenance: tuple[tuple[str, str], ...]
    choices: tuple[tuning.Choice, ...] = ()
    tuning: tuple[Table, ...] = ()


def compare(results: Results, suite: Suite, reference: Reference | None = None) -> Comparison:
    """Return the comparison of a suite's cells; nothing but the arguments enters."""
    members = [Member(result, suite.metric) for result in results.cells]
    layout = arrange(members)
    beside = _Beside(suite.further_metrics, suite.newcomers, reference)
    blocks = tuple(_block(layout, title, block, beside) for title, block in grouped(members, layout.title).items())
    ranking = over_data_sets(members, layout, higher_is_better(suite.metric))
    rows = row_settings(members, layout)
    partitions = partition_rows(members, layout, results.cards)
    choices = tuning.choices(members, layout, results.studies)
    return Comparison(
        title=suite.name,
        description=suite.description,
        metric=suite.metric,
        blocks=blocks,
        tables=(
            *(table for block in blocks for table in _tables(block, suite.metric, beside)),
            *([_ranks(ranking)] if ranking else []),
        ),
        reading=(*_reading(suite.metric, beside, blocks), *tuning.reading(choices)),
        notes=(
            *_others(results.others),
            *_notes(members, layout),
            *_power(blocks),
            *(_friedman(ranking) if ranking else []),
        ),
        ranking=ranking,
        rows=Table("Rows", ("row", "algorithm", "settings"), tuple(rows), texts=3),
        partitions=Table("Partitions", PARTITION_HEAD, tuple(partitions)),
        provenance=tuple(provenance(results, suite, members)),
        choices=choices,
        tuning=tuple(Table(*made) for made in tuning.tables(choices)),
    )


# --- numbers


@dataclass(frozen=True)
class _Beside:
    """What is shown beside the metric and the costs."""

    metrics: Sequence[str]
    newcomers: Newcomers | None
    reference: Reference | None


def _block(layout: Layout, title: str, members: Sequence[Member], beside: _Beside) -> Block:
    columns = grouped(members, layout.heading)
    rows = grouped(members, lambda member: member.label)
    controls = [row for row in rows.values() if _is_control(row[0])]
    control = {label: _control(row[0], controls) for label, row in rows.items()}
    entries: dict[str, list[Entry | None]] = {label: [] for label in rows}
    for heading, column in columns.items():
        places = grouped(column, lambda member: member.label)
        standing = _standings(places, control)
        for label in rows:
            others = [member for member in control[label] if layout.heading(member) == heading]
            here = places.get(label)
            entries[label].append(_entry(here, others, standing[label], beside) if here else None)
    return Block(title, tuple(columns), tuple(Row(label, tuple(found)) for label, found in entries.items()))


def _standings(places: Mapping[str, Sequence[Member]], control: Mapping[str, Sequence[Member]]) -> dict[str, Standing]:
    values = {
        label: {member.seeds: member.summary.mean for member in here if member.summary}
        for label, here in places.items()
    }
    controls = {
        label: others[0].label
        for label, others in control.items()
        if label in places and others and others[0].label in places and not _is_control(places[label][0])
    }
    metric = next(iter(places.values()))[0].metric
    return standings(values, controls, higher_is_better(metric))


def _is_control(member: Member) -> bool:
    return member.result.cell.control


def _control(member: Member, controls: Sequence[Sequence[Member]]) -> Sequence[Member]:
    """Return the control of a member's row: if there are several, the first with the same models."""
    models = member.result.cell.recipe["models"]
    same = (row for row in controls if row[0].result.cell.recipe["models"] == models)
    return next(same, controls[0] if controls else [])


def _entry(members: Sequence[Member], control: Sequence[Member], standing: Standing, beside: _Beside) -> Entry:
    found = [member.summary for member in members if member.summary]
    spent = [member.costs for member in members if member.costs]
    means = [summary.mean for summary in found]
    return Entry(
        mean=_mean(means),
        std=_mean(summary.std for summary in found),
        pooled=_mean(summary.pooled for summary in found),
        worst=_mean(summary.worst for summary in found),
        worst_decile=_mean(summary.worst_decile for summary in found),
        gini=_mean(summary.gini for summary in found),
        jain=_mean(summary.jain for summary in found),
        spread=_deviation(means),
        rounds=_mean(costs.rounds for costs in spent),
        up_scalars=_mean(costs.up_scalars for costs in spent),
        steps=_mean(costs.steps for costs in spent),
        seconds=_mean(costs.seconds for costs in spent),
        done=len(found),
        planned=len(members),
        trouble=_troubles(members),
        further=tuple(_mean_and_std(members, metric) for metric in beside.metrics),
        arrivals=_arrivals(members),
        published=beside.reference.find(members[0].facts, members[0].metric) if beside.reference else None,
        beats_control=None if _is_control(members[0]) else _beats(members, control),
        standing=standing,
    )


def _mean_and_std(members: Sequence[Member], metric: str) -> tuple[float, float]:
    found = [summary for member in members if (summary := member.summarised(metric))]
    return _mean(summary.mean for summary in found), _mean(summary.std for summary in found)


def _arrivals(members: Sequence[Member]) -> Arrivals:
    found = [member.arrivals for member in members if member.arrivals]
    stages = found[0].stages if found else {}
    return Arrivals(
        {n: (_mean(one.stages[n][0] for one in found), _mean(one.stages[n][1] for one in found)) for n in stages},
        _mean(one.down_scalars for one in found),
        _mean(one.steps for one in found),
    )


def _beats(members: Sequence[Member], control: Sequence[Member]) -> bool | None:
    other = {member.seeds: member.summary.mean for member in control if member.summary}
    gains = [m.summary.mean - other[m.seeds] for m in members if m.summary and m.seeds in other]
    if not gains:
        return None
    return _mean(gains) > 0 if higher_is_better(members[0].metric) else _mean(gains) < 0


def _troubles(members: Sequence[Member]) -> str:
    kinds = grouped((member for member in members if member.trouble), lambda member: member.trouble)
    said = []
    for kind, troubled in kinds.items():
        rounds = sorted({member.result.diverged_in for member in troubled if member.result.diverged_in})
        where = f" in round{'s' * (len(rounds) > 1)} {', '.join(map(str, rounds))}" if rounds else ""
        said.append(kind + where)
    return "; ".join(said)


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return math.fsum(known) / len(known) if known else math.nan


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - 1))


# --- formatted

_FURTHER = ("pooled", "worst client", "rounds", "up ×10³", "client-steps", "seconds")


def _tables(block: Block, metric: str, beside: _Beside) -> list[Table]:
    """Return a block as in the paper, rows × columns, with what else there is to say beside it or in further tables."""
    name = named(metric)
    if len(block.columns) == 1:
        title = ", ".join(text for text in (block.title, block.columns[0]) if text)
        rows = [(row.label, *_formatted(row.entries[0], metric)) for row in block.rows]
        tables = [Table(title, ("row", name, "± seeds", *_FURTHER), tuple(rows))]
    else:
        title = f"{name}: {block.title}" if block.title else name
        spread = (text for column in block.columns for text in (column, "± seeds"))
        main = [(row.label, *_side_by_side([_formatted(entry, metric) for entry in row.entries])) for row in block.rows]
        tables = [
            Table(title, ("row", *spread, "rounds", "up ×10³"), tuple(main)),
            _listed(
                block,
                f"{title}: further numbers",
                _FURTHER,
                lambda entry: _formatted(entry, metric)[2:] if entry.done else (),
            ),
        ]
    title = f"{title}: " if title else ""
    tables.append(_listed(block, f"{title}over clients", _FAIRNESS, lambda entry: _fairness(entry, metric)))
    if beside.newcomers:
        before = f"{named(newcomers_metric(metric))} before"
        after = (f"after {counted(number, 'epoch')}" for number in beside.newcomers.epochs)
        head = (before, *after, "steps", "down ×10³")
        tables.append(_listed(block, f"{title}newcomers", head, lambda entry: _newcomers(entry, metric)))
    if beside.metrics:
        head = tuple(map(named, beside.metrics))
        tables.append(_listed(block, f"{title}further metrics", head, lambda entry: _further(entry, beside.metrics)))
    if beside.reference:
        head = (name, *_PUBLISHED)
        tables.append(
            _listed(block, f"{title}beside {beside.reference.name}", head, lambda entry: _compared(entry, metric))
        )
    tables.append(_listed(block, f"{title}against the control", _AGAINST, partial(_against_control, metric), texts=1))
    tables.append(_listed(block, f"{title}against the best", _AGAINST, partial(_against_best, metric), texts=1))
    return [table for table in tables if table.rows]


def _listed(
    block: Block, title: str, head: Sequence[str], said: Callable[[Entry], Sequence[str]], texts: int = 0
) -> Table:
    """Return a table with a line for each of a block's entries of which something is said, the first `texts` text."""
    single = len(block.columns) == 1
    lines = [
        (row.label, *(() if single else (column,)), *words)
        for row in block.rows
        for column, entry in zip(block.columns, row.entries, strict=True)
        if entry and (words := said(entry))
    ]
    first = ("row",) if single else ("row", "column")
    return Table(title, (*first, *head), tuple(lines), texts=len(first) + texts)


def _side_by_side(entries: Sequence[Sequence[str]]) -> list[str]:
    """Return headline and spread of each column, and rounds and scalars: once if they are the same in all columns."""
    texts = [text for entry in entries for text in entry[:2]]
    for place in (4, 5):
        costs = [entry[place] for entry in entries]
        different = {cost for cost in costs if cost}
        texts.append(" / ".join(cost or _NOTHING for cost in costs) if len(different) > 1 else "".join(different))
    return texts


def _formatted(entry: Entry | None, metric: str) -> list[str]:
    """Return headline, spread over seeds and what `_FURTHER` names, as text."""
    if entry is None:
        return [_NOTHING, "", *("" for _ in _FURTHER)]
    return [
        _headline(entry, metric) + _mark(entry.standing),
        number(entry.spread, metric),
        number(entry.pooled, metric),
        number(entry.worst, metric),
        plain(entry.rounds, 0 if entry.rounds.is_integer() else 1),
        plain(entry.up_scalars / 1000, 2),
        plain(entry.steps, 0),
        plain(entry.seconds, 1),
    ]


def _mark(standing: Standing) -> str:
    return f" {BEST}" * standing.best + f" {NEAR_BEST}" * standing.near_best


_FAIRNESS = ("worst decile", "Gini", "Jain")


def _fairness(entry: Entry, metric: str) -> list[str]:
    """Return how unequal the clients are; nothing if the entry has no numbers."""
    if not entry.done:
        return []
    return [number(entry.worst_decile, metric), plain(entry.gini, 4), plain(entry.jain, 4)]


def _newcomers(entry: Entry, metric: str) -> list[str]:
    """Return what became of newcomers; nothing if the entry has none."""
    found = entry.arrivals
    if not found.stages:
        return []
    stages = [mean_and_std(mean, std, newcomers_metric(metric)) for mean, std in found.stages.values()]
    return [*stages, plain(found.steps, 0), plain(found.down_scalars / 1000, 2)]


_AGAINST = ("against", "pairs", "difference", "interval", "p", "p (Wilcoxon)", "verdict")


def _against_control(metric: str, entry: Entry) -> list[str]:
    return _against(entry.standing.control, entry.standing.against_control, metric)


def _against_best(metric: str, entry: Entry) -> list[str]:
    return _against(entry.standing.best_row, entry.standing.against_best, metric)


def _against(other: str | None, against: Against | None, metric: str) -> list[str]:
    """Return what a comparison came to; nothing if there are not two pairs to compare."""
    if other is None or against is None or against.pairs < 2:
        return []
    low, high = (signed(number(value, metric)) for value in against.interval)
    return [
        other,
        str(against.pairs),
        signed(number(against.difference, metric)),
        f"{low} to {high}",
        chance(against.p),
        chance(against.p_wilcoxon),
        against.verdict,
    ]


def _ranks(ranking: Ranking) -> Table:
    ranks = (plain(mean, 2) for mean in ranking.ranks)
    rows = tuple(zip(ranking.labels, ranks, strict=True))
    return Table(f"Ranks over {ranking.data_sets} data sets", ("row", "mean rank"), rows)


_PUBLISHED = ("theirs", "gap", "rounds", "theirs", "up ×10³", "theirs", "gap")


def _compared(entry: Entry, metric: str) -> list[str]:
    """Return headline and costs with what was published beside them; nothing if nothing was."""
    published = entry.published
    if not published:
        return []
    up = entry.up_scalars / published.up_scalars - 1 if published.up_scalars else math.nan
    return [
        _headline(entry, metric),
        mean_and_std(published.mean, published.std, metric),
        signed(number(entry.mean - published.mean, metric)),
        plain(entry.rounds, 0),
        plain(published.rounds, 0),
        plain(entry.up_scalars / 1000, 2),
        plain(published.up_scalars / 1000, 0),
        signed(plain(100 * up, 1), " %"),
    ]


def _further(entry: Entry, metrics: Sequence[str]) -> list[str]:
    """Return the further metrics; nothing if the entry has no numbers."""
    pairs = zip(entry.further, metrics, strict=True)
    return [mean_and_std(mean, std, metric) for (mean, std), metric in pairs] if entry.done else []


def _headline(entry: Entry, metric: str) -> str:
    if not entry.done:
        return entry.trouble
    flag = FLAG if entry.beats_control is False else ""
    few = f" ({entry.done} of {entry.planned}; {entry.trouble})" if entry.trouble else ""
    return f"{mean_and_std(entry.mean, entry.std, metric)}{flag}{few}"


# --- words


def _reading(metric: str, beside: _Beside, blocks: Sequence[Block]) -> tuple[str, ...]:
    worst = "lowest" if higher_is_better(metric) else "highest"
    reading = [
        f"a ± b: mean and standard deviation of {metric} over clients, every client counting the same, in the last "
        "evaluated round (never the best one), averaged over the pairs of partition seed and run seed.",
        "± seeds: standard deviation of that mean from pair to pair; blank for a single pair.",
        f"pooled: mean over samples instead of clients; worst client: the {worst} of all, averaged as the mean is.",
        "up ×10³: scalars that all clients together upload per round, in thousands; client-steps: optimiser steps of "
        "all clients in all rounds; seconds: of the whole run.",
        f"{FLAG}: not better than the control, where everybody trains alone.",
        f"{BEST}: the best mean, over two pairs of seeds or more; {NEAR_BEST}: not distinguishable from it by a test "
        "over them.",
        "worst decile: mean of the tenth of the clients that is worst off; Gini: 0 if all clients have the same, "
        "towards 1 if one has everything; Jain: 1 if all have the same, 1 / clients if one has everything.",
    ]
    if any(pairs > 1 for pairs, _ in _compared_pairs(blocks)):
        reading += [
            "difference: the row's mean over clients minus the other's, on average over the pairs of seeds that both "
            "have; interval: of 95 %, by bootstrap over these pairs; p: paired t test; Wilcoxon: exact signed-rank "
            "test. The spread over clients enters none of it.",
            "Both p are two-sided and corrected by Holm's method over the comparisons of a column: with the control "
            "those of all rows; with the best, which the same numbers have chosen, those of all pairs of rows. better, "
            f"worse: the t test's is at most {LEVEL} (the Wilcoxon test's where all pairs differ by the same).",
        ]
    if beside.newcomers:
        reading += [
            "newcomers: clients that take no part in training and are in no other number. before: with what the method "
            "lets them download, and new parts where these are personal; after: fine-tuned from there on their own "
            "samples, nothing being sent; a ± b over newcomers. The control begins from scratch. steps: of the "
            "optimiser in the longest fine-tuning; down: scalars downloaded; both of one newcomer, in no other column.",
        ]
    if beside.reference:
        reading += [
            f"theirs: what {beside.reference.name} says for the same {', '.join(beside.reference.settings)}, ± over "
            "clients; gap: ours minus theirs, accuracies in points, uploads in percent. Our uploads are counted, not "
            "declared: trainable scalars that reach the server, without batch norm's statistics.",
        ]
    return tuple(reading)


def _compared_pairs(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Yield pairs of seeds and size of the family of each comparison that there is a pair for."""
    for entry in (entry for block in blocks for row in block.rows for entry in row.entries if entry):
        for against in (entry.standing.against_control, entry.standing.against_best):
            if against and against.pairs:
                yield against.pairs, against.family


def _power(blocks: Sequence[Block]) -> list[str]:
    """Return what the pairs can show, for each number of pairs in the smallest family that it is in."""
    smallest = dict(sorted(set(_compared_pairs(blocks)), reverse=True))
    return [power(pairs, family) for pairs, family in sorted(smallest.items())]


def _friedman(ranking: Ranking) -> list[str]:
    return [
        f"Friedman's test that all rows rank alike over the {ranking.data_sets} data sets: p {_equals(ranking.p)}. By "
        f"Nemenyi's test, rows whose mean ranks differ by less than {ranking.critical_difference:.2f} are not "
        "distinguishable."
    ]


def _equals(p: float) -> str:
    return chance(p) if p < 0.001 else f"= {chance(p)}"


def _others(finished: int) -> list[str]:
    if not finished:
        return []
    cells = f"{counted(finished, 'finished cell')} in the suite's folder {'is' if finished == 1 else 'are'}"
    return [f"{cells} not shown: of other settings (--set, --seeds), or not selected (--only)."]


def _notes(members: Sequence[Member], layout: Layout) -> tuple[str, ...]:
    notes = []
    if not any(_is_control(member) for member in members):
        notes.append(f"No row is a control, where everybody trains alone, so none is marked {FLAG}.")
    notes += _left_out(members, layout)
    for member in members:
        if member.trouble:
            why = member.result.message.removeprefix(f"round {member.result.diverged_in}: ")
            said = ": ".join(part for part in (_troubles([member]), why) if part)
            notes.append(f"{_whose(member, layout)}: {said}.")
        if member.arrivals and (lost := member.arrivals.diverged):
            why = f"the fine-tuning of {counted(lost, 'newcomer')} diverged, which is left out of means"
            notes.append(f"{_whose(member, layout)}: {why}.")
    return tuple(notes)


def _left_out(members: Sequence[Member], layout: Layout) -> Iterator[str]:
    """Yield how many clients have no value, once for all cells of a partition of which the same is true."""
    found = [(member, member.summary) for member in members if member.summary]
    for there in grouped(found, lambda one: one[0].result.cell.partition_key).values():
        for (left_out, clients), alike in grouped(there, lambda one: (one[1].left_out, one[1].clients)).items():
            if left_out:
                place = [fact(name, alike[0][0].facts) for name in (*layout.implied, SEEDS[0])]
                rows = dict.fromkeys(member.label for member, _ in alike)
                whose = "all rows" if len(alike) == len(there) else ", ".join(rows)
                yield (
                    f"{', '.join([whose, *place])}: {left_out} of {clients} clients have no value (no samples to "
                    "measure on) and are left out of means."
                )


def _whose(member: Member, layout: Layout) -> str:
    return ", ".join([member.label, *(fact(name, member.facts) for name in (*layout.implied, *SEEDS))])
