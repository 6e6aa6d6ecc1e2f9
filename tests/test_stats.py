"""The tests hold their level where nothing is to be found, find what is planted, and survive degenerate numbers."""

import math

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from scipy import stats as scipy_stats

from fedbench.report.standing import Values, standings
from fedbench.stats import (
    LEVEL,
    Paired,
    critical_difference,
    gini,
    holm,
    interval,
    jain,
    judge,
    paired,
    paired_by_key,
    power,
    rank,
    t_test,
    wilcoxon,
    worst_decile,
)

nan = math.nan
STUDIES = 1000


def assert_rate(found: ArrayLike, rate: float) -> None:
    """Fail if so many findings in so many studies are less likely than 1 in 1000 at this rate (exact binomial)."""
    count = int(np.count_nonzero(found))
    test = scipy_stats.binomtest(count, STUDIES, rate)
    assert test.pvalue > 0.001, f"{count} of {STUDIES} studies, stated: {rate:.4f}"


def null(*shape: int, seed: int = 0) -> NDArray[np.float64]:
    """Return accuracies of equally good methods (studies, methods, pairs): what a pair has in common, and noise."""
    rng = np.random.default_rng(seed)
    studies, methods, pairs = shape
    return 0.8 + rng.normal(0, 0.05, (studies, 1, pairs)) + rng.normal(0, 0.01, (studies, methods, pairs))


def row(*values: float) -> Values:
    return {(pair,): value for pair, value in enumerate(values)}


# --- the stated rate


@pytest.mark.parametrize("pairs", [2, 3, 5, 10])
def test_studies_without_an_effect_reject_at_the_stated_rate(pairs: int) -> None:
    studies = null(STUDIES, 2, pairs)
    assert_rate(t_test(studies[:, 0] - studies[:, 1]) <= LEVEL, LEVEL)


def test_the_wilcoxon_test_rejects_at_the_rate_that_its_ranks_can_have() -> None:
    pairs = 10
    studies = null(STUDIES, 2, pairs)
    p = np.array([wilcoxon(differences) for differences in studies[:, 0] - studies[:, 1]])
    sums = np.array([sum(i + 1 for i in range(pairs) if signs >> i & 1) for signs in range(2**pairs)])
    chances = np.array([min(1.0, 2 * np.mean(sums <= min(s, 55 - s))) for s in sums])
    attainable = float(np.mean(chances <= LEVEL))  # 0.0488: p-values of ranks come in steps
    assert 0.04 < attainable <= LEVEL
    assert_rate(p <= LEVEL, attainable)


def test_a_family_of_independent_comparisons_rejects_anything_at_the_stated_rate() -> None:
    family = 7
    rng = np.random.default_rng(1)
    p = t_test(rng.normal(size=(STUDIES, family, 5)))
    found = (holm(p) <= LEVEL).any(axis=1)
    assert_rate(found, 1 - (1 - LEVEL / family) ** family)
    assert (p <= LEVEL).any(axis=1).mean() > 0.2  # as it would be without the correction


def test_marks_of_a_table_without_an_effect_are_wrong_at_most_at_the_stated_rate() -> None:
    labels = ["local", "a", "b", "c"]
    wrong_control, wrong_best = [], []
    for study in null(STUDIES, len(labels), 4, seed=2):
        rows = {label: row(*values) for label, values in zip(labels, study.tolist(), strict=True)}
        found = standings(rows, dict.fromkeys(labels[1:], "local"), True).values()
        against = [one.against_control for one in found if one.against_control]
        wrong_control.append(any(one.verdict != "not distinguishable" for one in against))
        wrong_best.append(not all(one.best or one.near_best for one in found))
    for wrong in (wrong_control, wrong_best):
        assert scipy_stats.binomtest(sum(wrong), STUDIES, LEVEL, alternative="greater").pvalue > 0.001


def test_a_planted_difference_is_found() -> None:
    labels = ["local", "same", "better", "worse"]
    effects = np.array([0.0, 0.0, 0.05, -0.05])[:, None]
    found = dict.fromkeys(labels, 0)
    for study in null(100, 4, 5, seed=3) + effects:
        rows = {label: row(*values) for label, values in zip(labels, study.tolist(), strict=True)}
        standing = standings(rows, dict.fromkeys(labels[1:], "local"), True)
        assert standing["better"].best
        for label in labels[1:]:
            against = standing[label].against_control
            assert against
            found[label] += against.verdict == ("not distinguishable" if label == "same" else label)
    assert found["better"] > 85
    assert found["worse"] > 85
    assert found["same"] > 90


# --- against other implementations and by hand


def test_the_t_test_is_scipys() -> None:
    one, other = np.random.default_rng(0).normal(size=(2, 6))
    assert paired(one, other).t == pytest.approx(scipy_stats.ttest_rel(one, other).pvalue, rel=1e-9)


@pytest.mark.parametrize("pairs", [2, 5, 9, 30])
def test_the_wilcoxon_test_is_scipys_where_that_is_exact(pairs: int) -> None:
    differences = np.random.default_rng(pairs).normal(0.3, 1, pairs)
    assert wilcoxon(differences) == pytest.approx(scipy_stats.wilcoxon(differences, method="exact").pvalue)


def test_the_wilcoxon_test_is_exact_with_shared_ranks_and_zeros() -> None:
    differences = np.array([1.0, 1.0, -1.0, 2.0, 0.0])
    ranks = np.array([2, 2, 2, 4])  # of what is not zero
    signs = np.array(np.meshgrid(*4 * [[0, 1]])).reshape(4, -1)
    sums = ranks @ signs  # of all 16 equally likely patterns of signs; here 2 + 2 + 4
    assert wilcoxon(differences) == pytest.approx(2 * np.mean(sums >= 8))


def test_five_pairs_cannot_go_below_0_0625() -> None:
    assert wilcoxon(np.arange(1.0, 6)) == 0.0625
    assert "5 pairs of seeds: the Wilcoxon test cannot go below p = 0.0625, so it can show no difference" in power(5, 1)
    assert "0.0312 corrected" not in power(6, 1)
    assert "cannot go below p = 0.0312, 0.219 corrected for 7 comparisons, so it can" in power(6, 7)
    assert "no difference at all" not in power(6, 1)
    assert power(1, 7).startswith("1 pair of seeds can show nothing")


def test_what_the_t_test_needs_is_where_its_p_value_crosses_the_level() -> None:
    needed = float(power(4, 3).split("exceeds ")[1].split()[0])
    base = np.array([-1.0, 0.5, 1.5, -1.0])
    base /= base.std(ddof=1)
    assert t_test(base + needed * 1.02) < LEVEL / 3 < t_test(base + needed * 0.98)


def test_holms_correction_by_hand() -> None:
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])
    np.testing.assert_array_equal(holm([nan, 0.02]), [nan, 0.04])  # one that cannot be tested counts all the same
    assert holm([]).shape == (0,)


def test_the_interval_is_always_the_same_and_covers_as_it_says() -> None:
    differences = null(400, 1, 8, seed=4)[:, 0] - 0.8
    low, high = interval(differences, resamples=2000)
    np.testing.assert_array_equal(low, interval(differences, resamples=2000)[0])
    assert 0.92 < np.mean((low < 0) & (high > 0)) < 0.985
    assert paired([1.0, 2, 3], [0.0, 0, 0]).interval == (1.0, 3.0)


def test_critical_differences_are_those_of_the_literature() -> None:
    # Demšar 2006, table 5: q at 0.05 is 2.343, 2.728, 3.031 for 3, 5, 8 methods
    for methods, q in ((3, 2.343), (5, 2.728), (8, 3.031)):
        expected = q * math.sqrt(methods * (methods + 1) / (6 * 10))
        assert critical_difference(methods, 10) == pytest.approx(expected, abs=1e-3)


def test_ranks_over_data_sets() -> None:
    scores = [[0.9, 0.5, 0.7, 0.1], [0.8, 0.6, 0.6, 0.2], [0.99, 0.3, 0.98, 0.97]]
    found = rank(["a", "b", "c", "d"], scores)
    assert found.labels == ("a", "c", "b", "d")
    assert found.ranks == pytest.approx((1.0, 6.5 / 3, 9.5 / 3, 11 / 3))
    assert found.p == pytest.approx(scipy_stats.friedmanchisquare(*np.array(scores).T).pvalue)
    assert found.groups == (("a", "c", "b", "d"),)
    more = rank(["a", "b", "c", "d"], scores + scores)
    assert (more.data_sets, more.ranks) == (6, found.ranks)
    assert more.critical_difference == pytest.approx(found.critical_difference / math.sqrt(2))
    assert more.groups == (("a", "c"), ("c", "b", "d"))
    worse = rank(["a", "b", "c", "d"], scores, more_is_better=False)
    assert worse.labels == ("d", "b", "c", "a")


def test_fairness_by_hand() -> None:
    values = np.arange(1.0, 21)
    assert worst_decile(values) == 1.5
    assert worst_decile(values, more_is_better=False) == 19.5
    assert worst_decile([0.4, 0.9, nan]) == 0.4
    assert gini([0.0, 0, 0, 1]) == pytest.approx(0.75)
    assert gini(values) == pytest.approx(np.abs(values[:, None] - values).mean() / (2 * values.mean()))
    assert jain([0.0, 0, 0, 1]) == 0.25
    assert jain([1.0, 3]) == pytest.approx(16 / 20)
    assert (gini([0.3, 0.3, nan]), jain([0.3, 0.3, nan])) == (0.0, 1.0)


# --- degenerate numbers


def test_equal_values_are_not_distinguishable() -> None:
    (one,) = judge([paired([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])])
    assert (one.difference, one.interval, one.p, one.p_wilcoxon) == (0, (0, 0), 1, 1)
    assert one.verdict == "not distinguishable"


def test_where_all_pairs_differ_by_the_same_the_wilcoxon_test_decides() -> None:
    for pairs, verdict in ((5, "not distinguishable"), (6, "better")):
        base = np.random.default_rng(0).uniform(size=pairs)
        (one,) = judge([paired(base + 0.1, base)])  # equal but for rounding
        assert one.p == one.p_wilcoxon == 2.0 ** (1 - pairs)
        assert one.verdict == verdict
        assert math.isnan(paired(base + 0.1, base).t)


def test_one_pair_shows_nothing() -> None:
    (one,) = judge([paired([0.9], [0.1])])
    assert (one.pairs, one.difference, one.verdict) == (1, 0.8, "not distinguishable")
    assert all(math.isnan(value) for value in (*one.interval, one.p, one.p_wilcoxon))


def test_no_pair_at_all() -> None:
    (one,) = judge([paired([nan, 1.0], [1.0, math.inf])])
    assert (one.pairs, one.verdict) == (0, "not distinguishable")
    assert math.isnan(one.difference)


def test_pairs_without_both_values_are_left_out() -> None:
    assert paired([0.5, nan, 0.75], [0.25, 0.1, 0.25]).differences.tolist() == [0.25, 0.5]
    found = paired_by_key({1: 0.5, 2: 0.75, 3: 1.0}, {3: 0.5, 1: 0.25, 4: 0.0})
    assert found.differences.tolist() == [0.25, 0.5]


def test_numbers_of_any_size_are_compared() -> None:
    for scale in (1e-100, 1e-9, 1e9, 1e100):
        one = paired(np.array([1.0, 2.0, 4.0]) * scale, np.array([0.5, 0.5, 0.5]) * scale)
        assert one.differences / scale == pytest.approx([0.5, 1.5, 3.5])
        assert one.t == pytest.approx(paired([1.0, 2.0, 4.0], [0.5, 0.5, 0.5]).t)
    assert Paired(np.zeros(3)).p == 1.0


def test_less_of_a_loss_is_better() -> None:
    family = [paired([0.1, 0.2, 0.15, 0.12], [1.0, 1.2, 1.1, 1.05]), paired([1.0], [1.0])]
    assert [one.verdict for one in judge(family, more_is_better=False)] == ["better", "not distinguishable"]
    assert judge(family)[0].verdict == "worse"
    assert judge(family)[0].family == 2


def test_methods_that_are_all_alike_rank_alike() -> None:
    found = rank(["a", "b", "c"], np.full((4, 3), 0.1))
    assert (found.p, found.ranks, found.groups) == (1.0, (2.0, 2.0, 2.0), (("a", "b", "c"),))


def test_fairness_of_nothing_or_nothing_to_share() -> None:
    for measure in (gini, jain, worst_decile):
        assert math.isnan(measure([]))
        assert math.isnan(measure([nan]))
    assert (gini([0.0, 0.0]), jain([0.0, 0.0])) == (0.0, 1.0)
    assert math.isnan(gini([-1.0, 1.0]))
    assert math.isnan(jain([-1.0, 1.0]))
    assert (gini([0, 1e300]), jain([0, 1e300])) == (0.5, 0.5)


# --- who is best


def test_rows_with_fewer_pairs_are_not_the_best() -> None:
    found = standings({"a": row(0.9), "b": row(0.5, 0.6), "c": row(0.1, 0.1)}, {}, True)
    assert [found[label].best for label in "abc"] == [False, True, False]
    assert found["a"].best_row == "b"
    assert not found["a"].near_best  # a single pair in common shows nothing


def test_rows_with_the_very_same_numbers_are_best_together() -> None:
    found = standings({"a": row(0.5, 0.7), "b": row(0.5, 0.7), "c": row(0.4, 0.7)}, {}, True)
    assert [found[label].best for label in "abc"] == [True, True, False]
    assert found["c"].near_best
    assert not found["b"].near_best
    same = standings({"a": row(0.5), "b": row(0.5)}, {}, True)
    assert not any(one.best for one in same.values())


def test_alone_or_without_numbers_nobody_is_best() -> None:
    for values in (row(0.5, 0.6), row()):
        found = standings({"a": values, "b": row()}, {"a": "b"}, True)
        assert not any(one.best or one.near_best for one in found.values())
        assert found["a"].against_control
        assert found["a"].against_control.pairs == 0
        assert found["a"].against_best is None
