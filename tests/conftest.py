"""A complete little suite on disk, which runs in about a second."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedbench import cli
from fedbench.cells import Cell, expand, fingerprints
from fedbench.config import load

# What a shell starts in the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Problems this small gain nothing from threads, which wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

Run = Callable[..., tuple[int, str, str]]

TROUBLE = '''
import os, time
from dataclasses import dataclass
from fedbench.averaging import Averaging


@dataclass(frozen=True)
class Trouble(Averaging):
    """FedAvg that, at the end of a round, waits, raises or dies; nothing that is tried before a run sees that."""

    what: str = "nothing"
    seconds: float = 0.0

    def shares(self, net, name):
        return True

    def merge(self, net, server, uploads, clients, sizes):
        time.sleep(self.seconds)
        if self.what == "raise":
            raise RuntimeError("two lines\\nof trouble")
        if self.what == "die":
            os._exit(9)
        return super().merge(net, server, uploads, clients, sizes)
'''


@dataclass(frozen=True)
class Tiny:
    """A suite file, the folder of its data and one for its runs."""

    file: Path
    data: Path
    out: Path

    def change(self, **keys: Any) -> None:
        """Give keys of the suite file other values."""
        suite = yaml.safe_load(self.file.read_text())
        self.file.write_text(yaml.safe_dump(suite | keys, sort_keys=False))

    def cells(self) -> list[Cell]:
        """Return the suite's cells."""
        suite = load(self.file)
        return expand(suite, fingerprints(suite.base, self.data))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Three methods on four clients with 40 samples of 6 numbers in 3 classes between them."""
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = (rng.normal(size=(120, 6)) + y[:, None]).astype(np.float32)
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)  # which tests of real data may have
    np.savez(data / "blobs.npz", allow_pickle=False, x_train=x[:90], y_train=y[:90], x_test=x[90:], y_test=y[90:])
    file = tmp_path / "tiny.yaml"
    suite = {
        "dataset": {"name": "arrays", "path": "blobs.npz"},
        "model": {"name": "mlp", "hidden": [8]},
        "partition": {"name": "iid", "clients": 4},
        "training": {"rounds": 3, "batch_size": 4},
        "methods": {"local": {}, "fedavg": {}, "fedproto": {}},
    }
    file.write_text(yaml.safe_dump(suite, sort_keys=False))
    (tmp_path / "trouble.py").write_text(TROUBLE)
    return Tiny(file, data, tmp_path / "runs")


@pytest.fixture
def fedbench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tiny: Tiny) -> Run:
    """Return `fedbench ARGUMENT ... -> (exit code, stdout, stderr)`, in this process and the suite's folder."""
    monkeypatch.chdir(tiny.file.parent)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def mlflow_server(tiny: Tiny) -> Iterator[str]:
    """A tracking server on this machine, with its database and artifacts in the folder `server` of the suite's runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tiny.out / "server"
    folder.mkdir(parents=True)
    server = subprocess.Popen(
        f"{sys.executable} -m mlflow server --port {port} --workers 1 --backend-store-uri sqlite:///{folder}/m.db "
        f"--artifacts-destination {folder}/artifacts".split(),
        env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield uri
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)
