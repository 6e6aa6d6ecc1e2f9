"""Several federations of one kind in one stacked program: what fills a device that one of them leaves idle."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar, final

from torch import Tensor

from fedbench.engines import Engine, Job, Model, Part
from fedbench.engines.choice import Chosen
from fedbench.engines.vectorised import Vectorised, trial
from fedbench.evaluation import Examples

T = TypeVar("T")

_log = logging.getLogger("fedbench")


@final
class Together(Engine):
    """The engine of one federation (by its number) of those that meet; `chosen` computes."""

    def __init__(self, meeting: "_Meeting", number: int) -> None:
        self.chosen, self._meeting, self._number = meeting.chosen, meeting, number

    def train(self, job: Job) -> Iterator[Part]:
        """Yield the job's clients after all jobs of the round are computed; raises what computing them raised."""
        yield from self._meeting.computed(self._number, job)

    def examine(self, job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
        """Return what the models of one federation answer."""
        return self.chosen.examine(job, places, model, split)


class _Meeting:
    """Waits until every federation has a job, and trains the clients of all of them at once.

    The federations run in lockstep, each in a thread of its own.  They must have the same models and settings, but for
    seeds, samples, the numbers of the method, and the learning rate of SGD without weight decay.  Jobs stand in the
    order of the federations, whichever comes first: the order decides how numbers are rounded.
    """

    def __init__(self, chosen: Chosen, federations: int) -> None:
        self.chosen, self._left = chosen, federations
        self._turn = Condition()
        self._jobs: dict[int, Job] = {}
        self._done: dict[int, list[Part] | BaseException] = {}
        self._stacks: bool | None = None
        self._stopped = False

    def computed(self, number: int, job: Job) -> list[Part]:
        """Return what becomes of a federation's job, when all jobs of the round are computed."""
        with self._turn:
            if self._stopped:
                raise RuntimeError("interrupted")
            self._jobs[number] = job
            self._compute_if_all_are_here()
            self._turn.wait_for(lambda: number in self._done)
            parts = self._done.pop(number)
        if isinstance(parts, BaseException):
            raise parts
        return parts

    def stop(self) -> None:
        """End every federation when it comes with its next job."""
        with self._turn:
            self._stopped = True
            self._done |= {number: RuntimeError("interrupted") for number in self._jobs}
            self._jobs = {}
            self._turn.notify_all()

    def leave(self) -> None:
        """Say that one federation has no more jobs."""
        with self._turn:
            self._left -= 1
            self._compute_if_all_are_here()

    def _compute_if_all_are_here(self) -> None:
        if not self._jobs or len(self._jobs) < self._left:
            return
        numbers = sorted(self._jobs)
        jobs = [self._jobs.pop(number) for number in numbers]
        gathered: dict[int, list[Part]] = {number: [] for number in numbers}
        try:
            for place, part in self._parts(jobs):
                gathered[numbers[place]].append(part)
            self._done |= gathered
        except Exception as error:  # every federation of the round ends with it
            self._done |= dict.fromkeys(numbers, error)
        self._turn.notify_all()

    def _parts(self, jobs: list[Job]) -> Iterator[tuple[int, Part]]:
        """Yield the parts of all jobs with the jobs' numbers."""
        engine = self.chosen.choose(jobs[0])
        if self._stacks is None:
            self._stacks = isinstance(engine, Vectorised) and _can_stack(jobs)
        if self._stacks and isinstance(engine, Vectorised):
            for parts in engine.train_together(jobs):
                yield from parts.items()
        else:
            for number, job in enumerate(jobs):
                yield from ((number, part) for part in self.chosen.train(job))


def _can_stack(jobs: Sequence[Job]) -> bool:
    """Return whether the jobs have the same phases, and the method takes its numbers as tensors: a trial tells."""
    phases = {tuple((p.name, p.epochs) for p in job.phases) for job in jobs}
    try:
        trial(jobs)
    except Exception as error:  # vmap, and what it runs, raise all kinds
        _log.info("federations are computed one after the other: %s", " ".join(str(error).split()))
        return False
    return len(phases) == 1


def play_together(plays: Sequence[Callable[[Engine], T]], chosen: Chosen) -> list[T]:
    """Return what each call gives, all in threads whose federations meet in every round."""
    meeting = _Meeting(chosen, len(plays))

    def play(number: int) -> T:
        try:
            return plays[number](Together(meeting, number))
        finally:
            meeting.leave()

    with ThreadPoolExecutor(len(plays)) as pool:
        try:
            return list(pool.map(play, range(len(plays))))
        except BaseException:  # an interrupt: the pool waits for the round under way, no longer
            meeting.stop()
            raise
