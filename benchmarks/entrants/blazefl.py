"""BlazeFL: the FedAvg that comes with it, client after client or in its thread pool, data in memory.

Its trainers have no momentum, which saves it a little work.
"""

import logging
import time
from enum import StrEnum
from importlib.metadata import version
from typing import Any

import torch
import workload
from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from blazefl.core import ModelSelector, PartitionedDataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Name(StrEnum):
    CNN = "CNN"


class Selector(ModelSelector):
    def select_model(self, model_name: str) -> nn.Module:
        return workload.Cnn()


class Data(PartitionedDataset):
    def __init__(self) -> None:
        self.sets = [TensorDataset(images, labels) for images, labels in zip(*workload.tensors(), strict=True)]

    def get_dataset(self, type_: Any, cid: int) -> TensorDataset:
        return self.sets[cid]

    def set_dataset(self, type_: Any, cid: int, dataset: Any) -> None:
        """Do nothing: no data change here."""

    def get_dataloader(
        self, type_: Any, cid: int, batch_size: int | None = None, generator: torch.Generator | None = None
    ) -> DataLoader[Any]:
        return DataLoader(self.sets[cid], batch_size=batch_size, shuffle=True, generator=generator)


def main(method: str, rounds: str, workers: str) -> None:
    logging.disable(logging.CRITICAL)
    common: dict[str, Any] = {
        "model_selector": Selector(),
        "model_name": Name.CNN,
        "dataset": Data(),
        "device": "cpu",
        "num_clients": workload.CLIENTS,
        "batch_size": workload.BATCH,
        "seed": 0,
    }
    handler = FedAvgBaseServerHandler(global_round=int(rounds), sample_ratio=1.0, **common)
    if int(workers) == 1:
        trainer = FedAvgBaseClientTrainer(epochs=1, lr=workload.LR, **common)
    else:
        trainer = FedAvgThreadPoolClientTrainer(num_parallels=int(workers), epochs=1, lr=workload.LR, **common)
    seconds = []
    while not handler.if_stop():  # the loop of its quickstart
        began = time.perf_counter()
        clients = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), clients)
        for package in trainer.uplink_package():
            handler.load(package)
        seconds.append(time.perf_counter() - began)
    workload.report(seconds, version("blazefl"))
