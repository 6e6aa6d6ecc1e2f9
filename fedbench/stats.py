"""What few paired runs can tell apart, how methods rank over data sets, and how fair one is to its clients.

Runs are paired: two methods on the same partition with the same run seed.  What is tested are the differences of their
means over clients from pair to pair.  Clients of one run are not independent of each other and are never tested.

Degenerate input (no pair or one, equal values, values that are not finite) gives NaN or p = 1, and no warning.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Floats = NDArray[np.float64]
Verdict = Literal["better", "worse", "not distinguishable"]

LEVEL = 0.05
"""Rate of false findings that every verdict keeps to, over the whole family of its comparisons."""

RESAMPLES = 10_000
_DIGITS = 12  # what is compared is rounded to so many digits, so that equal numbers are equal


# --- one difference


@dataclass(frozen=True, eq=False)
class Paired:
    """The differences (pairs,) float64 of two methods, one minus the other; NaN below for what they do not suffice to.

    `t` and `wilcoxon` are two-sided p-values; the t test has none where all differences are equal.
    """

    differences: Floats

    @property
    def pairs(self) -> int:
        """How many there are."""
        return len(self.differences)

    @cached_property
    def mean(self) -> float:
        """The mean difference."""
        return float(self.differences.mean()) if self.pairs else math.nan

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The ends of the bootstrap interval of the mean."""
        low, high = interval(self.differences)
        return float(low), float(high)

    @cached_property
    def t(self) -> float:
        """Of the paired t test."""
        return float(t_test(self.differences))

    @cached_property
    def wilcoxon(self) -> float:
        """Of the exact Wilcoxon signed-rank test."""
        return wilcoxon(self.differences)

    @property
    def p(self) -> float:
        """What decides: that of the t test, or of the Wilcoxon test where the t test has none."""
        return self.wilcoxon if math.isnan(self.t) else self.t


def paired(one: ArrayLike, other: ArrayLike) -> Paired:
    """Return the differences of two arrays (pairs,), of the pairs in which both values are finite."""
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    there = np.isfinite(a) & np.isfinite(b)
    a, b = a[there], b[there]
    return Paired(np.round(a - b, _decimals([a, b])))


def _decimals(values: ArrayLike) -> int:
    """Return the decimal places beyond which values have nothing but noise."""
    largest = float(np.abs(values).max(initial=0))
    return min(_DIGITS - math.floor(math.log10(largest)), 300) if largest else 0


def paired_by_key(one: Mapping[Any, float], other: Mapping[Any, float]) -> Paired:
    """Return the differences for the keys that both have."""
    both = [key for key in one if key in other]
    return paired([one[key] for key in both], [other[key] for key in both])


def t_test(differences: Floats) -> Floats:
    """Return the two-sided p-values (...) of the paired t test on differences (..., pairs).

    NaN for fewer than two pairs, and where all differences are equal, so that there is no spread to test against.
    """
    pairs = differences.shape[-1]
    if pairs < 2:
        return np.full(differences.shape[:-1], math.nan)
    flat = np.ptp(differences, axis=-1) == 0
    error = differences.std(axis=-1, ddof=1) / math.sqrt(pairs)
    t = np.abs(differences.mean(axis=-1)) / np.where(flat, 1.0, error)
    return np.where(flat, math.nan, 2 * special.stdtr(pairs - 1, -t))


def wilcoxon(differences: Floats) -> float:
    """Return the two-sided p-value of the Wilcoxon signed-rank test on differences (pairs,); NaN for fewer than two.

    It is exact also where ranks are shared (which scipy's exact mode is not): the distribution of the sum of the
    positive ranks is built up rank by rank.  Differences of zero are left out.
    """
    if len(differences) < 2:
        return math.nan
    there = differences[differences != 0]
    doubled = np.rint(2 * stats.rankdata(np.abs(there))).astype(int)  # shared ranks are halves
    total = int(doubled.sum())
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    for rank in doubled:
        without, chance = chance / 2, chance / 2
        chance[rank:] += without[: total + 1 - rank]
    positive = int(doubled[there > 0].sum())
    return min(1.0, 2 * float(chance[: min(positive, total - positive) + 1].sum()))


def interval(differences: Floats, resamples: int = RESAMPLES) -> tuple[Floats, Floats]:
    """Return the ends (...) of the 95 % bootstrap interval of the mean of differences (..., pairs), always the same.

    Percentiles are widened as for the t distribution (Hesterberg 2015, "expanded percentile interval"), since the plain
    ones are too narrow for few pairs; with four pairs or fewer the interval spans all differences.
    """
    pairs = differences.shape[-1]
    if pairs < 2:
        nothing = np.full(differences.shape[:-1], math.nan)
        return nothing, nothing
    tail = special.ndtr(math.sqrt(pairs / (pairs - 1)) * special.stdtrit(pairs - 1, LEVEL / 2))
    means = differences[..., _draws(pairs, resamples)].mean(axis=-1)
    low, high = np.quantile(means, [tail, 1 - tail], axis=-1)
    return low, high


@lru_cache(maxsize=8)
def _draws(pairs: int, resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(pairs, size=(resamples, pairs))


# --- a family of comparisons


@dataclass(frozen=True)
class Against:
    """How one method stands against another, in a family of so many comparisons; NaN where there are too few pairs.

    - `p`: of the paired t test (of the Wilcoxon test where all differences are equal); `p_wilcoxon`; both two-sided and
      after Holm's correction over the `family`.
    - `verdict`: "better" or "worse" if `p` is at most `LEVEL`.
    """

    paired: Paired
    family: int
    p: float
    p_wilcoxon: float
    verdict: Verdict

    @property
    def pairs(self) -> int:
        """How many pairs both have."""
        return self.paired.pairs

    @property
    def difference(self) -> float:
        """Mean over the pairs, its own minus the other's."""
        return self.paired.mean

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the bootstrap interval of the difference."""
        return self.paired.interval


def judge(family: Sequence[Paired], more_is_better: bool = True) -> list[Against]:
    """Return the comparisons of a family, corrected for all of it."""
    decisive = holm([one.p for one in family])
    ranked = holm([one.wilcoxon for one in family])
    return [
        Against(one, len(family), float(p), float(p_wilcoxon), _verdict(one.mean, float(p), more_is_better))
        for one, p, p_wilcoxon in zip(family, decisive, ranked, strict=True)
    ]


def _verdict(difference: float, p: float, more_is_better: bool) -> Verdict:
    if not p <= LEVEL:
        return "not distinguishable"
    return "better" if (difference > 0) == more_is_better else "worse"


def holm(p: ArrayLike) -> Floats:
    """Return p-values (..., family) after Holm's correction over the last axis; NaN stays and counts as a member."""
    raw = np.asarray(p, np.float64)
    order = np.argsort(raw, axis=-1)  # NaN last
    steps = np.arange(raw.shape[-1], 0, -1)
    sorted_ = np.take_along_axis(raw, order, axis=-1)
    adjusted = np.minimum(1.0, np.maximum.accumulate(sorted_ * steps, axis=-1))
    result = np.empty_like(raw)
    np.put_along_axis(result, order, adjusted, axis=-1)
    return result


def power(pairs: int, comparisons: int) -> str:
    """Return a sentence on what so many pairs can show at all in a family of so many comparisons."""
    if pairs < 2:
        return "1 pair of seeds can show nothing: whether another one would say the same is unknown."
    least = 2.0 ** (1 - pairs)
    needed = -special.stdtrit(pairs - 1, LEVEL / 2 / comparisons) / math.sqrt(pairs)
    cannot = ", so it can show no difference at all" if least * comparisons > LEVEL else ""
    corrected = f", {min(1.0, least * comparisons):.3g} corrected for {comparisons} comparisons" * (comparisons > 1)
    return (
        f"{pairs} pairs of seeds: the Wilcoxon test cannot go below p = {least:.3g}{corrected}{cannot}; the t test "
        f"shows a difference whose mean exceeds {needed:.2g} times its standard deviation from pair to pair."
    )


# --- over data sets


@dataclass(frozen=True)
class Ranking:
    """Methods ranked on each of several data sets, in order of their mean rank, from the best.

    - `ranks`: mean ranks, 1 being the best; ties share theirs.
    - `p`: of Friedman's test that all are alike.
    - `critical_difference`: of two mean ranks, by Nemenyi's test at `LEVEL` (Demšar 2006).
    - `groups`: labels whose mean ranks lie that close together, from the first to the last of each group.
    """

    labels: tuple[str, ...]
    ranks: tuple[float, ...]
    data_sets: int
    p: float
    critical_difference: float
    groups: tuple[tuple[str, ...], ...]


def rank(labels: Sequence[str], scores: ArrayLike, more_is_better: bool = True) -> Ranking:
    """Return the ranking of methods by their scores (data sets, methods), all finite, at least 2 × 3."""
    table = np.asarray(scores, np.float64) * (-1 if more_is_better else 1)
    ranks = stats.rankdata(np.round(table, _decimals(table)), axis=1)
    mean = ranks.mean(axis=0)
    order = np.argsort(mean, kind="stable")
    alike = bool(np.all(ranks == ranks[:, :1]))  # where scipy divides by zero
    names = [labels[i] for i in order]
    apart = critical_difference(len(labels), len(table))
    return Ranking(
        labels=tuple(names),
        ranks=tuple(float(mean[i]) for i in order),
        data_sets=len(table),
        p=1.0 if alike else float(stats.friedmanchisquare(*ranks.T).pvalue),
        critical_difference=apart,
        groups=_groups(names, mean[order], apart),
    )


def critical_difference(methods: int, data_sets: int) -> float:
    """Return by how much two mean ranks must differ for Nemenyi's test to tell them apart (Demšar 2006, eq. 6 ff.)."""
    q = stats.studentized_range.ppf(1 - LEVEL, methods, math.inf) / math.sqrt(2)
    return float(q * math.sqrt(methods * (methods + 1) / (6 * data_sets)))


def _groups(labels: Sequence[str], ranks: Floats, apart: float) -> tuple[tuple[str, ...], ...]:
    """Return the longest runs of two or more methods whose sorted mean ranks differ by at most `apart`."""
    found: list[tuple[int, int]] = []
    for first in range(len(labels)):
        last = int(np.searchsorted(ranks, ranks[first] + apart, side="right"))
        if last - first > 1 and (not found or last > found[-1][1]):
            found.append((first, last))
    return tuple(tuple(labels[first:last]) for first, last in found)


# --- fairness over clients


def worst_decile(values: ArrayLike, more_is_better: bool = True) -> float:
    """Return the mean of the tenth of the clients (at least one) that is worst off; NaN values are left out."""
    there = np.sort(_finite(values))
    few = math.ceil(len(there) / 10)
    if not few:
        return math.nan
    return float(there[:few].mean() if more_is_better else there[-few:].mean())


def gini(values: ArrayLike) -> float:
    """Return the Gini coefficient of values (clients,): 0 if all are equal, towards 1 if one client has everything.

    NaN values are left out; NaN if there is none, or one is negative.
    """
    there = np.sort(_finite(values))
    if not len(there) or there[0] < 0:
        return math.nan
    if there[0] == there[-1]:
        return 0.0
    clients, shares = len(there), there / there[-1]
    return float(2 * np.arange(1, clients + 1) @ shares / (clients * shares.sum()) - (clients + 1) / clients)


def jain(values: ArrayLike) -> float:
    """Return Jain's index of values (clients,): 1 if all are equal, 1 / clients if one client has everything.

    NaN values are left out; NaN if there is none, or one is negative.
    """
    there = _finite(values)
    if not len(there) or (there < 0).any():
        return math.nan
    if (there == there[0]).all():
        return 1.0
    shares = there / there.max()
    return float(shares.sum() ** 2 / (len(there) * (shares @ shares)))


def _finite(values: ArrayLike) -> Floats:
    given = np.asarray(values, np.float64)
    return given[np.isfinite(given)]
