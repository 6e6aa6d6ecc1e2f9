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
    """Waits until every federation has a job, and trains the clients of all of them at once.

    The federations run in lockstep, each in a thread of its own.  They must have the same models and settings, but for
    seeds, samples, the numbers of the method, and the learning rate of SGD without weight decay.  `chosen` computes.
    """

    def __init__(self, chosen: Chosen, federations: int) -> None:
        self.chosen, self._left = chosen, federations
        self._turn = Condition()
        self._jobs: list[Job] = []
        self._done: dict[int, list[Part] | BaseException] = {}
        self._stacks: bool | None = None
        self._stopped = False

    def train(self, job: Job) -> Iterator[Part]:
        """Yield the job's clients after all jobs of the round are computed; raises what computing them raised."""
        with self._turn:
            if self._stopped:
                raise RuntimeError("interrupted")
            self._jobs.append(job)
            self._compute_if_all_are_here()
            self._turn.wait_for(lambda: id(job) in self._done)
            parts = self._done.pop(id(job))
        if isinstance(parts, BaseException):
            raise parts
        yield from parts

    def examine(self, job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
        """Return what the models of one federation answer."""
        return self.chosen.examine(job, places, model, split)

    def stop(self) -> None:
        """End every federation when it comes with its next job."""
        with self._turn:
            self._stopped = True
            self._done |= {id(job): RuntimeError("interrupted") for job in self._jobs}
            self._jobs = []
            self._turn.notify_all()

    def leave(self) -> None:
        """Say that one federation has no more jobs."""
        with self._turn:
            self._left -= 1
            self._compute_if_all_are_here()

    def _compute_if_all_are_here(self) -> None:
        if not self._jobs or len(self._jobs) < self._left:
            return
        jobs, self._jobs = self._jobs, []
        results: dict[int, list[Part] | BaseException] = {id(job): [] for job in jobs}
        try:
            for number, part in self._parts(jobs):
                gathered = results[id(jobs[number])]
                assert isinstance(gathered, list)
                gathered.append(part)
        except Exception as error:  # every federation of the round ends with it
            results = dict.fromkeys(results, error)
        self._done |= results
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
    """Return what each call gives, all in threads that share one `Together`."""
    together = Together(chosen, len(plays))

    def play(one: Callable[[Engine], T]) -> T:
        try:
            return one(together)
        finally:
            together.leave()

    with ThreadPoolExecutor(len(plays)) as pool:
        try:
            return list(pool.map(play, plays))
        except BaseException:  # an interrupt: the pool waits for the round under way, no longer
            together.stop()
            raise
