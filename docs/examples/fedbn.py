"""FedBN (Li et al., ICLR 2021, arXiv 2102.07623)."""

from dataclasses import dataclass
from typing import final

from fedbench.averaging import Averaging
from fedbench.errors import InputError
from fedbench.net import Net


@final
@dataclass(frozen=True)
class FedBN(Averaging):
    """Batch norm stays with its client, scale and shift as well as statistics; the server averages everything else."""

    def check(self, net: Net) -> None:
        """Raise `InputError` for a model without batch norm, for which this is FedAvg."""
        if not net.has_batch_norm:
            raise InputError("fedbn: the model has no batch norm; want one that has, or fedavg")

    def shares(self, net: Net, name: str) -> bool:
        """Share a tensor unless its layer has running statistics."""
        layer = name.rpartition(".")[0]
        return f"{layer}.running_mean" not in net.buffers
