"""FedAvg (McMahan et al., arXiv 1602.05629)."""

from dataclasses import dataclass
from typing import final

from fedbench.averaging import Averaging
from fedbench.net import Net


@final
@dataclass(frozen=True)
class FedAvg(Averaging):
    """Every client trains the global model; the server averages the results."""

    presets = {
        "paper": {"weights": "size"},
        "table1": {"weights": "uniform"},  # the averaging helper in the FedProto code
    }

    def shares(self, net: Net, name: str) -> bool:
        """Share the whole model."""
        return True
