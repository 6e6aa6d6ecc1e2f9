"""Reports in reports/: they come from their numbers, and what findings say is in them."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbench import results_csv
from fedbench.cli import app

REPORTS = Path(__file__).resolve().parents[1] / "reports"
FOLDERS = sorted(path.parent for path in REPORTS.glob("*/results.csv"))


def test_there_are_reports() -> None:
    assert {"table1-mnist", "table2", "fig2", "fig3", "fig4"} == {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_report_comes_from_its_numbers(folder: Path, tmp_path: Path) -> None:
    options = ["--format", "html,md,latex,csv", "--to", str(tmp_path)]
    done = CliRunner().invoke(app, ["report", str(folder / "results.csv"), *options])
    assert done.exit_code == 0, done.output
    published = {file.name for file in folder.iterdir()} & {file.name for file in tmp_path.iterdir()}
    assert {"report.md", "results.csv", "summary.csv"} <= published
    for name in published:
        assert _without_figures(tmp_path / name) == _without_figures(folder / name), name


def _without_figures(file: Path) -> str:
    """Return a file's text without its figures, of which every version of matplotlib draws others."""
    text = file.read_text(encoding="utf-8")
    return re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL) if file.suffix == ".html" else text


@pytest.mark.parametrize("name", ["table1-mnist", "table2"])
def test_the_findings_on_tables_have_the_numbers_of_the_reports(name: str) -> None:
    measured = _measured(REPORTS / name)
    page = (REPORTS / name / "findings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S+) \| (.* ± .*) \|$", page, flags=re.MULTILINE)
    first, own = rows[:8], rows[-8:]
    assert {label for label, _ in first} == {label for label, _ in own} == {label for label, _, _ in measured}
    for label, cells in first:
        ours = cells.split(" | ")[::2]
        assert ours == [measured[label, n, "test/accuracy"] for n in (3, 4, 5)]
    for label, cells in own:
        assert cells.split(" | ") == [measured[label, n, "test/accuracy/head_own"] for n in (3, 4, 5)]
    for label in ("fedproto", "fedproto-mh"):
        printed = " | ".join(measured[label, n, "test/accuracy/cumulative/prototype"] for n in (3, 4, 5))
        assert f"| | as the code prints it | {printed} |" in page


@pytest.mark.parametrize(
    ("name", "fact", "values", "metrics"),
    [
        ("fig2", "n", [3], ["test/silhouette/class", "test/silhouette/client"]),
        ("fig3", "k", [10, 20, 40, 60, 80, 100], ["test/accuracy"]),
        ("fig4", "n", [3], ["test/accuracy", "test/accuracy/head_own", "test/loss/proto"]),
    ],
)
def test_the_findings_on_figures_have_the_numbers_of_the_reports(
    name: str, fact: str, values: list[int], metrics: list[str]
) -> None:
    measured = _measured(REPORTS / name, fact)
    page = (REPORTS / name / "findings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w[^|]*?) \| (.* ± .*?)(?: \|)+$", page, flags=re.MULTILINE)
    assert {label.partition(",")[0] for label, _ in rows} == {label for label, _, _ in measured}
    for label, cells in rows:
        row, _, by_head = label.partition(",")
        wanted = ["test/accuracy/head"] if by_head else metrics
        found = [
            measured[row, value, metric] for value in values for metric in wanted if (row, value, metric) in measured
        ]
        assert cells.split(" | ") == found, label


def _measured(folder: Path, fact: str = "n") -> dict[tuple[str, int, str], str]:
    """Return mean ± deviation over clients, averaged over seeds, by row, the value of a fact, and metric."""
    found: dict[tuple[str, int, str], list[tuple[np.floating, np.floating]]] = {}
    results, _, _ = results_csv.load(folder / "results.csv")
    for result in results.cells:
        assert result.numbers is not None
        value = int(str(result.cell.facts()[fact]))
        for metric, values in result.numbers.last.items():
            found.setdefault((result.cell.label, value, metric), []).append((np.nanmean(values), np.nanstd(values)))
    return {
        key: _formatted(key[2]).format(*np.mean(pairs, axis=0) * (100 if "accuracy" in key[2] else 1))
        for key, pairs in found.items()
        if len(pairs) == 3
    }


def _formatted(metric: str) -> str:
    return "{:.4f} ± {:.4f}" if "loss" in metric else "{:.2f} ± {:.2f}"
