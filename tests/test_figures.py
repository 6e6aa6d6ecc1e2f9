"""Figures: which there are, what they show by hand, that they come out the same each time, and labels as text."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from test_report import cell, diverged

from fedbench.cells import Cell
from fedbench.config import Suite
from fedbench.federation import Outcome
from fedbench.report import figures, plots
from fedbench.report.plots import CONTROL_LOOK, Figure, Group, Heat, Lines, Ranges, Ranks, Scatter, Strip
from fedbench.results import Result, Results, numbers

NASTY = r"""<script>alert("x")</script> & _ % # $x$ { } ~ ^ \ ' é λ"""
CARD = {
    "totals": {"clients": 2, "entropy_bits": 1.5},
    "per_client": {"classes": [[0, 1], [1, 3]], "samples": [[5, 6], [7, 8]]},
}


def outcome(*rounds: Sequence[float], up: int = 100, steps: float = 10.0, before: Sequence[float] = ()) -> Outcome:
    """Return an outcome with these accuracies, round by round; NaN is not measured."""
    table = np.array(rounds, np.float64)
    return Outcome(
        status="completed",
        message="",
        metrics={"test/accuracy": table, "test/loss": 3 - table},
        traffic={"up/scalars": np.full(table.shape, up), "down/scalars": np.full(table.shape, 2 * up)},
        work={"steps": np.full(table.shape, steps)},
        sizes={"train": np.full(table.shape[1], 50), "test": np.full(table.shape[1], 50)},
        seconds={"total": 2.0},
        initial={"test/accuracy": np.array(before)} if before else {},
    )


def done(one: Cell, *rounds: Sequence[float], **keys: Any) -> Result:
    return Result(one, "completed", "", numbers(outcome(*rounds, **keys)))


def made(*results: Result, cards: bool = False, **keys: Any) -> dict[str, Figure]:
    found = Results(results, {one.cell.partition_key: CARD for one in results} if cards else {})
    return {figure.name: figure for figure in figures.figures(found, Suite(name="study", **keys))}


def lines(figure: Figure) -> Lines:
    assert isinstance(figure.plot, Lines)
    return figure.plot


# --- curves


def test_curves_are_means_over_clients_with_a_band_over_pairs() -> None:
    found = made(
        done(cell("fedavg", seed=0), [0.1, 0.3], [0.5, 0.7], before=[0.0, 0.2]),
        done(cell("fedavg", seed=1), [0.3, 0.5], [0.9, 0.9], before=[0.1, 0.1]),
    )
    (line,) = lines(found["rounds"]).lines
    assert list(line.x) == [0, 1, 2]
    assert line.y == pytest.approx((10, 30, 75))
    assert line.low == pytest.approx((10, 20, 60))
    assert line.high == pytest.approx((10, 40, 90))
    assert "highest (75.0 %)" in found["rounds"].caption
    assert "2 pairs" in found["rounds"].caption


def test_a_single_pair_has_no_band_and_the_caption_says_so() -> None:
    figure = made(done(cell("fedavg"), [0.1, 0.3]))["rounds"]
    assert not lines(figure).lines[0].low
    assert "no band" in figure.caption


def test_rounds_without_a_measurement_are_no_points_but_their_costs_count() -> None:
    found = made(done(cell("fedavg"), [0.1, 0.3], [math.nan] * 2, [0.5, 0.7], up=100, steps=10))
    assert lines(found["rounds"]).lines[0].x == (1, 3)
    assert lines(found["scalars"]).lines[0].x == (200, 600)
    assert lines(found["steps"]).lines[0].x == (20, 60)


def test_who_sends_nothing_is_a_level_on_the_axis_of_scalars() -> None:
    plot = lines(made(done(cell("local"), [0.5], [0.6], up=0), done(cell("fedavg"), [0.1], [0.2]))["scalars"])
    assert plot.log
    assert [(line.label, line.look) for line in plot.lines] == [("fedavg", 0)]
    assert [(level.look, level.y) for level in plot.levels] == [(CONTROL_LOOK, 60.0)]


def test_without_any_upload_there_is_no_figure_of_scalars() -> None:
    assert "scalars" not in made(done(cell("local"), [0.5], up=0))


def test_work_that_is_far_apart_is_on_a_logarithmic_axis() -> None:
    near = made(done(cell("fedavg"), [0.1], steps=10), done(cell("fedrep"), [0.1], steps=20))
    far = made(done(cell("fedavg"), [0.1], steps=10), done(cell("fedrep"), [0.1], steps=2000))
    assert [lines(found["steps"]).log for found in (near, far)] == [False, True]


def test_a_row_keeps_its_look_in_every_figure() -> None:
    labels = ("local", "fedavg", "fedprox", "fedper")
    results = [done(cell(label, n=n), [0.5]) for n in (3, 4) for label in labels if (n, label) != (3, "fedavg")]
    looks = {
        (line.label, line.look) for f in made(*results).values() if isinstance(f.plot, Lines) for line in f.plot.lines
    }
    assert looks == {("local", CONTROL_LOOK), ("fedavg", 2), ("fedprox", 0), ("fedper", 1)}


def test_a_row_that_only_diverged_is_drawn_as_far_as_it_came() -> None:
    found = made(diverged(cell("fedavg"), 2), done(cell("local"), [0.5] * 2, [0.6] * 2, [0.7] * 2))
    assert [(line.label, len(line.x)) for line in lines(found["rounds"]).lines] == [
        ("fedavg (diverged)", 2),
        ("local", 3),
    ]
    assert "fedavg" not in found["rounds"].caption


def test_missing_and_failed_cells_leave_figures_of_the_others() -> None:
    found = made(done(cell("local"), [0.5]), Result(cell("fedavg"), "missing"), Result(cell("fedper"), "error", "no"))
    assert [line.label for line in lines(found["rounds"]).lines] == ["local"]
    assert made(Result(cell("fedavg"), "missing")) == {}


def test_of_a_loss_the_lowest_is_the_best() -> None:
    results = done(cell("local"), [0.5]), done(cell("fedavg"), [0.75])
    figure = made(*results, metric="test/loss")["rounds"]
    assert lines(figure).y_name == "test/loss"
    assert "fedavg is lowest (2.2500)" in figure.caption


# --- clients, communication, partition


def test_every_client_of_every_pair_is_a_point() -> None:
    figure = made(done(cell("fedavg", seed=0), [0.1, math.nan]), done(cell("fedavg", seed=1), [0.3, 0.5]))["clients"]
    assert isinstance(figure.plot, Strip)
    ((label, values),) = figure.plot.rows
    assert label == "fedavg"
    assert values == pytest.approx((10, 30, 50))
    assert "mean 30.0 %, from 10.0 % to 50.0 %" in figure.alt


def test_the_worst_clients_come_first() -> None:
    figure = made(done(cell("local"), [0.9, 0.2, 0.5]), done(cell("fedavg"), [0.7, 0.3, 0.1]))["worst"]
    assert isinstance(figure.plot, Heat)
    assert figure.plot.columns == ("1", "2", "0")
    assert figure.plot.rows == ("local", "fedavg")
    assert np.array(figure.plot.values) == pytest.approx(np.array([[20, 50, 90], [30, 10, 70]]))


def test_the_worst_clients_are_of_one_partition() -> None:
    results = [
        done(cell("fedavg", partition_seed=1), [0.9, 0.2]),
        done(cell("fedavg", partition_seed=2), [0.1, 0.8]),
        done(cell("local", partition_seed=2), [0.1, 0.8]),
    ]
    plot = made(*results)["worst"].plot
    assert isinstance(plot, Heat)
    assert (plot.columns, plot.rows) == (("1", "0"), ("fedavg",))


def test_communication_is_per_round_and_of_all_clients() -> None:
    plot = made(done(cell("fedavg"), [0.1, 0.1], [0.2, 0.2], up=50))["traffic"].plot
    assert isinstance(plot, Ranges)
    assert plot.rows == (("fedavg", 100.0, 200.0),)


def test_the_partition_is_clients_by_classes() -> None:
    figure = made(done(cell("fedavg"), [0.1, 0.1]), cards=True)["partition-7"]
    assert isinstance(figure.plot, Heat)
    assert (figure.plot.rows, figure.plot.columns) == (("0", "1"), ("0", "1", "3"))
    np.testing.assert_equal(np.array(figure.plot.values), [[5, 6, np.nan], [np.nan, 7, 8]])
    assert "2 classes are with one client alone" in figure.caption


def test_each_setting_has_its_figures_under_names_of_their_own() -> None:
    results = [done(cell("fedavg", n=n, dataset=d), [0.1, 0.1]) for d in ("digits", "flowers") for n in (3, 4)]
    found = Results(tuple(results))
    every = figures.figures(found, Suite(name="study"))
    assert len({figure.name for figure in every}) == len(every) == 4 * 6
    assert {figure.section for figure in every} == {
        f"dataset={d}, n={n}" for d in ("digits", "flowers") for n in (3, 4)
    }


def test_ranks_over_data_sets() -> None:
    results = []
    for dataset, accuracy in (("digits", 0.2), ("flowers", 0.5), ("stones", 0.7)):
        for number, label in enumerate(("local", "fedavg", "fedper")):
            one = cell(label, dataset=dataset)
            recipe = {**one.recipe, "dataset": {**one.recipe["dataset"], "content": dataset}}
            results.append(done(replace(one, recipe=recipe), [accuracy + 0.1 * number, accuracy]))
    plot = made(*results)["ranks"].plot
    assert isinstance(plot, Ranks)
    assert plot.rows == (("fedper", 1.0), ("fedavg", 2.0), ("local", 3.0))


# --- what a suite asks for


def sweep(**keys: Any) -> list[Result]:
    return [
        done(cell(f"fedproto (lam={lam})", "fedproto", {"lam": lam}, seed=seed), [value + 0.1 * seed] * 2)
        for lam, value in ((1.0, 0.5), (0.0, 0.1), (4.0, 0.3))
        for seed in (0, 1)
    ] + [done(cell("local"), [0.2, 0.2])]


def test_a_sweep_over_a_hyperparameter() -> None:
    found = made(*sweep(), figure={"x": "lam", "y": ["test/accuracy", "test/loss"]})
    plot = lines(found["figure-test-accuracy"])
    assert plot.x_name == "lam"
    (line,) = plot.lines
    assert (line.label, line.x) == ("fedproto", (0.0, 1.0, 4.0))
    assert line.y == pytest.approx((15, 55, 35))
    assert line.low == pytest.approx((10, 50, 30))
    assert line.high == pytest.approx((20, 60, 40))
    assert [(level.label, level.look, level.y) for level in plot.levels] == [("local", CONTROL_LOOK, 20.0)]
    assert "fedproto is highest at 1 (55.0 %)" in found["figure-test-accuracy"].caption
    assert "fedproto is lowest at 1 (2.4500)" in found["figure-test-loss"].caption
    assert next(iter(found)) == "figure-test-accuracy"


def test_a_sweep_over_the_partition_has_a_line_for_each_row_and_further_setting() -> None:
    results = [
        done(cell(label, k=k, n=n), [k / 1000] * 2) for n in (3, 4) for k in (10, 100) for label in ("local", "fedavg")
    ]
    plot = lines(made(*results, figure={"x": "k", "y": "test/accuracy"})["figure-test-accuracy"])
    assert [line.label for line in plot.lines] == ["local, n=3", "local, n=4", "fedavg, n=3", "fedavg, n=4"]
    assert all(list(line.x) == [10, 100] and not line.low for line in plot.lines)
    assert len({line.look for line in plot.lines}) == 4


@pytest.mark.parametrize(("values", "log"), [((0.1, 1.0, 100.0), True), ((0.0, 0.1, 100.0), False), ((1, 40), False)])
def test_values_that_are_far_apart_have_a_logarithmic_axis(values: Sequence[float], log: bool) -> None:
    results = [done(cell(f"fedproto (lam={lam})", "fedproto", {"lam": lam}), [0.5] * 2) for lam in values]
    assert lines(made(*results, figure={"x": "lam", "y": "test/accuracy"})["figure-test-accuracy"]).log is log


def test_a_sweep_over_words_has_them_on_its_axis() -> None:
    results = [done(cell("fedavg", dataset=name), [0.1] * 2) for name in ("flowers", "digits")]
    plot = lines(made(*results, figure={"x": "dataset", "y": "test/accuracy"})["figure-test-accuracy"])
    assert (plot.ticks, plot.lines[0].x) == (("flowers", "digits"), (0, 1))


def test_there_is_no_figure_of_what_the_cells_do_not_have() -> None:
    for x, y in (("mu", "test/accuracy"), ("lam", "test/other")):  # of rows that were not selected
        assert not any(name.startswith("figure-") for name in made(*sweep(), figure={"x": x, "y": y}))


# --- drawn

KINDS = [
    Lines("x", "y", (plots.Line(NASTY, 0, (1, 10), (1, 2), (0, 1), (2, 3)),), (plots.Level("b", -1, 1.5),), log=True),
    Lines("x", "y", (plots.Line("_hidden", 9, (0, 1), (1, 2)),), dots=True, ticks=(NASTY, "b")),
    Strip("x", ((NASTY, (1.0, 2.0, 4.0)), ("many", tuple(range(1000))))),
    Ranges("x", ("up", "down"), ((NASTY, 10, 2000), ("local", 0, 0), ("half", 0, 5))),
    Heat("x", "y", ("0", NASTY), ("a", "b"), ((1, math.nan), (2, 3)), "n"),
    Heat("x", "y", tuple(map(str, range(100))), tuple(map(str, range(100))), ((1.0,) * 100,) * 100, "n"),
    Ranks(((NASTY, 1.0), ("b", 2.0)), ((NASTY, "b"),)),
    Scatter((Group(NASTY, 0, ((0, 1), (1, 2))),), (Group("prototype", 0, ((1, 1),)),)),
]


@pytest.mark.parametrize("plot", KINDS, ids=lambda plot: type(plot).__name__)
def test_every_kind_is_drawn_the_same_each_time_whatever_the_user_has_set(plot: plots.Plot) -> None:
    figure = Figure("one", "", "t", "c", "a", plot)
    first = plots.svg(figure), plots.inline(figure), plots.pdf(figure)
    with matplotlib.rc_context({"font.size": 30, "text.usetex": False, "axes.grid": True, "svg.hashsalt": None}):
        again = plots.svg(figure), plots.inline(figure), plots.pdf(figure)
    assert again == first
    assert first[2].startswith(b"%PDF")
    assert not re.search(rb"CreationDate|/Producer|/Creator", first[2])


@pytest.mark.parametrize("plot", KINDS, ids=lambda plot: type(plot).__name__)
def test_every_kind_is_well_formed_with_labels_as_text_and_no_address_in_it(plot: plots.Plot) -> None:
    text = plots.inline(Figure("one", "", "t", "c", "a", plot))
    root = ET.fromstring(text)
    assert {element.tag.rpartition("}")[2] for element in root.iter()}.isdisjoint(
        {"script", "style", "metadata", "foreignObject"} - {"style"}
    )
    assert "http" not in text
    assert "<script" not in text
    ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
    assert len(set(ids)) == len(ids)
    assert all(name.startswith("one-") for name in ids)
    used = {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)}
    assert used == set(ids)


def test_a_label_is_shown_as_it_is() -> None:
    text = plots.inline(Figure("one", "", "t", "c", "a", Strip("x", ((r"a<b & $x_1$ \%", (1.0, 2.0)),))))
    shown = ["".join(element.itertext()) for element in ET.fromstring(text).iter() if element.tag.endswith("text")]
    assert r"a<b & $x_1$ \%" in shown


def test_a_page_shows_figures_in_its_own_colours() -> None:
    figure = Figure("one", "", "t", "c", "a", KINDS[0])
    assert plots.INK in plots.svg(figure)
    assert plots.INK not in plots.inline(figure)
    assert "currentColor" in plots.inline(figure)


def test_long_labels_are_cut() -> None:
    long = replace(lines(Figure("", "", "", "", "", KINDS[0])), levels=(plots.Level("x" * 300, 0, 1.0),))
    assert "x" * 33 not in plots.inline(Figure("one", "", "t", "c", "a", long))


def test_counts_in_three_digits() -> None:
    assert [plots.compact(n) for n in (0, 12, 999, 3550, 436800, 999_900, 2.2e8)] == [
        "0",
        "12",
        "999",
        "3.55k",
        "437k",
        "1M",
        "220M",
    ]
