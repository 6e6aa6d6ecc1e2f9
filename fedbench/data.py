"""A data set as plain arrays: what a data plugin gives, how its files are read, checked and identified."""

import hashlib
import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedbench.errors import InputError


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
    """A data set plugin; a concrete class is a frozen dataclass whose fields are the options of the data set."""

    about: ClassVar[About]

    @abstractmethod
    def files(self, root: Path, /) -> list[Path]:
        """Return the files whose bytes identify the content; `root` is the folder of the user's data."""

    @abstractmethod
    def load(self, root: Path, /) -> Arrays:
        """Return the decoded arrays; `fedbench.data.load` checks them."""


def data_root(given: Path | None = None) -> Path:
    """Return the folder of the user's data: the given one, else $FEDBENCH_DATA, else ./data."""
    return given or Path(os.environ.get("FEDBENCH_DATA") or "data")


def fingerprint(source: DataSource, root: Path) -> str:
    """Return the sha256 over the bytes of the source's files, in the source's order and whatever their names.

    Raises InputError if a file is missing.
    """
    return hash_files(_existing(source, root))


def load(source: DataSource, root: Path) -> Arrays:
    """Return the source's arrays, checked.

    Raises InputError, naming the file, if one is missing or unreadable, or if what it holds is not a data set.
    """
    files = _existing(source, root)
    arrays = source.load(root)
    validate(arrays, ", ".join(map(str, files)) or type(source).__name__)
    return arrays


def hash_files(files: list[Path]) -> str:
    """Return the sha256 over the sha256 of each file."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return every array of an .npz file, without ever unpickling.

    Raises InputError if the file is missing, truncated, damaged, or holds Python objects.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not a readable .npz archive of plain arrays ({reason})") from None


def validate(arrays: Arrays, where: str) -> None:
    """Check that arrays are a data set; raise InputError, beginning with `where`, if they are not."""
    if not len(arrays.x_train):
        raise InputError(f"{where}: x_train is empty; a data set has at least one training sample")
    if arrays.x_train.ndim < 2:
        raise InputError(f"{where}: x_train has shape {arrays.x_train.shape}; want (samples, ...)")
    if len(arrays.y_test) and arrays.x_test.shape[1:] != arrays.shape:
        raise InputError(f"{where}: samples of x_test have shape {arrays.x_test.shape[1:]}, of x_train {arrays.shape}")
    if arrays.augment == "crop_flip" and len(arrays.shape) != 3:
        raise InputError(f"{where}: augment 'crop_flip' wants images (C, H, W), not samples of shape {arrays.shape}")
    for part in ("train", "test"):
        _validate_part(arrays, part, where)
    for name in ("mean", "std"):
        values = np.asarray(getattr(arrays, name), np.float64)
        if len(values) not in (1, arrays.shape[0]) or not np.isfinite(values).all():
            raise InputError(f"{where}: {name} is {values.tolist()}; want 1 or {arrays.shape[0]} (channels) numbers")
    if min(arrays.std) <= 0:
        raise InputError(f"{where}: std is {list(arrays.std)}; want numbers above 0")


def _validate_part(arrays: Arrays, part: str, where: str) -> None:
    x: NDArray[Any] = getattr(arrays, f"x_{part}")
    y: NDArray[Any] = getattr(arrays, f"y_{part}")
    client: NDArray[Any] | None = getattr(arrays, f"client_{part}")
    if y.ndim != 1 or len(x) != len(y):
        raise InputError(f"{where}: y_{part} has shape {y.shape}; want ({len(x)},), one label for each row of x_{part}")
    if y.dtype != np.int64:
        raise InputError(f"{where}: y_{part} is {y.dtype}; labels are int64")
    if len(y) and not 0 <= y.min() <= y.max() < arrays.classes:
        raise InputError(f"{where}: y_{part} has labels {y.min()} to {y.max()}; want 0 to {arrays.classes - 1}")
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise InputError(f"{where}: x_{part} is {x.dtype}; want uint8 or floating numbers")
    if x.dtype != np.uint8 and not np.isfinite(x).all():
        row = int(np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))[0])
        raise InputError(
            f"{where}: x_{part} is not finite (NaN or infinite) in row {row}; fill in missing values first"
        )
    if client is None:
        if part == "test" and len(y) and arrays.client_train is not None:
            raise InputError(f"{where}: client_test is missing; with client_train, test samples name their client too")
    elif client.shape != y.shape or not np.issubdtype(client.dtype, np.integer):
        raise InputError(
            f"{where}: client_{part} has shape {client.shape} and type {client.dtype}; want {y.shape} integers"
        )


def _existing(source: DataSource, root: Path) -> list[Path]:
    files = source.files(root)
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file; put it there, or name the folder with your data (now {root})")
    return files
