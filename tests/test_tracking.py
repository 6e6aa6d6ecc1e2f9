"""Tracking, on a real MLflow store in SQLite."""

import csv
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny

from fedbench.cells import Cell, draw_partition
from fedbench.executors import Job, Setting, inline, load_arrays
from fedbench.federation import Outcome
from fedbench.store import Record, Store
from fedbench.tracking import Tracker, TrackingError, client_table, local_uri, series

NAN = float("nan")


def stored(tiny: Tiny) -> tuple[Store, list[Cell]]:
    """Run the tiny suite and return its store and cells."""
    store, cells = Store(tiny.out / "tiny"), tiny.cells()
    setting = Setting(tiny.data, tiny.file.parent)
    jobs = [Job(c, store.partition(c, lambda c=c: draw_partition(c, load_arrays(c, setting)))) for c in cells]  # type: ignore[misc]
    for result in inline(jobs, setting, lambda cell, done, total: None):
        assert isinstance(result, Record)
        store.put(result)
    return store, cells


def runs(uri: str, experiment: str = "tiny") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id]))


def test_series_of_a_hand_made_outcome() -> None:
    outcome = Outcome(
        "completed",
        "",
        metrics={
            "test/accuracy": np.array([[NAN, NAN], [1.0, 0.0], [NAN, 0.25]]),
            "train/loss": np.array([[1.0, 3.0]]),
        },
        traffic={"up/scalars": np.array([[5, 7], [1, 0]])},
        work={"steps": np.array([[2.0, 2.0]])},
        sizes={"train": np.array([3, 4]), "test": np.array([1, 1])},
        seconds={"total": 1.0},
    )
    assert list(series(outcome)) == [
        ("test/accuracy/mean", 2, 0.5),
        ("test/accuracy/std", 2, 0.5),
        ("test/accuracy/worst", 2, 0.0),
        ("test/accuracy/client 000", 2, 1.0),
        ("test/accuracy/client 001", 2, 0.0),
        ("test/accuracy/mean", 3, 0.25),
        ("test/accuracy/std", 3, 0.0),
        ("test/accuracy/worst", 3, 0.25),
        ("test/accuracy/client 001", 3, 0.25),
        ("train/loss/mean", 1, 2.0),
        ("up/scalars", 1, 12.0),
        ("up/scalars/total", 1, 12.0),
        ("up/scalars", 2, 1.0),
        ("up/scalars/total", 2, 13.0),
        ("steps", 1, 4.0),
        ("steps/total", 1, 4.0),
    ]
    rows = list(csv.DictReader(client_table(outcome).splitlines()))
    assert rows[0] == {
        "client": "0",
        "train samples": "3",
        "test samples": "1",
        "test/accuracy": "nan",
        "train/loss": "1.0",
        "up/scalars/total": "6",
        "steps/total": "2.0",
    }
    assert rows[1]["test/accuracy"] == "0.25"


def test_a_cell_is_one_run_below_the_suites(
    tiny: Tiny, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.file.parent)
    store, cells = stored(tiny)
    uri = local_uri(tiny.out)
    tracker = Tracker(store, "tiny", uri)
    assert all(tracker.lacks(cell) for cell in cells)
    for cell in cells:
        tracker.log(cell, f"the {cell.label}")
    assert not any(tracker.lacks(cell) for cell in cells)
    assert capfd.readouterr() == ("", "")  # no word of MLflow's

    found = {run.info.run_name: run for run in runs(uri)}
    assert sorted(found) == ["the fedavg", "the fedproto", "the local", "tiny"]
    run, cell = found["the fedavg"], cells[1]
    assert run.data.tags["mlflow.parentRunId"] == found["tiny"].info.run_id
    assert run.data.tags["fedbench.cell"] == cell.key
    assert run.info.status == "FINISHED"
    assert run.data.params == {name: str(value) for name, value in cell.facts().items()}
    outcome = store.get(cell.key).outcome
    last = {}
    for name, number, value in series(outcome):
        last[name] = (number, value)
    assert run.data.metrics == {name: value for name, (_, value) in last.items()}
    assert last["test/accuracy/mean"][0] == 3
    assert run.data.metrics["up/scalars/total"] == outcome.traffic["up/scalars"].sum() > 0

    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert folder.is_relative_to(tiny.out)
    assert json.loads((folder / "recipe.json").read_text()) == cell.recipe
    assert json.loads((folder / "partition.json").read_text()) == store.card(cell)
    assert len((folder / "clients.csv").read_text().splitlines()) == 1 + 4
    assert not Path("mlruns").exists()


def test_nothing_is_logged_twice_and_half_a_run_is_logged_anew(tiny: Tiny) -> None:
    from mlflow import MlflowClient

    store, cells = stored(tiny)
    cell, uri = cells[0], local_uri(tiny.out)
    Tracker(store, "tiny", uri).log(cell, "once")
    (tiny.out / "tiny" / "cells" / cell.key / "tracked.json").unlink()  # killed before it was noted
    Tracker(store, "tiny", uri).log(cell, "again")
    assert sorted(run.info.run_name for run in runs(uri)) == ["once", "tiny"]

    run = next(run for run in runs(uri) if run.info.run_name == "once")
    MlflowClient(uri).update_run(run.info.run_id, "RUNNING")  # killed while it was logged
    (tiny.out / "tiny" / "cells" / cell.key / "tracked.json").unlink()
    Tracker(store, "tiny", uri).log(cell, "anew")
    found = {run.info.run_name: run for run in runs(uri)}
    assert sorted(found) == ["anew", "tiny"]
    assert found["anew"].info.status == "FINISHED"

    record = store.get(cell.key)
    store.put(Record(cell, record.outcome, {**record.provenance, "started": "2026-01-01T00:00:00.000000+00:00"}))
    tracker = Tracker(store, "tiny", uri)
    assert tracker.lacks(cell)  # another outcome is another run
    tracker.log(cell, "second")
    assert sorted(run.info.run_name for run in runs(uri)) == ["anew", "second", "tiny"]
    (tiny.out / "mlflow.db").unlink()
    assert Tracker(store, "tiny", uri).lacks(cell)


def test_divergence_and_long_values(tiny: Tiny) -> None:
    store = Store(tiny.out / "tiny")
    first = tiny.cells()[0]
    recipe = {**first.recipe, "method": {**first.recipe["method"], "options": {"text": "x" * 7000, "short": 1}}}
    cell = Cell("tiny", "local", recipe)
    outcome = Outcome(
        "diverged",
        "round 2: client 0",
        metrics={"test/accuracy": np.array([[0.5]]), "train/loss": np.array([[np.inf]])},
        traffic={},
        work={},
        sizes={"train": np.array([1])},
        seconds={"total": 1.0},
    )
    store.put(Record(cell, outcome, {"started": "2026-01-01T00:00:00.000000+00:00", "seconds": 2.0}))
    uri = local_uri(tiny.out)
    Tracker(store, "tiny", uri).log(cell, "it")
    run = next(run for run in runs(uri) if run.info.run_name == "it")
    assert run.info.status == "FAILED"
    assert run.data.tags["fedbench.status"] == "diverged"
    assert run.data.metrics["test/accuracy/mean"] == 0.5
    assert run.data.params["method.short"] == "1"
    assert "method.text" not in run.data.params
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert json.loads((folder / "recipe.json").read_text())["method"]["options"]["text"] == "x" * 7000
    assert run.info.end_time - run.info.start_time == 2000


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "nonsense://x", "/some/folder"])
def test_a_store_that_cannot_be_reached_is_one_line(tiny: Tiny, uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    store, cells = stored(tiny)
    tracker = Tracker(store, "tiny", uri)
    with pytest.raises(TrackingError, match=f"MLflow at {uri} could not take a cell") as raised:
        tracker.log(cells[0], "it")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert store.has(cells[0])
    assert tracker.lacks(cells[0])


def test_a_password_is_not_stored_or_said(tiny: Tiny) -> None:
    store, cells = stored(tiny)
    tracker = Tracker(store, "tiny", "http://me:secret@127.0.0.1:9")
    store.put_tracked(cells[0], "http://127.0.0.1:9", "run")
    assert not tracker.lacks(cells[0])
    with pytest.raises(TrackingError, match=r"MLflow at mysql://127\.0\.0\.1:9/it could not take a cell") as raised:
        Tracker(store, "tiny", "mysql://me:secret@127.0.0.1:9/it").log(cells[1], "it")
    assert "secret" not in str(raised.value)


def test_repair_tells_other_suites_when_nobody_is_at_work_there(tiny: Tiny) -> None:
    store, cells = stored(tiny)
    other, uri = Store(tiny.out / "other"), local_uri(tiny.out)
    with other.lock(lambda: None):
        other.put(store.get(cells[0].key))
        other.put_tracked(cells[0], uri, "run")
    (tiny.out / "mlflow.db").write_bytes(b"no database" * 1000)
    store.checkpoints.mkdir()
    (store.checkpoints / "0123.pt").write_bytes(b"")
    held = other.lock(lambda: None)
    held.__enter__()
    repairing = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedbench", "repair", str(tiny.file), "--out", str(tiny.out)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert repairing.stdout is not None
    lines: list[str] = []
    while not lines or (lines[-1] and "another run is at work" not in lines[-1]):
        lines.append(repairing.stdout.readline())
    assert str(other.root) in lines[-1]
    assert f"{store.checkpoints}: 1 checkpoint of cells that have not ended; can be deleted\n" in lines
    assert other.tracked(cells[0], uri)
    held.__exit__(None, None, None)
    assert "1 moved aside" in repairing.communicate(timeout=60)[0]
    assert not other.tracked(cells[0], uri)


def test_a_damaged_database_is_one_line(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    store, cells = stored(tiny)
    (tiny.out / "mlflow.db").write_bytes(b"no database" * 1000)
    with pytest.raises(TrackingError, match=r"could not take a cell: .*not a database") as raised:
        Tracker(store, "tiny", local_uri(tiny.out)).log(cells[0], "it")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def _log_one(root: Path, key: str, name: str, ready: Barrier) -> None:
    store = Store(root)
    cell = store.get(key).cell
    ready.wait(60)
    Tracker(store, f"suite {name}", local_uri(root.parent)).log(cell, name)


def test_eight_processes_begin_one_database_together(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    store, cells = stored(tiny)
    keys = [cells[number % 3].key for number in range(8)]
    context = get_context("forkserver")
    context.set_forkserver_preload(["fedbench.federation"])
    ready = context.Barrier(len(keys))
    started = [
        context.Process(target=_log_one, args=(store.root, key, str(number), ready)) for number, key in enumerate(keys)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        assert process.exitcode == 0
    assert capfd.readouterr() == ("", "")
    uri = local_uri(tiny.out)
    for number, key in enumerate(keys):
        (run,) = [run for run in runs(uri, f"suite {number}") if run.info.run_name == str(number)]
        assert run.data.tags["fedbench.cell"] == key
        expected = store.get(key).outcome.metrics["test/accuracy"][-1].mean()
        assert run.data.metrics["test/accuracy/mean"] == expected
    with closing(sqlite3.connect(tiny.out / "mlflow.db")) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)


def test_a_server_takes_what_a_file_does(tiny: Tiny, mlflow_server: str) -> None:
    store, cells = stored(tiny)
    tracker = Tracker(store, "tiny", mlflow_server)
    for cell in cells[:2]:
        tracker.log(cell, cell.label)
    assert [tracker.lacks(cell) for cell in cells] == [False, False, True]
    assert sorted(run.info.run_name for run in runs(mlflow_server)) == ["fedavg", "local", "tiny"]
    assert len(list(tiny.out.glob("server/artifacts/**/clients.csv"))) == 2
