"""Federations of fedbench that are played round by round, on any device."""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import workload
from numpy.typing import NDArray

from fedbench import ClientArrays, plugins
from fedbench.engines import Engine
from fedbench.engines.choice import EngineName
from fedbench.federation import State, evaluate, first_state, play_round
from fedbench.samples import Samples, from_clients
from fedbench.settings import Optimizer, Training
from fedbench.setups import Setup, make_setup
from fedbench.wire import Wire


@dataclass
class Federation:
    """A federation between two rounds."""

    setup: Setup
    state: State
    wire: Wire

    def play(self) -> float:
        """Play one more round, without evaluation, and return its seconds."""
        began = time.perf_counter()
        self.state, self.record = play_round(self.setup, self.state, self.wire)
        if self.setup.data.x.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def examine(self) -> tuple[float, dict[str, NDArray[np.float64]]]:
        """Evaluate every client on its training samples; return the seconds and the metrics."""
        setup = replace(self.setup, data=replace(self.setup.data, test=self.setup.data.train))
        began = time.perf_counter()
        metrics = evaluate(setup, self.state, Wire(setup.data.clients, setup.buffers))
        return time.perf_counter() - began, metrics

    @property
    def steps(self) -> int:
        """The client-steps of the last round."""
        return int(self.record.work["steps"].sum())


def make(
    method: str,
    model: str,
    data: Samples,
    *,
    engine: EngineName | Engine = "auto",
    threads: int = 1,
    batch: int = workload.BATCH,
    seed: int = 0,
) -> Federation:
    """Return a federation before its first round, trained as the workload is."""
    optimizer = Optimizer(lr=workload.LR, momentum=workload.MOMENTUM)
    training = Training(
        rounds=10**6,
        evaluate_every=10**6,
        batch_size=batch,
        optimizer=optimizer,
        dtype="float64" if data.x.dtype == torch.float64 else "float32",
    )
    setup = make_setup(
        plugins.load("methods", method)(), [plugins.load("models", model)], data, training, seed, engine, threads
    )
    return Federation(setup, first_state(setup), Wire(data.clients, setup.buffers))


def digits(
    clients: int = workload.CLIENTS,
    samples: int = workload.SAMPLES,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Samples:
    """Return the workload's data, for another number of clients or of samples of each."""
    x, y = workload.digits(clients, samples)
    return _samples((x.astype(np.float32) / 255 - workload.MEAN) / workload.STD, y, device, dtype)


def photographs(clients: int, samples: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Samples:
    """Return noise of the shape of CIFAR-10."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients, samples, 3, 32, 32)).astype(np.float32)
    return _samples(x, rng.integers(0, 10, (clients, samples)), device, dtype)


def _samples(x: NDArray[Any], y: NDArray[Any], device: str, dtype: torch.dtype) -> Samples:
    clients = [ClientArrays(images, labels, images[:0], labels[:0]) for images, labels in zip(x, y, strict=True)]
    return from_clients(clients, 10, dtype, torch.device(device))
