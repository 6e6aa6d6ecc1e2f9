"""The store: what is complete, what is damaged, and who may write."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import Tiny

from fedbench import durable, interrupts
from fedbench.cells import Cell, draw_partition
from fedbench.errors import InputError
from fedbench.federation import Outcome
from fedbench.interrupts import Interrupted
from fedbench.partition import Partition
from fedbench.store import CellError, Record, Store

CELL = Cell("s", "row", {"protocol": 1, "dataset": {}, "partition": {}, "seed": 0}, {"Mine@1": "./mine.py:Mine"})


def record(accuracy: float = 0.5, status: str = "completed") -> Record:
    outcome = Outcome(
        status=status,  # type: ignore[arg-type]
        message="",
        metrics={"test/accuracy": np.array([[np.nan, accuracy]]), "test/accuracy/head": np.zeros((1, 2))},
        traffic={"up/scalars": np.array([[2**53 + 1, 0]])},
        work={"steps": np.ones((1, 2))},
        sizes={"train": np.array([3, 4])},
        seconds={"total": 0.1},
    )
    return Record(CELL, outcome, {"started": "2026-01-01T00:00:00.000001+00:00", "seconds": 0.1})


def test_what_is_put_comes_back_exactly(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    assert store.status(CELL) == "missing"
    assert not store.has(CELL)
    store.put(record())
    found = Store(tmp_path / "s").get(CELL.key)
    assert found.cell == CELL
    assert found.cell.specs == CELL.specs
    assert found.provenance == record().provenance
    for table in ("metrics", "traffic", "work", "sizes"):
        expected = getattr(record().outcome, table)
        assert getattr(found.outcome, table).keys() == expected.keys()
        for name, array in getattr(found.outcome, table).items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
    assert (found.outcome.status, found.outcome.message, found.outcome.seconds) == ("completed", "", {"total": 0.1})
    assert store.status(CELL) == "completed"
    assert store.finished() == [CELL.key]


def test_a_cell_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(record(0.25))
    done = tmp_path / "cells" / CELL.key
    done.rename(done.with_name(f"{CELL.key}.part"))
    assert store.status(CELL) == "missing"
    assert store.finished() == []
    store.put(record(0.75))
    assert store.get(CELL.key).outcome.metrics["test/accuracy"][0, 1] == 0.75
    assert [path.name for path in done.parent.iterdir()] == [CELL.key]


def test_a_second_outcome_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(record(0.25))
    store.put_tracked(CELL, "sqlite:///a.db", "run1")
    assert store.tracked(CELL, "sqlite:///a.db")
    assert not store.tracked(CELL, "sqlite:///b.db")
    store.put(record(0.75, "diverged"))
    assert store.status(CELL) == "diverged"
    assert not store.tracked(CELL, "sqlite:///a.db")  # the new outcome is not there yet


def test_what_is_written_is_whole_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it"
    seen: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_bytes()))
    with durable.written(path) as file:
        file.write(b"a few bytes, which stay in Python's buffer")
    assert seen == [b"a few bytes, which stay in Python's buffer"]


def test_halves_of_checkpoints_go_when_nobody_else_is_at_work(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.checkpoints.mkdir()
    for name in ("0123.host.4.part", "0123.pt"):
        (store.checkpoints / name).write_bytes(b"")
    with store.lock(lambda: None):
        assert [path.name for path in store.checkpoints.iterdir()] == ["0123.pt"]


def test_errors_stand_apart_and_end_with_an_outcome(tmp_path: Path) -> None:
    store = Store(tmp_path)
    error = CellError(CELL, "RuntimeError: no", "Traceback ...", input=False)
    store.put_error(error)
    assert store.status(CELL) == "error"
    assert not store.has(CELL)
    assert store.error(CELL.key) == error
    assert store.errors() == [error]
    store.put(record())
    assert store.status(CELL) == "completed"
    assert store.errors() == []
    store.put_error(error)
    assert store.status(CELL) == "completed"  # a failed repetition loses nothing


@pytest.mark.parametrize("name", ["metrics.npz", "outcome.json", "cell.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damage_is_named(tmp_path: Path, name: str, damage: str) -> None:
    store = Store(tmp_path)
    store.put(record())
    file = tmp_path / "cells" / CELL.key / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(
        InputError, match=rf"{CELL.key}/{name}: .*; `fedbench repair {tmp_path}` moves it aside"
    ) as raised:
        store.get(CELL.key)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("outcome.json", "[]"),
        ("outcome.json", "{}"),
        ("outcome.json", '{"status": "splendid"}'),
        ("outcome.json", '{"status": "completed"}'),
        ("outcome.json", "\x00"),
        ("cell.json", "{}"),
        ("cell.json", '{"suite": "s", "label": "row", "recipe": {"seed": 1}, "specs": {}}'),
    ],
)
def test_other_content_is_damage_too(tmp_path: Path, name: str, content: str) -> None:
    store = Store(tmp_path)
    store.put(record())
    (tmp_path / "cells" / CELL.key / name).write_text(content)
    with pytest.raises(
        InputError, match=rf"{CELL.key}/{name}: missing or damaged \(.*\); `fedbench repair {tmp_path}` moves"
    ):
        store.get(CELL.key)
    (broken,) = store.damaged()
    assert broken[0] == tmp_path / "cells" / CELL.key


def test_an_outcome_is_back_where_a_killed_process_had_moved_it_away(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put(record(0.25))
    done = tmp_path / "cells" / CELL.key
    done.rename(done.with_name(f"{CELL.key}.old.part"))
    with store.lock(pytest.fail):
        assert store.get(CELL.key).outcome.metrics["test/accuracy"][0, 1] == 0.25
    shutil.copytree(done, done.with_name(f"{CELL.key}.old.part"))
    with store.lock(pytest.fail):
        assert [path.name for path in done.parent.iterdir()] == [CELL.key]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_a_write_finish(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    write = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        os.kill(os.getpid(), number)
        return write(self, target)

    def put() -> None:
        with interrupts.raised():
            store.put(record(0.25))

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(Interrupted) as raised:
        put()
    assert raised.value.exit_code == 128 + number
    assert store.get(CELL.key).outcome.metrics["test/accuracy"][0, 1] == 0.25
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as it was


def test_what_is_set_aside_is_in_nobodys_way(tmp_path: Path) -> None:
    store = Store(tmp_path)
    places = []
    for _ in range(2):
        store.put(record())
        places.append(store.set_aside(tmp_path / "cells" / CELL.key))
    assert places == [tmp_path / "broken" / "cells" / name for name in (CELL.key, f"{CELL.key}.2")]
    assert all((place / "metrics.npz").exists() for place in places)
    assert store.status(CELL) == "missing"


def test_another_layout_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path).lock(pytest.fail):
        pass
    Store(tmp_path)
    (tmp_path / "version").write_text("2\n")
    with pytest.raises(InputError, match=r"layout 2.*reads layout 1"):
        Store(tmp_path)


def test_opening_a_store_writes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    assert (store.finished(), store.errors(), store.card(CELL)) == ([], [], None)
    assert not store.root.exists()


def test_a_partition_is_drawn_once_and_damage_is_seen(tiny: Tiny) -> None:
    from fedbench import data
    from fedbench.cells import source

    cells = tiny.cells()
    assert len({cell.partition_key for cell in cells}) == 1
    arrays = data.load(source(cells[0], tiny.file.parent), tiny.data)
    store = Store(tiny.out)
    draws: list[Cell] = []

    def draw() -> Partition:
        draws.append(cells[0])
        return draw_partition(cells[0], arrays)

    first = store.partition(cells[0], draw)
    assert store.partition(cells[1], draw).hash == first.hash
    assert len(draws) == 1
    assert store.card(cells[2]) == first.card
    (index,) = tiny.out.glob("partitions/*/index.npz")
    index.write_bytes(index.read_bytes()[:-30])
    with pytest.raises(InputError, match=f"{index.parent}.*damaged"):
        store.partition(cells[0], draw)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from fedbench.store import Store\n"
        "with Store(Path(sys.argv[1])).lock(lambda: print('waiting', flush=True)):\n"
        "    print(time.monotonic(), flush=True)"
    )
    said: list[str] = []
    with Store(tmp_path).lock(lambda: said.append("waiting")):
        other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "waiting\n"
        released = time.monotonic()
    rest, _ = other.communicate(timeout=30)
    assert float(rest) >= released
    assert not said
    with Store(tmp_path).lock(lambda: said.append("waiting")):  # free again
        assert not said
