"""The comparison and its figures as one page that needs nothing else: no network, and no script to be read.

Everything that comes from a suite is text to the template, which escapes it; and the page's own policy lets a browser
run the script that sorts tables, and nothing else, and load nothing.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedbench.report import plots
from fedbench.report.layout import grouped
from fedbench.report.plots import Figure
from fedbench.report.table import BEST, Comparison
from fedbench.words import counted


@dataclass(frozen=True)
class _Section:
    """Figures under one heading, drawn."""

    title: str
    figures: Sequence[tuple[Figure, Markup]]


def render(comparison: Comparison, figures: Sequence[Figure] = ()) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedbench", "report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    style, script = (loader.get_source(environment, name)[0].strip() for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.j2").render(
        it=comparison,
        best=BEST,
        description=[part for part in re.split(r"\n\s*\n", comparison.description) if part.strip()],
        chips=_chips(comparison),
        sections=_sections(figures),
        style=Markup(style),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _sections(figures: Sequence[Figure]) -> list[_Section]:
    return [
        _Section(title, [(figure, Markup(plots.inline(figure))) for figure in group])
        for title, group in grouped(figures, lambda figure: figure.section).items()
    ]


def _chips(comparison: Comparison) -> list[str]:
    """Return what there is, in a few words each."""
    entries = [entry for block in comparison.blocks for row in block.rows for entry in row.entries if entry]
    rows = {row.label for block in comparison.blocks for row in block.rows}
    settings = sum(len(block.columns) for block in comparison.blocks)
    done, planned = sum(entry.done for entry in entries), sum(entry.planned for entry in entries)
    cells = f"{planned} cells, all finished" if done == planned else f"{done} of {planned} cells finished"
    seeds = max(entry.planned for entry in entries)
    return [
        counted(len(rows), "row"),
        *([counted(settings, "setting")] if settings > 1 else []),
        f"{counted(seeds, 'pair')} of seeds",
        cells,
        comparison.metric,
    ]
