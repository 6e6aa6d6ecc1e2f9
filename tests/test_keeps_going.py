"""Whatever happens to the machine: one line says so, and what is finished stays as it is."""

import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Tiny

from fedbench.store import Store


def run(tiny: Tiny, *more: str, tracked: bool = False) -> list[str]:
    return ["run", str(tiny.file), "--workers", "1", *([] if tracked else ["--tracking-uri", "none"]), *more]


def process(tiny: Tiny, arguments: Sequence[str], before: Sequence[str] = (), **how: Any) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-W", "error", "-m", "fedbench", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=tiny.file.parent, start_new_session=True, **pipes, **how)


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of everything that is finished in a folder of runs."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.glob("*/cells/*/*"))
        if path.parent.suffix != ".part"
    }


@pytest.fixture
def one_done(fedbench: Run, tiny: Tiny) -> dict[str, bytes]:
    """The files of `local`, which is finished; the suite's other rows are not."""
    assert fedbench(*run(tiny, "--only", "method=local"))[0] == 0
    done = files(tiny.out)
    assert len(done) == 3
    return done


def test_a_full_disk(tiny: Tiny, one_done: dict[str, bytes], fedbench: Run) -> None:
    def little_room() -> None:  # for the second cell's numbers, and nothing else that is written before them
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    full = process(tiny, run(tiny, "--checkpoint", "0"), preexec_fn=little_room)
    out, err = full.communicate(timeout=120)
    assert full.returncode == 2
    checkpoint, line = err.splitlines()  # no Python knows where it is while it is written
    assert re.fullmatch(r"runs/tiny/checkpoints/[0-9a-f]{16}\.pt cannot be written: .*File too large.*", checkpoint)
    assert re.fullmatch(
        r"fedbench: runs/tiny.*: cannot be written \(File too large\); what is finished is kept.*", line
    )
    assert "[1/2]" not in out
    assert files(tiny.out) == one_done
    code, _, err = fedbench(*run(tiny))
    assert (code, err) == (0, "")
    assert one_done.items() < files(tiny.out).items()


def test_a_folder_that_is_read_only(tiny: Tiny, one_done: dict[str, bytes]) -> None:
    drop: list[str] = []
    if os.geteuid() == 0:  # who may write anywhere
        if not shutil.which("setpriv"):
            pytest.skip("root without setpriv")
        drop = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
    everything = [tiny.out, *tiny.out.rglob("*")]
    for path in everything:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        for arguments in (run(tiny), ["report", str(tiny.file)], ["repair", str(tiny.file)]):
            refused = process(tiny, arguments, drop)
            _, err = refused.communicate(timeout=120)
            assert refused.returncode == 2, err
            assert re.fullmatch(r"fedbench: \S*runs/tiny\S*: .*Permission denied.*\n", err), err
        assert files(tiny.out) == one_done
    finally:
        for path in everything:
            path.chmod(path.stat().st_mode | 0o200)


def test_a_corrupt_cell_and_a_corrupt_database_are_moved_aside(fedbench: Run, tiny: Tiny) -> None:
    assert fedbench("run", str(tiny.file), "--workers", "1")[0] == 0
    whole = files(tiny.out)
    store = Store(tiny.out / "tiny")
    broken = store.finished()[1]
    metrics = store.root / "cells" / broken / "metrics.npz"
    metrics.write_bytes(metrics.read_bytes()[:-50])
    code, _, err = fedbench("report", str(tiny.file))
    assert (code, err.count("\n")) == (2, 1)
    assert f"cells/{broken}/metrics.npz: not a readable .npz archive" in err
    assert err.endswith("; `fedbench repair runs/tiny` moves it aside, and the next run makes it anew\n")
    (index,) = store.root.glob("partitions/*/index.npz")
    index.write_bytes(b"nothing")
    database = tiny.out / "mlflow.db"
    database.write_bytes(b"no database" * 1000)

    code, out, err = fedbench("repair", "runs/tiny")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 4
    for line, what, where in (
        (lines[0], f"runs/tiny/cells/{broken}", f"cells/{broken}"),
        (lines[1], str(Path("runs/tiny") / index.parent.relative_to(store.root)), f"partitions/{index.parent.name}"),
        (lines[2], "runs/mlflow.db", "mlflow.db"),
    ):
        assert line.startswith(what)
        assert line.endswith(f"; moved to runs/tiny/broken/{where}")
        assert (store.root / "broken" / where).exists()
    assert lines[3] == "3 moved aside, the next run makes them anew"
    assert fedbench("repair", str(tiny.file))[1] == "0 moved aside: everything can be read\n"

    again = process(tiny, ["run", str(tiny.file), "--workers", "1"])
    out, err = again.communicate(timeout=120)
    assert (again.returncode, err) == (0, "")
    assert "3 cells, 1 to run" in out
    mended = files(tiny.out)
    assert mended.keys() == whole.keys()
    other = {name for name in whole if broken in name or name.endswith("tracked.json")}
    assert all(mended[name] == whole[name] for name in whole.keys() - other)
    with closing(sqlite3.connect(database)) as opened:
        assert opened.execute("select count(*) from runs").fetchone() == (4,)  # all of them, and the suite's


def test_repair_needs_something_to_repair(fedbench: Run, tiny: Tiny) -> None:
    code, _, err = fedbench("repair", str(tiny.file))
    assert (code, err) == (2, "fedbench: runs/tiny: no such folder; nothing of this suite has been run there\n")


def test_a_damaged_mlflow_database_costs_a_line_that_names_the_command(
    fedbench: Run, tiny: Tiny, one_done: dict[str, bytes]
) -> None:
    (tiny.out / "mlflow.db").write_bytes(b"no database" * 1000)
    code, out, err = fedbench(*run(tiny, "--only", "method=local", tracked=True))
    assert (code, err) == (0, "")
    said = re.search(
        r"^MLflow at .*not a database.*the next run logs them after `fedbench (repair \S+)`$", out, re.MULTILINE
    )
    assert said
    assert fedbench(*said[1].split())[0] == 0
    again = process(tiny, run(tiny, "--only", "method=local", tracked=True))  # MLflow keeps what it opened
    out, err = again.communicate(timeout=120)
    assert (again.returncode, err, "could not take" in out) == (0, "", False)


def test_a_locked_mlflow_database_costs_a_line(fedbench: Run, tiny: Tiny, one_done: dict[str, bytes]) -> None:
    assert fedbench(*run(tiny, "--only", "method=local", tracked=True))[0] == 0
    with closing(sqlite3.connect(tiny.out / "mlflow.db")) as other:
        other.execute("begin exclusive")
        code, out, err = fedbench(*run(tiny, "--only", "method=fedavg", tracked=True))
        assert (code, err) == (0, "")
        assert out.count("could not take a cell: ") == 1
        assert re.search(r"^MLflow at .*database is locked.*the next run logs them$", out, re.MULTILINE)
        other.rollback()
    code, _, err = fedbench(*run(tiny, "--only", "method=fedavg", tracked=True))
    assert (code, err) == (0, "")
    with closing(sqlite3.connect(tiny.out / "mlflow.db")) as opened:
        names = [name for (name,) in opened.execute("select name from runs")]
    assert sorted(names) == ["fedavg", "local", "tiny"]


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_ends_everybody_and_is_said(
    tiny: Tiny, one_done: dict[str, bytes], number: int, code: int, word: str
) -> None:
    tiny.change(methods={"local": {}, "slow": {"method": "./trouble.py:Trouble", "seconds": 60.0}, "fedavg": {}})
    driver = process(tiny, [*run(tiny, "--workers", "2")])
    assert driver.stdout is not None
    while not driver.stdout.readline().startswith("[1/2] fedavg"):
        assert driver.poll() is None
    os.killpg(driver.pid, number)  # as a terminal and a batch system do: everybody gets it
    out, err = driver.communicate(timeout=60)
    assert (driver.returncode, err) == (code, "")
    assert out == f"{word}; 2 of 3 cells are done and kept, the same command goes on from here\n"
    assert one_done.items() < files(tiny.out).items()
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-g", str(driver.pid)], capture_output=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.05)
