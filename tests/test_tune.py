"""Tuning with real studies: the same trials whatever is killed, test samples nobody sees, and values that count."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import optuna
import pytest
from conftest import Run, Tiny
from optuna.trial import TrialState

from fedbench import cells, config, export, federation, space, studies, tune
from fedbench.cells import draw_partition, expand, fingerprints
from fedbench.errors import InputError
from fedbench.executors import EXECUTORS, Executor, Job, Judge, OnRound, Setting, inline, load_arrays, mild, processes
from fedbench.executors import Results as Stream
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedrep import FedRep
from fedbench.options import resolve
from fedbench.report import compare
from fedbench.report.figures import figures
from fedbench.report.plots import Lines
from fedbench.results import Result, Results
from fedbench.settings import Training
from fedbench.space import Tune
from fedbench.store import CellError, Store
from fedbench.studies import Study, Trial

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture
def tunable(tiny: Tiny) -> Tiny:
    """Two rows with five trials each, of two rounds."""
    tiny.change(training={"rounds": 2, "batch_size": 8}, methods={"fedavg": {}, "fedproto": {}}, tune={"trials": 5})
    return tiny


def backwards(jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Stream:
    """Run the jobs one after the other, the last one first."""
    assert isinstance(jobs, deque)
    while jobs:
        yield from inline([jobs.pop()], setting, on_round, judge)


@cache
def empty_storage() -> bytes:
    """Return an SQLite storage without studies, which takes Optuna a second to make."""
    with TemporaryDirectory() as folder:
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/empty.db")
        storage.remove_session()
        storage.engine.dispose()
        return Path(folder, "empty.db").read_bytes()


def search(
    tiny: Tiny,
    out: str = "runs",
    execute: Executor = inline,
    most: int | None = None,
    url: str = "",
    data: Path | None = None,
) -> tuple[dict[str, Study], int]:
    """Tune, but end after `most` trials; return the studies so far by row, and how many trials were run."""
    suite = config.load(tiny.file)
    data = data or tiny.data
    store = Store(tiny.file.parent / out / "tiny")
    store.root.mkdir(parents=True, exist_ok=True)
    if not (database := store.root / "optuna.db").exists():
        database.write_bytes(empty_storage())
    setting = Setting(data, suite.base, workers=2)
    planned = expand(suite, fingerprints(suite.base, data))
    ran = 0
    with tune.searches(tune.unfinished(planned, store), store, url or tune.default_storage(store)) as found:
        probes = [tune.probe(one.cell) for one in found]
        partitions = {one.partition_key: draw_partition(one, load_arrays(one, setting), suite.base) for one in probes}
        results = tune.run(found, partitions, execute, setting, lambda cell, done, total: None)
        while ran != most and (result := next(results, None)):
            ran += 1
            if isinstance(result, CellError):
                store.put_error(result)
            else:
                store.put(result)
        results.close()
    return {cell.label: study for cell in planned if (study := store.study(cell))}, ran


def shape(study: Study) -> list[Any]:
    """Return everything about a study but the clock's readings and the keys of its cells."""
    return [replace(trial, seconds=0.0, cell="") for trial in study.trials]


def stored(path: Path) -> dict[str, list[Any]]:
    """Return the trials of all studies in an SQLite storage, by name."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    try:
        names = optuna.study.get_all_study_names(storage)
        return {name: optuna.load_study(study_name=name, storage=storage).get_trials() for name in names}
    finally:
        storage.remove_session()
        storage.engine.dispose()


# --- the space


def row(method: type, **training: Any) -> dict[str, Any]:
    options = resolve(method, {}, "")
    return {"method": {"name": "m", "options": options}, "training": resolve(Training, training, "")}


def test_marks_and_the_learning_rate_are_searched_and_the_suite_narrows_or_fixes() -> None:
    rate = {"low": 1e-3, "high": 0.3, "log": True}
    lam = {"low": 0.01, "high": 10, "log": True}
    assert space.span(Tune(), FedProto, row(FedProto), (), "")[1] == {"training.optimizer.lr": rate, "method.lam": lam}
    adam = space.span(Tune(), FedRep, row(FedRep, optimizer={"name": "adam"}), (), "")[1]
    assert adam == {
        "training.optimizer.lr": {"low": 1e-4, "high": 0.1, "log": True},
        "method.head_epochs": {"values": [1, 5, 10]},
    }
    momentum = Tune(params={"momentum": {"low": 0.1, "high": 0.9}, "optimizer.nesterov": [False, True]})
    assert len(space.span(momentum, FedRep, row(FedRep), (), "")[1]) == 4
    assert space.span(momentum, FedRep, row(FedRep, optimizer={"name": "adam"}), (), "")[1] == adam  # which has none
    params: dict[str, Any] = {
        "lam": {"low": 0.5, "high": 2},  # on the mark's scale
        "lr": [0.1, 0.01],
        "batch_size": {"low": 4, "high": 16},
        "epochs": 3,
        "distance": ["mse", "l2"],
        "mu": 0.5,  # another row's
    }
    fixed, searched = space.span(Tune(params=params), FedProto, row(FedProto), (), "")
    assert searched == {
        "method.lam": {"low": 0.5, "high": 2.0, "log": True},
        "training.optimizer.lr": {"values": [0.1, 0.01]},
        "training.batch_size": {"low": 4, "high": 16, "log": False},
        "method.distance": {"values": ["mse", "l2"]},
    }
    assert fixed["training"]["epochs"] == 3
    assert space.put(fixed, {"training.epochs": 1}) == row(FedProto)
    kept = space.span(Tune(params={"lr": None}), FedProto, row(FedProto), (), "")
    assert kept == (row(FedProto), {"method.lam": lam})
    assert space.span(Tune(), FedProto, row(FedProto), ("training.optimizer",), "")[1] == {"method.lam": lam}
    grid = Tune(sampler="grid", params={"batch_size": {"low": 4, "high": 6}})
    points = space.span(grid, FedProto, row(FedProto), ("training.optimizer.lr",), "")[1]
    assert points["training.batch_size"] == {"values": [4, 5, 6]}
    assert points["method.lam"]["values"] == pytest.approx([0.01, 0.0562341, 0.316228, 1.77828, 10])
    assert space.trials(grid, points) == 15
    assert space.trials(Tune(sampler="grid", trials=7), points) == 7


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"trials": 0}, "tune.trials: should be greater than or equal to 1, not 0"),
        ({"sampler": "tpee"}, "tune.sampler: unknown sampler 'tpee'; did you mean 'tpe'?"),
        ({"pruner": "mean"}, "tune.pruner: unknown pruner 'mean'; did you mean 'median'?"),
        ({"objective": "test/accuracy"}, "tune.objective: 'test/accuracy' is no metric of the validation samples"),
        ({"trial": 3}, "tune: unknown key 'trial'; did you mean 'trials'?"),
        ({"params": {"lr": {"low": 1, "high": 0.1}}}, "tune.params: lr: the range from 1 to 0.1 is empty"),
        ({"params": {"lr": {"low": 1, "high": 1}}}, "tune.params: lr: the range from 1 to 1 is empty"),
        ({"params": {"lr": []}}, "tune.params: lr has an empty list of values"),
        ({"params": {"lr": [0.1, 0.1]}}, "tune.params: lr has 0.1 more than once"),
        ({"params": {"lr": {"low": 1}}}, "tune.params: lr.high should be a number; a range is written"),
        ({"params": {"lr": {"min": 1}}}, "tune.params: lr: unknown key 'min'"),
        ({"params": {"lamm": 1}}, "tune.params: unknown setting 'lamm'; did you mean 'lam'?"),
        (
            {"params": {"optimzer.momentum": 1}},
            "tune.params: unknown setting 'optimzer.momentum'; did you mean 'optimizer.momentum'?",
        ),
        (
            {"params": {"optimizer.name": ["sgd", "adm"], "momentum": 0.1}},
            "tune.params.optimizer.name: should be 'sgd' or 'adam', not \"adm\"",
        ),
        ({"params": {"lr": {"low": 0, "high": 1}}}, "tune.params.optimizer.lr: should be greater than 0, not 0"),
        ({"params": {"lam": {"low": 0, "high": 1}}}, "tune.params.lam: low should be above 0 on a log scale, not 0"),
        ({"params": {"lam": [-1]}}, "tune.params.lam: should be greater than or equal to 0, not -1"),
        ({"params": {"shuffle": {"low": 0, "high": 1}}}, "tune.params.shuffle: should be true or false, not 0"),
        ({"params": {"lr": 0.1}}, "methods.fedavg: tune: nothing is left to search"),
    ],
)
def test_bad_input_is_one_line(tunable: Tiny, said: dict[str, Any], message: str) -> None:
    tunable.change(tune=said)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        tunable.cells()
    assert "\n" not in str(caught.value)
    assert str(tunable.file) in str(caught.value)


def test_a_setting_that_the_optimiser_does_not_have_is_not_searched(tunable: Tiny) -> None:
    adam = {"optimizer": {"name": "adam"}}
    rows = {"fedavg": {"training": adam}, "fedproto": {}}
    tunable.change(methods=rows, tune={"params": {"momentum": [0.1, 0.9]}})
    found = {cell.label for cell in tunable.cells() if "training.optimizer.momentum" in cell.recipe["tuning"]["space"]}
    assert found == {"fedproto"}
    tunable.change(training=adam, tune={"params": {"optimizer.momentum": [0.1, 0.9]}})
    with pytest.raises(InputError, match="is a setting that no row's optimiser has"):
        tunable.cells()


@pytest.mark.parametrize(
    ("rows", "said", "searched"),
    [
        ("adam", ["sgd", "adam"], True),
        ("adam", "sgd", True),
        ("sgd", "adam", False),
        ("sgd", ["adam"], False),
        ("sgd", None, True),
    ],
)
def test_what_an_optimiser_has_depends_on_which_the_tuning_gives(rows: str, said: Any, searched: bool) -> None:
    made = row(FedRep, optimizer={"name": rows})
    params = Tune(params={"momentum": [0.1, 0.9], "optimizer.name": said})
    assert ("training.optimizer.momentum" in space.span(params, FedRep, made, (), "")[1]) is searched
    varied = space.span(params, FedRep, made, ["training.optimizer.name"], "")[1]  # by a grid, so tuning gives none
    assert ("training.optimizer.momentum" in varied) is (rows == "sgd")


def test_what_a_grid_varies_is_not_searched(tunable: Tiny) -> None:
    rows = {"fedproto": {"grid": {"lam": [1.0, 2.0]}}, "fedavg": {"grid": {"training.epochs": [1, 2]}}}
    tunable.change(methods=rows, grid={"training.batch_size": [4, 8]}, tune={"params": {"batch_size": [2, 4]}})
    assert {(cell.label, *cell.recipe["tuning"]["space"]) for cell in tunable.cells()} == {
        (label, "training.optimizer.lr")
        for label in ("fedproto (lam=1.0)", "fedproto (lam=2.0)", "fedavg (epochs=1)", "fedavg (epochs=2)")
    }


def test_the_key_of_a_tuned_cell_holds_how_it_is_tuned(tunable: Tiny) -> None:
    tunable.change(seeds=[0, 1], partition_seeds=[5, 6])
    before = tunable.cells()
    assert len({cell.key for cell in before}) == 8
    assert len({cell.study_key for cell in before}) == 4  # one for all seeds of the run, but none for two partitions
    assert before[0].facts()["optimizer.lr"] == "tuned"
    for changed in ({"sampler": "random"}, {"seed": 1}, {"params": {"lr": [0.1]}}, {"batch": 2}, {"validation": 0.3}):
        tunable.change(tune={"trials": 5, **changed})
        after = tunable.cells()
        assert not {cell.key for cell in before} & {cell.key for cell in after}
        assert not {cell.study_key for cell in before} & {cell.study_key for cell in after}
    tunable.change(tune={"trials": 6})
    assert not {cell.key for cell in before} & {cell.key for cell in tunable.cells()}
    assert {cell.study_key for cell in before} == {cell.study_key for cell in tunable.cells()}
    tunable.change(tune=None)
    assert not any(cell.tuned for cell in tunable.cells())


# --- the trials


def test_trials_are_the_same_in_any_order_and_company(tunable: Tiny) -> None:
    tunable.change(tune={"trials": 10, "pruner": "median"}, methods={"fedproto": {}, "local": {}})
    one, ran = search(tunable)
    assert ran == 20
    assert [len(study.trials) for study in one.values()] == [10, 10]
    assert len({str(trial.values) for trial in one["fedproto"].trials}) == 10
    assert one["fedproto"].trials[0].values == {"training.optimizer.lr": 0.01, "method.lam": 1.0}  # the suite's own
    for study in one.values():
        low, high = study.space["training.optimizer.lr"]["low"], study.space["training.optimizer.lr"]["high"]
        assert all(low <= trial.values["training.optimizer.lr"] <= high for trial in study.trials)
    states = {trial.state for study in one.values() for trial in study.trials}
    assert states == {"completed", "pruned"}
    for execute, out in ((backwards, "backwards"), (processes, "processes")):
        other, _ = search(tunable, out, execute)
        assert {label: shape(study) for label, study in other.items()} == {k: shape(v) for k, v in one.items()}
    tunable.change(tune={"trials": 10, "pruner": "median", "seed": 1})
    assert search(tunable, "other", most=9)[0]["fedproto"].trials[1].values != one["fedproto"].trials[1].values


def test_a_study_goes_on_wherever_it_was_left(tunable: Tiny) -> None:
    tunable.change(tune={"trials": 6, "pruner": "median", "batch": 3})
    whole = {label: shape(study) for label, study in search(tunable, "whole")[0].items()}
    total = 0
    while total < 12:  # interrupted after every single trial
        total += search(tunable, most=1)[1]
    assert total == 12
    found, ran = search(tunable)
    assert ran == 0
    assert {label: shape(study) for label, study in found.items()} == whole
    finished = stored(tunable.out / "tiny" / "optuna.db")
    assert [[trial.state.is_finished() for trial in trials] for trials in finished.values()] == [[True] * 6] * 2


def test_what_optuna_has_is_not_run_again_and_what_the_store_has_neither(tunable: Tiny) -> None:
    tunable.change(methods={"fedavg": {}}, tune={"trials": 6})
    url = f"sqlite:///{tunable.out.parent / 'elsewhere.db'}"
    first, ran = search(tunable, url=url)
    assert ran == 6
    again, ran = search(tunable, "other", url=url)  # another store, the same storage
    assert (again, ran) == (first, 0)
    # A storage in which the first batch is not complete, as after a kill between two writes.
    name, trials = next(iter(stored(tunable.out.parent / "elsewhere.db").items()))
    half = f"sqlite:///{tunable.out.parent / 'half.db'}"
    storage = optuna.storages.RDBStorage(half)
    optuna.create_study(study_name=name, storage=storage, direction="maximize").add_trials(trials[:2])
    storage.remove_session()
    storage.engine.dispose()
    for path in (tunable.out / "tiny" / "studies").iterdir():
        path.unlink()
    assert search(tunable, url=half) == (first, 0)


def test_a_longer_study_begins_as_a_shorter_one(tunable: Tiny) -> None:
    tunable.change(tune={"trials": 10})
    direct = search(tunable, "direct")[0]["fedproto"]
    for trials in (1, 6, 10):
        tunable.change(tune={"trials": trials})
        found, _ = search(tunable)
        assert shape(found["fedproto"]) == shape(direct)[:trials]
    tunable.change(tune={"trials": 6})
    cell = tunable.cells()[1]
    assert search(tunable)[1] == 0
    assert tune.chosen(cell, found["fedproto"])["trial"] == direct.best(6)


def test_a_killed_study_of_20_ends_with_20(fedbench: Run, tunable: Tiny) -> None:
    slow = {"method": "./trouble.py:Trouble", "seconds": 0.2}
    tunable.change(methods={"slow": slow}, tune={"trials": 20})
    arguments = ["tune", str(tunable.file), "--workers", "1", "--tracking-uri", "none"]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "fedbench", *arguments],
        cwd=tunable.file.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folder = tunable.out / "tiny" / "cells"
    deadline = time.monotonic() + 100
    while len(list(folder.glob("*[0-9a-f]"))) < 7 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.communicate()[1]
    process.communicate()
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*[0-9a-f]")}
    assert 7 <= len(before) < 20
    (left,) = stored(tunable.out / "tiny" / "optuna.db").values()
    assert 4 <= len(left) <= len(before)  # whole batches
    assert all(trial.state == TrialState.COMPLETE for trial in left)

    code, out, err = fedbench(*arguments)
    assert (code, err) == (0, "")
    assert f"tuning: {20 - len(before)} trials to run" in out
    (trials,) = stored(tunable.out / "tiny" / "optuna.db").values()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 20
    assert len({trial.user_attrs["cell"] for trial in trials}) == 20
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*[0-9a-f]")}
    assert len(after) == 20
    assert before.items() <= after.items()  # nothing that had ended was run again
    tunable.change(methods={"slow": {"method": "./trouble.py:Trouble"}})  # as fast as it goes
    whole, _ = search(tunable, "whole")
    assert [trial.params for trial in trials] == [trial.values for trial in whole["slow"].trials]
    assert [trial.value for trial in trials] == [trial.value for trial in whole["slow"].trials]


# --- test samples


def test_no_trial_has_test_samples(tunable: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any, Any]] = []
    honest = federation.run

    def watched(method: Any, models: Any, arrays: Any, partition: Any, *more: Any, **settings: Any) -> Any:
        outcome = honest(method, models, arrays, partition, *more, **settings)
        seen.append((arrays, partition, outcome))
        return outcome

    monkeypatch.setattr(federation, "run", watched)
    held = dict(np.load(tunable.data / "blobs.npz"))
    for pool in ("test", "train"):
        if pool == "train":  # test samples are cut from the training samples
            np.savez(tunable.data / "blobs.npz", allow_pickle=False, x_train=held["x_train"], y_train=held["y_train"])
        seen.clear()
        cell = tunable.cells()[0]
        arrays = load_arrays(cell, Setting(tunable.data, tunable.file.parent))
        final = draw_partition(cell, arrays)
        search(tunable, pool)
        assert len(seen) == 10
        for given, partition, outcome in seen:
            assert not len(given.x_test)
            assert not len(given.y_test)
            assert not any(map(len, partition.test))
            assert not outcome.sizes["test"].any()
            assert not [name for name in (*outcome.metrics, *outcome.initial) if name.startswith(("test", "local"))]
            for client in range(4):
                mine = {*partition.train[client], *partition.validation[client]}
                assert mine == set(final.train[client])
                assert len(partition.validation[client]) == round(0.2 * len(final.train[client]))
                if pool == "train":
                    assert not mine & set(np.concatenate(final.test))


def test_poisoned_test_samples_change_nothing(tunable: Tiny) -> None:
    clean, _ = search(tunable)
    held = dict(np.load(tunable.data / "blobs.npz"))
    poisoned = tunable.file.parent / "poisoned"
    poisoned.mkdir()
    held["x_test"] = np.full_like(held["x_test"], 3e38)
    held["y_test"] = held["y_test"][::-1].copy()
    np.savez(poisoned / "blobs.npz", allow_pickle=False, **held)
    other, _ = search(tunable, "poisoned-runs", data=poisoned)
    assert {label: shape(study) for label, study in clean.items()} == {k: shape(v) for k, v in other.items()}


# --- what becomes of trials


def test_the_best_trial_counts_also_after_failures(tunable: Tiny) -> None:
    tunable.change(methods={"fedavg": {}}, tune={"sampler": "grid", "params": {"lr": [1e30, 1e-6, 0.1]}, "trials": 9})
    (study,) = search(tunable)[0].values()
    assert sorted(trial.values["training.optimizer.lr"] for trial in study.trials) == [1e-6, 0.1, 1e30]  # each once
    by_rate = {trial.values["training.optimizer.lr"]: trial for trial in study.trials}
    assert by_rate[1e30].state == "failed"
    assert by_rate[1e30].value is None
    assert by_rate[1e30].message.startswith("diverged in round 1")
    assert by_rate[0.1].value is not None
    best = study.best(9)
    assert best is not None
    assert study.trials[best] == by_rate[0.1]
    for trial in study.trials:
        assert trial.curve == () if trial.state == "failed" else trial.curve[-1] == (2, trial.value)
    assert by_rate[0.1].steps == 2 * 4 * 3  # rounds, clients, batches of 18 samples
    assert by_rate[0.1].up_scalars == 2 * 4 * (6 * 8 + 8 + 8 * 3 + 3)


def test_the_sampler_learns_from_trials_that_diverge(tunable: Tiny) -> None:
    tunable.change(methods={"fedavg": {}}, tune={"trials": 20, "params": {"lr": [0.1, 1e30, 1e31, 1e32]}})
    (study,) = search(tunable)[0].values()
    failed = [trial.state == "failed" for trial in study.trials]
    assert sum(failed[:8]) >= 5
    assert sum(failed[8:]) <= 3


def test_the_best_is_the_first_of_equals_and_never_one_that_was_pruned() -> None:
    def made(state: Any, value: float | None) -> Trial:
        return Trial({"method.lam": 1.0}, state, value, "", (), 0.0, 0.0, 0.0, "")

    trials = (
        made("failed", None),
        made("pruned", 0.9),
        made("completed", 0.5),
        made("completed", 0.7),
        made("completed", 0.7),
        made("completed", 0.8),
    )
    study = Study("validation/accuracy", True, {}, {"method.lam": 1.0}, trials)
    assert [study.best(count) for count in range(7)] == [None, None, None, 2, 3, 3, 5]
    assert replace(study, maximise=False).best(6) == 2
    assert studies.from_plain(studies.to_plain(study)) == study


def test_losses_are_minimised(tunable: Tiny) -> None:
    tunable.change(methods={"fedavg": {}}, tune={"trials": 4, "objective": "validation/loss"})
    (study,) = search(tunable)[0].values()
    losses = [trial.value for trial in study.trials if trial.value is not None]
    assert study.trials[study.best(4) or 0].value == min(losses)


def test_pruned_trials_end_early_and_tell_where(tunable: Tiny) -> None:
    rates = [0.1, 0.15, 0.2, 0.25, 0.3, 1e-7, 1e-6, 1e-5]
    tunable.change(
        methods={"fedavg": {}},
        training={"rounds": 4, "batch_size": 8, "evaluate_every": 2},
        tune={"sampler": "grid", "pruner": "median", "trials": 8, "batch": 5, "params": {"lr": rates}},
    )
    (study,) = search(tunable)[0].values()
    # Only the last three trials know of five others; those that are below the median of them in round 2 end there.
    known = [trial.curve[0][1] for trial in study.trials[:5]]
    for number, trial in enumerate(study.trials):
        ends = number >= 5 and trial.curve[0][1] < np.median(known)
        assert trial.state == ("pruned" if ends else "completed")
        assert [round_ for round_, _ in trial.curve] == ([2] if ends else [2, 4])
        assert trial.steps == (2 if ends else 4) * 4 * 3
    assert "pruned" in {trial.state for trial in study.trials}


def test_a_trial_that_is_tried_again_is_judged_as_the_first_time(tunable: Tiny) -> None:
    tunable.change(tune={"trials": 5, "pruner": "median"})
    store = Store(tunable.out / "tiny")
    store.root.mkdir(parents=True)
    (store.root / "optuna.db").write_bytes(empty_storage())
    with tune.searches(tunable.cells()[:1], store, tune.default_storage(store)) as (found,):
        trial = found.next()[0]
        assert found._before is not None
        for _ in range(5):
            found._before.add_trial(optuna.create_trial(value=0.9, intermediate_values={1: 0.5, 2: 0.9}))
        first = [found.ends(trial, 1, 0.6), found.ends(trial, 2, 0.8)]
        assert first == [False, True]
        assert [found.ends(trial, 1, 0.6), found.ends(trial, 2, 0.8)] == first


def test_a_row_that_always_fails_is_tried_as_often_as_the_others_and_no_more(fedbench: Run, tunable: Tiny) -> None:
    bad = {"method": "./trouble.py:Trouble", "what": "raise"}
    tunable.change(methods={"bad": bad, "fedavg": {}}, tune={"trials": 3})
    code, out, err = fedbench("run", str(tunable.file), "--workers", "1", "--tracking-uri", "none")
    assert code == 1
    assert "none of its 3 tuning trials was completed" in err
    assert "RuntimeError: two lines of trouble" in err
    assert out.count("bad trial") == 3
    assert "[6/6]" in out
    store = Store(tunable.out / "tiny")
    assert [store.status(cell) for cell in tunable.cells()] == ["error", "completed"]
    code, out, err = fedbench("run", str(tunable.file), "--workers", "1", "--tracking-uri", "none")
    assert code == 1
    assert "none of its 3 tuning trials was completed" in err
    assert "bad trial" not in out  # only the cell is tried again
    code, _, err = fedbench("tune", str(tunable.file), "--workers", "1", "--tracking-uri", "none")
    assert (code, err) == (1, "fedbench: no trial of bad was completed\n")


# --- from the suite to the report


def test_a_run_tunes_first_and_then_trains_with_the_values(fedbench: Run, tunable: Tiny) -> None:
    tunable.change(seeds=[0, 1], tune={"trials": 6})
    assert "4 of 4 cells would run, and 12 trials before that" in fedbench("run", str(tunable.file), "--dry-run")[1]
    shown = fedbench("show", str(tunable.file), "--no-calibrate")[1]
    # Rounds, clients, batches of 23 samples; and of 18 to 19 where a fifth is for validation.
    assert "to run: 4 cells, 96 client-steps\nbefore that, trials of tuning: 12 cells, 288 client-steps\n" in shown
    code, out, err = fedbench("run", str(tunable.file), "--workers", "1")
    assert (code, err) == (0, "")
    assert "tuning: 12 trials to run for 2 choices" in out
    assert "fedproto trial 0 (optimizer.lr=0.01, lam=1): validation/accuracy 0." in out
    store = Store(tunable.out / "tiny")
    for cell in tunable.cells():
        study, record = store.study(cell), store.get(cell.key)
        assert study is not None
        values = [trial.value or 0 for trial in study.trials]
        best = values.index(max(values))
        chosen = record.provenance["chosen"]
        assert (chosen["trial"], chosen["values"]) == (best, study.trials[best].values)
        assert chosen["validation/accuracy"] == study.trials[best].value
        # What ran is the plain cell with these values, on all training samples.
        plain = cells.settle(cell, chosen["values"])
        arrays = load_arrays(cell, Setting(tunable.data, tunable.file.parent))
        outcome = cells.run_cell(plain, arrays, draw_partition(plain, arrays))
        np.testing.assert_array_equal(outcome.metrics["test/accuracy"], record.outcome.metrics["test/accuracy"])
        assert record.outcome.sizes["validation"].sum() == 0

    page = (tunable.out / "tiny" / "report.md").read_text()
    assert "## Tuning: chosen values" in page
    assert re.search(r"\| fedproto +\| lam +\| 0.01 to 10, log +\| +1\.?0? +\|", page)
    assert re.search(r"\| fedavg +\| +6 +\| +0 +\| +0 +\|", page)
    assert "20 % of each client's training samples" in page
    assert "lam=tuned" in page
    html = (tunable.out / "tiny" / "report.html").read_text()
    assert '<section id="tuning">' in html
    assert "Best validation/accuracy so far" in html
    # The same can be written again from a file of results.
    assert fedbench("report", str(tunable.file), "--format", "md,csv", "--to", "once")[0] == 0
    assert fedbench("report", "once/results.csv", "--format", "md", "--to", "twice")[0] == 0
    once, twice = (Path(folder, "report.md").read_text() for folder in ("once", "twice"))
    assert once == twice
    assert once == page

    from mlflow import MlflowClient

    def logged() -> dict[str, Any]:
        client = MlflowClient(f"sqlite:///{tunable.out / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("tiny")
        assert experiment is not None
        return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}

    runs = logged()
    assert len(runs) == 1 + 12 + 4
    trials = [run for name, run in runs.items() if " trial " in name]
    assert len(trials) == 12
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {runs["tiny"].info.run_id}
    first = next(run for run in trials if run.info.run_name.startswith("fedproto trial 0 "))
    assert first.data.params["method.lam"] == "1.0"
    final = runs["fedproto seed=0"]
    lam = store.get(final.data.tags["fedbench.cell"]).provenance["chosen"]["values"]["method.lam"]
    assert final.data.params["method.lam"] == str(lam)
    assert final.data.params["tuning.trials"] == "6"

    code, out, err = fedbench("run", str(tunable.file), "--workers", "1")
    assert (code, err) == (0, "")
    assert "4 cells, 0 to run" in out
    assert "trials to run" not in out
    assert logged().keys() == runs.keys()


def test_tune_leaves_cells_alone_and_exports_a_suite_that_runs(fedbench: Run, tunable: Tiny) -> None:
    mixed = {"method": "fedproto", "models": "mixed", "lam": 0.5}
    folder = tunable.file.parent / "elsewhere"
    rows = {"mine": {"method": "./trouble.py:Trouble"}, "fedproto": {}, "mh": mixed}
    tunable.change(
        methods=rows, mixed=[{"dropout": 0.1}, {"dropout": 0.2}], partition_seeds=[3, 4], seeds=[7], tune=None
    )
    # The suite says nothing about tuning: the command tunes all of it.
    file = folder / "chosen.yaml"
    arguments = ("--trials", "2", "--workers", "1", "--tracking-uri", "none", "--export", str(file))
    code, out, err = fedbench("tune", str(tunable.file), *arguments)
    assert (code, err) == (0, "")
    assert f"written to {Path('runs/tiny/tuning.md')}" in out
    assert "Tuning: chosen values" in out
    assert "partition_seed=3" in (tunable.out / "tiny" / "tuning.md").read_text()
    suite = config.tuned(config.load(tunable.file), 2)
    tuned = expand(suite, fingerprints(suite.base, tunable.data))
    store = Store(tunable.out / "tiny")
    assert len(tuned) == 6
    assert not any(store.has(cell) for cell in tuned)
    exported = config.load(file)
    found = expand(exported, fingerprints(exported.base, tunable.data))
    values = {cell.key: tune.chosen(cell, store.study(cell))["values"] for cell in tuned}
    assert {(cell.label, cells.settle(cell, values[cell.key]).key) for cell in tuned} == {
        (cell.label, cell.key) for cell in found
    }
    code, out, err = fedbench("run", str(file), "--workers", "1", "--tracking-uri", "none")
    assert (code, err) == (0, "")
    assert "6 cells, 6 to run" in out
    code, out, err = fedbench("tune", str(tunable.file), *arguments)
    assert (code, "trials to run" in out, err) == (0, False, "")


def test_an_exported_suite_says_nothing_that_an_optimiser_does_not_have(tunable: Tiny) -> None:
    adam = {"method": "fedavg", "training": {"optimizer": {"name": "adam"}}}
    for rows in ({"first": adam, "fedproto": {}}, {"fedproto": {}, "last": adam}):
        tunable.change(methods=rows)
        suite = config.load(tunable.file)
        settled = [cells.settle(cell, {"training.optimizer.lr": 0.25}) for cell in tunable.cells()]
        tunable.file.with_name("chosen.yaml").write_text(export.dumps(suite, settled, suite.base, "chosen"))
        exported = config.load(tunable.file.with_name("chosen.yaml"))
        found = expand(exported, fingerprints(exported.base, tunable.data))
        assert [(cell.label, cell.key) for cell in found] == [(cell.label, cell.key) for cell in settled]


def test_only_takes_part_of_a_suite_and_trials_can_be_more_and_at_once(
    fedbench: Run, tunable: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--tracking-uri", "none", "--only", "method=fedavg")
    code, out, err = fedbench("tune", str(tunable.file), "--trials", "1", "--workers", "1", *arguments)
    assert (code, err) == (0, "")
    assert "[1/1] fedavg trial 0" in out
    assert "fedproto" not in out
    used = []

    def noted(name: str, execute: Executor) -> Callable[..., Stream]:
        def call(*given: Any) -> Stream:
            used.append(name)
            return execute(*given)

        return call

    kinds = {name: noted(name, execute) for name, execute in EXECUTORS.items()}
    monkeypatch.setattr("fedbench.executors.EXECUTORS", kinds)
    code, out, err = fedbench("tune", str(tunable.file), "--trials", "3", "--together", "3", *arguments)
    assert (code, err) == (0, "")
    assert "[2/2] fedavg trial " in out
    code, out, err = fedbench("tune", str(tunable.file), "--workers", "2", *arguments)
    assert (code, err) == (0, "")
    assert "tuning: 2 trials to run for 1 choice\n" in out
    assert used == ["together", "processes"]
    found = [study for cell in tunable.cells() if (study := Store(tunable.out / "tiny").study(cell))]
    rates = [trial.values["training.optimizer.lr"] for trial in found[0].trials]
    assert rates[:4] == [
        trial.values["training.optimizer.lr"] for trial in search(tunable, "other")[0]["fedavg"].trials[:4]
    ]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "Could not parse SQLAlchemy URL"),
        ("sqlite:////nowhere/at/all.db", "unable to open database file"),
        ("postgresql://me:secret@localhost:1/x", "postgresql://me:***@localhost:1/x"),
        ("redis://localhost", "redis"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_one_line(fedbench: Run, tunable: Tiny, url: str, message: str) -> None:
    code, _, err = fedbench("tune", str(tunable.file), "--storage", url, "--tracking-uri", "none")
    assert code == 2
    assert err.startswith("fedbench: the Optuna storage ")
    assert err.count("\n") == 1
    assert message in err
    assert "secret" not in err


def test_bad_arguments_are_one_line(fedbench: Run, tunable: Tiny) -> None:
    code, _, err = fedbench("tune", str(tunable.file), "--trials", "0")
    assert (code, err) == (2, "fedbench: --trials 0: tune.trials: should be greater than or equal to 1, not 0\n")


def test_optuna_is_imported_only_to_tune() -> None:
    modules = (
        "cli",
        "tune",
        "studies",
        "space",
        "export",
        "config",
        "cells",
        "store",
        "executors",
        "results",
        "report",
    )
    code = f"import sys; from fedbench import {', '.join(modules)}; print('optuna' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert made.stdout == "False\n"


def test_a_suite_may_tune_one_experiment_only(tunable: Tiny) -> None:
    tunable.change(tune=None, experiments=[{"tune": {"trials": 2}}, {"training": {"rounds": 1}}])
    assert [cell.tuned for cell in tunable.cells()] == [True, True, False, False]
    suite = config.tuned(config.load(tunable.file), 7)
    made = expand(suite, fingerprints(suite.base, tunable.data))
    assert [cell.recipe["tuning"]["trials"] for cell in made if cell.tuned] == [7, 7]


def test_the_report_shows_what_was_tried_and_what_it_took(tunable: Tiny) -> None:
    tunable.change(methods={"fedproto": {}}, tune={"trials": 6, "params": {"distance": ["mse", "l2"]}})
    (cell,) = tunable.cells()
    entries = [("completed", 0.5), ("failed", None), ("completed", 0.75), ("pruned", 0.9), ("completed", 0.7)]
    own = {"training.optimizer.lr": 0.01, "method.lam": 1.0, "method.distance": "mse"}
    trials = tuple(
        Trial({**own, "method.lam": 1.0 + number}, state, value, "", (), 10.0, 1.25, 2000.0, "")  # type: ignore[arg-type]
        for number, (state, value) in enumerate(entries)
    )
    study = Study("validation/accuracy", True, cell.recipe["tuning"]["space"], own, trials)
    results = Results((Result(cell, "missing"),), studies={cell.study_key: study})
    comparison = compare(results, config.load(tunable.file))
    values, spent, curve = comparison.tuning
    assert values.rows == (
        ("fedproto", "optimizer.lr", "0.001 to 0.3, log", "0.01", "0.01"),
        ("fedproto", "lam", "0.01 to 10, log", "1", "3"),
        ("fedproto", "distance", "mse, l2", "mse", "mse"),
    )
    assert spent.head[1:4] == ("trials", "pruned", "failed")
    assert spent.rows == (("fedproto", "5 of 6", "1", "1", "75.00", "50.00", "2", "50", "10.00", "6.2"),)
    assert curve.rows == (("fedproto", "0: 50.00, 2: 75.00"),)
    (figure,) = figures(results, config.load(tunable.file))
    assert isinstance(figure.plot, Lines)
    assert (figure.name, figure.plot.lines[0].x) == ("tuning", (0, 1, 2, 3, 4))
    assert figure.plot.lines[0].y == (50, 50, 75, 75, 75)
