"""Clients that somebody else has made: a file's, or those of the data set."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from fedbench.data import Arrays, read_npz
from fedbench.errors import InputError, unknown
from fedbench.partitioners import PARTS, Fraction, Index, Partitioner, Split
from fedbench.partitioners.dealing import CLIENTS, HOLD_OUT, by_class, check_rows, cut_all, stream_of
from fedbench.settings import Count
from fedbench.words import counted


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
        if self.path is None and arrays.client_train is None:
            raise InputError("partition.path: is missing; want a file with each client's rows (docs/partitions.md)")
        parts = _of_data(arrays) if self.path is None else _read_rows(Path(self.path))
        where = self.path or "the data set"
        if not any(map(len, parts.get("validation", ()))):
            parts.pop("validation", None)
        if "validation" in parts and self.validation:
            raise InputError(f"partition.validation: {self.validation}, but {where} lists validation samples already")
        if "test" not in parts:
            if len(arrays.y_test):
                raise InputError(f"partition.path: {where} lists no test samples, but the data set has some")
            check_rows(parts["train"], len(arrays.y_train), "training", where)
            train, test = cut_all(parts["train"], arrays.y_train, self.test_fraction, seed, HOLD_OUT)
            parts |= {"train": train, "test": test}
        for part, lists in parts.items():
            if len(lists) != len(parts["train"]):
                raise InputError(f"{where}: {counted(len(lists), 'client')} in {part}, {len(parts['train'])} in train")
        return Split(parts["train"], parts["test"], parts.get("validation"))


@final
@dataclass(frozen=True, kw_only=True)
class Natural(Partitioner):
    """The clients that the data set names: writers, hospitals, files.

    - `clients`: so many of them, drawn; by default all.
    - `min_samples`: clients with fewer samples in the training arrays are left out; the card says how many.
    - `test_fraction` of each client's samples become its test samples if the data set has none.
    """

    clients: Count | None = None
    min_samples: Count = 1
    test_fraction: Fraction = 0.2

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Group the samples by client."""
        parts = _of_data(arrays)
        large = [client for client, rows in enumerate(parts["train"]) if len(rows) >= self.min_samples]
        notes = {"named": len(parts["train"]), "too_small": len(parts["train"]) - len(large)}
        wanted = self.clients or max(len(large), 1)
        if wanted > len(large):
            raise InputError(
                f"partition.clients: {wanted}, but the data set names {notes['named']} clients, of whom {len(large)} "
                f"have partition.min_samples {self.min_samples} or more training samples"
            )
        chosen = sorted(stream_of(seed, CLIENTS).permutation(large)[:wanted].tolist())
        parts = {part: [lists[client] for client in chosen] for part, lists in parts.items()}
        if "test" not in parts:
            train, test = cut_all(parts["train"], arrays.y_train, self.test_fraction, seed, HOLD_OUT)
            return Split(train, test, notes=notes)
        return Split(parts["train"], parts["test"], notes=notes)


def _of_data(arrays: Arrays) -> dict[str, list[Index]]:
    if arrays.client_train is None:
        raise InputError("partition: the data set does not name clients of its own")
    names = np.unique(arrays.client_train)
    parts = {"train": _by_name(arrays.client_train, names)}
    if arrays.client_test is not None:
        if strangers := sorted(set(arrays.client_test.tolist()) - set(names.tolist())):
            raise InputError(f"the data set: client {strangers[0]} has test samples but no training samples")
        parts["test"] = _by_name(arrays.client_test, names)
    return parts


def _by_name(owner: Index, names: Index) -> list[Index]:
    return by_class(np.searchsorted(names, owner), len(names))


def _read_rows(path: Path) -> dict[str, list[Index]]:
    """Return the rows per client of each part listed in a file."""
    try:
        if path.suffix == ".npz":
            held = read_npz(path)
            if "shift" in held:
                raise InputError(f"{path}: is of a partition that shifts inputs; take the options on its card instead")
            return {part: unflatten(held, part) for part in PARTS if part == "train" or f"{part}_index" in held}
        held = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        if not isinstance(held, dict):
            raise InputError(f'{path}: want a mapping {{"train": [[rows of client 0], ...], "test": ...}}')
        if strange := [part for part in held if part not in PARTS]:
            raise InputError(f"{path}: {unknown('key', strange[0], PARTS)}")
        return {part: [_rows(rows) for rows in lists] for part, lists in ({"train": held["train"]} | held).items()}
    except OSError as error:
        raise InputError(f"partition.path: {path}: {error.strerror}") from None
    except KeyError as error:
        raise InputError(f"{path}: {error} is missing; see the partition 'given'") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: not lists of rows for each client ({error})") from None


def unflatten(held: dict[str, Any], part: str) -> list[Index]:
    """Return the rows of each client, stored one after the other; raises `ValueError` if they are not."""
    index, start = _rows(held[f"{part}_index"]), _rows(held[f"{part}_start"])
    if len(start) < 2 or start[0] != 0 or start[-1] != len(index) or (np.diff(start) < 0).any():
        raise ValueError(f"{part}_start does not divide {part}_index")
    return np.split(index, start[1:-1])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raises `ValueError` for a key that comes twice."""
    held = dict(pairs)
    if len(held) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)}' comes twice")
    return held


def _rows(values: Any) -> Index:
    if isinstance(values, list) and any(isinstance(value, bool) for value in values):
        raise ValueError("want a list of whole numbers, not true or false")
    rows = np.asarray(values)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise ValueError(f"want a list of whole numbers, not {rows.dtype} of shape {rows.shape}")
    return rows.astype(np.int64)
