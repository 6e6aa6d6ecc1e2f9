"""fedbench: cells of a suite through its own executors, as `fedbench run` computes them.

Several cells, of different seeds, are computed at a time by `processes` or `together`; the time is then that of all
their client-steps.

further arguments: [--engine NAME] [--threads N] [--executor NAME] [--cells N]
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import workload
import yaml

from fedbench import __version__, cells, config, executors
from fedbench.executors import EXECUTORS, Job, Setting
from fedbench.store import CellError


def write_suite(folder: Path, method: str, rounds: int, count: int) -> Path:
    """Write the workload as a suite of so many cells, and its data beside it; one test sample for each client."""
    x, y = workload.digits()
    clients = np.repeat(np.arange(workload.CLIENTS), workload.SAMPLES)
    np.savez(
        folder / "w.npz",
        allow_pickle=False,
        x_train=x.reshape(-1, 1, 28, 28),
        y_train=y.flatten(),
        client_train=clients,
        x_test=x[:, 0],
        y_test=y[:, 0],
        client_test=np.arange(workload.CLIENTS),
    )
    suite = {
        "seeds": list(range(count)),
        "partition_seeds": [0],
        "dataset": {"name": "arrays", "path": "w.npz", "mean": [workload.MEAN], "std": [workload.STD]},
        "model": "cnn_mnist",
        "partition": "given",
        "training": {
            "rounds": rounds,
            "batch_size": workload.BATCH,
            "optimizer": {"lr": workload.LR, "momentum": workload.MOMENTUM},
            "evaluate_every": rounds,
        },
        "methods": [method],
    }
    file = folder / "w.yaml"
    file.write_text(yaml.safe_dump(suite))
    return file


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    parser.add_argument("rounds", type=int)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--executor", default="inline")
    parser.add_argument("--cells", type=int, default=1)
    given = parser.parse_args(argv)
    ends: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The last round is also evaluated, so it is one more.
        suite = config.load(write_suite(folder, given.method, given.rounds + 1, given.cells))
        made = cells.expand(suite, cells.fingerprints(suite.base, folder))
        setting = Setting(
            folder, suite.base, workers=given.cells, threads=given.threads, engine=given.engine, together=given.cells
        )
        arrays = executors.load_arrays(made[0], setting)
        jobs = [Job(cell, cells.draw_partition(cell, arrays, suite.base)) for cell in made]
        for result in EXECUTORS[given.executor](
            jobs, setting, lambda cell, done, total: ends[cell.key].append(time.perf_counter())
        ):
            if isinstance(result, CellError):
                raise SystemExit(result.trace)
    each = np.diff(np.array(list(ends.values()))[:, :-1])
    workload.report([0.0, *(1 / (1 / each).sum(0))], __version__)
