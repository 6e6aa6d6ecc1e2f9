"""FedRep (Collins et al., arXiv 2102.07078)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, final

from annotated_types import Ge

from fedbench.averaging import Averaging, Personal, check_personal, is_personal
from fedbench.method import Choice, Phase
from fedbench.net import Net


@final
@dataclass(frozen=True)
class FedRep(Averaging):
    """A shared body and a personal head, trained one after the other; the server averages the bodies.

    Each phase has an optimiser of its own, so the frozen part does not drift.

    - `personal`: the part that never leaves its client, as in FedPer.
    - `head_epochs`, `body_epochs`: epochs of the two phases of a round, head first; they replace the suite's local
      epochs.
    """

    presets = {
        "paper": {"personal": "head", "head_epochs": 10, "body_epochs": 1, "weights": "uniform"},
        "official": {"personal": "head", "head_epochs": 10, "body_epochs": 1, "weights": "uniform"},
        "table1": {"personal": "dense", "head_epochs": 1, "body_epochs": 1, "weights": "uniform"},
    }

    weights: Literal["size", "uniform"] = "uniform"
    personal: Personal = "head"
    head_epochs: Annotated[int, Ge(0), Choice(1, 5, 10)] = 1
    body_epochs: Annotated[int, Ge(0)] = 1

    def check(self, net: Net) -> None:
        """Raise `InputError` for a personal part that the model does not have."""
        check_personal(self.personal, net)

    def shares(self, net: Net, name: str) -> bool:
        """Share everything but the personal part."""
        return not is_personal(self.personal, net, name)

    def phases(self, net: Net, epochs: int) -> Sequence[Phase]:
        """Return the head phase and the body phase."""
        return (
            Phase("head", self.head_epochs, lambda name: not self.shares(net, name)),
            Phase("body", self.body_epochs, lambda name: self.shares(net, name)),
        )
