"""Flower's simulation: a NumPyClient that runs the plain loop, the FedAvg strategy, Ray."""

import logging
import time
import warnings
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import workload
from flwr.client import Client, ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset


@cache
def data_sets() -> list[TensorDataset]:
    """Return every client's data, held in each worker, as Flower's examples hold theirs."""
    return [TensorDataset(images, labels) for images, labels in zip(*workload.tensors(), strict=True)]


class Trainer(NumPyClient):
    """One client."""

    def __init__(self, client: int) -> None:
        self.net, self.data = workload.Cnn(), data_sets()[client]

    def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, float]]:
        torch.set_num_threads(1)
        state = {n: torch.tensor(p) for n, p in zip(self.net.state_dict(), parameters, strict=True)}
        self.net.load_state_dict(state, strict=True)
        self.net.train()
        optimizer = torch.optim.SGD(self.net.parameters(), lr=workload.LR, momentum=workload.MOMENTUM)
        total = 0.0
        for x, y in DataLoader(self.data, batch_size=workload.BATCH, shuffle=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(self.net(x), y)
            torch.autograd.backward(loss)
            optimizer.step()
            total += loss.item()
        return [tensor.numpy() for tensor in self.net.state_dict().values()], len(self.data), {"loss": total}


class Timed(FedAvg):
    """FedAvg that notes when each round begins, and when the last one ends."""

    began: list[float] = []
    end = 0.0

    def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
        Timed.began.append(time.perf_counter())
        return super().configure_fit(*args, **kwargs)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures:  # which Flower passes over in silence
            raise SystemExit(str(failures[0]))
        merged = super().aggregate_fit(server_round, results, failures)
        Timed.end = time.perf_counter()
        return merged


def make_client(context: Context) -> Client:
    return Trainer(int(context.node_config["partition-id"])).to_client()


def main(method: str, rounds: str, workers: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    initial = ndarrays_to_parameters([tensor.numpy() for tensor in workload.Cnn().state_dict().values()])
    everybody = {"min_fit_clients": workload.CLIENTS, "min_available_clients": workload.CLIENTS}

    def make_server(context: Context) -> ServerAppComponents:
        strategy = Timed(fraction_fit=1.0, fraction_evaluate=0.0, initial_parameters=initial, **everybody)
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=int(rounds)))

    resources = {"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}, "init_args": {"num_cpus": int(workers)}}
    run_simulation(
        ServerApp(server_fn=make_server), ClientApp(client_fn=make_client), workload.CLIENTS, backend_config=resources
    )
    seconds = [after - before for before, after in pairwise([*Timed.began, Timed.end])]
    workload.report(seconds, version("flwr"))
