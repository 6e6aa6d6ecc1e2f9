"""FedPer (Arivazhagan et al., arXiv 1912.00818)."""

from dataclasses import dataclass
from typing import final

from fedbench.averaging import Averaging, Personal, check_personal, is_personal
from fedbench.net import Net


@final
@dataclass(frozen=True)
class FedPer(Averaging):
    """A shared body and a personal head, trained together; the server averages the bodies.

    - `personal`: the part that never leaves its client: "head" (the paper), "dense" (the FedProto comparison: the
      convolutions are shared), "none" (FedAvg), "all" (Local), or a list of module paths.
    """

    presets = {
        "paper": {"personal": "head", "weights": "size"},
        "table1": {"personal": "dense", "weights": "uniform"},
    }

    personal: Personal = "head"

    def check(self, net: Net) -> None:
        """Raise `InputError` for a personal part that the model does not have."""
        check_personal(self.personal, net)

    def shares(self, net: Net, name: str) -> bool:
        """Share everything but the personal part."""
        return not is_personal(self.personal, net, name)
