"""Clients that differ by a law with few numbers: in their classes, their sizes, their inputs."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Literal, final

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from fedbench.data import Arrays
from fedbench.errors import InputError
from fedbench.partitioners import Fraction, Index, Partitioner, Split
from fedbench.partitioners.dealing import (
    HOLD_OUT,
    LAW,
    SHIFT,
    TRAIN,
    check_clients,
    cut_all,
    deal,
    deal_test,
    even,
    stream_of,
)
from fedbench.settings import Count

Shares = NDArray[np.float64]

_DRAWS = 10  # of a law, for one that gives every client enough; then samples are moved


@dataclass(frozen=True, kw_only=True)
class Skewed(Partitioner):
    """All samples, dealt to the clients by a law; abstract: what such partitions have in common.

    - `test`: how test samples are dealt.  `match`: those of a class in proportion to the clients' training samples of
      it, so that clients are tested on what they train on; what nobody trains on is left out.  `iid`: in equal parts.
    - `test_fraction` of each client's samples become its test samples if the data set has none.
    - `noise`, `rotation`: shift of the inputs, in training and testing alike.  The clients have, in a drawn order,
      evenly spaced amounts: a deviation from 0 to `noise` of normal noise on the normalised inputs, drawn once for each
      sample, and an angle from -`rotation` to `rotation` degrees by which images are turned.
    """

    clients: Count = 20
    test: Literal["match", "iid"] = "match"
    test_fraction: Fraction = 0.2
    noise: Annotated[float, Ge(0)] = 0.0
    rotation: Annotated[float, Ge(0), Le(180)] = 0.0

    @abstractmethod
    def counts(self, totals: Index, seed: int, /) -> tuple[Index, dict[str, Any]]:
        """Return how many samples of each class each client gets (clients, classes), and notes for the card.

        `totals` (classes,) is what there is; raises `InputError` if that is not enough.
        """

    @final
    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Deal training and test samples."""
        y = arrays.y_train
        counts, notes = self.counts(np.bincount(y, minlength=arrays.classes), seed)
        shift, amounts = self._shift(arrays, seed)
        train = deal(y, counts, seed, TRAIN)
        if len(arrays.y_test):
            test = deal_test(arrays, counts, self.test, seed)
        elif self.test == "iid":
            raise InputError("partition.test: 'iid' wants a data set with test samples; use 'match' and test_fraction")
        else:
            train, test = cut_all(train, y, self.test_fraction, seed, HOLD_OUT)
        return Split(train, test, notes=notes | amounts, shift=shift)

    @final
    def _shift(self, arrays: Arrays, seed: int) -> tuple[Shares | None, dict[str, list[float]]]:
        if not self.noise and not self.rotation:
            return None, {}
        if self.rotation and len(arrays.shape) != 3:
            raise InputError(f"partition.rotation: samples of shape {arrays.shape} are no images (channels, H, W)")
        noise = np.linspace(0, self.noise, self.clients)
        degrees = np.linspace(-self.rotation, self.rotation, self.clients)
        drawn = [stream_of(seed, SHIFT, kind).permutation(one) for kind, one in enumerate((noise, degrees))]
        return np.stack(drawn, 1), {"noise": drawn[0].tolist(), "rotation": drawn[1].tolist()}


@final
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Skewed):
    """Label skew: the smaller `alpha`, the fewer classes make up a client.

    - `sizes`: `unbalanced`, and each class is divided among the clients by shares from a symmetric Dirichlet
      distribution (Yurochkin et al., arXiv 1905.12022); or `balanced`, and all clients have the same number of samples,
      of classes by such shares, one client after the other in a drawn order, each as far as the classes last (Hsu et
      al., arXiv 1909.06335).
    - `min_samples` of each client, before validation samples (and test samples, if the data set has none) are taken
      from them.  If ten draws do not give it to all, samples of the largest clients go to those that lack some, by
      their shares as far as possible; the card says how many samples moved.
    """

    alpha: Annotated[float, Ge(1e-6)]
    sizes: Literal["unbalanced", "balanced"] = "unbalanced"
    min_samples: Count = 10

    def counts(self, totals: Index, seed: int, /) -> tuple[Index, dict[str, Any]]:
        """Divide classes among clients, or fill clients with classes."""
        _check_enough(self.clients, self.min_samples, totals)
        if self.sizes == "balanced":
            stream = stream_of(seed, LAW)
            liked = _dirichlet(stream, self.alpha, (self.clients, len(totals)))
            wanted = _equal(int(totals.sum()), self.clients)
            return _filled(wanted, liked, totals, stream), {}
        for attempt in range(_DRAWS):
            stream = stream_of(seed, LAW, attempt)
            shares = _dirichlet(stream, self.alpha, (len(totals), self.clients))
            counts = np.stack([_divided(int(n), row, stream) for n, row in zip(totals, shares, strict=True)], 1)
            if counts.sum(1).min() >= self.min_samples:
                return counts, {"draws": attempt + 1, "moved": 0}
        levelled = _levelled(counts, (shares * totals[:, None]).T, self.min_samples, stream)
        return levelled, {"draws": _DRAWS, "moved": int(np.maximum(levelled - counts, 0).sum())}


@final
@dataclass(frozen=True, kw_only=True)
class Shards(Skewed):
    """Label skew, pathological: samples sorted by class and cut into pieces, `shards` of which each client gets.

    As in McMahan et al. (arXiv 1602.05629), so a client has few classes; all pieces are equally long (up to one).
    """

    shards: Count = 2

    def counts(self, totals: Index, seed: int, /) -> tuple[Index, dict[str, Any]]:
        """Cut the sorted samples, and draw who gets which pieces."""
        _check_enough(self.clients, self.shards, totals, "shards")
        pieces = self.clients * self.shards
        owner = stream_of(seed, LAW).permutation(pieces) % self.clients
        owners = np.repeat(owner, _equal(int(totals.sum()), pieces))
        return _counted(owners, _labels(totals), (self.clients, len(totals))), {}


@final
@dataclass(frozen=True, kw_only=True)
class Quantity(Skewed):
    """Quantity skew: clients of different sizes, with labels drawn alike.

    Every client has `min_samples`, and what remains is divided by shares: from a symmetric Dirichlet distribution with
    `alpha`, or log-normal ones whose logarithms have the deviation `sigma`.  One of the two is given.
    """

    alpha: Annotated[float, Ge(1e-6)] | None = None
    sigma: Annotated[float, Ge(0)] | None = None
    min_samples: Count = 10

    def __post_init__(self) -> None:
        """Raise `InputError` unless one law is given."""
        if (self.alpha is None) == (self.sigma is None):
            raise InputError("a partition by quantity wants one of alpha (Dirichlet) and sigma (log-normal)")

    def counts(self, totals: Index, seed: int, /) -> tuple[Index, dict[str, Any]]:
        """Draw the sizes, then who gets which sample."""
        _check_enough(self.clients, self.min_samples, totals)
        stream = stream_of(seed, LAW)
        if self.alpha is not None:
            shares = _dirichlet(stream, self.alpha, (self.clients,))
        else:
            shares = _normalised((self.sigma or 0.0) * stream.standard_normal(self.clients))
        rest = int(totals.sum()) - self.clients * self.min_samples
        return _alike(self.min_samples + _divided(rest, shares, stream), totals, stream), {}


@final
@dataclass(frozen=True, kw_only=True)
class FeatureShift(Skewed):
    """Feature skew: clients alike in sizes and labels, whose inputs are shifted by `noise`, `rotation` or both."""

    def __post_init__(self) -> None:
        """Raise `InputError` without a shift."""
        if not self.noise and not self.rotation:
            raise InputError("a partition by feature shift wants noise or rotation above 0; without it is 'iid'")

    def counts(self, totals: Index, seed: int, /) -> tuple[Index, dict[str, Any]]:
        """Draw who gets which sample."""
        _check_enough(self.clients, 1, totals)
        return _alike(_equal(int(totals.sum()), self.clients), totals, stream_of(seed, LAW)), {}


def _check_enough(clients: int, each: int, totals: Index, key: str = "min_samples") -> None:
    samples = int(totals.sum())
    check_clients(clients, samples)
    if clients * each > samples:
        fewer = f", or at most {samples // each} clients" if each <= samples else ""
        raise InputError(
            f"partition.{key}: {each} for each of {clients} clients is {clients * each}, more than the {samples} "
            f"training samples; want {key} of at most {samples // clients}{fewer}"
        )


def _equal(total: int, parts: int) -> Index:
    """Return sizes that are equal up to one, and add up to the total."""
    return np.diff(np.arange(parts + 1, dtype=np.int64) * total // parts)


def _labels(totals: Index) -> Index:
    return np.repeat(np.arange(len(totals)), totals)


def _counted(owner: Index, labels: Index, shape: tuple[int, int]) -> Index:
    """Return a table (clients, classes) from each sample's owner and label."""
    table: Index = np.bincount(owner * shape[1] + labels, minlength=shape[0] * shape[1]).reshape(shape)
    return table


def _alike(sizes: Index, totals: Index, stream: np.random.RandomState) -> Index:
    """Return the counts of clients of these sizes who draw from the same samples, without putting back."""
    labels = stream.permutation(_labels(totals))
    return _counted(np.repeat(np.arange(len(sizes)), sizes), labels, (len(sizes), len(totals)))


def _dirichlet(stream: np.random.RandomState, alpha: float, shape: tuple[int, ...]) -> Shares:
    """Draw shares along the last axis; in logarithms, since for small alpha the numbers behind them underflow."""
    # A gamma variate for alpha is one for alpha + 1 times u ** (1 / alpha).
    gamma = np.log(stream.standard_gamma(alpha + 1, shape))
    return _normalised(gamma + np.log1p(-stream.random_sample(shape)) / alpha)


def _normalised(logarithms: Shares) -> Shares:
    shares = np.exp(logarithms - logarithms.max(-1, keepdims=True))
    normalised: Shares = shares / shares.sum(-1, keepdims=True)
    return normalised


def _divided(total: int, shares: Shares, stream: np.random.RandomState) -> Index:
    """Return a total divided by shares into whole numbers, each rounded up or down, without favour to any place."""
    ends = np.floor(np.cumsum(shares) * total + stream.random_sample()).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def _filled(wanted: Index, liked: Shares, left: Index, stream: np.random.RandomState) -> Index:
    """Return the counts of clients who, in a drawn order, take what they want of what is left, as they like it."""
    counts, left = np.zeros(liked.shape, np.int64), left.copy()
    for client in stream.permutation(len(wanted)):
        counts[client] = _taken(int(wanted[client]), liked[client], left, stream)
        left -= counts[client]
    return counts


def _taken(wanted: int, liked: Shares, left: Index, stream: np.random.RandomState) -> Index:
    """Return how many samples of each class: by shares, and where a class has run out by those of the others."""
    taken = np.zeros(len(left), np.int64)
    while missing := wanted - int(taken.sum()):  # every pass but the last uses a class up
        weights = np.where(left > taken, liked, 0.0)
        if not weights.sum():
            weights = (left - taken).astype(np.float64)
        taken += np.minimum(_divided(missing, weights / weights.sum(), stream), left - taken)
    return taken


def _levelled(counts: Index, liked: Shares, least: int, stream: np.random.RandomState) -> Index:
    """Return counts in which every client has at least so many: the largest give, those that lack some take."""
    sizes = counts.sum(1)
    short = np.maximum(least - sizes, 0)
    donors = sizes > least
    keeping = sizes.copy()
    keeping[donors] = even(sizes[donors], int(sizes[donors].sum() - short.sum()))
    offset = stream.randint(np.maximum(sizes, 1))[:, None]
    ends = (counts.cumsum(1) * keeping[:, None] + offset) // np.maximum(sizes, 1)[:, None]
    kept = np.diff(ends, axis=1, prepend=0)
    levelled: Index = kept + _filled(short, liked, (counts - kept).sum(0), stream)
    return levelled
