"""The command line: what it prints, what it returns, what it keeps."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import Run, Tiny
from rich.console import Console

from fedbench import cells
from fedbench.cells import Cell, Checker, draw_partition
from fedbench.executors import Setting, load_arrays, usable_cores
from fedbench.partition import Partition
from fedbench.plan import titles
from fedbench.progress import Bar, Lines
from fedbench.store import Store


def arguments(tiny: Tiny, *more: str, tracking: str = "none") -> list[str]:
    return ["run", str(tiny.file), "--workers", "1", "--tracking-uri", tracking, *more]


def process(tiny: Tiny, *more: str) -> subprocess.Popen[str]:
    """Start `python -m fedbench run` on the tiny suite, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "fedbench", *arguments(tiny), *more],
        cwd=tiny.file.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def contents(tiny: Tiny, out: str = "runs") -> dict[str, dict[str, bytes]]:
    """Return all stored numbers but the clock's readings, by cell."""
    store = Store(tiny.file.parent / out / "tiny")
    found = {}
    for key in store.finished():
        outcome = store.get(key).outcome
        found[key] = {
            f"{table}/{name}": array.tobytes()
            for table in ("metrics", "traffic", "work", "sizes")
            for name, array in getattr(outcome, table).items()
            if name != "seconds"
        }
    return found


def started(tiny: Tiny) -> dict[str, str]:
    """Return when each stored outcome began."""
    store = Store(tiny.out / "tiny")
    return {key: store.get(key).provenance["started"] for key in store.finished()}


# --- a run


def test_a_run_ends_with_its_report_and_a_second_one_computes_nothing(fedbench: Run, tiny: Tiny) -> None:
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err) == (0, "")
    assert "tiny: 3 cells, 3 to run\n[1/3] local: test/accuracy 0." in out
    assert f"written to {Path('runs/tiny/report.md')}" in out
    written = (tiny.out / "tiny" / "report.md").read_text()
    for label, key in (("local", "fedavg"), ("fedproto", "fedavg")):
        assert label in out
        assert label in written
        assert key in written
    before = started(tiny)
    assert len(before) == 3
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err) == (0, "")
    assert "3 cells, 0 to run" in out
    assert "[1/" not in out
    assert started(tiny) == before
    code, again, err = fedbench("report", str(tiny.file))
    assert (code, err) == (0, "")
    assert again == out.partition("\n")[2]


def test_a_report_says_how_many_finished_cells_it_does_not_show(fedbench: Run, tiny: Tiny) -> None:
    def note(*command: str) -> str:
        code, _, err = fedbench(*command)
        assert (code, err) == (0, "")
        found = re.search(".*not shown.*", (tiny.out / "tiny" / "report.md").read_text())
        return found[0] if found else ""

    assert note(*arguments(tiny)) == ""
    assert "2 finished cells in the suite's folder are not shown: of other" in note(
        *arguments(tiny, "--only", "method=local")
    )
    assert "3 finished cells" in note("report", str(tiny.file), "--set", "rounds=7")
    assert note("report", str(tiny.file)) == ""


def test_everything_is_logged_by_default_and_what_is_logged_needs_no_mlflow(fedbench: Run, tiny: Tiny) -> None:
    code, _, err = fedbench("run", str(tiny.file), "--workers", "1")
    assert (code, err) == (0, "")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tiny.out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    names = [run.info.run_name for run in client.search_runs([experiment.experiment_id])]
    assert sorted(names) == ["fedavg", "fedproto", "local", "tiny"]
    code_ = (
        "import sys\nfrom fedbench.cli import main\nsys.argv = ['fedbench', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    print('imported', sorted({'mlflow', 'optuna'} & set(sys.modules)))"
    )
    again = subprocess.run(
        [sys.executable, "-W", "error", "-c", code_, "run", str(tiny.file)],
        cwd=tiny.file.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stderr == ""
    assert "3 cells, 0 to run" in again.stdout
    assert again.stdout.endswith("imported []\n")


def test_a_tracking_server_that_is_away_costs_a_line(fedbench: Run, tiny: Tiny) -> None:
    code, out, err = fedbench(*arguments(tiny, tracking="http://127.0.0.1:9"))
    assert (code, err) == (0, "")
    assert out.count("MLflow at http://127.0.0.1:9 could not take a cell") == 1
    assert len(started(tiny)) == 3


def test_order_company_and_workers_change_no_number(fedbench: Run, tiny: Tiny) -> None:
    assert fedbench(*arguments(tiny))[0] == 0
    tiny.change(methods={"fedproto": {}, "fedavg": {}, "local": {}})
    assert fedbench(*arguments(tiny, "--workers", "2", "--out", "two"))[0] == 0
    assert fedbench(*arguments(tiny, "--only", "method=fedavg", "--out", "alone"))[0] == 0
    assert len(contents(tiny)) == 3
    assert contents(tiny, "two") == contents(tiny)
    assert len(contents(tiny, "alone")) == 1
    assert contents(tiny, "alone").items() <= contents(tiny).items()


def test_what_to_run(fedbench: Run, tiny: Tiny) -> None:
    def cells(*more: str) -> list[str]:
        code, out, err = fedbench(*arguments(tiny, "--dry-run", *more))
        assert (code, err) == (0, "")
        return re.findall(r"^[0-9a-f]{16}  missing    (.*)$", out, re.MULTILINE)

    assert cells() == ["local", "fedavg", "fedproto"]
    assert cells("--only", "method=fedproto") == ["fedproto"]
    assert cells("--only", "method=local", "--only", "method=fedavg") == ["local", "fedavg"]
    assert cells("--only", "method=local", "--only", "seed=0") == ["local"]
    assert cells("--seeds", "0,7", "--only", "method=local") == ["local seed=0", "local seed=7"]
    code, out, _ = fedbench(*arguments(tiny, "--dry-run", "--set", "rounds=5", "--set", "shuffle=False"))
    assert code == 0
    assert "rounds=5" in out
    assert "shuffle=False" in out
    assert "3 of 3 cells would run" in out
    assert not tiny.out.exists()
    assert max(map(len, out.splitlines())) <= 100
    (tiny.data / "blobs.npz").unlink()
    code, out, err = fedbench(*arguments(tiny, "--dry-run"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "blobs.npz: no such file; put it there" in err


def test_a_storage_is_tried_although_no_trial_is_left(
    fedbench: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbench.tune.unfinished", lambda cells, store: [])
    code, _, err = fedbench("tune", str(tiny.file), "--storage", "foo://bar", "--tracking-uri", "none")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("fedbench: the Optuna storage foo://bar cannot be used")


@pytest.mark.parametrize(
    ("policy", "redone"), [("missing", {"bad"}), ("failed", {"bad", "wild"}), ("all", {"bad", "wild", "good"})]
)
def test_policies(fedbench: Run, tiny: Tiny, policy: str, redone: set[str]) -> None:
    tiny.change(
        methods={
            "good": {"method": "fedavg"},
            "wild": {"method": "fedavg", "training": {"optimizer": {"lr": 1e30}}},
            "bad": {"method": "./trouble.py:Trouble", "what": "raise"},
        }
    )
    code, out, err = fedbench(*arguments(tiny))
    assert code == 1
    assert "wild: diverged in round 1" in out
    assert re.fullmatch(
        r"fedbench: 1 of 3 cells failed, first bad: RuntimeError: two lines of trouble; .* tells more\n", err
    )
    code, out, _ = fedbench(*arguments(tiny, "--policy", policy))
    assert code == 1
    assert f"3 cells, {len(redone)} to run" in out
    assert set(re.findall(r"^\[\d/\d\] (\w+):", out, re.MULTILINE)) == redone
    assert len(started(tiny)) == 2
    key = re.search("show ([0-9a-f]{16})`", err)
    assert key
    code, out, _ = fedbench("show", key[1][:8])
    assert code == 0
    assert "Traceback" in out
    assert "two lines\nof trouble" in out


# --- ends before its time


def _slow(tiny: Tiny, seconds: float) -> None:
    tiny.change(
        methods={
            "local": {},
            "fedavg": {},
            "slow": {"method": "./trouble.py:Trouble", "seconds": seconds},
            "fedproto": {},
        }
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_kill_9_loses_nothing_that_was_finished(fedbench: Run, tiny: Tiny, workers: str) -> None:
    _slow(tiny, 2.0)
    driver = process(tiny, "--workers", workers)
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("[2/4]"):
            break
    os.kill(driver.pid, signal.SIGKILL)
    assert driver.wait(10) == -signal.SIGKILL
    driver.communicate()
    before = started(tiny)
    assert len(before) in (2, 3)
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err) == (0, "")
    assert f"4 cells, {4 - len(before)} to run" in out
    assert before.items() <= started(tiny).items()
    assert fedbench(*arguments(tiny, "--out", "undisturbed"))[0] == 0
    assert len(contents(tiny)) == 4
    assert contents(tiny) == contents(tiny, "undisturbed")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_keeps_what_is_finished(fedbench: Run, tiny: Tiny, workers: str) -> None:
    _slow(tiny, 60.0)
    tiny.change(methods={**yaml.safe_load(tiny.file.read_text())["methods"], "fedproto": {"method": "local"}})
    driver = process(tiny, "--workers", workers)
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("[2/3]"):  # the same cell under two labels is one
            break
    time.sleep(0.5)
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    out, err = driver.communicate(timeout=50)  # less than the slow cell takes
    assert driver.returncode == 130
    assert err == ""
    assert "interrupted; 2 of 3 cells are done and kept, the same command goes on from here" in out
    before = started(tiny)
    assert len(before) == 2
    _, out, _ = fedbench(*arguments(tiny, "--dry-run"))
    assert "1 of 3 cells would run" in out
    tiny.change(methods={"local": {}, "fedavg": {}, "fedproto": {}})
    code, out, _ = fedbench(*arguments(tiny))
    assert code == 0
    assert "3 cells, 1 to run" in out
    assert before.items() <= started(tiny).items()


def test_a_second_run_on_one_store_waits(tiny: Tiny) -> None:
    _slow(tiny, 3.0)
    first = process(tiny)
    assert first.stdout is not None
    assert first.stdout.readline().startswith("tiny: 4 cells, 4 to run")
    second = process(tiny)
    out, err = second.communicate(timeout=120)
    assert (second.returncode, err) == (0, "")
    assert out.startswith(f"another run is at work in {Path('runs/tiny')}; waiting for it\ntiny: 4 cells, 0 to run\n")
    _, err = first.communicate(timeout=60)
    assert (first.returncode, err) == (0, "")
    assert len(started(tiny)) == 4


# --- bad input


BAD_SUITES: list[tuple[dict[str, Any], str]] = [
    ({"methods": ["fedavgg"]}, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
    ({"methods": {"fedprox": {"muu": 1.0}}}, "did you mean 'mu'?"),
    ({"methods": {"fedprox": {"mu": -1.0}}}, "greater than or equal to 0, not -1.0"),
    ({"methods": {}}, "no cells"),
    ({"dataset": {"name": "mnist_mimi"}}, "did you mean 'mnist_mini'?"),
    ({"model": "mlpp"}, "did you mean 'mlp'?"),
    ({"modle": "mlp"}, "did you mean 'model'?"),
    ({"training": {"participation": 5.0}}, "participation"),
    ({"training": {"rounds": True}}, "rounds"),
    ({"training": {"shuffle": "False"}}, 'should be true or false, not "False"'),
    ({"partition": {"name": "nway_kshot", "n": 2, "k": 0}}, "partition.k"),
    ({"partition": {"name": "nway_kshot", "n": 4, "k": 2, "test_shots": 1}}, "4 is more than the 3 classes"),
    ({"partition": {"name": "nway_kshot", "n": 3, "k": 500, "test_shots": 1}}, "class"),
    ({"methods": {"mine": {"method": "./broken.py:Mine"}}}, "cannot be imported: ZeroDivisionError"),
]


@pytest.mark.parametrize(("change", "said"), BAD_SUITES, ids=[said for _, said in BAD_SUITES])
def test_a_bad_suite_is_one_line_and_nothing_is_lost(
    fedbench: Run, tiny: Tiny, change: dict[str, Any], said: str
) -> None:
    (tiny.file.parent / "broken.py").write_text("1 / 0\n")
    tiny.change(**change)
    code, out, err = fedbench(*arguments(tiny))
    assert code == 2
    assert err.startswith("fedbench: ")
    assert err.count("\n") == 1
    assert said in err
    assert "[1/" not in out
    assert not list(tiny.out.glob("tiny/cells/*"))


def test_bad_arguments_are_one_line(fedbench: Run, tiny: Tiny) -> None:
    assert fedbench(*arguments(tiny))[0] == 0
    before = contents(tiny)
    for more, said in [
        (["--only", "method=fedpro"], "did you mean 'fedproto'?"),
        (["--only", "method"], "write fact=value"),
        (["--set", "roundz=1"], "did you mean 'rounds'?"),
        (["--seeds", "a"], "--seeds a"),
        (["--seeds", ""], "--seeds : seeds: is empty"),
        (["--only", ""], "write fact=value"),
        (["--tracking-uri", "foo"], "--tracking-uri foo: want none, the address of an MLflow server"),
        (["--threads", "100000"], f"--threads 100000: this machine has {usable_cores()} core"),
        (["--workers", "x"], "Invalid value for '--workers': should be a valid integer, not x; see"),
        (["--policy", "some"], "'some' is not one of 'missing', 'failed', 'all'"),
        (["--workerz", "1"], "No such option: --workerz"),
        (["--set", "lr=1"], "unknown key 'lr'; it stands in training.optimizer"),
        (["--set", "mu=1"], "unknown key 'mu'; it stands in the row of a method, such as fedprox"),
        (["--device", "tpu9"], "--device tpu9: not on this machine"),
        (["--device", "tpu9", "--dry-run"], "--device tpu9: not on this machine"),
        (["--set", "rounds=yes"], "rounds"),
        (["--out", tiny.file.name], f"--out {tiny.file.name}: is a file; want the folder of all runs"),
        (["--workers", "-1"], "Invalid value for '--workers': should be greater than or equal to 0, not -1; see"),
        (
            ["--checkpoint", "nan"],
            "Invalid value for '--checkpoint': should be greater than or equal to 0, not nan; see",
        ),
        (
            ["--set", "partition.clients=100"],
            "tiny.yaml with --set partition.clients=100: partition.clients: 100 is more",
        ),
        (
            ["--set", "partition.name=natural"],
            "tiny.yaml with --set partition.name=natural: partition: the data set does",
        ),
        (["--set", "partition.name=dirichlett"], "; --set partition=dirichlett drops the options of the one before"),
        (["--set", "partition=given"], "partition=given: partition.path: is missing"),
        (
            ["--set", "partition={name: shards, shards: 50, clients: 4}"],
            "want shards of at most 22, or at most 1 clients",
        ),
        (["--set", "partition={name: shards, shards: 500, clients: 4}"], "want shards of at most 22\n"),
        (["--set", "newcomers.client=1"], "newcomers: unknown key 'client'; did you mean 'clients'?"),
    ]:
        code, _, err = fedbench(*arguments(tiny, *more))
        assert (code, err.count("\n")) == (2, 1), err
        assert said in err
    code, _, err = fedbench("rnu")
    assert (code, err.count("\n")) == (2, 1)
    code, out, err = fedbench()
    assert (code, "Usage: " in out + err) == (2, True)
    code, _, err = fedbench("run", "quickstat")
    assert (code, err) == (2, "fedbench: unknown suite 'quickstat'; did you mean 'quickstart'?\n")
    tiny.file.write_text("methods: [local\nmodel: mlp\n")
    code, _, err = fedbench(*arguments(tiny))
    assert (code, err.count("\n")) == (2, 1)
    assert "line 2, column" in err
    assert contents(tiny) == before


ASKED: list[tuple[dict[str, Any], str]] = [
    ({"metric": "test/acuracy"}, "tiny.yaml: metric: unknown metric 'test/acuracy'; did you mean 'test/accuracy'?"),
    ({"further_metrics": ["test/los"]}, "tiny.yaml: further_metrics: unknown metric 'test/los'; did you mean"),
    ({"figure": {"x": "k", "y": "test/accuracy"}}, "tiny.yaml: figure.x: unknown fact 'k'"),
    ({"figure": {"x": "seed", "y": "acc"}}, "tiny.yaml: figure.y: unknown metric 'acc'"),
    ({"metric": "validation/loss"}, "metric: no 'validation/loss', since no client of the partition has validation"),
    ({"tune": {"objective": "validation/acc"}}, "tiny.yaml: tune.objective: local: unknown metric 'validation/acc'"),
]


@pytest.mark.parametrize(("change", "said"), ASKED, ids=[said for _, said in ASKED])
def test_what_no_cell_measures_is_refused_before_anything_runs(
    fedbench: Run, tiny: Tiny, change: dict[str, Any], said: str
) -> None:
    tiny.change(**change)
    for more in ([], ["--dry-run"]):
        code, out, err = fedbench(*arguments(tiny, *more))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err
    assert not tiny.out.exists()


def test_a_partition_is_drawn_once(fedbench: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def counted(cell: Cell, *others: Any) -> Partition:
        drawn.append(cell.partition_key)
        return draw_partition(cell, *others)

    monkeypatch.setattr(cells, "draw_partition", counted)
    assert fedbench(*arguments(tiny, "--dry-run"))[0] == 0
    assert fedbench(*arguments(tiny))[0] == 0
    assert len(drawn) == 2
    assert len(set(drawn)) == 1


def test_every_metric_that_is_measured_may_be_asked_for(fedbench: Run, tiny: Tiny) -> None:
    tiny.change(
        methods={"fedproto": {}, "fedrep": {}},
        partition={"name": "iid", "clients": 4, "validation": 0.2},
        keep=["embeddings"],
    )
    assert fedbench(*arguments(tiny))[0] == 0
    store = Store(tiny.out / "tiny")
    measured = sorted({name for key in store.finished() for name in store.get(key).outcome.metrics})
    tiny.change(further_metrics=measured)
    code, _, err = fedbench(*arguments(tiny, "--out", "again", "--dry-run"))
    assert (code, err) == (0, "")
    checker, (cell, *_) = Checker(tiny.file.parent), tiny.cells()
    arrays = load_arrays(cell, Setting(tiny.data, tiny.file.parent))
    partition = store.partition(cell, lambda: pytest.fail("it is there"))
    assert set().union(*(checker.metrics(one, arrays, partition) for one in tiny.cells())) == set(measured)


def test_a_metric_of_a_row_that_is_not_selected_stays_blank(fedbench: Run, tiny: Tiny) -> None:
    tiny.change(further_metrics=["test/accuracy/prototype_all"])
    code, out, err = fedbench(*arguments(tiny, "--only", "method=fedavg"))
    assert (code, err) == (0, "")
    assert "further metrics" in out
    code, _, err = fedbench("report", str(tiny.file), "--only", "method=fedavg", "--format", "csv,html")
    assert (code, err) == (0, "")
    code, _, err = fedbench("report", str(tiny.out / "tiny" / "results.csv"), "--format", "html")
    assert (code, err) == (0, "")


def test_clients_without_test_samples_are_left_out_and_counted(fedbench: Run, tiny: Tiny) -> None:
    rows = {"train": [[*range(30)], [*range(30, 60)], [*range(60, 90)]], "test": [[], [0, 1, 2, 3], []]}
    (tiny.file.parent / "rows.json").write_text(json.dumps(rows))
    tiny.change(partition={"name": "given", "path": "rows.json"}, methods=["local", "fedavg", "fedproto", "fesem"])
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err) == (0, "")
    assert len(re.findall(r"\] \w+: test/accuracy [01]\.\d{4}, std 0\.0000 over 1 of 3 clients ", out)) == 4
    page = (tiny.out / "tiny" / "report.md").read_text()
    assert page.count("2 of 3 clients have no value") == 1
    rows["test"] = [[], [], []]
    (tiny.file.parent / "rows.json").write_text(json.dumps(rows))
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err.count("\n")) == (2, 1)
    assert "metric: no 'test/accuracy', since no client of the partition has test samples" in err


def test_a_damaged_data_file_is_found_before_anything_runs(fedbench: Run, tiny: Tiny) -> None:
    file = tiny.data / "blobs.npz"
    file.write_bytes(file.read_bytes()[:-100])
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err.count("\n")) == (2, 1)
    assert str(Path("data") / "blobs.npz") in err
    assert "[1/" not in out


BROKEN_NET = """
from torch import nn


class Boom(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Linear(shape[7], 3)


class Late(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.head = nn.Flatten(), nn.Linear(shape[0], classes)
        self.body.forward = lambda x: x.nothing
"""


def test_a_row_that_does_not_fit_is_refused_before_anything_runs(fedbench: Run, tiny: Tiny) -> None:
    tiny.change(
        mixed=[{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [9]}],
        methods={"local": {}, "fedavg": {"models": "mixed"}},
    )
    code, _, err = fedbench(*arguments(tiny))
    assert (code, err.count("\n")) == (2, 1)
    assert "fedavg on arrays: FedAvg cannot mix these architectures: 'body.1.bias' is (8,) in model 0" in err
    assert "methods that can: fedproto, local" in err
    assert started(tiny) == {}
    (tiny.file.parent / "net.py").write_text(BROKEN_NET)
    for model, said in [
        ("cnn_mnist", "model CnnMnist takes images"),
        ("./net.py:Boom", "model Boom cannot be made for inputs (6,) and 3 classes: IndexError: tuple index out of"),
        ("./net.py:Late", "model Late does not take inputs of shape (6,): AttributeError: 'Tensor' object has no"),
    ]:
        tiny.change(model=model, methods={"local": {}})
        for more in ([], ["--dry-run"]):
            code, _, err = fedbench(*arguments(tiny, *more))
            assert (code, err.count("\n")) == (2, 1)
            assert f"local on arrays: {said}" in err


# --- the other commands


def test_list(fedbench: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "broken-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[fedbench.methods]\nbroken = nowhere_at_all:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = fedbench("list", "methods")
    assert (code, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert {"local", "fedavg", "fedprox", "fedper", "fedrep", "fesem", "fedproto", "broken"} <= rows.keys()
    assert "cannot be imported: ModuleNotFoundError" in rows["broken"]
    assert rows["local"] == "Every client trains for itself and sends nothing."
    for kind, name in (("datasets", "mnist_mini"), ("models", "cnn_mnist"), ("suites", "quickstart")):
        code, out, err = fedbench("list", kind)
        assert (code, err) == (0, "")
        assert re.search(rf"^{name} +\w", out, re.MULTILINE)


def test_show_a_suite_without_its_data(fedbench: Run, tmp_path: Path) -> None:
    code, out, err = fedbench("show", "table1", "--seeds", "0", "--data", str(tmp_path / "none"))
    assert (code, err) == (0, "")
    assert len(re.findall("^-{16}  no data    .* n=[345]$", out, re.MULTILINE)) == 72
    assert re.findall("^([a-z0-9]+): no files here", out, re.MULTILINE) == ["mnist", "femnist", "cifar10"]
    assert "to run" not in out
    assert not (tmp_path / "none").exists()


def test_a_dry_run_counts_only_what_has_its_data(fedbench: Run, tiny: Tiny) -> None:
    where = ("--data", str(tiny.data), "--out", str(tiny.out))
    code, out, err = fedbench("run", "table1", "--dry-run", "--only", "dataset=mnist,n=3", "--seeds", "0", *where)
    assert (code, err) == (0, "")
    assert "0 of 8 cells would run, 8 more once their data are there" in out


def test_a_dry_run_refuses_a_file_that_nothing_would_fetch(fedbench: Run, tiny: Tiny) -> None:
    (tiny.data / "blobs.npz").unlink()
    code, _, err = fedbench(*arguments(tiny, "--dry-run"))
    assert code == 2
    assert re.fullmatch("fedbench: .*blobs.npz: no such file; put it there, or name the folder with your data.*\n", err)


def test_show_without_timing(fedbench: Run, tiny: Tiny) -> None:
    code, out, err = fedbench("show", str(tiny.file), "--only", "method=fedavg", "--set", "rounds=3", "--no-calibrate")
    assert (code, err) == (0, "")
    assert "rounds=3" in out
    assert re.search(r"^to run: 1 cell, \d+ client-steps$", out, re.MULTILINE)


def test_a_reference_that_is_not_there_is_said_before_anything_runs(fedbench: Run, tiny: Tiny) -> None:
    tiny.change(reference="numbers.csv")
    code, out, err = fedbench(*arguments(tiny))
    assert (code, out) == (2, "")
    assert "reference: no file" in err
    (tiny.file.parent / "numbers.csv").write_text("method,accuracy_mean\nfedavg,33.3\n")
    code, out, err = fedbench(*arguments(tiny))
    assert (code, err) == (0, "")
    assert "33.30" in (tiny.out / "tiny" / "report.md").read_text()


def test_what_cannot_be_estimated_is_said_with_its_place(fedbench: Run, tiny: Tiny) -> None:
    tiny.change(partition={"name": "iid", "clients": 100})
    code, _, err = fedbench("show", str(tiny.file), "--set", "rounds=1", "--data", str(tiny.data))
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"fedbench: {tiny.file} with --set rounds=1: partition.clients: 100 is more")


def test_show(fedbench: Run, tiny: Tiny) -> None:
    assert fedbench(*arguments(tiny, "--only", "method=fedavg"))[0] == 0
    code, out, err = fedbench("show", str(tiny.file))
    assert (code, err) == (0, "")
    pattern = r"^{}: {}, \d+ client-steps, about \d+ s{}$"
    for words in (("[a-z]+, mlp with \\d+ parameters", "3 cells", " one after the other"), ("to run", "2 cells", ".*")):
        assert re.search(pattern.format(*words), out, re.MULTILINE)
    assert re.findall("^[0-9a-f]{16}  (.*)$", out, re.MULTILINE) == [
        "missing    local",
        "completed  fedavg",
        "missing    fedproto",
    ]
    (key,) = started(tiny)
    code, out, err = fedbench("show", key[:6])
    assert (code, err) == (0, "")
    shown = yaml.safe_load(out)
    record = Store(tiny.out / "tiny").get(key)
    assert shown["cell"] == key
    assert shown["recipe"] == record.cell.recipe
    assert shown["provenance"]["partition"] == shown["partition"]["hash"]
    assert shown["metrics"]["test/accuracy"]["mean"] == record.outcome.metrics["test/accuracy"][-1].mean()
    code, _, err = fedbench("show", "0000dead")
    assert (code, err.count("\n")) == (2, 1)
    assert "0000dead" in err


def test_schema(fedbench: Run) -> None:
    code, out, err = fedbench("schema")
    assert (code, err) == (0, "")
    assert "methods" in json.loads(out)["properties"]


def test_ui_needs_runs(fedbench: Run) -> None:
    code, _, err = fedbench("ui")
    assert (code, err) == (2, "fedbench: --out runs: no mlflow.db in it; run a suite first\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, fedbench.cells, fedbench.cli, fedbench.executors, fedbench.progress, fedbench.tracking\n"
        "print(sorted({'torch', 'mlflow', 'optuna', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    code = (
        "import sys; from fedbench.cli import main; sys.argv = ['fedbench', '--help']\n"
        "try:\n    main()\nfinally:\n    print(sorted({'numpy', 'pydantic', 'rich', 'yaml'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("[]\n")
    for command in ("run", "report", "list", "show", "schema", "ui"):
        assert re.search(rf"^  {command} ", out, re.MULTILINE)


# --- progress


def test_bar_on_a_terminal(tiny: Tiny) -> None:
    cells = tiny.cells()
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Bar(cells, console) as bar:
        bar.on_round(cells[0], 1, 3)
        bar.on_round(cells[1], 2, 3)
        bar.finish(cells[0], "local: [red] fine")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[1/3] local: [red] fine" in text
    assert "1/3 cells" in text
    assert "5/9" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_plain_lines(tiny: Tiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cells = tiny.cells()
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Lines(cells) as lines:
        lines.on_round(cells[0], 1, 3)
        assert capsys.readouterr().out == ""
        now = 31.0
        lines.on_round(cells[0], 2, 3)
        assert capsys.readouterr().out == "... 2 of 9 rounds\n"
        now = 61.0
        lines.on_round(cells[0], 3, 3)
        lines.finish(cells[0], "local: fine")
        assert capsys.readouterr().out == "[1/3] local: fine\n"
        now = 91.5
        lines.on_round(cells[1], 1, 3)
        assert capsys.readouterr().out == "... 4 of 9 rounds\n"


def test_titles_name_what_differs(tiny: Tiny) -> None:
    tiny.change(seeds=[0, 1], grid={"partition.clients": [2, 4]}, methods=["local"])
    assert list(titles(tiny.cells()).values()) == [
        "local seed=0 clients=2",
        "local seed=1 clients=2",
        "local seed=0 clients=4",
        "local seed=1 clients=4",
    ]
    assert np.unique([cell.key for cell in tiny.cells()]).size == 4


def test_rows_of_one_cell_are_both_named(tiny: Tiny) -> None:
    tiny.change(methods={"a": {"method": "local"}, "b": {"method": "local"}, "fedavg": {}})
    assert list(titles(tiny.cells()).values()) == ["a = b", "fedavg"]


def test_there_is_no_report_where_nothing_was_run(fedbench: Run, tiny: Tiny) -> None:
    code, out, err = fedbench("report", str(tiny.file), "--out", "nowhere", "--data", str(tiny.data))
    assert (code, out) == (2, "")
    assert err == "fedbench: nowhere/tiny: no such folder; nothing of this suite has been run there\n"
    assert not Path("nowhere").exists()


def test_a_folder_that_cannot_be_written_is_one_line(fedbench: Run, tiny: Tiny) -> None:
    in_the_way = tiny.file.parent / "a-file"
    in_the_way.write_text("")
    code, _, err = fedbench("run", str(tiny.file), "--data", str(tiny.data), "--out", str(in_the_way))
    assert (code, err.count("\n")) == (2, 1)
    assert "a-file" in err
