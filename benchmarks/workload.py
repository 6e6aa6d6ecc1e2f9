"""The workload W that all benchmarks share, made of nothing but numpy and torch so that every entrant can read it.

W is one FedAvg round of 20 clients with full participation: each holds 3 classes x 100 digits of MNIST and trains
cnn_mnist, with its dropout, for one epoch of batches of 8 by SGD with learning rate 0.01 and momentum 0.5, which makes
760 client-steps.  Evaluation is no part of it.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

CLIENTS, CLASSES, SHOTS = 20, 10, 100
SAMPLES = 3 * SHOTS
BATCH, LR, MOMENTUM = 8, 0.01, 0.5
STEPS = -(-SAMPLES // BATCH)
MEAN, STD = 0.1307, 0.3081
FLOP_PER_STEP = 20.76e6
"""Forward and backward of a batch of 8, by torch.utils.flop_counter."""

_DIGITS = Path(__file__).resolve().parents[1] / "datasets" / "mnist_mini.npz"
_MARK = "RESULT "


def digits(clients: int = CLIENTS, samples: int = SAMPLES) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return every client's images (clients, samples, 1, 28, 28) and labels (clients, samples).

    Client i holds the classes i, i + 3 and i + 7 modulo 10.  The digits are real and taken in the order of the file,
    again and again, so several clients may hold the same: no time depends on which they are.
    """
    with np.load(_DIGITS, allow_pickle=False) as held:
        x, y = held["x_train"], held["y_train"].astype(np.int64)
    of_class = [np.flatnonzero(y == label) for label in range(CLASSES)]
    index = np.empty((clients, samples), np.int64)
    for client in range(clients):
        for turn, shift in enumerate((0, 3, 7)):
            own = of_class[(client + shift) % CLASSES]
            place = index[client, turn::3]
            place[:] = np.take(own, np.arange(len(place)) + client * len(place), mode="wrap")
    return x[index].reshape(clients, samples, 1, 28, 28), y[index]


def tensors() -> tuple[Tensor, Tensor]:
    """Return every client's normalised images (clients, samples, 1, 28, 28) float32 and labels (clients, samples)."""
    x, y = digits()
    return torch.from_numpy((x.astype(np.float32) / 255 - MEAN) / STD), torch.from_numpy(y)


class Body(nn.Module):
    """The body of cnn_mnist, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.channel_dropout = nn.Dropout2d(0.5)
        self.fc1 = nn.Linear(320, 50)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.channel_dropout(self.conv2(x)), 2))
        return F.relu(self.fc1(x.flatten(1)))


class Cnn(nn.Module):
    """cnn_mnist: 21,840 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def report(seconds: Sequence[float], version: str, **facts: Any) -> None:
    """Print, for `read_report`, how long an entrant's rounds took; the first one only warms up and is left out."""
    found = {"us_per_step": 1e6 * statistics.median(list(seconds)[1:]) / (CLIENTS * STEPS), "version": version}
    print(_MARK + json.dumps({**found, "torch": torch.__version__, "threads": torch.get_num_threads(), **facts}))


def read_report(output: str) -> dict[str, Any]:
    """Return what `report` printed; raises ValueError if it did not."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise ValueError("no result")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return found
