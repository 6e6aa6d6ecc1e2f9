"""How the clients of a cell are computed.  Which engine runs is no property of the result: the numbers are the same."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from fedbench.evaluation import Examples, examine
from fedbench.method import Message, Method, Phase, tree_map
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.settings import Training
from fedbench.trainer import Work

Probe = Callable[[str, int, Params], None]
"""Called with a stage, a client and its parameters: "phase/<name>" after each phase, "trained" at the end."""


@dataclass(frozen=True)
class Job:
    """Some clients with one architecture in one round, to be trained or examined.

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

    def received(self, place: int) -> Message:
        """Return what was sent to one client."""
        return tree_map(itemgetter(place), self.down)

    def held(self, place: int) -> Params:
        """Return what one client keeps."""
        return {name: tensor[self.rows[place]] for name, tensor in self.kept.items()}

    def start(self, place: int) -> Params:
        """Return the model with which one client begins."""
        return self.method.start(self.net, self.held(place), self.received(place))

    def examine(self, place: int, params: Params, split: Sequence[Tensor]) -> Examples:
        """Return what one client's model answers on its samples; `split` holds every client's, by number."""
        own, index = self.data.own[self.clients[place]], split[self.clients[place]]
        return examine(self.method, self.net, params, self.received(place), self.data, index, own)


Model = Callable[[Job, int], Params]
"""Gives the model of one of a job's clients, by its place; the job may have a net of its own, for another thread."""


class Part(NamedTuple):
    """Some clients after local training, by their places: their models, what they keep and upload (all stacked), and
    what each of them did."""

    places: Sequence[int]
    params: Params
    kept: Params
    uploads: Message
    work: Sequence[Work]


class Engine(ABC):
    """Trains the clients of a job, and examines their models."""

    @abstractmethod
    def train(self, job: Job) -> Iterator[Part]:
        """Yield the job's clients, each once, some at a time, so that never all models are in memory twice."""

    def examine(self, job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
        """Return what the models of some of the job's clients answer, by the clients' numbers.

        `split` holds every client's samples, by number.
        """
        return {job.clients[place]: job.examine(place, model(job, place), split) for place in places}
