"""Which sample belongs to which client, as one value: drawn, checked, described, stored.

Methods never draw: a partition is made once and stored.
"""

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbench import durable
from fedbench.data import Arrays, hash_files, read_npz
from fedbench.errors import InputError
from fedbench.options import resolve
from fedbench.partitioners import PARTS, Index, Partitioner, Split
from fedbench.partitioners.dealing import VALIDATION, check_rows, cut_all, label_counts
from fedbench.partitioners.flower import Flower, installed
from fedbench.partitioners.given import Given, Natural, unflatten
from fedbench.partitioners.iid import Iid
from fedbench.partitioners.nway_kshot import NWayKShot
from fedbench.partitioners.skews import Dirichlet, FeatureShift, Quantity, Shards

__all__ = [
    "PARTITIONERS",
    "Dirichlet",
    "FeatureShift",
    "Flower",
    "Given",
    "Iid",
    "NWayKShot",
    "Natural",
    "Partition",
    "Partitioner",
    "Quantity",
    "Shards",
    "content",
    "draw",
    "draw_for_tuning",
]


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client: rows of the training arrays and, for `test`, of the test arrays.

    Where the data set has no test arrays, `test` holds rows of the training arrays too (`card["test_pool"]` says
    "test" or "train").  The card holds plain JSON values: see `draw`.  `shift` (clients, 2) float64, if there is one,
    is what each client does to its inputs: the deviation of the noise on normalised ones, and degrees of rotation.
    """

    train: tuple[Index, ...]
    validation: tuple[Index, ...]
    test: tuple[Index, ...]
    card: dict[str, Any]
    shift: NDArray[np.float64] | None = None

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train)

    @property
    def hash(self) -> str:
        """The sha256 over all index lists and where each begins, as little-endian int64, and the bits of the shift."""
        return _sha256(*(array.view(np.int64) for array in self._flat().values()))

    def save(self, folder: Path) -> None:
        """Write index.npz and card.json into a new folder, which appears only when it is complete."""
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with durable.written(part / "index.npz") as file:
            np.savez_compressed(file, allow_pickle=False, **self._flat())
        with durable.written(part / "card.json") as file:
            file.write((json.dumps(self.card, indent=1) + "\n").encode())
        part.rename(folder)

    @classmethod
    def load(cls, folder: Path) -> "Partition":
        """Read what `save` wrote; raises InputError if the folder is incomplete or its content has changed."""
        try:
            held = read_npz(folder / "index.npz")
            train, validation, test = (tuple(unflatten(held, part)) for part in PARTS)
            card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
            partition = cls(train, validation, test, card, held.get("shift"))
            if card["hash"] == partition.hash:
                return partition
        except (InputError, OSError, KeyError, TypeError, ValueError):
            pass
        raise InputError(f"{folder}: the stored partition is damaged")

    def _flat(self) -> dict[str, NDArray[Any]]:
        flat: dict[str, NDArray[Any]] = {}
        for part in PARTS:
            lists: tuple[Index, ...] = getattr(self, part)
            flat[f"{part}_index"] = np.concatenate(lists)
            flat[f"{part}_start"] = np.cumsum([0, *map(len, lists)])
        return flat if self.shift is None else flat | {"shift": self.shift}


PARTITIONERS: dict[str, type[Partitioner]] = {
    "nway_kshot": NWayKShot,
    "iid": Iid,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "quantity": Quantity,
    "feature_shift": FeatureShift,
    "natural": Natural,
    "given": Given,
    "flwr": Flower,
}


def draw(partitioner: Partitioner, arrays: Arrays, seed: int, base: Path = Path()) -> Partition:
    """Draw a partition, take the validation samples out of the training samples, check it and make its card.

    `base` is the folder that the path of `given` is relative to.  The card holds: `name`, `options`, `seed`,
    `classes`, `test_pool`, `hash` (of the Partition), `sha256` (of each part's index lists one after the other),
    `totals` (samples of each part; `clients_without_test`; `test_of_unseen_class`, samples whose class the client
    does not train on; `clients_with_unseen_class`; `entropy_bits`, mean over clients), the partitioner's notes (drawn
    n and k; shrunk classes; draws and moved samples; amounts of noise and rotation), and `per_client` columns: `train`,
    `validation`, `test`, `classes` (in training), `samples` (training samples of each of these), `entropy_bits` (of the
    training labels), `test_of_unseen_class`.

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
        train, validation = cut_all(train, arrays.y_train, partitioner.validation, seed, VALIDATION)
    partition = Partition(tuple(train), tuple(validation), tuple(split.test), {}, split.shift)
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
    """Return the sha256 of the file that the partition is read from, or the version of the package that draws it.

    None if it is drawn here.  Raises InputError if the file or the package is missing.
    """
    if isinstance(partitioner, Flower):
        return f"flwr-datasets {installed()}"
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
        check_rows(train, len(arrays.y_train), "training", where)
        check_rows(split.test, len(arrays.y_test), "test", where)
    else:
        check_rows([*train, *split.test], len(arrays.y_train), "training", where)
    for client, rows in enumerate(split.train):
        if not len(rows):
            raise InputError(f"{where}: client {client} of {len(split.train)} has no training samples")


def _describe(partition: Partition, arrays: Arrays) -> dict[str, Any]:
    """Return the part of the card that follows from the rows and their true labels."""
    y_test = arrays.y_test if len(arrays.y_test) else arrays.y_train
    counts = label_counts(partition.train, arrays.y_train, arrays.classes)
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -(shares * np.log2(shares, where=shares > 0, out=np.zeros_like(shares))).sum(axis=1) + 0.0
    unseen = (label_counts(partition.test, y_test, arrays.classes) * (counts == 0)).sum(axis=1)
    sizes = {part: [len(rows) for rows in getattr(partition, part)] for part in PARTS}
    return {
        "classes": arrays.classes,
        "test_pool": "test" if len(arrays.y_test) else "train",
        "sha256": {part: _sha256(np.concatenate(getattr(partition, part))) for part in PARTS},
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


def _sha256(*rows: Index) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(row.astype("<i8").tobytes())
    return total.hexdigest()
