"""pfl-research: FederatedAveraging on its simulated backend; for several processes, under torchrun.

It takes samples in a fixed order.
"""

import os
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops  # noqa: F401 (chooses PyTorch)
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.version import __version__
from torch import Tensor


class Model(workload.Cnn):
    """cnn_mnist with the two functions that pfl calls."""

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
        self.train(not is_eval)
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, is_eval: bool = True) -> dict[str, Any]:
        return {"loss": Weighted(self.loss(x, y, is_eval).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes how long each round takes."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, list[float]()

    def on_train_begin(self, *, model: Any) -> Any:
        self.began = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.began = now
        return False, Metrics()


def main(method: str, rounds: str) -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (pfl draws from it)
    users = dict(enumerate(zip(*workload.tensors(), strict=True)))
    sampler = get_user_sampler("minimize_reuse", range(workload.CLIENTS))
    data = FederatedDataset.from_slices(users, sampler)
    net = Model()
    local = partial(torch.optim.SGD, momentum=workload.MOMENTUM)
    model = PyTorchModel(net, local, torch.optim.SGD(net.parameters(), 1.0))
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=int(rounds),
            evaluation_frequency=10**9,
            train_cohort_size=workload.CLIENTS,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.LR, local_batch_size=workload.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[clock],
    )
    if os.environ.get("RANK", "0") == "0":
        workload.report(clock.seconds, __version__)
