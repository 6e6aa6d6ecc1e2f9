"""The comparison's tables in LaTeX, with booktabs: a document that compiles as it stands, or one that papers can input.

Written for pdfLaTeX, and the other engines read it as well; a character that they may not have is named by its number.
"""

import re
from collections.abc import Iterable

from fedbench.report.table import Comparison, Table

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    # A hyphen in braces joins no other to a dash.
    "-": "{-}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "‘": r"\textquoteleft{}",
    "’": r"\textquoteright{}",
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "…": r"\ldots{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "²": r"$^2$",
    "³": r"$^3$",
    "†": r"$^\dagger$",
    "●": r"$\bullet$",
    "○": r"$\circ$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "−": r"$-$",
    "→": r"$\rightarrow$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "δ": r"$\delta$",
    "ε": r"$\epsilon$",
    "η": r"$\eta$",
    "θ": r"$\theta$",
    "κ": r"$\kappa$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "µ": r"$\mu$",
    "ρ": r"$\rho$",
    "σ": r"$\sigma$",
    "τ": r"$\tau$",
}

_HEAD = r"""\documentclass[a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{textcomp}
\usepackage[margin=2cm]{geometry}
\usepackage{booktabs}
\usepackage{graphicx}
\begin{document}
"""


def render(comparison: Comparison) -> str:
    """Return a whole document with all tables, how to read them, the notes, and the provenance."""
    parts = [_HEAD + rf"\section*{{{escape(comparison.title)}}}"]
    parts += [escape(comparison.description)] if comparison.description.strip() else []
    parts += [table(one, comparison.title) for one in (*comparison.tables, *comparison.tuning)]
    parts += [r"\subsection*{How to read this}", _items(comparison.reading)]
    if comparison.notes:
        parts += [r"\subsection*{Notes}", _items(comparison.notes)]
    parts += [r"\subsection*{Rows}", _items(": ".join(filter(None, row)) for row in comparison.rows.rows)]
    parts += [table(comparison.partitions, comparison.title)]
    parts += [r"\subsection*{Provenance}", _items(f"{word}: {text}" for word, text in comparison.provenance)]
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def tables(comparison: Comparison) -> str:
    r"""Return the tables alone, for \input{}; they want the packages booktabs and graphicx."""
    head = "% \\usepackage{booktabs,graphicx}\n"
    return head + "\n\n".join(table(one, comparison.title) for one in comparison.tables) + "\n"


def table(one: Table, title: str) -> str:
    """Return one table as a float, made narrower where it is wider than the text."""
    columns = "".join("l" if place < one.texts else "r" for place in range(len(one.head)))
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{escape(one.title or title)}}}",
        r"\small",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        _line(one.head),
        r"\midrule",
        *map(_line, one.rows),
        r"\bottomrule",
        r"\end{tabular}%",
        "}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def escape(text: str) -> str:
    """Return plain text as LaTeX that shows it as it is, on one line."""
    # A hyphen before a number is a minus.
    parts = re.split(r"(?<!\S)-(?=\d)", " ".join(text.split()))
    return "$-$".join("".join(_SPECIAL.get(letter) or _letter(letter) for letter in part) for part in parts)


def _letter(letter: str) -> str:
    # What T1 fonts have as letters: Latin-1 from its capital A grave on.
    return letter if " " <= letter <= "~" or "À" <= letter <= "ÿ" else f"[U+{ord(letter):04X}]"


def _line(cells: Iterable[str]) -> str:
    # The braces keep a bracket at the line's beginning from being taken for an argument of the line before it.
    return " & ".join(f"{{{escape(cell)}}}" for cell in cells) + r" \\"


def _items(sentences: Iterable[str]) -> str:
    items = "\n".join(rf"\item {{}}{escape(sentence)}" for sentence in sentences)
    return f"\\begin{{itemize}}\n\\raggedright\n{items}\n\\end{{itemize}}"
