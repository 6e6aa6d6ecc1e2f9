"""All clients alike."""

from dataclasses import dataclass

import numpy as np

from fedbench.data import Arrays
from fedbench.partitioners import Fraction, Index, Partitioner, Split
from fedbench.partitioners.dealing import HOLD_OUT, TEST, TRAIN, check_clients, cut_all, stream_of
from fedbench.settings import Count


@dataclass(frozen=True, kw_only=True)
class Iid(Partitioner):
    """All samples, shuffled and dealt to the clients in equal numbers (up to one).

    `test_fraction` of each client's samples become its test samples if the data set has none.
    """

    clients: Count = 20
    test_fraction: Fraction = 0.2

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Deal training and test samples."""
        check_clients(self.clients, len(arrays.y_train))
        train = self._deal(len(arrays.y_train), seed, TRAIN)
        if len(arrays.y_test):
            return Split(train, self._deal(len(arrays.y_test), seed, TEST))
        return Split(*cut_all(train, arrays.y_train, self.test_fraction, seed, HOLD_OUT))

    def _deal(self, samples: int, seed: int, use: int) -> list[Index]:
        return [np.sort(rows) for rows in np.array_split(stream_of(seed, use).permutation(samples), self.clients)]
