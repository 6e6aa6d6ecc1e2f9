"""fluke through its Python API."""

import time

import fluke
import workload
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedproto import FedProto
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.nets import EncoderHeadNet
from fluke.utils import FederationObserver
from torch import Tensor, nn


class Net(EncoderHeadNet):
    """cnn_mnist in two parts, as fluke wants it."""

    def __init__(self) -> None:
        super().__init__(workload.Body(), nn.Sequential(nn.Dropout(0.5), nn.Linear(50, workload.CLASSES)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x))
        return logits


class Clock(FederationObserver):
    """Notes how long each round takes."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, list[float]()

    def start_round(self, round: int, global_model: nn.Module) -> None:
        self.began = time.perf_counter()

    def end_round(self, round: int) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def main(method: str, rounds: str) -> None:
    x, y = workload.tensors()
    loaders = [
        FastDataLoader(images, labels, num_labels=workload.CLASSES, batch_size=workload.BATCH, shuffle=True)
        for images, labels in zip(x, y, strict=True)
    ]
    env = FlukeENV()
    env.set_seed(0)
    env.set_device("cpu")
    env.set_evaluator(ClassificationEval(eval_every=10**9, n_classes=workload.CLASSES))
    env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    data = DummyDataContainer(loaders, [None] * workload.CLIENTS, None, num_classes=workload.CLASSES)
    client = DDict(
        batch_size=workload.BATCH,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=workload.LR, momentum=workload.MOMENTUM),
        scheduler=DDict(gamma=1, step_size=1),
    )
    server = DDict(weighted=True)
    if method == "fedproto":  # each client makes its own model, so it gets the name of the class
        client.update(n_protos=workload.CLASSES, lam=1.0, model=f"{__name__}.Net")
        server.update(n_protos=workload.CLASSES)
    kind = {"fedavg": FedAVG, "fedproto": FedProto}[method]
    federation = kind(workload.CLIENTS, DataSplitter(dataset=data), DDict(client=client, server=server, model=Net()))
    clock = Clock()
    federation.set_callbacks([clock])
    federation.finalize = lambda: None  # evaluates, after the last round
    federation.run(n_rounds=int(rounds), eligible_perc=1.0)
    workload.report(clock.seconds, fluke.__version__)
