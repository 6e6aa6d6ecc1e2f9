"""What the README and the pages in docs/ say is true: their snippets run, their commands exist, their links lead."""

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from fedbench import cli, config, testing
from fedbench.report.table import FLAG
from fedbench.store import Store

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def block(page: str, language: str, word: str) -> str:
    """Return the one block with a word in it."""
    (found,) = (text for text in blocks(ROOT / page, language) if word in text)
    return found


def fedbench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def run(monkeypatch: pytest.MonkeyPatch, suite: str, *more: str) -> int:
    return fedbench(monkeypatch, "run", suite, "--workers", "1", "--tracking-uri", "none", "--set", "rounds=1", *more)


def test_the_method_in_the_readme_gets_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = block("README.md", "python", "class Mine")
    assert len(code.splitlines()) <= 20
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(block("README.md", "yaml", "mine.py:Mine"))
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "mine.yaml") == 0
    assert re.search(r"^mine +\d", capsys.readouterr().out, re.MULTILINE)
    uploads = {}
    store = Store(tmp_path / "runs" / "mine")
    for key in store.finished():
        record = store.get(key)
        uploads[record.cell.label] = int(record.outcome.traffic["up/scalars"].sum())
    assert uploads == {"local": 0, "fedavg": 20 * 21840, "mine": 20 * 510}  # the head: 50 x 10 weights and 10 biases


def test_the_python_door_in_the_readme_opens(capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("README.md", "python", "simulate"), {})
    accuracies, *uploads = capsys.readouterr().out.split("\n")
    assert len(re.findall(r"0\.\d+|1\.", accuracies)) == 3
    assert re.findall(r"\d+", " ".join(uploads)) == ["585"] * 20  # 3 clients, 195 weights


def test_your_own_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "own.yaml").write_text(block("docs/add-a-data-set.md", "yaml", "points.npz"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    exec(block("docs/add-a-data-set.md", "python", "points.npz"), {})
    assert run(monkeypatch, "own.yaml") == 0


def test_the_data_set_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    numbers = np.random.default_rng(0).normal(size=(80, 3)).round(3)
    lines = ["a,b,c,class", *(f"{a},{b},{c},{number % 3}" for number, (a, b, c) in enumerate(numbers))]
    (tmp_path / "data" / "wine.csv").write_text("\n".join(lines))
    (tmp_path / "wine.py").write_text(block("docs/add-a-data-set.md", "python", "class Wine"))
    (tmp_path / "wine.yaml").write_text(block("docs/add-a-data-set.md", "yaml", "wine.py:Wine"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    assert run(monkeypatch, "wine.yaml") == 0
    assert "where it is from" in (tmp_path / "runs" / "wine" / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_suite_in_a_page_can_be_read(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        (tmp_path / "suite.yaml").write_text(text)
        assert config.load(tmp_path / "suite.yaml").methods


def parse(arguments: Sequence[str]) -> None:
    """Raise click's UsageError for a command, a flag or a value that does not exist."""
    command: Any = typer.main.get_command(cli.app)
    context, left = None, ["fedbench", *arguments]
    while True:
        context = command.make_context(left[0], left[1:], parent=context)
        if not hasattr(command, "resolve_command"):
            return
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        left = [name, *rest]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_a_page_exists(page: Path) -> None:
    lines = [line for shell in blocks(page, "sh") for part in shell.splitlines() for line in part.split("&&")]
    lines += re.findall(r"`(fedbench [a-z][^`]*)`", page.read_text(encoding="utf-8"))
    for line in (line.strip() for line in lines if line.strip().startswith("fedbench ")):
        arguments = shlex.split(line.partition(" > ")[0])[1:]
        if len(arguments) == 1 and arguments != ["schema"]:  # spoken of, without what it wants
            arguments.append("--help")
        with suppress(typer.Exit):  # after help
            parse(arguments)


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    for arguments in (["rum", "quickstart"], ["run"], ["run", "quickstart", "--sed", "1"], ["list", "method"]):
        with pytest.raises(Exception, match=r"(?i)no such|missing|invalid|not one of|should be"):
            parse(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_table_in_the_readme_is_one_of_the_quickstart() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    head, _, *body = rows
    suite = config.load("quickstart")
    assert isinstance(suite.methods, dict)
    assert [row[0] for row in body] == list(suite.methods)
    uploaded = {row[0]: row[head.index("up ×10³")] for row in body}
    for name in ("fedavg", "fedprox", "fesem"):
        assert uploaded[name] == f"{20 * 21.84:.2f}"
    for name in ("fedper", "fedrep"):
        assert uploaded[name] == f"{20 * 5.28:.2f}"
    assert uploaded["local"] == "0.00"
    accuracy = {row[0]: float(row[1].split()[0]) for row in body}
    assert {name for name in accuracy if accuracy[name] < accuracy["local"]} == {r[0] for r in body if FLAG in r[1]}


def test_the_checks_in_ci_are_those_of_the_readme() -> None:
    (line,) = (line for text in blocks(ROOT / "README.md", "sh") for line in text.splitlines() if "check.py" in line)
    assert line == (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1]


def test_the_example_in_the_docs_is_the_one_that_is_tested() -> None:
    page = ROOT / "docs" / "add-a-method.md"
    for language, name in (("python", "fedbn.py"), ("yaml", "fedbn.yaml")):
        assert (page.parent / "examples" / name).read_text(encoding="utf-8") in blocks(page, language)


def test_every_check_of_a_method_is_explained() -> None:
    text = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    rows = [f"| `{check.name}` | {check.promise} |" for check in testing.CHECKS]
    assert re.findall(r"^\| `\w+` \| .* \|$", text.partition("## Check it")[2].partition("\n## ")[0], re.M) == rows
