"""What the README and the pages in docs/ say is true: their snippets run, their commands exist, their links lead."""

import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
import yaml

from fedbench import cli, config, testing
from fedbench.report.table import FLAG
from fedbench.store import Store

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


FENCE = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
NAMED = re.compile(r"\bas `([\w.]+)`")


class Block(NamedTuple):
    """A fenced block, the file that the words above it say it is saved as, and why it is not run, if it is not."""

    language: str
    text: str
    name: str
    reason: str


def read(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text, end, found = page.read_text(encoding="utf-8"), 0, []
    for fence in FENCE.finditer(text):
        above = text[end : fence.start()].strip().rpartition("\n\n")[2]
        end = fence.end()
        name, reason = (pattern.findall(above)[-1:] or [""] for pattern in (NAMED, NOT_RUN))
        found.append(Block(fence[1], textwrap.dedent(fence[2]), name[0], reason[0]))
    return found


def blocks(page: Path, language: str) -> list[str]:
    """Return the texts of the fenced blocks of one language."""
    return [block.text for block in read(page) if block.language == language]


class Reader:
    """Does what a page says, in an empty folder, with the quickstart and all other suites cut short."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        self._names: dict[str, Any] = {}
        suites = folder / "shipped"
        shutil.copytree(config.SUITES, suites)
        quick = yaml.safe_load((suites / "quickstart.yaml").read_text(encoding="utf-8"))
        quick["partition"] |= {"clients": 3, "k": 4, "test_shots": 4}
        quick["training"] |= {"rounds": 1}
        quick["methods"] = ["local", "fedavg", "fedproto"]
        (suites / "quickstart.yaml").write_text(yaml.safe_dump(quick, sort_keys=False))
        shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
        (folder / "data").mkdir()
        monkeypatch.setattr(config, "SUITES", suites)
        monkeypatch.chdir(folder)
        monkeypatch.delenv("FEDBENCH_DATA", raising=False)
        monkeypatch.syspath_prepend(folder)

    def do(self, block: Block) -> str:
        """Save a block that has a name, run one that has none; return what it prints."""
        if block.name:
            (self._folder / block.name).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(block.text, self._names)
        elif block.language == "yaml" and not block.reason and "dataset" in yaml.safe_load(block.text):
            (self._folder / "suite.yaml").write_text(block.text, encoding="utf-8")
            self._fedbench(["run", "suite.yaml", "--dry-run"])
        elif block.language == "sh":
            for line in block.text.splitlines():
                self._shell(line, run=not block.reason)
        return self._capsys.readouterr().out

    def _shell(self, line: str, run: bool) -> None:
        program, *arguments = shlex.split(line)
        if program == "fedbench" and run:
            command, _, file = line.partition(" > ")
            self._fedbench(shlex.split(command)[1:])
            if file:
                Path(file).write_text(self._capsys.readouterr().out, encoding="utf-8")
        elif program == "fedbench" and arguments[0] == "run":
            self._fedbench([*arguments, "--dry-run"])
        elif run:
            assert program == "cp", f"say why this is not run, as in <!-- not run: a download -->: {line}"
            subprocess.run([program, *arguments], check=True)

    def _fedbench(self, arguments: list[str]) -> None:
        if arguments[0] == "run" and "--dry-run" not in arguments:
            arguments = [*arguments, *([] if "rounds=" in str(arguments) else ["--set", "rounds=1"])]
            for flag, value in (("--workers", "1"), ("--tracking-uri", "none")):
                arguments += [] if flag in arguments else [flag, value]
        self._monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code, (arguments, *self._capsys.readouterr())


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Reader:
    return Reader(tmp_path, monkeypatch, capsys)


def readme(printed: list[str], folder: Path) -> None:
    """The method gets a row, and what it uploads is counted; the Python door opens."""
    uploads = {}
    store = Store(folder / "runs" / "mine")
    for key in store.finished():
        record = store.get(key)
        uploads[record.cell.label] = int(record.outcome.traffic["up/scalars"].sum())
    assert uploads == {"local": 0, "fedavg": 20 * 21840, "mine": 20 * 510}  # the head: 50 x 10 weights and 10 biases
    assert len((folder / "mine.py").read_text(encoding="utf-8").splitlines()) <= 20
    (door,) = (text for text in printed if text.startswith("["))
    accuracies, *uploaded = door.split("\n")
    assert len(re.findall(r"0\.\d+|1\.", accuracies)) == 3
    assert re.findall(r"\d+", " ".join(uploaded)) == ["585"] * 20  # 3 clients, 195 weights


def add_a_method(printed: list[str], folder: Path) -> None:
    """FedBN runs, and is the one that is tested; the new package is there."""
    assert any(re.search(r"^fedbn +\d", text, re.MULTILINE) for text in printed)
    for name in ("fedbn.py", "fedbn.yaml"):
        assert (folder / name).read_bytes() == (ROOT / "docs" / "examples" / name).read_bytes()
    assert (folder / "my_method" / "pyproject.toml").is_file()


def add_a_data_set(printed: list[str], folder: Path) -> None:
    """Both data sets get a report, with where they are from."""
    assert (folder / "runs" / "points" / "report.md").is_file()
    assert "where it is from" in (folder / "runs" / "wine" / "report.md").read_text(encoding="utf-8")


def scaling_out(printed: list[str], folder: Path) -> None:
    """The report shows the cells of both machines, and the others as missing."""
    text = (folder / "here" / "quickstart" / "report.md").read_text(encoding="utf-8")
    rows = dict(reversed(re.findall(r"^\| (local|fedavg|fedproto) +\| +(\S+)", text, re.MULTILINE)))  # the first table
    assert re.fullmatch(r"\d+\.\d+", rows["local"])
    assert re.fullmatch(r"\d+\.\d+", rows["fedavg"])
    assert rows["fedproto"] == "missing"


CAME_OUT = {
    ROOT / "README.md": readme,
    ROOT / "docs" / "add-a-method.md": add_a_method,
    ROOT / "docs" / "add-a-data-set.md": add_a_data_set,
    ROOT / "docs" / "scaling-out.md": scaling_out,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_does_what_it_says(page: Path, reader: Reader, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(80, 3)).round(3)
    lines = ["a,b,c,class", *(f"{a},{b},{c},{number % 3}" for number, (a, b, c) in enumerate(numbers))]
    (tmp_path / "data" / "wine.csv").write_text("\n".join(lines))
    printed = [reader.do(block) for block in read(page)]
    if page in CAME_OUT:
        CAME_OUT[page](printed, tmp_path)


def test_a_command_that_fails_or_is_no_command_of_ours_would_be_noticed(reader: Reader) -> None:
    for line in ("fedbench list method", "fedbench run nowhere", "curl https://example.org", "cp nothing somewhere"):
        with pytest.raises((AssertionError, subprocess.CalledProcessError)):
            reader.do(Block("sh", line, "", ""))
    assert reader.do(Block("sh", "curl https://example.org", "", "a download")) == ""


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


def test_every_check_of_a_method_is_explained() -> None:
    text = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    rows = [f"| `{check.name}` | {check.promise} |" for check in testing.CHECKS]
    assert re.findall(r"^\| `\w+` \| .* \|$", text.partition("## Check it")[2].partition("\n## ")[0], re.M) == rows
