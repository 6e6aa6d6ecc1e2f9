"""Which engine a cell gets: the one asked for, or the one that was measured to be faster."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, final

import torch
from torch import Tensor

from fedbench import memory
from fedbench.engines import Engine, Job, Model, Part, exam, vectorised
from fedbench.engines.loop import Loop
from fedbench.engines.lowering import Lowering
from fedbench.engines.vectorised import Vectorised
from fedbench.evaluation import Examples
from fedbench.net import Net

EngineName = Literal["auto", "loop", "vectorised"]

_log = logging.getLogger("fedbench")

# Measured, see benchmarks/README.md: on the CPU, more clients or samples together gain next to nothing; a GPU is not
# filled by so few.
_CLIENTS = {"cpu": 20, "cuda": 256}
_SAMPLES = {"cpu": 2048, "cuda": 16384}


def engine(name: EngineName | Engine, device: torch.device, threads: int = 1) -> Engine:
    """Return the engine of that name for a device; `threads` are chunks of clients computed at the same time."""
    if isinstance(name, Engine):
        return name
    return Loop() if name == "loop" else Chosen(device, threads, measured=name == "auto")


def used(engine: Engine) -> str:
    """Return the name of the engine that computed, in a word; of several, each."""
    engines = list(engine.of.values()) if isinstance(engine, Chosen) else [engine]
    return ", ".join(dict.fromkeys(type(one).__name__.lower() for one in engines)) or "none"


@final
class Chosen(Engine):
    """Vectorised where that is possible; else, and if `measured` where it was measured to be faster, the loop.

    Measured (benchmarks/README.md): on the CPU a net whose layers all have a stacked form gains, and one that goes
    through vmap, such as ResNet18, loses; on a GPU both gain.  Whether vmap can take model and method at all, and how
    many clients fit into memory together, a trial of one step tells.  Both look at nothing but the cell and the
    machine, so that a cell is computed by the same engine in the same chunks every time.

    - `of`: each net's engine.
    - `refused`: what was raised when clients were to be "trained" or "examined" together, where that cannot be.
    """

    def __init__(self, device: torch.device, threads: int, measured: bool) -> None:
        self._device, self._threads, self._measured = device, threads, measured
        self.of: dict[Net, Engine] = {}
        self.refused: dict[str, Exception] = {}

    def train(self, job: Job) -> Iterator[Part]:
        """Yield the clients as the engine that was chosen for their net does."""
        return self.choose(job).train(job)

    def examine(self, job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
        """Return what the models answer, as the engine that was chosen for their net finds it."""
        return self.choose(job).examine(job, places, model, split)

    def choose(self, job: Job) -> Engine:
        """Return the engine for the job's net."""
        if job.net not in self.of:
            self.of[job.net] = self._choose(job)
        return self.of[job.net]

    def _choose(self, job: Job) -> Engine:
        if self._measured and Lowering.of(job.net) is None and self._device.type == "cpu":
            return Loop()
        client = self._tried("trained", lambda: vectorised.trial([job]))
        if client is None:
            return Loop()
        sample = self._tried("examined", lambda: exam.trial(job))
        samples = 0 if sample is None else self._most(_SAMPLES, sample)
        return Vectorised(max(1, self._most(_CLIENTS, client)), self._threads, samples)

    def _tried(self, what: str, trial: Callable[[], int]) -> int | None:
        """Return the bytes that a trial found, or None if clients can be trained or examined only alone."""
        try:
            return trial()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # vmap, and what it runs, raise all kinds
            self.refused[what] = error
            _log.info("clients are %s one after the other: %s", what, " ".join(str(error).split()))
            return None

    def _most(self, wanted: Mapping[str, int], needed: int) -> int:
        """Return how many to compute together: as many as are wanted on the device, and fit into its memory."""
        return min(wanted.get(self._device.type, wanted["cpu"]), memory.share(self._device) // needed)
