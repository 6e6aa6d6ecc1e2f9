"""Cells on a real Ray cluster of two nodes on this machine: the same numbers, whatever is lost on the way."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import optuna
import pytest
from conftest import Tiny
from test_executors import ignore, jobs, numbers
from test_executors import setting as on_this_machine
from test_tracking import runs
from typer.testing import CliRunner

from fedbench.cli import app
from fedbench.cluster import _own_cpus, _room, _slots, on_ray
from fedbench.errors import InputError
from fedbench.executors import ATTEMPTS, Cluster, inline, usable_cores
from fedbench.store import CellError, Record

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

WAITING = '''
import importlib.util, os, time
from dataclasses import dataclass
from pathlib import Path
from fedbench.averaging import Averaging


@dataclass(frozen=True)
class Waiting(Averaging):
    """FedAvg that says where it is, and waits for a file before it merges."""

    file: str = ""
    number: int = 0

    def shares(self, net, name):
        return True

    def merge(self, net, server, uploads, clients, sizes):
        assert importlib.util.find_spec("folder_of_the_driver") is None
        if not Path(self.file).exists():
            with open(self.file + ".begun", "a") as begun:
                begun.write(f"{self.number}\\n")
        while not Path(self.file).exists():
            time.sleep(0.02)
        return super().merge(net, server, uploads, clients, sizes)
'''


@dataclass
class RealCluster:
    """Nodes with one processor each; the processes of one `ray start` each, by their group."""

    folder: Path
    address: str
    nodes: list[int] = field(default_factory=list)

    def start(self, *options: str) -> int:
        """Start a node, the first time the head; return its process group."""
        where = ["--address", self.address]
        if not self.nodes:
            where = ["--head", "--port", self.address.rpartition(":")[2], "--temp-dir", str(self.folder)]
            where += ["--include-dashboard=false"]
        limits = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        node = subprocess.Popen([*ray, "start", *where, *limits, *options], start_new_session=True)
        self.nodes.append(node.pid)
        assert node.wait(120) == 0
        return node.pid

    def kill(self, node: int) -> None:
        """End all processes of a node at once."""
        with suppress(ProcessLookupError):
            os.killpg(node, signal.SIGKILL)
        self.nodes.remove(node)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[RealCluster]:
    # Whatever else this machine does, no cell is ended for another program's hunger, or waits behind all others.
    calm = {"RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        for name, value in {**calm, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
            patch.setenv(name, value)
        made = RealCluster(Path(folder), f"127.0.0.1:{free_port()}")
        try:
            made.start("--num-gpus=1")
            yield made
        finally:
            for node in list(made.nodes):
                made.kill(node)


def found(results: Sequence[Record | CellError]) -> dict[str, dict[str, bytes]]:
    return {result.cell.key: numbers(result.outcome) for result in results if isinstance(result, Record)}


def test_a_node_that_is_killed_costs_time_and_no_number(
    tiny: Tiny, cluster: RealCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "folder_of_the_driver").mkdir()
    monkeypatch.chdir(tmp_path)
    go, begun = tmp_path / "go", tmp_path / "go.begun"
    rows = {f"waiting{n}": {"method": "./waiting.py:Waiting", "file": str(go), "number": n} for n in range(2)}
    dies = {"method": "./trouble.py:Trouble", "what": "die"}
    tiny.change(methods={**rows, "local": {}, "fedproto": {}, "dies": dies})
    todo = jobs(tiny)
    second = cluster.start()

    def kill_when_both_are_busy() -> None:
        while not begun.exists() or len(begun.read_text().split()) < 2:
            time.sleep(0.02)
        cluster.kill(second)
        go.touch()

    killer = Thread(target=kill_when_both_are_busy, daemon=True)
    killer.start()
    heard: list[tuple[str, int]] = []
    where = replace(on_this_machine(tiny), workers=0, cluster=Cluster(cluster.address))
    results = list(on_ray(todo, where, lambda cell, done, _: heard.append((cell.label, done))))
    killer.join()
    assert sorted(begun.read_text().split()) == ["0", "1"]
    assert all((label, 3) in heard for label in ("waiting0", "waiting1", "local", "fedproto"))
    (died,) = (result for result in results if isinstance(result, CellError))
    assert died.cell.label == "dies"
    assert died.line.startswith(f"its worker was lost {ATTEMPTS} times, last: ")
    here = list(inline([job for job in todo if job.cell.label != "dies"], on_this_machine(tiny), ignore))
    assert len(here) == 4
    assert found(results) == found(here)


def test_trials_run_there_too_logged_by_a_server_and_kept_in_a_storage(
    tiny: Tiny, cluster: RealCluster, mlflow_server: str
) -> None:
    tiny.change(tune={"trials": 4, "batch": 2, "params": {"optimizer.lr": {"low": 0.001, "high": 1.0, "log": True}}})
    command = ["tune", str(tiny.file), "--only", "method=fedavg", "--data", str(tiny.data)]
    there = ["--executor", "ray", "--ray-address", cluster.address, "--tracking-uri", mlflow_server]
    storage = f"sqlite:///{tiny.out.parent}/shared.db"
    for out, more in (("here", ["--tracking-uri", "none"]), ("there", [*there, "--storage", storage])):
        done = CliRunner().invoke(app, [*command, "--out", str(tiny.out / out), *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    (here,), (other,) = (
        [json.loads(file.read_text()) for file in (tiny.out / out).glob("tiny/studies/*.json")]
        for out in ("here", "there")
    )
    for study in (here, other):
        assert len(study["trials"]) == 4
        for trial in study["trials"]:
            trial.pop("seconds")
    assert here == other
    (summary,) = optuna.get_all_study_summaries(storage)
    assert summary.n_trials == 4
    assert len([run for run in runs(mlflow_server) if "mlflow.parentRunId" in run.data.tags]) == 4


def test_what_no_cluster_can_do_is_said_at_once(tiny: Tiny, cluster: RealCluster) -> None:
    todo = jobs(tiny)[:1]
    absent = f"127.0.0.1:{free_port()}"
    for where, line in (
        (Cluster(absent), f"--ray-address {absent}: nothing answers there"),
        (Cluster(cluster.address, 2), "no node could run a cell, which takes 1 CPUs and 2 GPUs; the nodes have: "),
    ):
        with pytest.raises(InputError, match=line):
            list(on_ray(todo, replace(on_this_machine(tiny), cluster=where), ignore))


def test_rooms() -> None:
    assert _slots({"CPU": 8.0}, 2, 0.0) == 4
    assert _slots({"CPU": 8.0, "GPU": 1.0}, 1, 0.25) == 4
    assert _slots({"CPU": 8.0, "GPU": 1.0}, 1, 0.1) == 8
    assert _slots({"CPU": 8.0}, 1, 0.25) == 0
    assert _slots({"GPU": 1.0}, 1, 1.0) == 0


def test_a_cluster_on_this_machine_has_its_processors_however_many_threads_a_cell_has(tiny: Tiny) -> None:
    where = replace(on_this_machine(tiny), workers=0, threads=2)
    assert _own_cpus(where) == max(2, usable_cores())
    assert _own_cpus(replace(where, threads=1000)) == 1000
    assert _own_cpus(replace(where, workers=3)) == 6
    assert _room([{"CPU": 4.0}, {"CPU": 3.0}, {"CPU": 1.0}], where, 0.0) == 3
    assert _room([{"CPU": 4.0}], replace(where, workers=1), 0.0) == 1
    with pytest.raises(InputError, match="takes 2 CPUs and 0 GPUs; the nodes have: 1 CPUs and 0 GPUs"):
        _room([{"CPU": 1.0}], where, 0.0)


def test_why_ray_did_not_start_is_said_in_a_line(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(*_: object, **__: object) -> None:
        raise ray.exceptions.AuthenticationError("no token")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr("fedbench.cluster._check_address", lambda address: None)
    for address, words in (("", "--executor ray: "), ("10.0.0.1:6379", "--ray-address 10.0.0.1:6379: ")):
        with pytest.raises(InputError, match=f"^{words}.*no token") as caught:
            list(on_ray(jobs(tiny)[:1], replace(on_this_machine(tiny), cluster=Cluster(address)), ignore))
        assert "\n" not in str(caught.value)
