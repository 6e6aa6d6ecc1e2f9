"""`fedbench report` and `fedbench compare`: what cells have come to, printed and written."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.plan import Plan, make_plan

if TYPE_CHECKING:
    from fedbench.config import Suite
    from fedbench.reference import Reference
    from fedbench.results import Results


def report_cells(
    plan: Plan, to: Path | None = None, formats: Sequence[str] = ("html", "md"), figures: bool = False
) -> None:
    """Print the report on the plan's cells, and write it, by default beside them."""
    from fedbench import results

    found = results.collect(plan.store, plan.cells, plan.suite.base, plan.data)
    write_report(found, plan.suite, plan.reference, to or plan.store.root, formats, figures)


def write_report(
    found: "Results",
    suite: "Suite",
    reference: "Reference | None",
    folder: Path,
    formats: Sequence[str],
    figures: bool,
) -> None:
    """Print a report on results, and write it into a folder in each of the formats."""
    from rich.console import Console

    from fedbench import report

    comparison = report.compare(found, suite, reference)
    Console().print(report.terminal.render(comparison))
    for path in report.write(found, suite, comparison, folder, formats, figures, reference):
        print(f"written to {path}")


def report_tuning(plan: Plan) -> None:
    """Print what tuning came to, and write it beside the cells."""
    from rich.console import Console

    from fedbench import report, results

    found = results.collect(plan.store, plan.cells, plan.suite.base, plan.data)
    comparison = report.compare(found, plan.suite)
    Console().print(report.terminal.render_tuning(comparison))
    file = plan.store.root / "tuning.md"
    file.write_text(report.markdown.render_tuning(comparison), encoding="utf-8")
    print(f"written to {file}")


def side(name: str, out: Path, data: Path | None) -> "tuple[Results, str]":
    """Return what `compare` is to compare, and the metric that its suite reports, if there is one."""
    from fedbench import results, results_csv
    from fedbench.compare import stored

    if name.endswith(".csv"):
        found, suite, _ = results_csv.load(Path(name))
        return found, suite.metric
    if Path(name).is_dir():
        return stored(Path(name)), ""
    plan = make_plan(name, (), (), None, out, data)
    return results.collect(plan.store, plan.cells, plan.suite.base, plan.data), plan.suite.metric
