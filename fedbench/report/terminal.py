"""The comparison on a terminal."""

import re
import textwrap
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from fedbench.report import tuning
from fedbench.report.table import Comparison, Table

# Space between columns, and the widest that a column of text and one of numbers may be, from comfortable to tight.
_FITS = ((1, 60, 20), (0, 20, 14))


def render(comparison: Comparison) -> RenderableType:
    """Return the title, the tables, how to read them and the notes; the rest is for the written page."""
    # Text, not strings: what stands in brackets in a label or a message is no markup.
    parts: list[RenderableType] = [Text(comparison.title, style="bold"), Text()]
    for table in (*comparison.tables, *comparison.tuning):
        parts += [Text(table.title), _Fitting(table), Text()] if table.title else [_Fitting(table), Text()]
    parts += [Text(sentence, style="dim") for sentence in comparison.reading]
    parts += [Text(sentence, style="yellow") for sentence in comparison.notes]
    return Group(*parts)


def render_tuning(comparison: Comparison) -> RenderableType:
    """Return nothing but how values were chosen."""
    parts: list[RenderableType] = []
    for table in comparison.tuning:
        parts += [Text(table.title), _Fitting(table), Text()]
    return Group(*parts, *(Text(sentence, style="dim") for sentence in tuning.reading(comparison.choices)))


def render_table(table: Table) -> RenderableType:
    """Return one table under its title."""
    return Group(Text(table.title, style="bold"), _Fitting(table))


@dataclass(frozen=True)
class _Fitting:
    """A table that becomes narrower, and breaks its numbers last, where there is little room."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for fit in _FITS:
            made = _table(self.table, *fit)
            if Measurement.get(console, options.update(max_width=10_000), made).maximum <= options.max_width:
                break
        yield made


def _table(table: Table, space: int, text_width: int, number_width: int) -> RichTable:
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, space, 0, 0))
    for place, name in enumerate(table.head):
        justify: JustifyMethod = "left" if place < table.texts else "right"
        made.add_column(Text("\n".join(re.split(r" |(?<=-)", name))), justify=justify, overflow="fold")
    for row in table.rows:
        widths = (text_width if place < table.texts else number_width for place in range(len(row)))
        made.add_row(*(Text(textwrap.fill(cell, width)) for cell, width in zip(row, widths, strict=True)))
    return made
