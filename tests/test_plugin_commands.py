"""`fedbench check`, as an author of a method calls it."""

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
    assert "./mine.py:SmugglesUp: 2 of 15 checks fail; begin with the first" in out


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
