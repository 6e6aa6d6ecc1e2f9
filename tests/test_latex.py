"""LaTeX: a document that compiles as it stands, in which whatever a suite says stays text."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report import cell, compared, diverged, done

from fedbench.report import latex
from fedbench.report.table import Comparison, Table

ENGINES = [engine for engine in ("pdflatex", "lualatex", "xelatex") if shutil.which(engine)]
NASTY = r"""<script> & _ % # $x$ {a} ~ ^ \input{/etc/passwd} -- `q' "é" λ 中 ★ |[1]*"""


def nasty() -> Comparison:
    """Return a comparison in which every text of a suite, and a cell that diverged, is as nasty as can be."""
    return compared(
        done(cell(NASTY, "fedavg"), 0.5, 0.7),
        diverged(cell("[brackets]*", "local"), 1),
        done(cell("fine", "fedper"), 0.1, 0.2),
        name="study",
        description=f"{NASTY}\n\n\\end{{document}} $ % unbalanced {{",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b & 50 % #1", r"a\_b \& 50 \% \#1"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("$x^2$ ~", r"\$x\textasciicircum{}2\$ \textasciitilde{}"),
        ("<a|b>", r"\textless{}a\textbar{}b\textgreater{}"),
        ("88.3 ± 0.1† ●", r"88.3 $\pm$ 0.1$^\dagger$ $\bullet$"),
        ("up ×10³", r"up $\times$10$^3$"),
        ("-1.5 to -0.2, fedproto-mh --x", r"$-$1.5 to $-$0.2, fedproto{-}mh {-}{-}x"),
        ("é λ 中\n\n next", r"é $\lambda$ [U+4E2D] next"),
    ],
)
def test_text_is_shown_as_it_is(text: str, expected: str) -> None:
    assert latex.escape(text) == expected


def test_a_table_has_the_rules_of_booktabs_and_its_columns() -> None:
    lines = latex.table(Table("some title", ("row", "a (%)"), (("x_1", "50.00"), ("y", ""))), "study").splitlines()
    body = lines[lines.index(r"\begin{tabular}{lr}") : lines.index(r"\end{tabular}%")]
    assert body[1:] == [
        r"\toprule",
        r"{row} & {a (\%)} \\",
        r"\midrule",
        r"{x\_1} & {50.00} \\",
        r"{y} & {} \\",
        r"\bottomrule",
    ]
    assert r"\caption{some title}" in lines


def test_the_document_has_all_that_the_comparison_says() -> None:
    comparison = nasty()
    document = latex.render(comparison)
    assert document.startswith(r"\documentclass")
    assert document.count(r"\begin{table}") == len(comparison.tables) + len(comparison.tuning) + 1
    for sentence in (*comparison.reading, *comparison.notes, *(text for _, text in comparison.provenance)):
        assert latex.escape(sentence) in document
    assert document.count(r"\end{document}") == 1
    assert latex.render(nasty()) == document


def test_tables_alone_are_for_input() -> None:
    comparison = nasty()
    alone = latex.tables(comparison)
    assert "documentclass" not in alone
    assert all(latex.table(table, comparison.title) in alone for table in comparison.tables)


@pytest.mark.skipif(not ENGINES, reason="no LaTeX here")
@pytest.mark.parametrize("engine", ENGINES[:1])
@pytest.mark.parametrize("whole", [True, False])
def test_it_compiles(tmp_path: Path, engine: str, whole: bool) -> None:
    """Compile the document, or the tables as input of another one; an error of LaTeX stops it."""
    comparison = nasty()
    text = latex.render(comparison)
    if not whole:
        (tmp_path / "tables.tex").write_text(latex.tables(comparison), encoding="utf-8")
        head = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{textcomp,booktabs,graphicx}"
        text = head + r"\begin{document}\input{tables}\end{document}"
    (tmp_path / "report.tex").write_text(text, encoding="utf-8")
    command = [engine, "-no-shell-escape", "-halt-on-error", "-interaction=nonstopmode", "report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    assert not re.findall(rb"undefined|Missing character", done.stdout + (tmp_path / "report.log").read_bytes())
