"""What a partitioner is: a rule that deals samples to clients, drawing from nothing but (labels, options, seed).

All draws come from numpy's RandomState and Python's random.Random, whose streams are frozen, so a partition is the same
on every machine and with every version; its hash proves it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from fedbench.data import Arrays

Index = NDArray[np.int64]
Fraction = Annotated[float, Ge(0), Lt(1)]

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """What a partitioner returns: rows per client, before validation samples are taken and anything is checked.

    - `notes` go onto the card.
    - `shift`: see `fedbench.partition.Partition`.
    """

    train: Sequence[Index]
    test: Sequence[Index]
    validation: Sequence[Index] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    shift: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True)
class Partitioner(ABC):
    """A rule that deals samples to clients; a concrete class's fields are the options of the partition.

    `validation` is the fraction of each client's training samples that is set aside for choosing hyperparameters, at
    least one where the client has two.
    """

    validation: Fraction = 0.0

    @abstractmethod
    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Deal the samples; raises InputError if that is not possible."""
