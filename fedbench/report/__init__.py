"""What people read: one comparison of a suite's results, written in every format.

`compare` makes the comparison, and a format renders it: the same results give the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from fedbench import results_csv
from fedbench.config import Suite
from fedbench.errors import InputError, unknown
from fedbench.reference import Reference
from fedbench.report import figures, html, latex, markdown, plots, terminal
from fedbench.report.plots import Figure
from fedbench.report.table import Comparison, compare
from fedbench.results import Results

__all__ = ["FORMATS", "Comparison", "compare", "html", "latex", "markdown", "read_formats", "terminal", "write"]

_Render = Callable[[Comparison, Sequence[Figure]], str]
FORMATS: Mapping[str, Mapping[str, _Render]] = MappingProxyType(
    {
        "html": {"report.html": html.render},
        "md": {"report.md": lambda comparison, _: markdown.render(comparison)},
        "latex": {
            "report.tex": lambda comparison, _: latex.render(comparison),
            "tables.tex": lambda comparison, _: latex.tables(comparison),
        },
    }
)
"""Format -> its files, and what writes a comparison and its figures into each."""


def read_formats(text: str, where: str) -> list[str]:
    """Return the formats in "html,md"; InputError, beginning with `where`, if one is none."""
    wanted = list(dict.fromkeys(name.strip() for name in text.split(",")))
    known = (*FORMATS, "csv")
    for name in wanted:
        if name not in known:
            raise InputError(f"{where} {text}: {unknown('format', name, known)}")
    return wanted


def write(
    results: Results,
    suite: Suite,
    comparison: Comparison,
    folder: Path,
    formats: Sequence[str],
    save_figures: bool,
    reference: Reference | None = None,
) -> Iterator[Path]:
    """Write a comparison's files into a folder, and yield each one's path (that of `figures/` for all of them).

    Besides `FORMATS` there is csv: results.csv, from which all of it can be written again (see
    `fedbench.results_csv`), and summary.csv, a line for each cell with its settings and what it came to.
    """
    drawn = figures.figures(results, suite) if save_figures or "html" in formats else ()
    folder.mkdir(parents=True, exist_ok=True)
    for name in formats:
        if name == "csv":
            yield _written(folder / "results.csv", results_csv.dumps(results, suite, reference))
            summary = results.summary(suite.metric)
            yield _written(folder / "summary.csv", summary.to_csv(index=False, lineterminator="\n"))
        for file, render in FORMATS.get(name, {}).items():
            yield _written(folder / file, render(comparison, drawn))
    if save_figures and drawn:
        saved = folder / "figures"
        saved.mkdir(exist_ok=True)
        for figure in drawn:
            _written(saved / f"{figure.name}.svg", plots.svg(figure))
            (saved / f"{figure.name}.pdf").write_bytes(plots.pdf(figure))
        yield saved


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="\n")
    return path
