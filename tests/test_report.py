"""The comparison: where cells stand, what the numbers come to by hand, and that labels stay text in every format."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from fedbench.cells import Cell
from fedbench.config import Suite
from fedbench.data import About
from fedbench.federation import Outcome
from fedbench.reference import Reference
from fedbench.report import FORMATS, compare, markdown, terminal
from fedbench.report.table import Comparison, Entry, Table
from fedbench.results import Result, Results, numbers

PROVENANCE = {
    "fedbench": "0.1.0",
    "torch": "2.14.1",
    "commit": None,
    "host": "secret-host",
    "cpu": "Some CPU",
    "device": "cpu",
    "started": "2026-01-01T00:00:00.000000+00:00",
    "seconds": 8.0,
}
CARD = {
    "hash": "0123456789abcdef" * 4,
    "totals": {"clients": 2, "entropy_bits": 1.5},
    "per_client": {
        "train": [30, 1200],
        "validation": [0, 0],
        "test": [90, 10],
        "classes": [[0, 1], [1, 2, 3]],
        "samples": [[15, 15], [400, 400, 400]],
    },
}


def cell(label: str, algorithm: str = "", options: Any = None, **changes: Any) -> Cell:
    """Return a cell; changes are of the partition (n, k), the training (rounds, lr), the data set, models and seeds."""
    partition = {"n": changes.get("n", 3), "k": changes.get("k", 100), "clients": 2}
    training = {"rounds": changes.get("rounds", 2), "optimizer": {"lr": changes.get("lr", 0.01)}}
    recipe = {
        "protocol": 1,
        "dataset": {"name": changes.get("dataset", "digits"), "options": {}, "content": "d" * 64},
        "partition": {"name": "nway_kshot", "options": partition, "seed": changes.get("partition_seed", 7)},
        "models": changes.get("models", [{"name": "cnn", "options": {"channels": 20}}]),
        "training": training,
        "method": {"name": algorithm or label, "options": options or {}, "revision": 1},
        "seed": changes.get("seed", 0),
    }
    return Cell("study", label, recipe, changes.get("specs", {}), control=(algorithm or label) == "local")


def outcome(*accuracy: float, test: tuple[int, ...] = (90, 10), up: int = 1000, rounds: int = 2) -> Outcome:
    """Return an outcome whose last round has these accuracies, and whose rounds before were perfect."""
    shape = rounds, len(accuracy)
    metric = np.ones(shape)
    metric[-1] = accuracy
    return Outcome(
        status="completed",
        message="",
        metrics={"test/accuracy": metric, "test/loss": 3 - metric},
        traffic={"up/scalars": np.full(shape, up)},
        work={"steps": np.full(shape, 600.0)},
        sizes={"train": np.array(test), "test": np.array(test)},
        seconds={"total": 2.0},
    )


def done(one: Cell, *accuracy: float, **keys: Any) -> Result:
    return Result(one, "completed", "", numbers(outcome(*accuracy, **keys)), PROVENANCE)


def diverged(one: Cell, rounds: int) -> Result:
    base = outcome(0.5, 0.5, rounds=rounds)
    out = Outcome("diverged", "", base.metrics, base.traffic, base.work, base.sizes, base.seconds)
    message = f"round {rounds + 1}: client 1 sent 'w' with values that are not finite"
    return Result(one, "diverged", message, numbers(out))


def compared(
    *results: Result,
    metric: str = "test/accuracy",
    name: str = "study",
    description: str = "",
    further: Sequence[str] = (),
    reference: Reference | None = None,
) -> Comparison:
    contents = [result.cell.recipe["dataset"]["content"] for result in results]
    found = Results(
        results,
        {results[0].cell.partition_key: CARD},
        dict.fromkeys(contents, About("Some digits", "a museum", "CC0", "A. Author, 1998")),
    )
    suite = Suite(name=name, description=description, metric=metric, further_metrics=list(further))
    return compare(found, suite, reference)


def entry(comparison: Comparison, row: int = 0, column: int = 0, block: int = 0) -> Entry:
    found = comparison.blocks[block].rows[row].entries[column]
    assert found
    return found


# --- numbers


def test_one_cell_by_hand() -> None:
    comparison = compared(done(cell("fedavg"), 1.0, 0.0))
    one = entry(comparison)
    assert (one.mean, one.std, one.pooled, one.worst) == (0.5, 0.5, 0.9, 0.0)
    table = comparison.tables[0]
    assert dict(zip(table.head, table.rows[0], strict=True)) == {
        "row": "fedavg",
        "test/accuracy (%)": "50.00 ± 50.00",
        "± seeds": "",
        "pooled": "90.00",
        "worst client": "0.00",
        "rounds": "2",
        "up ×10³": "2.00",
        "client-steps": "2,400",
        "seconds": "2.0",
    }


def test_spread_over_clients_and_over_seeds_are_apart() -> None:
    accuracies = [(1.0, 0.0), (0.8, 0.6), (0.9, 0.9)]
    results = [done(cell("fedavg", seed=seed), *values) for seed, values in enumerate(accuracies)]
    one = entry(compared(*results))
    assert one.mean == pytest.approx(2.1 / 3)
    assert one.std == pytest.approx((0.5 + 0.1 + 0.0) / 3)
    assert one.spread == pytest.approx(math.sqrt((0.2**2 + 0.0 + 0.2**2) / 2))
    assert one.worst == pytest.approx((0.0 + 0.6 + 0.9) / 3)
    assert (one.done, one.planned) == (3, 3)


def test_partition_seeds_and_run_seeds_make_pairs() -> None:
    results = [done(cell("fedavg", seed=s, partition_seed=p), 0.1 * s, 0.1 * p) for p in (1, 2) for s in (3, 4)]
    comparison = compared(*results)
    assert len(comparison.blocks) == 1
    assert entry(comparison).planned == 4
    assert entry(comparison).mean == pytest.approx(0.25)


# --- the control


def test_rows_not_better_than_the_control_are_flagged() -> None:
    better, same, worse = (0.8, 0.8), (0.7, 0.7), (0.6, 0.6)
    comparison = compared(
        done(cell("fedavg"), *better),
        done(cell("fedprox"), *same),
        done(cell("fedper"), *worse),
        done(cell("alone", "local"), *same),
    )
    assert [row.entries[0].beats_control for row in comparison.blocks[0].rows if row.entries[0]] == [
        True,
        False,
        False,
        None,
    ]
    assert [row[1] for row in comparison.tables[0].rows] == [
        "80.00 ± 0.00",
        "70.00 ± 0.00†",
        "60.00 ± 0.00†",
        "70.00 ± 0.00",
    ]


def test_of_a_loss_less_is_better() -> None:
    comparison = compared(done(cell("local"), 0.5, 0.5), done(cell("fedavg"), 0.6, 0.6), metric="test/loss")
    assert entry(comparison, 1).beats_control is True
    assert comparison.tables[0].rows[1][:2] == ("fedavg", "2.4000 ± 0.0000")


def test_the_control_is_compared_on_the_seeds_that_both_have() -> None:
    comparison = compared(
        done(cell("local", seed=0), 0.2, 0.2),
        diverged(cell("local", seed=1), 1),
        done(cell("fedavg", seed=0), 0.3, 0.3),
        done(cell("fedavg", seed=1), 0.1, 0.1),
        Result(cell("fedprox", seed=0), "missing"),
        done(cell("fedprox", seed=1), 0.9, 0.9),
    )
    assert entry(comparison, 1).beats_control is True
    assert entry(comparison, 2).beats_control is None


def test_each_block_and_column_has_its_own_control() -> None:
    values = {("digits", 3): 0.5, ("digits", 5): 0.7, ("flowers", 3): 0.5, ("flowers", 5): 0.3}
    results = [
        result
        for (dataset, n), value in values.items()
        for result in (
            done(cell("fedavg", dataset=dataset, n=n), value, value),
            done(cell("local", dataset=dataset, n=n), 0.4, 0.6),
        )
    ]
    comparison = compared(*results)
    assert [entry(comparison, 0, column, block).beats_control for block in (0, 1) for column in (0, 1)] == [
        False,
        True,
        False,
        False,
    ]


def test_mixed_models_have_the_control_with_the_same_models() -> None:
    mixed = [{"name": "cnn", "options": {"channels": width}} for width in (18, 22)]
    comparison = compared(
        done(cell("local"), 0.5, 0.5),
        done(cell("local-mh", "local", models=mixed), 0.9, 0.9),
        done(cell("fedproto"), 0.7, 0.7),
        done(cell("fedproto-mh", "fedproto", models=mixed), 0.7, 0.7),
    )
    assert entry(comparison, 2).beats_control is True
    assert entry(comparison, 3).beats_control is False


def test_without_a_control_nothing_is_flagged_and_a_note_says_so() -> None:
    comparison = compared(done(cell("fedavg"), 0.5, 0.5))
    assert entry(comparison).beats_control is None
    assert comparison.notes == ("No row is a control, where everybody trains alone, so none is marked †.",)


# --- which differences are real


def repeated(**means: Sequence[float]) -> Iterator[Result]:
    """Yield cells with these means over two clients that differ, one for each run seed."""
    for label, values in means.items():
        for seed, mean in enumerate(values):
            yield done(cell(label, seed=seed), mean - 0.05, mean + 0.05)


STUDY = {
    "local": (0.50, 0.60, 0.55, 0.52, 0.58, 0.54),
    "fedavg": (0.51, 0.60, 0.54, 0.53, 0.57, 0.55),
    "fedproto": (0.71, 0.79, 0.76, 0.70, 0.79, 0.75),
    "fedper": (0.70, 0.80, 0.75, 0.71, 0.78, 0.74),
    "fedrep": (0.40, 0.51, 0.44, 0.43, 0.49, 0.45),
}


def test_every_row_is_tested_against_the_control_and_against_the_best() -> None:
    comparison = compared(*repeated(**STUDY))
    verdicts = {row[0]: row[-1] for row in table(comparison, "against the control").rows}
    assert verdicts == {
        "fedavg": "not distinguishable",
        "fedproto": "better",
        "fedper": "better",
        "fedrep": "worse",
    }
    against_best = table(comparison, "against the best")
    assert against_best.head == ("row", "against", "pairs", "difference", "interval", "p", "p (Wilcoxon)", "verdict")
    assert {row[0]: row[-1] for row in against_best.rows} == {
        "local": "worse",
        "fedavg": "worse",
        "fedper": "not distinguishable",
        "fedrep": "worse",
    }
    assert [row[1] for row in comparison.tables[0].rows] == [
        "54.83 ± 5.00",
        "55.00 ± 5.00",
        "75.00 ± 5.00 ●",
        "74.67 ± 5.00 ○",
        "45.33 ± 5.00†",
    ]
    fedrep = table(comparison, "against the control").rows[-1]
    assert fedrep[1:4] == ("local", "6", "-9.50")
    assert float(fedrep[6]) == pytest.approx(4 * 2**-5)  # the least that six pairs can give, of four comparisons
    assert "6 pairs of seeds: the Wilcoxon test cannot go below p = 0.0312" in comparison.notes[0]
    assert any("The spread over clients enters none of it" in sentence for sentence in comparison.reading)


def test_the_spread_over_clients_changes_no_verdict() -> None:
    def verdicts(width: float) -> list[str]:
        cells = [
            done(cell(label, seed=seed), mean - width, mean + width)
            for label, values in STUDY.items()
            for seed, mean in enumerate(values)
        ]
        return [" ".join(row[2:]) for row in table(compared(*cells), "against the control").rows]

    assert verdicts(0.0) == verdicts(0.2)


def test_with_a_single_pair_nothing_is_tested() -> None:
    comparison = compared(*repeated(local=(0.5,), fedavg=(0.9,)))
    assert not [table.title for table in comparison.tables if "against" in table.title]
    assert [row[1] for row in comparison.tables[0].rows] == ["50.00 ± 5.00", "90.00 ± 5.00"]
    assert comparison.notes == ("1 pair of seeds can show nothing: whether another one would say the same is unknown.",)
    assert not any("Holm" in sentence for sentence in comparison.reading)


def test_only_pairs_that_both_have_are_compared() -> None:
    cells = [*repeated(local=(0.5, 0.6, 0.7)), *repeated(fedavg=(0.6, 0.75, 0.1))][:-1]
    comparison = compared(*cells, diverged(cell("fedavg", seed=2), 1))
    (line,) = table(comparison, "against the control").rows
    assert line[:4] == ("fedavg", "local", "2", "+12.50")


def over(data_sets: Sequence[str], **scores: Sequence[float]) -> Iterator[Result]:
    for label, values in scores.items():
        for data_set, value in zip(data_sets, values, strict=True):
            one = cell(label, dataset=data_set)
            one.recipe["dataset"]["content"] = data_set
            yield done(one, value, value)


def test_rows_are_ranked_over_data_sets() -> None:
    data_sets = ["digits", "flowers", "hearts"]
    comparison = compared(*over(data_sets, local=(0.5, 0.6, 0.7), fedavg=(0.4, 0.7, 0.6), fedproto=(0.9, 0.9, 0.9)))
    assert comparison.ranking
    assert comparison.ranking.labels == ("fedproto", "local", "fedavg")
    assert comparison.ranking.ranks == pytest.approx((1, 7 / 3, 8 / 3))
    assert table(comparison, "Ranks over 3 data sets").rows[1] == ("local", "2.33")
    assert "over the 3 data sets: p = 0.097" in comparison.notes[-1]


def test_rows_that_are_not_complete_are_not_ranked() -> None:
    scores = {"local": (0.5, 0.6), "fedavg": (0.4, 0.7), "fedproto": (0.9, 0.9), "fedper": (0.8, 0.8)}
    cells = list(over(["digits", "flowers"], **scores))
    assert compared(*cells[:-1], Result(cells[-1].cell, "missing")).ranking == compared(*cells[:-2]).ranking
    assert compared(*cells[:-3], Result(cells[-3].cell, "missing")).ranking is None
    assert compared(*cells[::2]).ranking is None  # one data set


# --- cells without a number


def test_cells_without_a_number_say_why() -> None:
    comparison = compared(
        done(cell("local"), 0.5, 0.5),
        diverged(cell("fedavg"), 2),
        Result(cell("fedprox"), "error", "RuntimeError: out of luck"),
        Result(cell("fedper"), "missing"),
    )
    assert [row[1] for row in comparison.tables[0].rows] == ["50.00 ± 0.00", "diverged in round 3", "failed", "missing"]
    assert all(set(row[2:]) == {""} for row in comparison.tables[0].rows[1:])
    assert comparison.notes == (
        "fedavg, partition_seed=7, seed=0: diverged in round 3: client 1 sent 'w' with values that are not finite.",
        "fedprox, partition_seed=7, seed=0: failed: RuntimeError: out of luck.",
        "fedper, partition_seed=7, seed=0: missing.",
    )


def test_a_mean_over_some_of_the_seeds_says_so() -> None:
    comparison = compared(
        done(cell("fedavg", seed=0), 0.5, 0.5),
        diverged(cell("fedavg", seed=1), 4),
        diverged(cell("fedavg", seed=2), 1),
        Result(cell("fedavg", seed=3), "error", "no"),
    )
    assert comparison.tables[0].rows[0][1] == "50.00 ± 0.00 (1 of 4; diverged in rounds 2, 5; failed)"


def test_a_metric_that_a_row_does_not_have() -> None:
    with_other = outcome(0.5, 0.5)
    with_other.metrics["test/accuracy/prototype"] = np.full((2, 2), 0.25)
    other = Result(cell("fedproto"), "completed", "", numbers(with_other), PROVENANCE)
    comparison = compared(other, done(cell("local"), 0.5, 0.5), metric="test/accuracy/prototype")
    assert [row[1] for row in comparison.tables[0].rows] == ["25.00 ± 0.00", "not measured"]


def test_a_store_without_any_outcome_still_has_a_report() -> None:
    comparison = compared(Result(cell("local"), "missing"), Result(cell("fedavg"), "missing"))
    assert [row[1] for row in comparison.tables[0].rows] == ["missing", "missing"]
    assert "missing" in markdown.render(comparison)


def test_clients_without_test_samples_are_counted() -> None:
    comparison = compared(done(cell("local"), 0.5, math.nan, 0.7, test=(5, 0, 15)))
    assert (entry(comparison).mean, entry(comparison).pooled) == (0.6, 0.65)
    assert "all rows, partition_seed=7: 1 of 3 clients have no value" in comparison.notes[0]
    results = [
        done(cell(label, seed=seed), 0.5, math.nan, test=(5, 0)) for label in ("local", "fedavg") for seed in (0, 1)
    ]
    some = compared(*results, done(cell("fedprox"), 0.5, 0.6))
    assert [note for note in some.notes if "no value" in note] == [
        "local, fedavg, partition_seed=7: 1 of 2 clients have no value (no samples to measure on) and are left out of "
        "means."
    ]


# --- beside the metric

PUBLISHED = Reference(
    "paper.csv",
    ("n", "method"),
    {
        (3.0, "local"): {"accuracy_mean": 94.05, "accuracy_std": 2.93, "rounds": 0, "params_thousands": 0},
        (3.0, "fedavg"): {"accuracy_mean": 40.0, "accuracy_std": 6.48, "rounds": 150, "params_thousands": 4},
        (4.0, "fedavg"): {"accuracy_mean": 50.5, "accuracy_std": math.nan},
    },
)


def table(comparison: Comparison, title: str) -> Table:
    (found,) = (table for table in comparison.tables if title in table.title)
    return found


def test_what_was_published_stands_beside_the_numbers() -> None:
    comparison = compared(*planned(n=(3, 4)), Result(cell("fedprox"), "missing"), reference=PUBLISHED)
    assert comparison.blocks[0].rows[1].entries[0] is not None
    found = table(comparison, "beside paper.csv")
    assert found.texts == 2
    assert found.head[2:6] == ("test/accuracy (%)", "theirs", "gap", "rounds")
    assert found.rows == (
        ("local", "n=3", "50.00 ± 0.00", "94.05 ± 2.93", "-44.05", "2", "0", "0.60", "0", ""),
        ("fedavg", "n=3", "50.00 ± 0.00†", "40.00 ± 6.48", "+10.00", "2", "150", "0.60", "4", "-85.0 %"),
        ("fedavg", "n=4", "50.00 ± 0.00†", "50.50", "-0.50", "2", "", "0.80", "", ""),
    )
    assert any("paper.csv says for the same n, method" in sentence for sentence in comparison.reading)
    assert "beside paper.csv" in page(comparison)
    assert "94.05 ± 2.93" in screen(comparison)


def test_what_was_published_stands_beside_cells_that_are_missing() -> None:
    comparison = compared(Result(cell("local"), "missing"), reference=PUBLISHED)
    assert table(comparison, "beside").rows == (("local", "missing", "94.05 ± 2.93", "", "", "0", "", "0", ""),)


def test_without_a_reference_nothing_is_said_about_one() -> None:
    comparison = compared(*planned(n=(3, 4)))
    assert not any(
        "theirs" in text for text in (*comparison.reading, *(t.title + str(t.head) for t in comparison.tables))
    )


def test_further_metrics_have_a_table() -> None:
    first = outcome(1.0, 0.0)
    first.metrics["test/accuracy/head"] = np.array([[1.0, 1.0], [0.2, 0.4]])
    results = [
        Result(cell("fedavg", seed=0), "completed", "", numbers(first), PROVENANCE),
        done(cell("fedavg", seed=1), 0.5, 0.5),
        Result(cell("fedprox"), "missing"),
    ]
    comparison = compared(*results, further=["test/loss", "test/accuracy/head"])
    assert np.array(entry(comparison).further) == pytest.approx(np.array([[2.5, 0.25], [0.3, 0.1]]))
    found = table(comparison, "further metrics")
    assert found.head == ("row", "test/loss", "test/accuracy/head (%)")
    assert found.rows == (("fedavg", "2.5000 ± 0.2500", "30.00 ± 10.00"),)
    found = table(compared(*results, further=["test/other"]), "further metrics")  # of a row that was not selected
    assert found.rows == (("fedavg", ""),)


# --- where cells stand


def planned(labels: tuple[str, ...] = ("local", "fedavg"), **grid: tuple[Any, ...]) -> Iterator[Result]:
    """Yield results in the order in which a suite's grid expands: the last fact varies fastest, rows innermost."""
    points: list[dict[str, Any]] = [{}]
    for name, values in grid.items():
        points = [{**point, name: value} for point in points for value in values]
    for point in points:
        for label in labels:
            yield done(cell(label, **point), 0.5, 0.5, up=point.get("n", 1) * 100)


def places(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    return {block.title: block.columns for block in comparison.blocks}


def test_what_varies_last_makes_columns_as_in_the_paper() -> None:
    comparison = compared(*planned(n=(3, 4, 5)))
    assert places(comparison) == {"": ("n=3", "n=4", "n=5")}
    main, further, clients = comparison.tables
    assert main.head == ("row", "n=3", "± seeds", "n=4", "± seeds", "n=5", "± seeds", "rounds", "up ×10³")
    assert main.rows[1][-2:] == ("2", "0.60 / 0.80 / 1.00")
    assert [row[:2] for row in further.rows[:4]] == [
        ("local", "n=3"),
        ("local", "n=4"),
        ("local", "n=5"),
        ("fedavg", "n=3"),
    ]
    assert clients.rows[0] == ("local", "n=3", "50.00", "0.0000", "1.0000")


def test_everything_else_that_varies_makes_blocks() -> None:
    comparison = compared(*planned(dataset=("digits", "flowers"), k=(20, 100), n=(3, 4)))
    assert places(comparison) == {
        f"dataset={dataset}, k={k}": ("n=3", "n=4") for dataset in ("digits", "flowers") for k in (20, 100)
    }
    assert len(comparison.tables) == 12


def test_what_follows_from_something_else_makes_no_block_of_its_own() -> None:
    results = [*planned(dataset=("digits",), k=(100,), n=(3, 4)), *planned(dataset=("flowers",), k=(50,), n=(3, 4))]
    assert list(places(compared(*results))) == ["dataset=digits (k=100)", "dataset=flowers (k=50)"]
    results = [*planned(dataset=("digits",), n=(3,)), *planned(dataset=("flowers",), n=(4,))]
    assert places(compared(*results)) == {"": ("n=3 (dataset=digits)", "n=4 (dataset=flowers)")}


def test_settings_of_a_row_make_neither_blocks_nor_columns() -> None:
    rounds = {
        ("digits", "local"): 100,
        ("digits", "fedproto"): 50,
        ("flowers", "local"): 90,
        ("flowers", "fedproto"): 60,
    }
    results = [
        done(cell(label, options={"lam": 1.0}, rounds=value, dataset=dataset), 0.5, 0.5)
        for (dataset, label), value in rounds.items()
    ]
    comparison = compared(*results)
    assert places(comparison) == {"": ("dataset=digits", "dataset=flowers")}
    assert comparison.rows.rows == (
        ("local", "local", "lam=1.0, rounds=100 / 90"),
        ("fedproto", "fedproto", "lam=1.0, rounds=50 / 60"),
    )


def test_a_learning_rate_that_all_rows_vary_makes_columns() -> None:
    assert places(compared(*planned(lr=(0.01, 0.1)))) == {"": ("optimizer.lr=0.01", "optimizer.lr=0.1")}


def test_two_settings_of_one_label_never_share_a_place() -> None:
    results = [done(cell("fedproto", options={"lam": lam}), lam / 4, lam / 4) for lam in (0.0, 1.0)]
    comparison = compared(*results)
    assert places(comparison) == {"": ("method.lam=0.0", "method.lam=1.0")}
    assert entry(comparison, 0, 1).planned == 1


def test_a_cell_that_the_suite_does_not_have_is_a_dash() -> None:
    comparison = compared(*planned(n=(3, 4)), *planned(("fedper",), n=(4,)))
    assert comparison.blocks[0].rows[2].entries[0] is None
    assert comparison.tables[0].rows[2] == ("fedper", "–", "", "50.00 ± 0.00†", "", "2", "0.80")
    assert len(comparison.tables[1].rows) == 5


# --- pages


def page(comparison: Comparison) -> str:
    return markdown.render(comparison)


def screen(comparison: Comparison, width: int = 120) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal.render(comparison))
    return capture.get()


def cells_of(text: str, label: str) -> list[str]:
    """Return the cells of the first table row of a Markdown page that begins with a label."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
    return [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_page_has_numbers_partition_and_provenance() -> None:
    description = "What this is.\n\nSecond\nparagraph."
    one = done(cell("fedproto", options={"lam": 1.0, "distance": "mse"}), 1.0, 0.0)
    text = page(compared(one, done(cell("local"), 0.4, 0.4), description=description))
    assert text.startswith("# study\n\nWhat this is.\n\nSecond paragraph.\n\n| row ")
    assert cells_of(text, "fedproto")[1:5] == ["50.00 ± 50.00", "", "90.00", "0.00"]
    assert "| fedproto | fedproto  | lam=1.0, distance=mse |" in text
    partition = cells_of(text, "nway_kshot, seed=7")
    assert partition[1:] == ["2", "30 to 1,200", "0", "10 to 90", "2 to 3", "1.50", "0123456789abcdef"]
    for said in (
        "- protocol: 1\n",
        "- seeds: partition 7 with run 0\n",
        "- data digits: Some digits; a museum; CC0; A. Author, 1998; sha256 dddddddddddddddd\n",
        "- torch: 2.14.1\n",
        "- cpu: Some CPU\n",
        "- wall time: 16.0 s for 2 cells, at most 8.0 s for one\n",
        "- started: 2026-01-01T00:00:00\n",
        f"- cells of local: {cell('local').key}\n",
        "n=3, k=100, clients=2, rounds=2, optimizer.lr=0.01",
    ):
        assert said in text
    assert re.search(r"- suite: study, sha256 of its content [0-9a-f]{16}\n", text)
    assert "secret-host" not in text
    assert "commit" not in text


def test_a_suite_with_other_content_has_another_hash() -> None:
    one = done(cell("local"), 0.5, 0.5)
    assert len({compared(one, description=text).provenance[0] for text in ("a", "b", "a")}) == 2


def test_a_plugin_in_a_file_is_called_what_the_suite_calls_it() -> None:
    name = "Mine@" + "ab" * 32
    mine = cell("mine", name, specs={name: "./mine.py:Mine"})
    comparison = compared(done(mine, 0.5, 0.5), done(cell("local"), 0.4, 0.4))
    assert comparison.rows.rows[0][:2] == ("mine", "./mine.py:Mine")
    assert ("plugin ./mine.py:Mine", "sha256 abababababababab") in comparison.provenance


AWKWARD = "a|b *c* _d_ `e` <f> [g](h) $i$ & \\ [bold]"


@pytest.mark.parametrize("render", [page, screen])
def test_the_same_results_give_the_same_bytes(render: Callable[[Comparison], str]) -> None:
    def made() -> str:
        return render(compared(*planned(dataset=("digits", "flowers"), n=(3, 4))))

    assert made() == made()


def test_labels_stay_text_in_markdown() -> None:
    said = "# no heading\n- no item\n\n1. neither"
    results = [done(cell(label, "local"), 0.5, 0.5) for label in (AWKWARD, "fed_heart_2", "- no item", "<script>")]
    text = page(compared(*results, description=said, name="a_b"))
    assert "fed_heart_2" in text
    tokens = MarkdownIt().enable("table").parse(text)
    shown = ["".join(part.content for part in token.children or ()) for token in tokens if token.type == "inline"]
    assert shown[:3] == ["a_b", "# no heading - no item", "1. neither"]
    assert shown[3:13] == [*compared(*results).tables[0].head, AWKWARD]
    assert {"fed_heart_2", "- no item", "<script>"} < set(shown)
    kinds = {token.type for token in tokens} | {part.type for token in tokens for part in token.children or ()}
    assert not {kind for kind in kinds if re.match("code|em|strong|link|html|ordered|fence", kind)}


def test_labels_stay_text_on_the_terminal() -> None:
    seen = screen(compared(done(cell(AWKWARD, "local"), 0.5, 0.5)), width=200)
    assert AWKWARD in seen
    assert "50.00 ± 0.00" in seen


def test_numbers_stay_whole_at_80_columns() -> None:
    labels = ("local", "fedavg", "fedproto-mh")
    results = [done(cell(label), 0.5, 0.5, up=16_986_640 // 2) for label in labels]
    seen = screen(compared(*results, diverged(cell("fedprox"), 2)), width=80)
    assert max(map(len, seen.splitlines())) <= 80
    for text in ("fedproto-mh", "50.00 ± 0.00†", " 16,986.64 ", " 2,400 ", "diverged in ", "†: not better than"):
        assert text in seen


def test_a_table_too_wide_for_the_screen_is_folded_and_not_cut() -> None:
    seen = screen(compared(*planned(n=(3, 4, 5, 6, 7, 8))), width=40)
    assert "…" not in seen
    assert max(map(len, seen.splitlines())) <= 40


def test_markdown_is_a_format() -> None:
    comparison = compared(done(cell("local"), 0.5, 0.5))
    assert FORMATS["md"]["report.md"](comparison, ()) == page(comparison)
