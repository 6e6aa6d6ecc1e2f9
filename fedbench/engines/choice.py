"""Which engine a cell gets: the one asked for, or the one that was measured to be faster."""

import logging
from typing import Literal, final

import torch

from fedbench.engines import Engine, Job, Trained
from fedbench.engines.loop import Loop
from fedbench.engines.lowering import Lowering
from fedbench.engines.vectorised import Vectorised
from fedbench.net import Net

EngineName = Literal["auto", "loop", "vectorised"]

_log = logging.getLogger("fedbench")

# Clients computed together (see benchmarks/README.md).
_CHUNK = {"cpu": 20, "cuda": 256}


def engine(name: EngineName, device: torch.device, threads: int = 1) -> Engine:
    """Return the engine of that name for a device; `threads` are chunks of clients computed at the same time."""
    chosen = {"loop": Loop(), "vectorised": Vectorised(_CHUNK.get(device.type, 20), threads)}
    return chosen[name] if name != "auto" else Auto(chosen["loop"], chosen["vectorised"])


@final
class Auto(Engine):
    """Vectorised where that was measured to be faster, and possible; else the loop.

    Measured (benchmarks/README.md): on the CPU a net whose layers all have a stacked form gains, and one that goes
    through vmap, such as ResNet18, loses; on a GPU both gain.  The rule looks at nothing but the net and the device, so
    that a cell is computed by the same engine every time.
    """

    def __init__(self, loop: Engine, vectorised: Engine) -> None:
        self._loop, self._vectorised = loop, vectorised
        self._of: dict[Net, Engine] = {}

    def train(self, job: Job) -> Trained:
        """Return the clients' replies."""
        if job.net not in self._of:
            self._of[job.net] = self._choose(job)
        return self._of[job.net].train(job)

    def _choose(self, job: Job) -> Engine:
        if Lowering.of(job.net) is None and job.net.device.type == "cpu":
            return self._loop
        return self._vectorised
