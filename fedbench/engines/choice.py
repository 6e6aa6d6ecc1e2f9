"""Which engine a cell gets: the one asked for, or the one that was measured to be faster."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, final

import torch
from torch import Tensor

from fedbench import memory
from fedbench.engines import Engine, Job, Part
from fedbench.engines.loop import Loop
from fedbench.engines.lowering import Lowering
from fedbench.engines.vectorised import Vectorised, trial
from fedbench.evaluation import Examples
from fedbench.net import Net, Params

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

    - `of`: each net's engine.  Its models are also examined by it, unless vmap does not take the method's scores.
    - `refused`: what was raised where vmap did not take something.
    """

    def __init__(self, device: torch.device, threads: int, measured: bool) -> None:
        self._device, self._threads, self._measured = device, threads, measured
        self.of: dict[Net, Engine] = {}
        self.refused: list[Exception] = []
        self._examined_alone: set[Net] = set()

    def train(self, job: Job) -> Iterator[Part]:
        """Yield the clients as the engine that was chosen for their net does."""
        return self.choose(job).train(job)

    def examine(
        self, job: Job, places: Sequence[int], model: Callable[[int], Params], split: Sequence[Tensor]
    ) -> dict[int, Examples]:
        """Return what the models answer, as the engine that was chosen for their net finds it, if it can."""
        engine = self.choose(job)
        if isinstance(engine, Vectorised) and job.net not in self._examined_alone:
            try:
                return engine.examine(job, places, model, split)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # vmap, and what it runs, raise all kinds
                self._refuse("examined", error)
                self._examined_alone.add(job.net)
        return super().examine(job, places, model, split)

    def choose(self, job: Job) -> Engine:
        """Return the engine for the job's net."""
        if job.net not in self.of:
            self.of[job.net] = self._choose(job)
        return self.of[job.net]

    def _choose(self, job: Job) -> Engine:
        if self._measured and Lowering.of(job.net) is None and self._device.type == "cpu":
            return Loop()
        try:
            needed = trial([job])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # vmap, and what it runs, raise all kinds
            self._refuse("trained", error)
            return Loop()
        kind = self._device.type if self._device.type in _CLIENTS else "cpu"
        fit = max(1, memory.share(self._device) // needed)
        # To examine a sample takes no more than to train on it.
        samples = fit * min(job.training.batch_size, max(map(len, job.data.train)))
        return Vectorised(min(_CLIENTS[kind], fit), self._threads, min(_SAMPLES[kind], samples))

    def _refuse(self, what: str, error: Exception) -> None:
        self.refused.append(error)
        _log.info("clients are %s one after the other: %s", what, " ".join(str(error).split()))
