"""Checkpoints: a run that was killed inside a cell goes on there and ends as if nothing had happened."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import kill_loop
import numpy as np
import pytest
import torch
from conftest import Tiny
from helpers import assert_same_results, blobs, plain_mlp, results, small_cnn

from fedbench import Outcome, executors, plugins
from fedbench.cells import draw_partition
from fedbench.checkpoint import Checkpoint
from fedbench.executors import EXECUTORS, Job, Setting, load_arrays
from fedbench.federation import play, run
from fedbench.method import Method
from fedbench.methods.fedproto import FedProto
from fedbench.models.mlp import Mlp
from fedbench.samples import from_clients
from fedbench.settings import Training
from fedbench.setups import Setup, make_setup
from fedbench.store import Record, Store

ABOUT = {"recipe": "0123", "code": "4567"}
TRAINING = Training(rounds=10, batch_size=4, evaluate_every=2, participation=0.75, batch_norm="local")


def setup_of(method: Method, engine: Any, **changes: Any) -> Setup:
    training = replace(TRAINING, last_batch="drop_single", **changes)
    data = from_clients(blobs((7, 12, 6, 9), shape=(1, 5, 5)), 4, torch.float32, torch.device("cpu"))
    return make_setup(method, [small_cnn], data, training, 3, engine)


class Killed(BaseException):
    """Ends a federation as a signal would: nothing after it is done."""


def killed_in(number: int) -> Callable[[int, int], None]:
    def on_round(done: int, total: int) -> None:
        if done == number:
            raise Killed

    return on_round


def cut_off(setup: Setup, path: Path, after: int = 5) -> None:
    """Leave what a run of a setup leaves that was killed in the round behind one."""
    with pytest.raises(Killed):
        play(setup, killed_in(after + 1), checkpoint=Checkpoint(path, ABOUT, 0))


METHODS = [
    pytest.param((name, options), id=f"{name} {preset}".strip())
    for name in ("local", "fedavg", "fedprox", "fedper", "fedrep", "fesem", "fedproto")
    for preset, options in {"": {}, **plugins.load("methods", name).presets}.items()
]


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize("chosen", METHODS)
def test_stopped_after_round_5_of_10_and_resumed_is_bitwise_the_same(
    chosen: tuple[str, Mapping[str, Any]], engine: str, tmp_path: Path
) -> None:
    setup = setup_of(plugins.build("methods", *chosen), engine)
    whole = play(setup)
    path = tmp_path / "new folder" / "it.pt"
    cut_off(setup, path)
    assert [file.name for file in path.parent.iterdir()] == ["it.pt"]
    told: list[tuple[int, int]] = []
    checkpoint = Checkpoint(path, ABOUT, 0)
    resumed = play(setup, lambda *round: told.append(round), checkpoint=checkpoint)
    assert checkpoint.resumed == 5
    assert told == [(number, 10) for number in range(5, 11)]
    assert_equal(whole, resumed)


def assert_equal(whole: Outcome, resumed: Outcome) -> None:
    assert_same_results(whole, resumed)
    assert resumed.initial.keys() == whole.initial.keys()
    for name, values in whole.initial.items():
        np.testing.assert_array_equal(resumed.initial[name], values)
    for name, array in results(resumed).items():
        assert array.dtype == results(whole)[name].dtype
    assert resumed.seconds.keys() == whole.seconds.keys()
    assert resumed.kept.keys() == whole.kept.keys()
    for name, kept in whole.kept.items():
        np.testing.assert_array_equal(resumed.kept[name], kept)


def test_a_run_may_be_killed_after_every_round(tmp_path: Path) -> None:
    setup = setup_of(FedProto(), "auto")
    for after in range(1, 9):
        cut_off(setup, tmp_path / "it.pt", after)
    assert_equal(play(setup), play(setup, checkpoint=Checkpoint(tmp_path / "it.pt", ABOUT, 0)))


def test_divergence_after_a_resumption_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    clients = blobs()
    clients[3] = clients[3]._replace(x_train=1e30 * np.asarray(clients[3].x_train, np.float32))
    data = from_clients(clients, 4, torch.float32, torch.device("cpu"))
    setup = make_setup(FedProto(), [plain_mlp], data, Training(rounds=9), 0)
    setup = replace(setup, participants=[[0, 1]] * 6 + [[3]] * 3)
    whole = play(setup)
    assert whole.message.startswith("round 7: client 3")
    cut_off(setup, tmp_path / "it.pt")
    assert_equal(whole, play(setup, checkpoint=Checkpoint(tmp_path / "it.pt", ABOUT, 0)))


def test_a_judge_hears_every_round_again(tmp_path: Path) -> None:
    setup = setup_of(FedProto(), "loop", evaluate_every=1)

    def told(heard: dict[int, bytes]) -> Callable[[int, Mapping[str, Any]], bool]:
        def stop(number: int, metrics: Mapping[str, Any]) -> bool:
            heard[number] = np.asarray(metrics["test/accuracy"]).tobytes()
            return number == 7

        return stop

    first: dict[int, bytes] = {}
    whole = play(setup, stop=told(first))
    cut_off(setup, tmp_path / "it.pt")
    again: dict[int, bytes] = {}
    resumed = play(setup, stop=told(again), checkpoint=Checkpoint(tmp_path / "it.pt", ABOUT, 0))
    assert (resumed.status, resumed.message) == ("stopped", "round 7")
    assert again == first
    assert list(again) == [1, 2, 3, 4, 5, 6, 7]
    assert_equal(whole, resumed)


def test_mixed_models_and_what_is_kept_for_figures(tiny: Tiny, tmp_path: Path) -> None:
    (cell,) = (cell for cell in tiny.cells() if cell.label == "fedproto")
    arrays = load_arrays(cell, Setting(tiny.data, tiny.file.parent))
    partition = draw_partition(cell, arrays)

    def mlp(shape: tuple[int, ...], classes: int) -> Mlp:
        return Mlp(shape, classes, hidden=(9, 8))

    for models in ([plain_mlp], [lambda shape, classes: Mlp(shape, classes, hidden=(8,)), mlp]):

        def made(models: Any = models, **how: Any) -> Outcome:
            return run(FedProto(), models, arrays, partition, Training(rounds=6), seed=1, keep=("embeddings",), **how)

        path = tmp_path / f"{len(models)}.pt"
        with pytest.raises(Killed):
            made(on_round=killed_in(4), checkpoint=Checkpoint(path, ABOUT, 0))
        whole, resumed = made(), made(checkpoint=Checkpoint(path, ABOUT, 0))
        assert "table/prototypes" in whole.kept
        assert_equal(whole, resumed)


# --- what is not gone on from


class Evil:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a flipped bit": _flipped,
    "empty": lambda path: path.write_bytes(b""),
    "a pickle": lambda path: torch.save({"about": ABOUT, "progress": Evil(path.with_name("touched"))}, path),
    "of another kind": lambda path: torch.save([1, 2, 3], path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_never_used(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = setup_of(FedProto(), "auto", rounds=3)
    path = tmp_path / "it.pt"
    cut_off(setup, path, 1)
    DAMAGE[damage](path)
    checkpoint = Checkpoint(path, ABOUT, 0)
    assert_equal(play(setup), play(setup, checkpoint=checkpoint))
    assert checkpoint.resumed == 0
    (line,) = caplog.messages
    assert line.startswith(f"{path} is damaged and not used: ")
    assert "\n" not in line
    assert not (tmp_path / "touched").exists()


def test_one_of_another_code_or_recipe_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = setup_of(FedProto(), "auto", rounds=3)
    path = tmp_path / "it.pt"
    cut_off(setup, path, 1)
    checkpoint = Checkpoint(path, ABOUT | {"code": "89", "recipe": "ab"}, 0)
    assert_equal(play(setup), play(setup, checkpoint=checkpoint))
    assert caplog.messages == [f"{path} is not used, since it was made with another code, recipe"]


def test_what_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setup = setup_of(FedProto(), "auto", rounds=4)
    (tmp_path / "file").write_text("in the way")
    checkpoint = Checkpoint(tmp_path / "file" / "it.pt", ABOUT, 0)
    assert_equal(play(setup), play(setup, checkpoint=checkpoint))
    said = [line for line in caplog.messages if line.startswith(f"{tmp_path / 'file' / 'it.pt'} cannot be written: ")]
    assert len(said) == 1


def test_it_is_saved_when_it_is_time_and_takes_little_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def slowly(content: Any, file: Any) -> None:
        nonlocal now
        now += 2.0

    def slow() -> dict[str, Any]:
        nonlocal now
        now += 4.0
        return {"round": 1}

    monkeypatch.setattr(torch, "save", slowly)
    checkpoint = Checkpoint(tmp_path / "it.pt", ABOUT, 30.0)
    saved = []
    for now in (10.0, 29.0, 30.0, 66.0, 155.0, 156.0):
        if checkpoint.due:
            saved.append(now)
            checkpoint.save(slow)
    assert saved == [30.0, 156.0]


# --- in a suite


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_executors_go_on_and_say_so_and_the_store_removes_what_is_done(
    executor: str, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.change(training={"rounds": 6, "batch_size": 4})
    store = Store(tiny.out)
    setting = Setting(tiny.data, tiny.file.parent, checkpoints=store.checkpoints, checkpoint=0)
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in tiny.cells()]

    def killed(cell: Any, done: int, total: int) -> None:
        if (cell.key, done) == (jobs[1].cell.key, 4):
            raise Killed

    def drive() -> None:
        with closing(EXECUTORS[executor](jobs, setting, killed)) as results:
            for result in results:
                assert isinstance(result, Record)
                store.put(result)

    with pytest.raises(Killed):
        drive()
    left = {file.name for file in store.checkpoints.iterdir()}
    assert f"{jobs[1].cell.key}.pt" in left
    assert f"{jobs[0].cell.key}.pt" not in left
    again = {result.cell.label: result for result in EXECUTORS[executor](jobs[1:], setting, lambda *_: None)}
    whole = {
        r.cell.label: r for r in EXECUTORS["inline"](jobs[1:], replace(setting, checkpoints=None), lambda *_: None)
    }
    for label, record in again.items():
        undisturbed = whole[label]
        assert isinstance(record, Record)
        assert isinstance(undisturbed, Record)
        assert_equal(undisturbed.outcome, record.outcome)
        store.put(record)
    fedavg = again["fedavg"]
    assert isinstance(fedavg, Record)
    assert fedavg.provenance["resumed"] in [f"after round {number}" for number in (3, 4, 5)]
    assert not list(store.checkpoints.iterdir())
    assert not caplog.messages


def test_another_commit_of_the_same_code_goes_on(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(tiny.data, tiny.file.parent, checkpoints=tiny.out, checkpoint=0)
    cell = tiny.cells()[1]
    job = Job(cell, draw_partition(cell, load_arrays(cell, setting)))

    def killed(cell: Any, done: int, total: int) -> None:
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        next(EXECUTORS["inline"]([job], setting, killed))
    machine = executors._machine("cpu")
    monkeypatch.setattr(executors, "_machine", lambda device: {**machine, "commit": "another", "host": "another"})
    record = next(EXECUTORS["inline"]([job], setting, lambda *_: None))
    assert isinstance(record, Record)
    assert (record.provenance["resumed"], record.provenance["commit"]) == ("after round 1", "another")


def test_cells_computed_together_save_nothing(tiny: Tiny) -> None:
    tiny.change(seeds=[0, 1], methods={"fedavg": {}})
    setting = Setting(tiny.data, tiny.file.parent, together=2, checkpoints=tiny.out, checkpoint=0)
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in tiny.cells()]
    assert all(isinstance(result, Record) for result in EXECUTORS["together"](jobs, setting, lambda *_: None))
    assert not tiny.out.exists()


def test_kill_9_inside_a_cell(tiny: Tiny) -> None:
    tiny.change(training={"rounds": 60, "batch_size": 4}, methods={"fedavg": {}, "fedproto": {}})
    command = [sys.executable, "-W", "error", "-m", "fedbench", "run", str(tiny.file), "--tracking-uri", "none"]
    command += ["--workers", "1", "--checkpoint", "0"]

    def start() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tiny.file.parent, start_new_session=True, **pipes)

    store = Store(tiny.out / "tiny")
    driver = start()
    while not list(store.checkpoints.glob("*.pt")) and driver.poll() is None:
        time.sleep(0.001)
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert driver.returncode == -signal.SIGKILL
    again = start()
    out, err = again.communicate()
    assert (err, again.returncode) == ("", 0)
    assert re.search(r"^\[1/2\] .* over clients \([0-9.]+ s, resumed after round [0-9]+\)$", out, re.MULTILINE)
    records = {key: store.get(key) for key in store.finished()}
    assert len(records) == 2
    assert any("resumed" in record.provenance for record in records.values())
    assert not list(store.checkpoints.iterdir())
    setting = Setting(tiny.data, tiny.file.parent)
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in tiny.cells()]
    for result in EXECUTORS["inline"](jobs, setting, lambda *_: None):
        assert isinstance(result, Record)
        assert_equal(result.outcome, records[result.cell.key].outcome)


def test_killed_at_random_moments(tiny: Tiny) -> None:
    """A short form of kill_loop.py."""
    tiny.change(training={"rounds": 40, "batch_size": 4})
    more = ["--data", str(tiny.data), "--tracking-uri", "none", "--workers", "1", "--checkpoint", "0"]
    assert kill_loop.kill(str(tiny.file), tiny.out, 2, 0.2, random.Random(1), more, saved=True) > 0
    found = kill_loop.numbers(tiny.out / "tiny")
    setting = Setting(tiny.data, tiny.file.parent)
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in tiny.cells()]
    store = Store(tiny.out / "undisturbed")
    for result in EXECUTORS["inline"](jobs, setting, lambda *_: None):
        assert isinstance(result, Record)
        store.put(result)
    assert len(found) == 3
    assert found == kill_loop.numbers(store.root)
