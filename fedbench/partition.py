"""Which sample belongs to which client, drawn from nothing but (labels, options, seed).

All draws come from numpy's RandomState and Python's random.Random, whose streams are frozen, so a partition is the same
on every machine and with every version; its hash proves it.  Methods never draw: a partition is made once and stored.
"""

import hashlib
import json
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Lt
from numpy.typing import NDArray

from fedbench.data import Arrays, hash_files, read_npz
from fedbench.errors import InputError, unknown
from fedbench.options import resolve

Index = NDArray[np.int64]
Fraction = Annotated[float, Ge(0), Lt(1)]

_PARTS = ("train", "validation", "test")

# Each use of random numbers has a stream of its own, made of the partition seed and one of these.
_TRAIN, _TEST, _HOLD_OUT, _VALIDATION = range(1, 5)


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client: rows of the training arrays and, for `test`, of the test arrays.

    Where the data set has no test arrays, `test` holds rows of the training arrays too (`card["test_pool"]` says
    "test" or "train").  The card holds plain JSON values: see `draw`.
    """

    train: tuple[Index, ...]
    validation: tuple[Index, ...]
    test: tuple[Index, ...]
    card: dict[str, Any]

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train)

    @property
    def hash(self) -> str:
        """The sha256 over all index lists and where each begins, as little-endian int64."""
        return _sha256(*self._flat().values())

    def save(self, folder: Path) -> None:
        """Write index.npz and card.json into a new folder, which appears only when it is complete."""
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        np.savez_compressed(part / "index.npz", allow_pickle=False, **self._flat())
        (part / "card.json").write_text(json.dumps(self.card, indent=1) + "\n", encoding="utf-8")
        part.rename(folder)

    @classmethod
    def load(cls, folder: Path) -> "Partition":
        """Read what `save` wrote; raises InputError if the folder is incomplete or its content has changed."""
        try:
            held = read_npz(folder / "index.npz")
            train, validation, test = (tuple(_unflatten(held, part)) for part in _PARTS)
            card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
            partition = cls(train, validation, test, card)
            if card["hash"] == partition.hash:
                return partition
        except (InputError, OSError, KeyError, TypeError, ValueError):
            pass
        raise InputError(f"{folder}: the stored partition is damaged; delete the folder to have it drawn again")

    def _flat(self) -> dict[str, Index]:
        flat = {}
        for part in _PARTS:
            lists: tuple[Index, ...] = getattr(self, part)
            flat[f"{part}_index"] = np.concatenate(lists)
            flat[f"{part}_start"] = np.cumsum([0, *map(len, lists)])
        return flat


@dataclass(frozen=True)
class Split:
    """What a partitioner returns: rows per client, before validation samples are taken and anything is checked.

    `notes` go onto the card.
    """

    train: Sequence[Index]
    test: Sequence[Index]
    validation: Sequence[Index] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


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

    n: Annotated[int, Ge(1)]
    k: Annotated[int, Ge(1)]
    stdev: Annotated[float, Ge(0)] = 0.0
    noise: Literal["gaussian", "uniform"] = "gaussian"
    k_noise: Literal["wide", "narrow"] = "wide"
    clients: Annotated[int, Ge(1)] = 20
    assignment: Literal["demand", "slots"] = "demand"
    train_shots_max: Annotated[int, Ge(1)] = 110
    test_shots: Annotated[int, Ge(0)] = 15
    shortage: Literal["error", "shrink"] = "error"

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Draw n, k and the class lists, then deal the samples."""
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
            k = np.maximum(np.rint(stream.normal(self.k, self.stdev, self.clients)), 1)
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
        positions = _by_class(y, classes)
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
        train_pools = _shuffled_by_class(arrays.y_train, arrays.classes, seed, _TRAIN)
        if len(arrays.y_test):
            test_pools = _shuffled_by_class(arrays.y_test, arrays.classes, seed, _TEST)
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
            ends = np.cumsum(_even(wants, available))
            for owner, piece in zip(owners, np.split(pool[: ends[-1]], ends[:-1]), strict=True):
                dealt[owner].append(np.sort(piece))
        return [np.concatenate(pieces) for pieces in dealt]

    def _shortage(self, what: str, label: int, wanted: int, available: int) -> InputError:
        fewer = "want fewer clients, n, k or test_shots"
        advice = f"{fewer}, or shortage 'shrink'" if self.shortage == "error" else f"a holder would get none; {fewer}"
        return InputError(
            f"partition: {wanted} {what} samples of class {label} wanted, available {available}; {advice}"
        )


@dataclass(frozen=True, kw_only=True)
class Iid(Partitioner):
    """All samples, shuffled and dealt to the clients in equal numbers (up to one).

    `test_fraction` of each client's samples become its test samples if the data set has none.
    """

    clients: Annotated[int, Ge(1)] = 20
    test_fraction: Fraction = 0.2

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Deal training and test samples."""
        if self.clients > len(arrays.y_train):
            raise InputError(
                f"partition.clients: {self.clients} is more than the {len(arrays.y_train)} training samples"
            )
        train = self._deal(len(arrays.y_train), seed, _TRAIN)
        if len(arrays.y_test):
            return Split(train, self._deal(len(arrays.y_test), seed, _TEST))
        return Split(*_cut_all(train, arrays.y_train, self.test_fraction, seed, _HOLD_OUT))

    def _deal(self, samples: int, seed: int, use: int) -> list[Index]:
        return [np.sort(rows) for rows in np.array_split(_stream(seed, use).permutation(samples), self.clients)]


@dataclass(frozen=True, kw_only=True)
class Given(Partitioner):
    """Rows listed in a file, or without a file the clients that the data set itself names.

    - `path`: a .json file {"train": [[rows of client 0], ...], "test": ..., "validation": ...}, or an .npz file with
      train_index, train_start (client i owns train_index[start[i]:start[i + 1]]) and so on, as in a stored partition;
      `validation` may be missing; test rows count in the test arrays, or in the training arrays if there are none.
      Relative to the suite file's folder.
    - `test_fraction` of each client's samples become its test samples if neither the file nor the data set has any.
    """

    path: str | None = None
    test_fraction: Fraction = 0.2

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Read the rows, or group the samples by client."""
        parts = self._of_data(arrays) if self.path is None else _read_rows(Path(self.path))
        where = self.path or "the data set"
        if not any(map(len, parts.get("validation", ()))):
            parts.pop("validation", None)
        if "validation" in parts and self.validation:
            raise InputError(f"partition.validation: {self.validation}, but {where} lists validation samples already")
        if "test" not in parts:
            if len(arrays.y_test):
                raise InputError(f"partition.path: {where} lists no test samples, but the data set has some")
            _check_rows(parts["train"], len(arrays.y_train), "training", where)
            train, test = _cut_all(parts["train"], arrays.y_train, self.test_fraction, seed, _HOLD_OUT)
            parts |= {"train": train, "test": test}
        for part, lists in parts.items():
            if len(lists) != len(parts["train"]):
                raise InputError(f"{where}: {len(lists)} clients in {part}, {len(parts['train'])} in train")
        return Split(parts["train"], parts["test"], parts.get("validation"))

    def _of_data(self, arrays: Arrays) -> dict[str, list[Index]]:
        if arrays.client_train is None:
            raise InputError("partition.path: missing, and the data set does not name clients of its own")
        names = np.unique(arrays.client_train)
        parts = {"train": _by_name(arrays.client_train, names)}
        if arrays.client_test is not None:
            if strangers := sorted(set(arrays.client_test.tolist()) - set(names.tolist())):
                raise InputError(f"the data set: client {strangers[0]} has test samples but no training samples")
            parts["test"] = _by_name(arrays.client_test, names)
        return parts


PARTITIONERS: dict[str, type[Partitioner]] = {"nway_kshot": NWayKShot, "iid": Iid, "given": Given}


def draw(partitioner: Partitioner, arrays: Arrays, seed: int, base: Path = Path()) -> Partition:
    """Draw a partition, take the validation samples out of the training samples, check it and make its card.

    `base` is the folder that the path of `given` is relative to.  The card holds: `name`, `options`, `seed`,
    `classes`, `test_pool`, `hash` (of the Partition), `sha256` (of each part's index lists one after the other),
    `totals` (samples of each part; `clients_without_test`; `test_of_unseen_class`, samples whose class the client
    does not train on; `clients_with_unseen_class`; `entropy_bits`, mean over clients), the partitioner's notes (drawn
    n and k; shrunk classes), and `per_client` columns: `train`, `validation`, `test`, `classes` (in training),
    `samples` (training samples of each of these), `entropy_bits` (of the training labels), `test_of_unseen_class`.

    Raises InputError if an option is out of range, samples do not suffice, a client gets no training sample, or (for
    `given`) rows are out of range or belong to two clients.
    """
    options = resolve(type(partitioner), asdict(partitioner), "partition")
    if not 0 <= seed < 2**32:
        raise InputError(f"partition_seeds: {seed}; want 0 to {2**32 - 1}")
    located = _located(partitioner, base)
    split = located.split(arrays, seed)
    _check(split, arrays, getattr(located, "path", None) or "partition")
    train, validation = split.train, split.validation
    if validation is None:
        train, validation = _cut_all(train, arrays.y_train, partitioner.validation, seed, _VALIDATION)
    partition = Partition(tuple(train), tuple(validation), tuple(split.test), card={})
    head = {"name": _name(partitioner), "options": options, "seed": seed, "hash": partition.hash}
    return replace(partition, card=head | split.notes | _describe(partition, arrays))


def draw_for_tuning(
    partitioner: Partitioner, arrays: Arrays, seed: int, fraction: float, base: Path = Path()
) -> Partition:
    """Draw the partition on which hyperparameters are chosen: the same clients, without any test samples.

    Where the partition has no validation samples of its own, they are `fraction` of each client's training samples.
    InputError as `draw`, and if no client has two training samples.
    """
    found = draw(partitioner, arrays, seed, base)
    if not any(map(len, found.validation)):
        found = draw(replace(partitioner, validation=fraction), arrays, seed, base)
    if not any(map(len, found.validation)):
        raise InputError("tune.validation: no client has a second training sample to validate on")
    blind = replace(found, test=tuple(rows[:0] for rows in found.test))
    return replace(blind, card=found.card | {"hash": blind.hash} | _describe(blind, arrays))


def content(partitioner: Partitioner, base: Path = Path()) -> str | None:
    """Return the sha256 of the file that the partition is read from; None if it is drawn.

    Raises InputError if the file is missing.
    """
    located = _located(partitioner, base)
    if not isinstance(located, Given) or located.path is None:
        return None
    if not Path(located.path).is_file():
        raise InputError(f"partition.path: no file {located.path}")
    return hash_files([Path(located.path)])


def _located(partitioner: Partitioner, base: Path) -> Partitioner:
    if isinstance(partitioner, Given) and partitioner.path is not None:
        return replace(partitioner, path=str(base / partitioner.path))
    return partitioner


def _name(partitioner: Partitioner) -> str:
    return next((name for name, kind in PARTITIONERS.items() if kind is type(partitioner)), type(partitioner).__name__)


def _check(split: Split, arrays: Arrays, where: str) -> None:
    """Check that rows exist, that no two clients share one, and that every client has something to train on."""
    if not split.train:
        raise InputError(f"{where}: no clients")
    train = [*split.train, *(split.validation or ())]
    if len(arrays.y_test):
        _check_rows(train, len(arrays.y_train), "training", where)
        _check_rows(split.test, len(arrays.y_test), "test", where)
    else:
        _check_rows([*train, *split.test], len(arrays.y_train), "training", where)
    for client, rows in enumerate(split.train):
        if not len(rows):
            raise InputError(f"{where}: client {client} of {len(split.train)} has no training samples")


def _check_rows(lists: Sequence[Index], samples: int, what: str, where: str) -> None:
    rows = np.concatenate([np.empty(0, np.int64), *lists])
    outside = rows[(rows < 0) | (rows >= samples)]
    if len(outside):
        raise InputError(f"{where}: row {outside[0]} is not among the {samples} {what} samples")
    times = np.bincount(rows, minlength=1)
    if times.max() > 1:
        raise InputError(f"{where}: {what} sample {times.argmax()} is given out {times.max()} times; want at most once")


def _describe(partition: Partition, arrays: Arrays) -> dict[str, Any]:
    """Return the part of the card that follows from the rows and their true labels."""
    y_test = arrays.y_test if len(arrays.y_test) else arrays.y_train
    counts = _label_counts(partition.train, arrays.y_train, arrays.classes)
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log2(shares, where=shares > 0, out=np.zeros_like(shares))).sum(axis=1) + 0.0
    unseen = (_label_counts(partition.test, y_test, arrays.classes) * (counts == 0)).sum(axis=1)
    sizes = {part: [len(rows) for rows in getattr(partition, part)] for part in _PARTS}
    return {
        "classes": arrays.classes,
        "test_pool": "test" if len(arrays.y_test) else "train",
        "sha256": {part: _sha256(np.concatenate(getattr(partition, part))) for part in _PARTS},
        "totals": {part: sum(lengths) for part, lengths in sizes.items()}
        | {
            "clients": partition.clients,
            "clients_without_test": sizes["test"].count(0),
            "test_of_unseen_class": int(unseen.sum()),
            "clients_with_unseen_class": int(np.count_nonzero(unseen)),
            "entropy_bits": float(entropy.mean()),
        },
        "per_client": sizes
        | {
            "classes": [np.flatnonzero(row).tolist() for row in counts],
            "samples": [row[row > 0].tolist() for row in counts],
            "entropy_bits": entropy.tolist(),
            "test_of_unseen_class": unseen.tolist(),
        },
    }


def _label_counts(lists: Sequence[Index], y: Index, classes: int) -> Index:
    """Return how many samples of each class each client has, (clients, classes) int64."""
    owner = np.repeat(np.arange(len(lists)), [len(rows) for rows in lists])
    flat = np.bincount(owner * classes + y[np.concatenate(lists)], minlength=len(lists) * classes)
    return flat.reshape(len(lists), classes)


def _sha256(*rows: Index) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(row.astype("<i8").tobytes())
    return total.hexdigest()


def _stream(seed: int, use: int) -> np.random.RandomState:
    return np.random.RandomState([seed, use])


def _by_class(y: Index, classes: int) -> list[Index]:
    """Return the positions of each class in file order; the sort is stable, unlike numpy's default."""
    order = np.argsort(y, kind="stable")
    return np.split(order, np.cumsum(np.bincount(y, minlength=classes))[:-1])


def _shuffled_by_class(y: Index, classes: int, seed: int, use: int) -> list[Index]:
    shuffled = _stream(seed, use).permutation(len(y))
    return [shuffled[positions] for positions in _by_class(y[shuffled], classes)]


def _by_name(owner: Index, names: Index) -> list[Index]:
    return _by_class(np.searchsorted(names, owner), len(names))


def _even(wants: Index, available: int) -> Index:
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


def _cut_all(lists: Sequence[Index], y: Index, fraction: float, seed: int, use: int) -> tuple[list[Index], list[Index]]:
    """Take a fraction of each client's rows out; return what remains and what was taken, both in their old order."""
    stream = _stream(seed, use)
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


def _read_rows(path: Path) -> dict[str, list[Index]]:
    """Return the rows per client of each part listed in a file."""
    try:
        if path.suffix == ".npz":
            held = read_npz(path)
            return {part: _unflatten(held, part) for part in _PARTS if part == "train" or f"{part}_index" in held}
        held = json.loads(path.read_text(encoding="utf-8"))
        if strange := [part for part in held if part not in _PARTS]:
            raise InputError(f"{path}: {unknown('key', strange[0], _PARTS)}")
        return {part: [_rows(rows) for rows in lists] for part, lists in ({"train": held["train"]} | held).items()}
    except OSError as error:
        raise InputError(f"partition.path: {path}: {error.strerror}") from None
    except KeyError as error:
        raise InputError(f"{path}: {error} is missing; see the partition 'given'") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: not lists of rows for each client ({error})") from None


def _unflatten(held: dict[str, Any], part: str) -> list[Index]:
    index, start = _rows(held[f"{part}_index"]), _rows(held[f"{part}_start"])
    if len(start) < 2 or start[0] != 0 or start[-1] != len(index) or (np.diff(start) < 0).any():
        raise ValueError(f"{part}_start does not divide {part}_index")
    return np.split(index, start[1:-1])


def _rows(values: Any) -> Index:
    rows = np.asarray(values)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError(f"want a list of whole numbers, not {rows.dtype} of shape {rows.shape}")
    return rows.astype(np.int64)
