"""How the clients of a cell are computed.  Which engine runs is no property of the result: the numbers are the same."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedbench.method import Message, Method, Phase
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.settings import Training
from fedbench.trainer import Work

Probe = Callable[[str, int, Params], None]
"""Called with a stage, a client and its parameters: "phase/<name>" after each phase, "trained" at the end."""


@dataclass(frozen=True)
class Job:
    """Local training of some clients with one architecture in one round.

    - `clients`: their numbers, ascending; a client's place is its position here.
    - `kept`: what all clients with this architecture keep, stacked; `rows`: which row is whose, by place.
    - `down`: what was sent, stacked over `clients`.
    - `probe`: called at the end of every phase, perhaps from several threads.
    - `repeats`: how many times in a row the phases are gone through.
    """

    method: Method
    net: Net
    data: Samples
    training: Training
    seed: int
    round_number: int
    clients: Sequence[int]
    rows: Sequence[int]
    kept: Params
    down: Message
    probe: Probe
    repeats: int = 1

    @property
    def phases(self) -> list[Phase]:
        """The phases of training, one after the other."""
        return [*self.method.phases(self.net, self.training.epochs)] * self.repeats


class Part(NamedTuple):
    """Some clients after local training, by their places: their models, what they keep and upload (all stacked), and
    what each of them did."""

    places: Sequence[int]
    params: Params
    kept: Params
    uploads: Message
    work: Sequence[Work]


class Engine(ABC):
    """Trains the clients of a job."""

    @abstractmethod
    def train(self, job: Job) -> Iterator[Part]:
        """Yield the job's clients, each once, some at a time, so that never all models are in memory twice."""
