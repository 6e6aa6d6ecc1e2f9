"""How long things take, on one thread; no time is asserted.

    pytest benchmarks --benchmark-json=speed.json && python benchmarks/table.py speed.json

Every benchmark also records what it means, such as µs per client-step, which table.py prints.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import federations
import numpy as np
import pytest
import torch
import yaml

from fedbench import cells, config, executors, memory, plugins
from fedbench.engines.choice import EngineName
from fedbench.samples import Samples
from fedbench.store import Record, Store

HERE = Path(__file__).parent

# Model, data, batch: cnn_mnist is the workload; a round of the others takes about as long.
MODELS: dict[str, tuple[Samples, int]] = {
    "cnn_mnist": (federations.digits(), 8),
    "mlp": (federations.digits(), 8),
    "resnet18": (federations.photographs(4, 16), 8),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    memory.keep_freed()
    yield
    torch.set_num_threads(before)


def play(benchmark: Any, federation: federations.Federation, rounds: int = 5) -> None:
    """Time rounds, and record what a client-step takes."""
    benchmark.pedantic(federation.play, rounds=rounds, warmup_rounds=1)
    median = benchmark.stats.stats.median
    benchmark.extra_info["us_per_client_step"] = 1e6 * median / federation.steps
    benchmark.extra_info["client_steps_per_s"] = federation.steps / median


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["loop", "vectorised", "auto"])
def test_engine(benchmark: Any, engine: EngineName, model: str) -> None:
    data, batch = MODELS[model]
    benchmark.group = model
    play(benchmark, federations.make("fedavg", model, data, engine=engine, batch=batch), 3)


@pytest.mark.parametrize("method", plugins.names("methods"))
def test_method(benchmark: Any, method: str) -> None:
    benchmark.group = "methods"
    play(benchmark, federations.make(method, "cnn_mnist", MODELS["cnn_mnist"][0]))


@pytest.mark.parametrize("clients", [20, 2000])
@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_evaluation(benchmark: Any, engine: EngineName, clients: int) -> None:
    benchmark.group = "evaluation"
    samples = 6000 // clients
    federation = federations.make("fedavg", "cnn_mnist", federations.digits(clients, samples), engine=engine)
    benchmark.pedantic(federation.examine, rounds=5, warmup_rounds=1)
    benchmark.extra_info["us_per_sample"] = 1e6 * benchmark.stats.stats.median / (clients * samples)


@pytest.mark.parametrize("clients", [20, 200, 2000])
def test_clients(benchmark: Any, clients: int) -> None:
    benchmark.group = "clients"
    found: list[Any] = []

    def run() -> None:
        command = [sys.executable, str(HERE / "clients.py"), str(clients)]
        found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))

    benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update(found[0])


def test_cell(benchmark: Any, tmp_path: Path) -> None:
    """A cell like those of Table 1, from its recipe to its folder: what does not train and does not evaluate."""
    benchmark.group = "harness"
    suite = {
        "dataset": "mnist_mini",
        "model": "cnn_mnist",
        "partition": {"name": "iid", "clients": 20},
        "training": {"rounds": 20, "evaluate_every": 10},
        "methods": ["fedavg"],
    }
    file = tmp_path / "cell.yaml"
    file.write_text(yaml.safe_dump(suite))
    shares: list[dict[str, float]] = []

    def run() -> None:
        began = time.perf_counter()
        loaded = config.load(file)
        (cell,) = cells.expand(loaded, cells.fingerprints(loaded.base, tmp_path))
        setting = executors.Setting(tmp_path, loaded.base)
        store = Store(tmp_path / f"runs{len(shares)}")
        arrays = executors.load_arrays(cell, setting)
        job = executors.Job(cell, store.partition(cell, lambda: cells.draw_partition(cell, arrays, loaded.base)))
        (record,) = executors.inline([job], setting, lambda cell, done, total: None)
        assert isinstance(record, Record), record
        store.put(record)
        total, seconds = time.perf_counter() - began, record.outcome.seconds
        training, evaluation = seconds["training"] / total, seconds["evaluation"] / total
        shares.append({"training": training, "evaluation": evaluation, "rest": 1 - training - evaluation})

    benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    for name in shares[0]:
        benchmark.extra_info[f"{name}_%"] = 100 * float(np.median([share[name] for share in shares[1:]]))


@pytest.mark.parametrize("arguments", ["--help", "run --help"])
def test_start_up(benchmark: Any, arguments: str) -> None:
    benchmark.group = "start"
    command = [sys.executable, "-m", "fedbench", *arguments.split()]
    benchmark.pedantic(lambda: subprocess.run(command, capture_output=True, check=True), rounds=5, warmup_rounds=1)
