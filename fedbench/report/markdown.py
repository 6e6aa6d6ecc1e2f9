"""The comparison as a Markdown page."""

import re
from collections.abc import Iterable, Mapping, Sequence

from fedbench.report import tuning
from fedbench.report.table import Comparison, Table


def render(comparison: Comparison) -> str:
    """Return the page."""
    parts = [f"# {_escape(comparison.title)}", *_paragraphs(comparison.description)]
    for table in (*comparison.tables, *comparison.tuning):
        parts += [f"## {_escape(table.title)}"] if table.title else []
        parts.append(_table(table))
    parts += ["## How to read this", _items(comparison.reading)]
    if comparison.notes:
        parts += ["## Notes", _items(comparison.notes)]
    for table in (comparison.rows, comparison.partitions):
        parts += [f"## {_escape(table.title)}", _table(table)]
    parts += ["## Provenance", _items(f"{word}: {text}" for word, text in comparison.provenance)]
    return "\n\n".join(parts) + "\n"


def render_tuning(comparison: Comparison) -> str:
    """Return a page on nothing but how values were chosen."""
    reading = tuning.reading(comparison.choices)
    return page(f"{comparison.title}: tuning", comparison.tuning, {"How to read this": reading})


def page(title: str, tables: Iterable[Table], lists: Mapping[str, Sequence[str]]) -> str:
    """Return a page of tables, and of sentences under headings."""
    parts = [f"# {_escape(title)}"]
    for table in tables:
        parts += [f"## {_escape(table.title)}", _table(table)]
    for heading, sentences in lists.items():
        parts += [f"## {_escape(heading)}", _items(sentences)]
    return "\n\n".join(parts) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [_begin(_escape(part)) for part in re.split(r"\n\s*\n", text) if part.strip()]


def _items(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {_begin(_escape(sentence))}" for sentence in sentences)


def _table(table: Table) -> str:
    lines = [[_escape(text) for text in line] for line in (table.head, *table.rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(table.head))]
    rule = ["-" * width if column < table.texts else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    sides = [str.ljust if column < table.texts else str.rjust for column in range(len(table.head))]
    padded = [[pad(text, width) for pad, text, width in zip(sides, line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (padded[0], rule, *padded[1:]))


def _escape(text: str) -> str:
    """Return plain text as Markdown that shows it as it is, on one line."""
    text = re.sub(r"([\\`*\[\]<>|~$&#])", r"\\\1", " ".join(text.split()))
    # Inside a word an underscore is one; `fed_heart` stays readable in the source.
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)


def _begin(text: str) -> str:
    """Return escaped text that is no list item either."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", text)
