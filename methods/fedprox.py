"""FedProx (Li et al., arXiv 1812.06127)."""

from dataclasses import dataclass
from typing import Annotated, final

import torch
from annotated_types import Ge
from torch import Tensor

from fedbench.averaging import Averaging
from fedbench.method import Batch, Log, Loss, Message, cross_entropy, parameters
from fedbench.net import Net, Params


@final
@dataclass(frozen=True)
class FedProx(Averaging):
    """FedAvg with a pull towards the received model: mu / 2 times the squared distance over trainable parameters.

    The anchor is the model received in this round and stays fixed during local training (eq. 2 of the paper).

    - `mu`: weight of the pull; 0 is FedAvg.
    """

    presets = {
        "paper": {"weights": "uniform"},  # for clients sampled in proportion to their size
        "official": {"weights": "size"},  # the authors' code: clients sampled evenly
        "table1": {"weights": "uniform"},  # the averaging helper in the FedProto code
    }

    mu: Annotated[float, Ge(0), Log(1e-3, 1)] = 0.1

    def shares(self, net: Net, name: str) -> bool:
        """Share the whole model."""
        return True

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        """Return cross-entropy plus the proximal term."""
        ce, _ = cross_entropy(net, params, batch)
        pull = self.mu / 2 * squared_distance(net, params, parameters(down))
        return Loss(ce + pull, {"ce": ce, "prox": pull})


def squared_distance(net: Net, params: Params, anchor: Params) -> Tensor:
    """Return the squared Euclidean distance (a scalar) over the trainable parameters."""
    terms = [(params[name] - anchor[name]).square().sum() for name in net.parameters if name in anchor]
    return torch.stack(terms).sum()
