"""So many classes for a client, so many samples of each."""

import random
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from fedbench.data import Arrays
from fedbench.errors import InputError
from fedbench.partitioners import Index, Partitioner, Split
from fedbench.partitioners.dealing import TEST, TRAIN, by_class, check_clients, even, shuffled_by_class
from fedbench.settings import MOST, Count


@dataclass(frozen=True, kw_only=True)
class NWayKShot(Partitioner):
    """Client i holds k_i training samples of each of n_i classes (FedProto, arXiv 2105.00243, section 5).

    - `n`, `k`: average number of classes of a client, and of training samples per class (one k_i for all its classes).
    - `noise`: what is added to them.  `gaussian`, as the paper says: rounded normal draws with deviation `stdev`, n_i
      between 2 (1 if n is 1) and all classes, k_i at least 1.  `uniform`, as its code does, in the code's order: n_i
      on [max(2, n - stdev), min(classes - 1, n + stdev)] (so its mean can exceed n), then k_i by `k_noise`.
    - `k_noise`: range of uniform k_i: `wide` is [k - stdev + 1, k + stdev] (the code on CIFAR-10 and FEMNIST),
      `narrow` [k - stdev + 1, k + stdev - 2] (the code on MNIST).  With stdev 0, k_i = k.
    - `assignment`: `demand` deals the shuffled samples of a class to those who hold it, one after the other.  `slots`,
      as the code does, gives client i the positions from i * `train_shots_max` on of each of its classes, in file
      order, and for testing those from i * `test_shots` on, whether or not the clients before it hold the class.
    - `test_shots`: test samples per class of a client (the code: 40 on MNIST, else 15).
    - `shortage`: with `demand`, what happens if a class has fewer samples than its holders want: `error`, or `shrink`,
      which gives all of them the same number as far as they want it; the card lists the classes.
    """

    n: Count
    k: Count
    stdev: Annotated[float, Ge(0)] = 0.0
    noise: Literal["gaussian", "uniform"] = "gaussian"
    k_noise: Literal["wide", "narrow"] = "wide"
    clients: Count = 20
    assignment: Literal["demand", "slots"] = "demand"
    train_shots_max: Count = 110
    test_shots: Annotated[int, Ge(0)] = 15
    shortage: Literal["error", "shrink"] = "error"

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Draw n, k and the class lists, then deal the samples."""
        check_clients(self.clients, len(arrays.y_train))
        n, k, held = self.shots(arrays.classes, seed)
        notes = {"n": n.tolist(), "k": k.tolist()}
        if self.assignment == "slots":
            return Split(*self._slots(arrays, k, held), notes=notes)
        train, test, shrunk = self._demand(arrays, k, held, seed)
        return Split(train, test, notes=notes | {"shrunk": shrunk})

    def shots(self, classes: int, seed: int) -> tuple[Index, Index, list[list[int]]]:
        """Return n_i and k_i, (clients,) int64 each, and the sorted class list of every client."""
        if self.n > classes:
            raise InputError(f"partition.n: {self.n} is more than the {classes} classes of the data")
        stream = np.random.RandomState(seed)
        if self.noise == "uniform":
            (n_low, n_high), (k_low, k_high) = self._ranges(classes)
            n = stream.randint(n_low, n_high + 1, self.clients, np.int64)
            k = stream.randint(k_low, k_high + 1, self.clients, np.int64)
        else:
            n = np.clip(np.rint(stream.normal(self.n, self.stdev, self.clients)), min(2, self.n), classes)
            k = np.clip(np.rint(stream.normal(self.k, self.stdev, self.clients)), 1, MOST)
        pick = random.Random(seed)
        held = [sorted(pick.sample(range(classes), int(count))) for count in n]
        return n.astype(np.int64), k.astype(np.int64), held

    def _ranges(self, classes: int) -> tuple[tuple[int, int], tuple[int, int]]:
        if self.stdev != int(self.stdev):
            raise InputError(f"partition.stdev: {self.stdev} with noise 'uniform'; want a whole number")
        stdev = int(self.stdev)
        n_low, n_high = max(2, self.n - stdev), min(classes - 1, self.n + stdev)
        if n_low > n_high:
            raise InputError(
                f"partition.n: {self.n} with stdev {stdev} and noise 'uniform' leaves no n from {n_low} to {n_high}"
            )
        if stdev == 0:
            return (n_low, n_high), (self.k, self.k)
        k_low, k_high = self.k - stdev + 1, self.k + stdev - (2 if self.k_noise == "narrow" else 0)
        if k_low > k_high:
            raise InputError(
                f"partition.stdev: {stdev} leaves no k from {k_low} to {k_high} with k_noise 'narrow'; "
                "want stdev 2 or more, or k_noise 'wide'"
            )
        if k_low < 1:
            raise InputError(
                f"partition.k: {self.k} with stdev {stdev} goes down to {k_low}; want k of {stdev} or more"
            )
        return (n_low, n_high), (k_low, k_high)

    def _slots(self, arrays: Arrays, k: Index, held: list[list[int]]) -> tuple[list[Index], list[Index]]:
        if k.max() > self.train_shots_max:
            raise InputError(
                f"partition.k: a client draws {k.max()} samples of a class, more than a slot of "
                f"partition.train_shots_max {self.train_shots_max}"
            )
        if not len(arrays.y_test) and self.test_shots:
            raise InputError("partition.assignment: 'slots' wants a data set with test samples; use 'demand'")
        shots = np.full(self.clients, self.test_shots)
        return (
            self._slot(arrays.y_train, arrays.classes, held, "train_shots_max", k),
            self._slot(arrays.y_test, arrays.classes, held, "test_shots", shots),
        )

    def _slot(self, y: Index, classes: int, held: list[list[int]], key: str, take: Index) -> list[Index]:
        width: int = getattr(self, key)
        positions = by_class(y, classes)
        short = min(range(classes), key=lambda label: len(positions[label]))
        available = len(positions[short])
        if self.clients * width > available:  # also if nobody holds that class: a layout must not depend on the draw
            raise InputError(
                f"partition.clients: {self.clients} slots of {key} {width} want {self.clients * width} samples of "
                f"class {short}, available {available}: at most {available // width} clients, or assignment 'demand'"
            )
        begin = width * np.arange(self.clients)
        return [
            np.concatenate([positions[label][begin[i] : begin[i] + take[i]] for label in labels])
            for i, labels in enumerate(held)
        ]

    def _demand(
        self, arrays: Arrays, k: Index, held: list[list[int]], seed: int
    ) -> tuple[list[Index], list[Index], list[dict[str, Any]]]:
        holders: list[list[int]] = [[] for _ in range(arrays.classes)]
        for i, labels in enumerate(held):
            for label in labels:
                holders[label].append(i)
        train_pools = shuffled_by_class(arrays.y_train, arrays.classes, seed, TRAIN)
        if len(arrays.y_test):
            test_pools = shuffled_by_class(arrays.y_test, arrays.classes, seed, TEST)
        else:
            test_pools = []
            for label, pool in enumerate(train_pools):
                for_test = len(holders[label]) * self.test_shots
                wanted = int(k[holders[label]].sum()) + for_test
                if wanted > len(pool) and self.shortage == "error":
                    raise self._shortage("training and test", label, wanted, len(pool))
                cut = min(for_test, len(pool) * for_test // max(wanted, 1))
                test_pools.append(pool[:cut])
                train_pools[label] = pool[cut:]
        shrunk: list[dict[str, Any]] = []
        shots = np.full(self.clients, self.test_shots)
        train = self._deal("training", train_pools, holders, k, shrunk)
        test = self._deal("test", test_pools, holders, shots, shrunk)
        return train, test, shrunk

    def _deal(
        self, what: str, pools: list[Index], holders: list[list[int]], take: Index, shrunk: list[dict[str, Any]]
    ) -> list[Index]:
        dealt: list[list[Index]] = [[] for _ in range(self.clients)]
        for label, (pool, owners) in enumerate(zip(pools, holders, strict=True)):
            if not owners:
                continue
            wants = take[owners]
            wanted, available = int(wants.sum()), len(pool)
            if wanted > available:
                # A client that lost a class in training would hold fewer than it drew; in testing it is only counted.
                if self.shortage == "error" or (what == "training" and available < len(owners)):
                    raise self._shortage(what, label, wanted, available)
                shrunk.append({"samples": what, "class": label, "wanted": wanted, "available": available})
            ends = np.cumsum(even(wants, available))
            for owner, piece in zip(owners, np.split(pool[: ends[-1]], ends[:-1]), strict=True):
                dealt[owner].append(np.sort(piece))
        return [np.concatenate(pieces) for pieces in dealt]

    def _shortage(self, what: str, label: int, wanted: int, available: int) -> InputError:
        fewer = "want fewer clients, n, k or test_shots"
        advice = f"{fewer}, or shortage 'shrink'" if self.shortage == "error" else f"a holder would get none; {fewer}"
        return InputError(
            f"partition: {wanted} {what} samples of class {label} wanted, available {available}; {advice}"
        )
