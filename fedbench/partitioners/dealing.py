"""What partitioners have in common: streams of random numbers, samples by class, fractions of them."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedbench.data import Arrays
from fedbench.errors import InputError
from fedbench.partitioners import Index

# Each use of random numbers has a stream of its own, made of the partition seed and one of these.
TRAIN, TEST, HOLD_OUT, VALIDATION, LAW, SHIFT, CLIENTS = range(1, 8)


def stream_of(seed: int, use: int, *more: int) -> np.random.RandomState:
    """Return the random numbers of one use, or of a further part of it, under a partition seed."""
    return np.random.RandomState([seed, use, *more])


def by_class(y: Index, classes: int) -> list[Index]:
    """Return the positions of each class in file order; the sort is stable, unlike numpy's default."""
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y, minlength=classes))[:-1])


def shuffled_by_class(y: Index, classes: int, seed: int, use: int) -> list[Index]:
    """Return the positions of each class in a drawn order."""
    shuffled = stream_of(seed, use).permutation(len(y))
    return [shuffled[positions] for positions in by_class(y[shuffled], classes)]


def deal(y: Index, counts: Index, seed: int, use: int) -> list[Index]:
    """Return each client's rows, ascending: of each class as many as `counts` (clients, classes) says, drawn."""
    pools = shuffled_by_class(y, counts.shape[1], seed, use)
    ends = counts.cumsum(0)
    owners = np.repeat(np.tile(np.arange(len(counts)), counts.shape[1]), counts.T.ravel())
    rows = np.concatenate([pool[:end] for pool, end in zip(pools, ends[-1], strict=True)])
    order = np.lexsort((rows, owners))
    return np.split(rows[order], np.cumsum(counts.sum(1))[:-1])


def deal_test(arrays: Arrays, counts: Index, how: Literal["match", "iid"], seed: int) -> list[Index]:
    """Return each client's rows of the test arrays, given its training samples of each class (clients, classes).

    `match`: each class in proportion to the clients' training samples of it; `iid`: in equal parts, whatever the class.
    """
    if how == "iid":
        order = stream_of(seed, TEST).permutation(len(arrays.y_test))
        return [np.sort(rows) for rows in np.array_split(order, len(counts))]
    there = np.bincount(arrays.y_test, minlength=counts.shape[1])
    held = np.maximum(counts.sum(0), 1)
    # Where the first piece begins is drawn, so that no place in the list of clients is favoured by rounding.
    ends = (counts.cumsum(0) * there + stream_of(seed, TEST, 1).randint(held)) // held
    return deal(arrays.y_test, np.diff(ends, axis=0, prepend=0), seed, TEST)


def even(wants: Index, available: int) -> Index:
    """Return what each of some clients gets: all it wants, or else one common number as far as it wants that.

    What then remains goes to the first clients that want more, one each.
    """
    low, high = 0, int(wants.max(initial=0))
    while low < high:
        level = (low + high + 1) // 2
        low, high = (level, high) if np.minimum(wants, level).sum() <= available else (low, level - 1)
    shares = np.minimum(wants, low)
    shares[np.flatnonzero(wants > low)[: available - shares.sum()]] += 1
    return shares


def cut_all(lists: Sequence[Index], y: Index, fraction: float, seed: int, use: int) -> tuple[list[Index], list[Index]]:
    """Take a fraction of each client's rows out; return what remains and what was taken, both in their old order."""
    stream = stream_of(seed, use)
    taken = [_pick(y[rows], fraction, stream) for rows in lists]
    return (
        [rows[~chosen] for rows, chosen in zip(lists, taken, strict=True)],
        [rows[chosen] for rows, chosen in zip(lists, taken, strict=True)],
    )


def _pick(labels: Index, fraction: float, stream: np.random.RandomState) -> NDArray[np.bool_]:
    """Choose a fraction of some samples, from every class in proportion: at least one of two, and never all."""
    total = len(labels)
    chosen = np.zeros(total, bool)
    if fraction and total > 1:
        size = min(max(1, round(fraction * total)), total - 1)
        order = stream.permutation(total)
        order = order[np.argsort(labels[order], kind="stable")]
        chosen[order[(np.arange(size) * total + stream.randint(total)) // size]] = True
    return chosen


def label_counts(lists: Sequence[Index], y: Index, classes: int) -> Index:
    """Return how many samples of each class each client has, (clients, classes) int64."""
    owner = np.repeat(np.arange(len(lists)), [len(rows) for rows in lists])
    flat = np.bincount(owner * classes + y[np.concatenate(lists)], minlength=len(lists) * classes)
    return flat.reshape(len(lists), classes)


def check_clients(clients: int, samples: int) -> None:
    """Raise `InputError` if there are more clients than training samples."""
    if clients > samples:
        raise InputError(f"partition.clients: {clients} is more than the {samples} training samples")


def check_rows(lists: Sequence[Index], samples: int, what: str, where: str) -> None:
    """Raise `InputError` unless all rows exist and none belongs to two clients."""
    rows = np.concatenate([np.empty(0, np.int64), *lists])
    outside = rows[(rows < 0) | (rows >= samples)]
    if len(outside):
        raise InputError(f"{where}: row {outside[0]} is not among the {samples} {what} samples")
    times = np.bincount(rows, minlength=1)
    if times.max() > 1:
        raise InputError(f"{where}: {what} sample {times.argmax()} is given out {times.max()} times; want at most once")
