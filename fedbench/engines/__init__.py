"""How the clients of a cell are computed.  Which engine runs is no property of the result: the numbers are the same."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from fedbench.method import Message, Method
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.settings import Training
from fedbench.trainer import Work

T, R = TypeVar("T"), TypeVar("R")

Probe = Callable[[str, int, Params], None]
"""Called with a stage, a client and its parameters: "phase/<name>" after each phase, "trained" at the end."""


@dataclass(frozen=True)
class Job:
    """Local training of some clients with one architecture in one round.

    - `clients`: their numbers, ascending; a client's place is its position here.
    - `kept`: what all clients with this architecture keep, stacked; `rows`: which row is whose, by place.
    - `down`: what was sent, stacked over `clients`.
    - `probe`: called at the end of every phase, perhaps from several threads.
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


def spread(work: Callable[[Net, T], R], items: Sequence[T], net: Net, threads: int) -> Iterator[R]:
    """Yield what `work` makes of a net and each item, in order, `threads` at a time.

    Every thread has a net of its own, since computing with one puts tensors into its modules, and every operation of
    torch runs on one thread: two that share one wait for each other, on a busy machine many times as long as they work.
    """
    if threads == 1:
        yield from (work(net, item) for item in items)
        return
    nets: SimpleQueue[Net] = SimpleQueue()
    for _ in range(threads):
        nets.put(net.with_own_modules())

    def work_alone(item: T) -> R:
        mine = nets.get()
        try:
            return work(mine, item)
        finally:
            nets.put(mine)

    under_way: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for item in items:
            if len(under_way) > threads:  # no more than that lie finished and wait
                yield under_way.popleft().result()
            under_way.append(pool.submit(work_alone, item))
        while under_way:
            yield under_way.popleft().result()
