"""A results file gives back what a report needs, exactly, and says in one line what is wrong with it."""

import csv
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from test_report import AWKWARD, CARD, PROVENANCE, PUBLISHED, cell, diverged, done

from fedbench import report, results_csv
from fedbench.config import Suite
from fedbench.data import About
from fedbench.errors import InputError
from fedbench.federation import Outcome
from fedbench.reference import Reference
from fedbench.report import compare
from fedbench.results import Numbers, Result, Results, numbers

nan = math.nan
SUITE = Suite.model_validate(
    {
        "name": "study",
        "description": 'One line,\n\nand "another".',
        "further_metrics": ["test/loss", "test/never"],
        "methods": {"local": {}, "mine": {"method": "./mine.py:Mine", "lam": 0.1}},
        "figure": {"x": "n", "y": ["local/loss"]},
    }
)


def awkward_outcome(seed: int) -> Outcome:
    """Return an outcome with unevaluated rounds, clients without values and numbers that are easily lost."""
    rng = np.random.default_rng(seed)
    accuracy = rng.uniform(size=(5, 3))
    accuracy[[1, 3]] = nan
    accuracy[:, 2] = nan
    accuracy[4] = 1 / 3, 0.1 + 0.2, nan
    loss = rng.normal(size=(5, 3)) * 1e-9
    loss[2, 1], loss[4] = nan, (math.inf, -0.0, 1e300)
    return Outcome(
        status="completed",
        message="",
        metrics={
            "test/accuracy": accuracy,
            "test/loss": loss,
            "test/never": np.full((5, 3), nan),
            "test/accuracy/head": accuracy / 3,
            "local/loss": np.abs(rng.normal(size=(5, 3))),
            "local/accuracy": accuracy,
        },
        traffic={
            "up/scalars": np.array([[0, 0, 0], [7, 7, 7], [7, 7, 7], [9, 0, 0], [7, 7, 7]]),
            "down/scalars": np.zeros((5, 3), np.int64),
        },
        work={"steps": np.full((5, 3), 2.0), "seconds": rng.uniform(size=(5, 3))},
        sizes={"train": np.array([5, 2**40, 3]), "validation": np.zeros(3, np.int64), "test": np.array([2, 2, 0])},
        seconds={"total": 1 / 7, "training": 0.1},
        initial={"test/accuracy": np.array([0.25, 0.5, nan]), "test/never": np.full(3, nan)},
    )


def awkward(reference: bool = True) -> tuple[Results, Suite, Reference | None]:
    """Return results with every status, the same work under two labels, and labels that have to be escaped."""
    mine = "Mine@" + "ab" * 32
    at_once = Outcome("diverged", "round 1: loss", {}, {}, {}, {"train": np.array([3])}, {"total": 0.1})
    made = [
        Result(cell(label, "local", seed=seed), "completed", "", numbers(awkward_outcome(seed)), PROVENANCE)
        for seed in (0, 1, 2)
        for label in ("local", "again", AWKWARD)
    ]
    cells = (
        *made,
        done(cell("mine", mine, n=4, specs={mine: "./mine.py:Mine"}, options={"lam": 0.1, "name": "ü"}), 0.5, nan),
        diverged(cell("fedavg", n=4), 2),
        Result(cell("fedavg", n=3), "diverged", "round 1: loss", numbers(at_once), PROVENANCE),
        Result(cell("fedper"), "error", 'ValueError: "a", b'),
        Result(cell("fedrep"), "missing"),
    )
    sources = {"d" * 64: About("Some digits", "a museum", "CC0")}
    return Results(cells, {cells[0].cell.partition_key: CARD}, sources), SUITE, PUBLISHED if reference else None


def written(path: Path, reference: bool = True) -> Path:
    file = path / "results.csv"
    file.write_text(results_csv.dumps(*awkward(reference)), encoding="utf-8", newline="\n")
    return file


def kept(found: Numbers) -> dict[str, object]:
    """Return what a file holds of the numbers."""
    asked = ("test/accuracy", "test/loss", "test/never", "local/loss")
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    values["last"] = {name: v for name, v in found.last.items() if name in asked or name.startswith("test/")}
    values["at"] = {name: v for name, v in found.at.items() if name in values["last"]}
    values["curves"] = {name: v for name, v in found.curves.items() if name in asked}
    values["initial"] = {name: v for name, v in found.initial.items() if not math.isnan(v)}
    return values


def test_the_numbers_come_back_exactly(tmp_path: Path) -> None:
    results, suite, _ = awkward()
    found, same_suite, reference = results_csv.load(written(tmp_path))
    assert found.cards == results.cards
    assert found.sources == results.sources
    assert same_suite.model_dump(exclude_unset=True) == suite.model_dump(exclude_unset=True)
    assert reference is not None
    np.testing.assert_equal(reference.plain(), PUBLISHED.plain())
    assert [(one.cell, one.status, one.message) for one in found.cells] == [
        (one.cell, one.status, one.message) for one in results.cells
    ]
    for one, other in zip(found.cells, results.cells, strict=True):
        assert dict(one.provenance) == {k: v for k, v in other.provenance.items() if k != "host"}
        assert (one.numbers is None) == (other.numbers is None)
        if one.numbers and other.numbers:
            np.testing.assert_equal(kept(one.numbers), kept(other.numbers))
            assert one.diverged_in == other.diverged_in


@pytest.mark.parametrize("reference", [True, False])
def test_the_report_comes_back_byte_for_byte(tmp_path: Path, reference: bool) -> None:
    def files(folder: Path, results: Results, suite: Suite, published: Reference | None) -> dict[str, bytes]:
        comparison = compare(results, suite, published)
        paths = report.write(results, suite, comparison, folder, ["html", "md", "latex", "csv"], False, published)
        return {path.name: path.read_bytes() for path in paths}

    one = files(tmp_path / "one", *awkward(reference))
    two = files(tmp_path / "two", *results_csv.load(tmp_path / "one" / "results.csv"))
    assert one == two
    assert {"report.html", "report.md", "report.tex", "results.csv", "summary.csv"} <= one.keys()


def test_the_file_is_a_table_that_anybody_can_read(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    table = pd.read_csv(written(tmp_path))
    assert table.value.dtype == np.float64
    mine = table[(table.label == "local") & (table.key == cell("local", seed=1).key)]
    last = mine[(mine.metric == "test/accuracy") & mine.client.notna()]
    assert last[["round", "client", "value"]].to_numpy().tolist() == [[5, 0, 1 / 3], [5, 1, 0.1 + 0.2]]
    means = mine[(mine.metric == "test/accuracy") & mine.client.isna()]
    assert means["round"].tolist() == [0, 1, 3, 5]
    sums = mine[mine.metric == "up/scalars"]
    assert sums[["round", "value"]].to_numpy().tolist() == [[1, 0], [2, 21], [4, 9], [5, 21]]
    assert set(mine[mine.metric.str.startswith("local/")].metric) == {"local/loss"}
    assert "secret-host" not in written(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:0], "not a results.csv, which"),
        (lambda rows: [["a", "b"], *rows[1:]], "not a results.csv, which"),
        (
            lambda rows: [rows[0], [*rows[1][:5], "2", ""], *rows[2:]],
            "version 2 of a results.csv, but .* version 1; use",
        ),
        (lambda rows: [row for row in rows if row[2] != "suite"], "has no suite; it is not whole"),
        (lambda rows: [rows[0], *(row for row in rows if not row[0])], "has no cells; it is not whole"),
        (lambda rows: [row for row in rows if not row[2].startswith("size/")], "is not whole: KeyError: 'train'"),
        (lambda rows: [row for row in rows if row[2] != "cell"], "row 7 is not as fedbench wrote it"),
        (
            lambda rows: [[v.replace('"k":100', '"k":99') for v in row] for row in rows],
            "row 7 is not .*: recipe of cell",
        ),
        (lambda rows: [*rows, [*rows[-1][:2], "test/accuracy", "5", "0", "high", ""]], "row .* is not as .*'high'"),
        (lambda rows: [*rows, ["too", "short"]], "is not as fedbench wrote it"),
        (
            lambda rows: [[v.replace('"name":"study"', '"nam":"study"') for v in row] for row in rows],
            "unknown key 'nam'; did you mean 'name'",
        ),
    ],
)
def test_what_is_no_results_file_is_bad_input(tmp_path: Path, change: object, message: str) -> None:
    file = written(tmp_path)
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.reader(stream))
    with file.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(change(rows))  # type: ignore[operator]
    with pytest.raises(InputError, match=f"results.csv: .*{message}") as error:
        results_csv.load(file)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^[^:]*: No such file or directory$"):
        results_csv.load(tmp_path / "results.csv")
    (tmp_path / "results.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="decode"):
        results_csv.load(tmp_path / "results.csv")


# --- the command


def test_a_published_report_is_written_again_by_one_command(fedbench: Callable[..., Any], tiny: Tiny) -> None:
    methods = {"local": {}, "fedavg": {}, "bad": {"method": "trouble.py:Trouble", "what": "raise"}}
    tiny.change(methods=methods, training={"rounds": 3, "batch_size": 4}, seeds=[0, 1])
    assert fedbench("run", str(tiny.file), "--workers", "1", "--tracking-uri", "none", "--only", "seed=0")[0] == 1
    formats = ("--format", "html,md,latex,csv")
    code, out, err = fedbench("report", str(tiny.file), *formats, "--to", "published")
    assert (code, err) == (0, "")
    before = {path.name: path.read_bytes() for path in Path("published").iterdir()}
    page = before["report.md"].decode()
    assert "bad, partition_seed=1234, seed=0: failed: RuntimeError: two lines of trouble" in page
    assert "local, partition_seed=1234, seed=1: missing" in page
    tiny.file.unlink()
    code, again, err = fedbench("report", "published/results.csv", *formats)
    assert (code, again, err) == (0, out, "")
    assert {path.name: path.read_bytes() for path in Path("published").iterdir()} == before
    code, _, err = fedbench("report", "published/results.csv", "--only", "seed=0")
    assert (code, err.count("\n")) == (2, 1)
    assert "a results.csv is reported whole" in err


def test_what_tuning_came_to_is_in_the_file_too(fedbench: Callable[..., Any], tiny: Tiny) -> None:
    tiny.change(methods={"local": {}, "fedavg": {}}, training={"rounds": 2, "batch_size": 8}, tune={"trials": 2})
    assert fedbench("run", str(tiny.file), "--workers", "1", "--tracking-uri", "none")[0] == 0
    formats = ("--format", "html,md,latex,csv")
    code, out, err = fedbench("report", str(tiny.file), *formats, "--to", "published")
    assert (code, err) == (0, "")
    before = {path.name: path.read_bytes() for path in Path("published").iterdir()}
    assert b"study/" in before["results.csv"]
    assert fedbench("report", "published/results.csv", *formats) == (0, out, "")
    assert {path.name: path.read_bytes() for path in Path("published").iterdir()} == before
    code, out, err = fedbench("compare", "runs/tiny", "published/results.csv")
    assert (code, err) == (0, "")
    assert "2 cells in both, 0 only in A, 0 only in B" in out  # trials are none
    assert "expected: 2 have them" in out
