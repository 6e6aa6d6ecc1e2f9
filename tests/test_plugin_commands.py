"""`fedbench check` and `fedbench new`, as authors of methods and data sets call them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import broken_methods
import pytest

from fedbench import cli, testing

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fedbench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Return `fedbench ARGUMENT ... -> (exit code, stdout, stderr)`, in this process and an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


def test_a_method_that_keeps_everything_has_a_line_for_each_check(fedbench: Call) -> None:
    code, out, err = fedbench("check", "fedprox", "--preset", "table1", "--set", "mu=0.5")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()] == [["fedprox:", str(c), "ok"] for c in testing.CHECKS]


def test_smuggling_and_saying_less_than_is_sent_are_caught(fedbench: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(broken_methods.__file__).read_text(encoding="utf-8"))
    code, out, _ = fedbench("check", "./mine.py:SmugglesUp", "broken_methods:SaysBuffer")
    assert code == 1
    broken = [line for line in out.splitlines() if "BROKEN" in line]
    assert [line.split()[:2] for line in broken] == [
        ["./mine.py:SmugglesUp:", "inputs"],
        ["./mine.py:SmugglesUp:", "processes"],
        ["broken_methods:SaysBuffer:", "messages"],
    ]
    assert "something passes between them beside the messages, such as a global variable" in broken[1]
    assert "counted apart as the model's buffer of that name" in broken[2]
    assert "./mine.py:SmugglesUp: 2 of 16 checks fail; begin with the first" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fedavgg"], "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (["./nine.py:Mine"], "plugin file nine.py: No such file or directory"),
        (["fedprox", "--set", "mu=-1"], "fedprox.mu: should be greater than or equal to 0, not -1"),
        (["fedprox", "--set", "mu"], "--set mu: write key=value, as in mu=0.1"),
        (["fedprox", "--preset", "offcial"], "fedprox: unknown preset 'offcial'; did you mean 'official'?"),
        (["fedavg", "fedprox", "--set", "mu=1"], "fedavg: unknown key 'mu'; known: weights"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_checked(fedbench: Call, arguments: list[str], line: str) -> None:
    assert fedbench("check", *arguments) == (2, "", f"fedbench: {line}\n")


# --- packages that are written


def python(folder: Path, *arguments: str, **more: str) -> str:
    """Run Python in a folder, as an author does, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("kind", "tests"), [("method", 17), ("dataset", 3)])
def test_a_new_package_passes_its_tests_and_runs_its_suite_as_it_stands(
    fedbench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tests: int
) -> None:
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    code, out, err = fedbench("new", kind, "my_own")
    assert (code, err) == (0, "")
    assert out == "written to my_own; next: cd my_own && pytest && fedbench run my_own.yaml\n"
    folder = tmp_path / "my_own"
    names = {"README.md", "pyproject.toml", "fedbench_my_own.py", "test_my_own.py", "my_own.yaml"}
    assert {path.name for path in folder.iterdir()} == names
    assert not any("$" in path.read_text(encoding="utf-8") for path in folder.iterdir())
    python(folder, "-P", "-m", "ruff", "check", "--isolated", "--select", "E,F,I", "--line-length", "120", ".")
    python(folder, "-P", "-m", "ruff", "format", "--isolated", "--check", "--line-length", "120", ".")
    assert f"{tests} passed" in python(folder, "-P", "-m", "pytest", "-q", "-W", "error")
    monkeypatch.chdir(folder)
    once = ("--set", "rounds=1", "--workers", "1", "--tracking-uri", "none")
    assert fedbench("run", "my_own.yaml", *once)[0] == 0
    report = (folder / "runs" / "my_own" / "report.md").read_text(encoding="utf-8")
    assert [row in report for row in ("| local", "| fedavg", "| my_own")] == [True, True, kind == "method"]


@pytest.mark.parametrize("kind", ["method", "dataset"])
def test_a_new_package_registers_its_name(fedbench: Call, tmp_path: Path, kind: str) -> None:
    assert fedbench("new", kind, "my_own", "--to", "some/where")[0] == 0
    folder = tmp_path / "some" / "where"
    python(folder, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info")  # what installing it leaves
    said = python(tmp_path, "-P", "-m", "fedbench", "list", f"{kind}s", PYTHONPATH=str(folder))
    assert re.search("^my_own +(Clients train|Points round)", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["method", "there"], "there: is there already; want a new folder, with --to"),
        (["dataset", "demo", "--to", "there"], "there: is there already; want a new folder, with --to"),
        (["method", "fedavg"], "fedavg: is registered already, see `fedbench list methods`; want another name"),
        (["dataset", "mnist"], "mnist: is registered already, see `fedbench list datasets`; want another name"),
        (["method", "class"], "class: is a keyword of Python; want another name, such as my_class"),
        (["method", "torch"], "torch: a module of Python is called that, and a folder may hide it; want another name"),
        (["method", "loss"], "loss: its class would be called Loss, which something else is; want another name"),
        (
            ["method", "test_it"],
            "test_it: its class would be called TestIt, which something else is; want another name",
        ),
        *(
            (["method", name], f"{name}: want a name of lower-case letters, digits and single underscores, such as my_")
            for name in ("Mine", "a-b", "../up", "1st", "a__b", "x" * 41)
        ),
    ],
)
def test_what_cannot_be_written_is_one_line(fedbench: Call, tmp_path: Path, arguments: list[str], line: str) -> None:
    (tmp_path / "there").mkdir()
    code, out, err = fedbench("new", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"fedbench: {line}")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
