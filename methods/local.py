"""Local training alone: the control of every comparison."""

from dataclasses import dataclass
from typing import final

from fedbench.averaging import Averaging
from fedbench.net import Net


@final
@dataclass(frozen=True)
class Local(Averaging):
    """Every client trains for itself and sends nothing."""

    mixed_models = True
    control = True

    def shares(self, net: Net, name: str) -> bool:
        """Share nothing."""
        return False
