"""How the rows of a table stand to each other: in one column over its pairs of seeds, and over all data sets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from fedbench.cells import Scalar
from fedbench.report.layout import Layout, Member, grouped
from fedbench.stats import Against, Paired, Ranking, judge, paired_by_key, rank

Values = Mapping[tuple[Scalar, ...], float]
"""Pair of partition and run seed -> mean over clients."""


@dataclass(frozen=True)
class Standing:
    """How one row stands in one column.

    - `best`: it has the best mean, of the rows with the most pairs, which are two at least.
    - `near_best`: it was tested against the best, and they are not distinguishable.
    - `control`: which row its control is; `against_control`: the comparison with that; None if it is one itself.
    - `best_row`, `against_best`: the same of the best; None for the best itself.
    """

    best: bool = False
    near_best: bool = False
    control: str | None = None
    against_control: Against | None = None
    best_row: str | None = None
    against_best: Against | None = None


def standings(rows: Mapping[str, Values], controls: Mapping[str, str], more_is_better: bool) -> dict[str, Standing]:
    """Return how each row stands; `controls` says which row is whose control.

    The comparisons with controls are one family.  Which row is the best is told by the same numbers, so comparisons
    with it belong to the family of all pairs of rows that might have been compared.
    """
    with_control = [label for label in rows if label in controls]
    tested = judge([paired_by_key(rows[one], rows[controls[one]]) for one in with_control], more_is_better)
    against_control = dict(zip(with_control, tested, strict=True))
    best = _best(rows, more_is_better)
    against_best = _against(best[0], rows, more_is_better) if best else {}
    return {
        label: Standing(
            best=label in best and len(rows[label]) > 1,  # one pair of seeds tells nobody the best
            near_best=label not in best and _alike(against_best.get(label)),
            control=controls.get(label),
            against_control=against_control.get(label),
            best_row=best[0] if label in against_best else None,
            against_best=against_best.get(label),
        )
        for label in rows
    }


def _best(rows: Mapping[str, Values], more_is_better: bool) -> list[str]:
    """Return the row with the best mean, and those that have the very same; none if that goes for all."""
    most = max(map(len, rows.values()))
    means = {label: math.fsum(values.values()) / most for label, values in rows.items() if len(values) == most > 0}
    top = (max if more_is_better else min)(means.values(), default=math.nan)
    best = [label for label, mean in means.items() if mean == top]
    return best if len(best) < sum(map(bool, rows.values())) else []


def _against(best: str, rows: Mapping[str, Values], more_is_better: bool) -> dict[str, Against]:
    """Return the comparison of every other row that has numbers with the best, corrected for all pairs of rows."""
    known = [label for label in rows if rows[label]]
    others = [label for label in known if label != best]
    family: list[Paired] = [paired_by_key(rows[label], rows[best]) for label in others]
    family += [paired_by_key(rows[a], rows[b]) for a, b in combinations(others, 2)]
    return dict(zip(others, judge(family, more_is_better), strict=False))


def _alike(against: Against | None) -> bool:
    return against is not None and against.pairs > 1 and against.verdict == "not distinguishable"


def over_data_sets(members: Sequence[Member], layout: Layout, more_is_better: bool) -> Ranking | None:
    """Return how the rows rank on each data set, by their mean over all places and seeds of it; None below 2 × 3.

    Rows that have no number in a place where the suite has cells are left out.
    """
    places = dict.fromkeys(_place(member, layout) for member in members)
    rows = {
        label: {_place(member, layout): member.summary.mean for member in row if member.summary}
        for label, row in grouped(members, lambda member: member.label).items()
    }
    complete = {label: found for label, found in rows.items() if found.keys() == places.keys()}
    data_sets = grouped(places, lambda place: place[0])
    if len(data_sets) < 2 or len(complete) < 3:
        return None
    scores = [
        [math.fsum(found[place] for place in there) / len(there) for found in complete.values()]
        for there in data_sets.values()
    ]
    return rank(list(complete), scores, more_is_better)


def _place(member: Member, layout: Layout) -> tuple[str, str, str, tuple[Scalar, ...]]:
    data_set = member.result.cell.recipe["dataset"]["content"]
    return data_set, layout.title(member), layout.heading(member), member.seeds
