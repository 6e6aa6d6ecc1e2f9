"""How the clients of a cell are computed.  Which engine runs is no property of the result: the numbers are the same."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedbench.method import Message, Method
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.settings import Training
from fedbench.trainer import Work

Probe = Callable[[str, int, Params], None]
"""Called with a stage, a client and its parameters: "phase/<name>" after each phase, "trained" at the end."""


@dataclass(frozen=True)
class Job:
    """Local training of some clients with one architecture in one round.

    `kept` and `down` are stacked over `clients`, whose numbers ascend.
    """

    method: Method
    net: Net
    data: Samples
    training: Training
    seed: int
    round_number: int
    clients: Sequence[int]
    kept: Params
    down: Message
    probe: Probe


class Trained(NamedTuple):
    """What clients keep and upload, stacked in the order of the job, and what each of them did."""

    kept: Params
    uploads: Message
    work: list[Work]


class Engine(ABC):
    """Trains the clients of a job."""

    @abstractmethod
    def train(self, job: Job) -> Trained:
        """Return the clients' replies."""
