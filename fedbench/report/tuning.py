"""How the values of tuned rows were chosen: what was tried, what came of it, and what it took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbench import space
from fedbench.metrics import is_percentage
from fedbench.report.formatted import number, plain
from fedbench.report.layout import Layout, Member, fact, grouped
from fedbench.studies import Study
from fedbench.words import text


@dataclass(frozen=True)
class Choice:
    """One study: for the cells of a row that differ in nothing but the seed of the run.

    - `place`: which cells of the row, if there are others.
    - `study`: its trials, no more than were asked for.
    - `best`: the number of the trial whose values were chosen; None if none was completed.
    - `aim`: how many trials there should be; `how`: the recipe.
    """

    label: str
    place: str
    study: Study
    best: int | None
    aim: int
    how: Mapping[str, Any]

    @property
    def so_far(self) -> tuple[tuple[int, float], ...]:
        """The best value after each trial that improved on those before it: (number of the trial, value)."""
        found: list[tuple[int, float]] = []
        for place, trial in enumerate(self.study.trials):
            if trial.state != "completed" or trial.value is None:
                continue
            if not found or ((trial.value > found[-1][1]) == self.study.maximise and trial.value != found[-1][1]):
                found.append((place, trial.value))
        return tuple(found)


def choices(members: Sequence[Member], layout: Layout, studies: Mapping[str, Study]) -> tuple[Choice, ...]:
    """Return the studies of the tuned rows that have trials, in the order of the rows."""
    tuned = [member for member in members if member.result.cell.tuned]
    several = len({member.facts["partition_seed"] for member in tuned}) > 1
    rows = grouped(tuned, lambda m: (m.label, m.result.cell.study_key, m.result.cell.recipe["tuning"]["trials"]))
    found = []
    for (label, key, aim), (first, *_) in sorted(rows.items(), key=lambda row: _order(row[0][0], tuned)):
        if key in studies:
            study = Study(**{**vars(studies[key]), "trials": studies[key].trials[:aim]})
            named = [layout.title(first), layout.heading(first)]
            named += [fact("partition_seed", first.facts)] if several else []
            how = first.result.cell.recipe["tuning"]
            found.append(Choice(label, ", ".join(filter(None, named)), study, study.best(aim), aim, how))
    return tuple(found)


def _order(label: str, members: Sequence[Member]) -> int:
    return next(place for place, member in enumerate(members) if member.label == label)


# --- as tables: title, head, rows, columns of text

Formatted = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], int]


def tables(found: Sequence[Choice]) -> list[Formatted]:
    """Return the chosen values, what the trials took, and how the best value grew."""
    if not found:
        return []
    placed = any(choice.place for choice in found)
    start = ("row", *(["cells"] if placed else []))
    lead = len(start)

    def begin(choice: Choice) -> tuple[str, ...]:
        return (choice.label, *([choice.place] if placed else []))

    metrics = " / ".join(dict.fromkeys(choice.study.objective for choice in found))
    unit = " (%)" if all(is_percentage(choice.study.objective) for choice in found) else ""
    values = [(*begin(choice), *line) for choice in found for line in _values(choice)]
    spent = [(*begin(choice), *_spent(choice)) for choice in found]
    curve = [
        (*begin(choice), ", ".join(f"{n}: {number(v, choice.study.objective)}" for n, v in choice.so_far))
        for choice in found
    ]
    return [
        ("Tuning: chosen values", (*start, "setting", "searched", "suite", "chosen"), tuple(values), lead + 2),
        (
            "Tuning: trials",
            (*start, "trials", "pruned", "failed", f"{metrics}{unit}", "of the suite", "in trial", *_SPENT),
            tuple(spent),
            lead,
        ),
        (f"Tuning: best {metrics}{unit} so far, by trial", (*start, "curve"), tuple(curve), lead + 1),
    ]


_SPENT = ("client-steps", "up ×10³", "seconds")


def _values(choice: Choice) -> list[tuple[str, ...]]:
    best = choice.study.trials[choice.best].values if choice.best is not None else {}
    return [
        (
            space.short(place),
            _searched(entry),
            _value(choice.study.own[place]),
            _value(best[place]) if place in best else "none",
        )
        for place, entry in choice.study.space.items()
    ]


def _searched(entry: Mapping[str, Any]) -> str:
    if "values" in entry:
        return ", ".join(map(_value, entry["values"]))
    return f"{_value(entry['low'])} to {_value(entry['high'])}{', log' if entry['log'] else ''}"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else text(value)


def _spent(choice: Choice) -> tuple[str, ...]:
    trials = choice.study.trials
    states = [trial.state for trial in trials]
    best = trials[choice.best].value if choice.best is not None else None
    own = choice.study.own_value
    return (
        str(len(trials)) if len(trials) == choice.aim else f"{len(trials)} of {choice.aim}",
        str(states.count("pruned")),
        str(states.count("failed")),
        "none" if best is None else number(best, choice.study.objective),
        "" if own is None else number(own, choice.study.objective),
        "" if choice.best is None else str(choice.best),
        plain(sum(trial.steps for trial in trials), 0),
        plain(sum(trial.up_scalars for trial in trials) / 1000, 2),
        plain(sum(trial.seconds for trial in trials), 1),
    )


def reading(found: Sequence[Choice]) -> list[str]:
    """Return how to read that, a sentence each."""
    if not found:
        return []
    shares = ", ".join(dict.fromkeys(f"{100 * choice.how['validation']:g} %" for choice in found))
    samplers = ", ".join(dict.fromkeys(f"{choice.how['sampler']} (seed {choice.how['seed']})" for choice in found))
    return [
        "Tuning: a row ran with the values of the trial whose objective, mean over clients in the last round, was best "
        f"on validation samples. Where the partition sets none aside, these are {shares} of each client's training "
        "samples, cut off for the trials alone: the cells of the results train on all of them. No trial had test "
        "samples. Trials are numbered from 0; number 0 tried the suite's own values, if they are among those searched.",
        f"Tuning: every row has the same number of trials, chosen by {samplers} in batches that do not depend on how "
        "many ran at a time, so that they come out the same again. A pruned trial was given up between rounds, a "
        "failed one diverged or ended in an error; client-steps, uploads and seconds are of all trials together, and "
        "not in the tables of results.",
    ]
