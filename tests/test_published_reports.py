"""Reports in reports/: they come from their numbers, and what findings say is in them."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbench import results_csv
from fedbench.cli import app

REPORTS = Path(__file__).resolve().parents[1] / "reports"
TABLE1 = REPORTS / "table1-mnist"


FOLDERS = sorted(path.parent for path in REPORTS.glob("*/results.csv"))


def test_there_are_reports() -> None:
    assert TABLE1 in FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_report_comes_from_its_numbers(folder: Path, tmp_path: Path) -> None:
    options = ["--format", "html,md,latex,csv", "--to", str(tmp_path)]
    done = CliRunner().invoke(app, ["report", str(folder / "results.csv"), *options])
    assert done.exit_code == 0, done.output
    for file in sorted(tmp_path.iterdir()):
        if file.is_file():
            assert _without_figures(file) == _without_figures(folder / file.name), file.name


def _without_figures(file: Path) -> str:
    """Return a file's text without its figures, of which every version of matplotlib draws others."""
    text = file.read_text(encoding="utf-8")
    return re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL) if file.suffix == ".html" else text


def test_the_findings_on_table_1_have_the_numbers_of_the_report() -> None:
    measured = _measured()
    page = (TABLE1 / "findings.md").read_text(encoding="utf-8")
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


def _measured() -> dict[tuple[str, int, str], str]:
    """Return mean ± deviation over clients, averaged over seeds, by row, n and metric."""
    found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    results, _, _ = results_csv.load(TABLE1 / "results.csv")
    for result in results.cells:
        assert result.numbers is not None
        n = int(str(result.cell.facts()["n"]))
        for metric, values in result.numbers.last.items():
            pair = 100 * float(np.mean(values)), 100 * float(np.std(values))
            found.setdefault((result.cell.label, n, metric), []).append(pair)
    return {key: "{:.2f} ± {:.2f}".format(*np.mean(pairs, axis=0)) for key, pairs in found.items() if len(pairs) == 3}
