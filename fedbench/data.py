"""A data set as plain arrays: what a data plugin gives, how its files are read, checked and identified."""

import hashlib
import itertools
import json
import os
import shutil
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedbench.errors import InputError, unknown
from fedbench.options import one_line

LAYOUTS = "x_train, y_train, x_test, y_test (and client_train, client_test), or x, y (and client)"
"""The arrays of an .npz that is a data set."""

_MOST_CLASSES = 2**16  # heads and tables of prototypes have a row for each

ALONE = {"x": "x_train", "y": "y_train", "client": "client_train"}
"""What arrays of an .npz without test arrays are in `Arrays`."""

_BIG = ("x_train", "x_test")
_SMALL = ("y_train", "y_test", "client_train", "client_test")


@dataclass(frozen=True)
class About:
    """Where a data set comes from and how it may be used; printed in every report on it."""

    title: str
    source: str
    licence: str
    citation: str = ""


@dataclass(frozen=True, eq=False)
class Arrays:
    """A decoded data set, the same for every client; the partition says who owns which row.

    - `x_train`, `x_test`: (samples, *shape), uint8 or floating; images are channel-first, (samples, C, H, W).
    - `y_train`, `y_test`: (samples,) int64 labels in 0..`classes`-1.  The test arrays may have length 0: then the
      partition takes test samples out of the training arrays.
    - `mean`, `std`: one value, or one per channel (axis 1 of x).  A sample enters a model as (x - mean) / std, a uint8
      one after division by 255.
    - `client_train`, `client_test`: (samples,) int64, the client that each sample naturally belongs to, if any.
    - `augment`: what is done to training samples anew at each use: nothing, or a random crop after padding by 4
      pixels and a random horizontal flip.
    """

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    client_train: NDArray[np.int64] | None = None
    client_test: NDArray[np.int64] | None = None
    augment: Literal["none", "crop_flip"] = "none"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.x_train.shape[1:]


class DataSource(ABC):
    """A data set plugin; a concrete class is a frozen dataclass whose fields are the options of the data set.

    - `about`: what the data set is.
    - `decoding`: the version of what `load` makes of the files.  From 1 on, what it makes of large ones is kept in the
      cache and mapped into memory, so that processes share it; a `load` that gives other arrays has the next version.
    """

    about: ClassVar[About]
    decoding: ClassVar[int] = 0

    @abstractmethod
    def files(self, root: Path, /) -> list[Path]:
        """Return the files whose bytes identify the content; `root` is the folder of the user's data."""

    @abstractmethod
    def load(self, root: Path, /) -> Arrays:
        """Return the decoded arrays; `fedbench.data.load` checks them."""

    def fetch(self, root: Path, /) -> None:
        """Get the files that are missing; raises InputError if that is not possible, as it is here."""
        raise _missing(next(file for file in self.files(root) if not file.is_file()), root)

    def describe(self, root: Path, /) -> About:
        """Return what the data set is if it is read from `root`."""
        return self.about


def data_root(given: Path | None = None) -> Path:
    """Return the folder of the user's data: the given one, else $FEDBENCH_DATA, else ./data."""
    return given or Path(os.environ.get("FEDBENCH_DATA") or "data")


def cache_folder(root: Path) -> Path:
    """Return the folder of what was made of large files: $FEDBENCH_CACHE, else `cache` in the user's data."""
    return Path(os.environ.get("FEDBENCH_CACHE") or root / "cache")


def present(source: DataSource, root: Path) -> list[Path]:
    """Return the source's files, fetched as far as they are missing; raises InputError if that is not possible."""
    files = source.files(root)
    if not all(file.is_file() for file in files):
        source.fetch(root)
        files = source.files(root)
        for file in files:
            if not file.is_file():
                raise _missing(file, root)
    return files


def fingerprint(source: DataSource, root: Path) -> str:
    """Return the sha256 of the source's content: see `hash_files`; the names of the files do not enter.

    Files that are missing are fetched; raises InputError if that is not possible.
    """
    files = present(source, root)
    return _remembered(files, root) if _large(files) else hash_files(files)


def load(source: DataSource, root: Path) -> Arrays:
    """Return the source's arrays, checked; do not write to them.

    Files that are missing are fetched.  Raises InputError, naming the file, if that is not possible, if one is
    unreadable, or if what it holds is not a data set.
    """
    files = present(source, root)
    if source.decoding and _large(files):
        return _shared(source, root, files)
    return decode(source, root, files)


def decode(source: DataSource, root: Path, files: list[Path]) -> Arrays:
    """Return the arrays of a source whose files are there, checked, whatever the cache holds."""
    try:
        arrays = source.load(root)
    except InputError:
        raise
    except Exception as error:  # a fault in somebody's plugin, or a file that it did not expect
        raise InputError(
            f"{place(files) or root}: {type(source).__name__} cannot read it: {one_line(error)}"
        ) from error
    validate(arrays, place(files) or type(source).__name__)
    return arrays


def place(files: Sequence[Path]) -> str:
    """Return files as words."""
    if len(files) > 4:
        return f"{os.path.commonpath(files)} ({len(files)} files)"
    return ", ".join(map(str, files))


def hash_files(files: Sequence[Path]) -> str:
    """Return the sha256 of a file; of several files, the sha256 over the sha256 of each, in their order."""
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256"))
    if len(digests) == 1:
        return digests[0].hexdigest()
    return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return every array of an .npz file, without ever unpickling.

    Raises InputError if the file is missing, truncated, damaged, or holds Python objects.
    """
    try:
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("none at all, or cut short; numpy.savez writes one")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) else " ".join(str(error).split())
        raise InputError(f"{path}: not a readable .npz archive of plain arrays ({reason})") from None


def by_part(held: Mapping[str, NDArray[Any]], where: str, refuse_others: bool = False) -> dict[str, Any]:
    """Return what an archive holds under the names of `Arrays`; x, y and client alone are training arrays.

    Labels and clients become int64; other arrays are left out, or refused.  Raises InputError, beginning with `where`,
    if they are not whole numbers, or if arrays are missing.
    """
    said, known = {name: name for name in held}, {*_BIG, *_SMALL}
    if "x_train" not in held:
        said, known = {name: ALONE.get(name, name) for name in held}, {*ALONE, *known}
        held = {said[name]: values for name, values in held.items()}
    if not {"x_train", "y_train"} <= held.keys() or ("x_test" in held) != ("y_test" in held):
        raise InputError(f"{where}: holds {', '.join(sorted(said)) or 'nothing'}; want {LAYOUTS}")
    for name, meant in said.items():
        if meant not in (*_BIG, *_SMALL):
            if refuse_others:
                raise InputError(f"{where}: {unknown('array', name, known)}")
        elif not held[meant].ndim:
            raise InputError(f"{where}: {name} is a single number; want one entry for each sample")
    called = {meant: name for name, meant in said.items()}
    parts: dict[str, Any] = {name: _whole(held[name], f"{where}: {called[name]}") for name in _SMALL if name in held}
    parts |= {name: held[name] for name in _BIG if name in held}
    return {"x_test": parts["x_train"][:0], "y_test": parts["y_train"][:0]} | parts


def validate(arrays: Arrays, where: str, called: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check that arrays are a data set; raise InputError, beginning with `where`, if they are not.

    `called` says which names other than those of `Arrays` whoever reads the message knows them by.
    """
    said = {name: called.get(name, name) for name in (*_BIG, *_SMALL)}
    if not len(arrays.x_train):
        raise InputError(f"{where}: {said['x_train']} is empty; a data set has at least one training sample")
    if arrays.x_train.ndim < 2:
        raise InputError(f"{where}: {said['x_train']} has shape {arrays.x_train.shape}; want (samples, ...)")
    if len(arrays.y_test) and arrays.x_test.shape[1:] != arrays.shape:
        raise InputError(f"{where}: samples of x_test have shape {arrays.x_test.shape[1:]}, of x_train {arrays.shape}")
    if len(arrays.y_test) and (arrays.x_train.dtype == np.uint8) != (arrays.x_test.dtype == np.uint8):
        kinds = f"x_train is {arrays.x_train.dtype} and x_test {arrays.x_test.dtype}"
        raise InputError(f"{where}: {kinds}; want bytes, which are divided by 255, in both or in neither")
    if arrays.augment == "crop_flip" and len(arrays.shape) != 3:
        raise InputError(f"{where}: augment 'crop_flip' wants images (C, H, W), not samples of shape {arrays.shape}")
    for part in ("train", "test"):
        _validate_part(arrays, part, where, said)
    for name in ("mean", "std"):
        values = np.asarray(getattr(arrays, name), np.float64)
        if len(values) not in (1, arrays.shape[0]) or not np.isfinite(values).all():
            raise InputError(f"{where}: {name} is {values.tolist()}; want 1 or {arrays.shape[0]} (channels) numbers")
    if min(arrays.std) <= 0:
        raise InputError(f"{where}: std is {list(arrays.std)}; want numbers above 0")


def _validate_part(arrays: Arrays, part: str, where: str, said: Mapping[str, str]) -> None:
    x_name, y_name, client_name = (said[f"{kind}_{part}"] for kind in ("x", "y", "client"))
    x: NDArray[Any] = getattr(arrays, f"x_{part}")
    y: NDArray[Any] = getattr(arrays, f"y_{part}")
    client: NDArray[Any] | None = getattr(arrays, f"client_{part}")
    if y.ndim != 1 or len(x) != len(y):
        raise InputError(f"{where}: {y_name} has shape {y.shape}; want ({len(x)},), one label for each row of {x_name}")
    if y.dtype != np.int64:
        raise InputError(f"{where}: {y_name} is {y.dtype}; labels are int64")
    if arrays.classes > _MOST_CLASSES:
        raise InputError(
            f"{where}: labels up to {arrays.classes - 1}; want them numbered from 0, below {_MOST_CLASSES}"
        )
    if len(y) and not 0 <= y.min() <= y.max() < arrays.classes:
        want = "whole numbers from 0" if y.min() < 0 and y.max() == arrays.classes - 1 else f"0 to {arrays.classes - 1}"
        raise InputError(f"{where}: {y_name} has labels {y.min()} to {y.max()}; want {want}")
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise InputError(f"{where}: {x_name} is {x.dtype}; want uint8 or floating numbers")
    if x.dtype != np.uint8 and len(x):
        with np.errstate(over="ignore"):
            finite = np.isfinite(x.astype(np.float32, copy=False))
        if not finite.all():
            row = int(np.flatnonzero(~finite.reshape(len(x), -1).all(axis=1))[0])
            if np.isfinite(x[row]).all():
                raise InputError(f"{where}: {x_name} has numbers beyond those of float32 in row {row}; scale them")
            raise InputError(
                f"{where}: {x_name} is not finite (NaN or infinite) in row {row}; fill in missing values first"
            )
    if client is None:
        if part == "test" and len(y) and arrays.client_train is not None:
            raise InputError(f"{where}: client_test is missing; with client_train, test samples name their client too")
    elif client.shape != y.shape or not np.issubdtype(client.dtype, np.integer):
        raise InputError(
            f"{where}: {client_name} has shape {client.shape} and type {client.dtype}; want {y.shape} integers"
        )
    elif client.min(initial=0) < 0:
        raise InputError(f"{where}: {client_name} has {client.min()}; want whole numbers from 0")


def _whole(values: NDArray[Any], where: str) -> NDArray[np.int64]:
    if values.dtype.kind not in "ui":
        raise InputError(f"{where} is {values.dtype}; want whole numbers from 0")
    return values.astype(np.int64)


def _missing(file: Path, root: Path) -> InputError:
    if file.is_dir():
        return InputError(f"{file}: is a folder; want a file in the folder with your data (now {root})")
    return InputError(f"{file}: no such file; put it there, or name the folder with your data (now {root})")


# --- what large files come to is kept

_LARGE = 4 * 2**20
"""Bytes of files from which on hashing and decoding take longer than looking up what they came to."""

_SETTLED = 2.0
"""Seconds after which a file's times tell of any further change to it."""


def _large(files: Sequence[Path]) -> bool:
    return any(size >= _LARGE for size in itertools.accumulate(file.stat().st_size for file in files))


def _remembered(files: Sequence[Path], root: Path) -> str:
    """Return the hash of files, computed anew only if one has changed its size, times or place on the disk."""
    stats = [(str(file), file.stat()) for file in files]
    state = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
    memo = cache_folder(root) / f"{_sha256(state)[:16]}.sha256"
    with suppress(OSError):
        return memo.read_text()
    digest = hash_files(files)
    if max(max(s.st_mtime, s.st_ctime) for _, s in stats) < time.time() - _SETTLED:
        with suppress(OSError):  # a folder that cannot be written to remembers nothing
            memo.parent.mkdir(parents=True, exist_ok=True)
            part = memo.with_suffix(f".{os.getpid()}.part")
            part.write_text(digest)
            part.replace(memo)
    return digest


def _shared(source: DataSource, root: Path, files: list[Path]) -> Arrays:
    """Return the arrays mapped from the cache, where the first of all processes that want them puts them."""
    from filelock import FileLock

    # The module of a plugin in a file carries the hash of that file.
    recipe = [type(source).__module__, repr(source), source.decoding, _remembered(files, root)]
    folder = cache_folder(root) / f"{type(source).__name__.lower()}-{_sha256(recipe)[:16]}"
    if (kept := _mapped(folder)) is not None:
        return kept
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock").acquire()
    except (OSError, NotImplementedError):  # a cache that cannot be written to: everybody has a copy
        return decode(source, root, files)
    with lock:
        if (kept := _mapped(folder)) is not None:
            return kept
        arrays = decode(source, root, files)
        with suppress(OSError):  # no space left
            _keep(arrays, folder)
        return _mapped(folder) or arrays


def _keep(arrays: Arrays, folder: Path) -> None:
    """Write arrays into a folder, which appears only when it is complete."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    held = {name: value for name in (*_BIG, *_SMALL) if (value := getattr(arrays, name)) is not None}
    for name, value in held.items():
        np.save(part / f"{name}.npy", value, allow_pickle=False)
    rest = {name: getattr(arrays, name) for name in ("classes", "mean", "std", "augment")}
    (part / "rest.json").write_text(json.dumps({"held": list(held), "rest": rest}), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def _mapped(folder: Path) -> Arrays | None:
    """Return the arrays in a folder, samples mapped into memory; None if they are not there or damaged."""
    try:
        about = json.loads((folder / "rest.json").read_text(encoding="utf-8"))
        held: dict[str, Any] = {name: _read_npy(folder / f"{name}.npy", name in _BIG) for name in about["held"]}
        rest: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in about["rest"].items()
        }
        return Arrays(**held, **rest)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def _read_npy(path: Path, mapped: bool) -> NDArray[Any]:
    return np.asarray(np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False))


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
