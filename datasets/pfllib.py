"""Clients that PFLlib has dealt: a folder with train/0.npz, train/1.npz, ..., test/0.npz, ... and config.json.

Each file holds one pickled Python object, {"x": array, "y": array}.  A pickle may run any code when it is loaded, so
none is: `read_client` takes it apart, and refuses a file that names anything but the names which plain numpy arrays
need.  For these it has stand-ins, so that nothing that a file names is ever imported or called.
"""

import json
import math
import pickle
import re
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from fedbench.data import About, Arrays, DataSource
from fedbench.errors import InputError


@dataclass(frozen=True)
class PFLlib(DataSource):
    """The clients in a folder of PFLlib's; with the partition `natural` they are as they were dealt there.

    - `path`: the folder, absolute or relative to the folder of the user's data.
    """

    about: ClassVar[About] = About(
        title="Clients dealt by PFLlib",
        source="files that PFLlib's generate_*.py wrote",
        licence="that of the data set behind them",
        citation="J. Zhang et al.: PFLlib: A Beginner-Friendly and Comprehensive Personalized Federated Learning "
        "Library and Benchmark. JMLR 26, 2025",
    )

    path: str

    def files(self, root: Path, /) -> list[Path]:
        """Return every client's files, and config.json if it is there."""
        folder = root / self.path
        config = folder / "config.json"
        train = _numbered(folder / "train") or {0: folder / "train" / "0.npz"}
        return [*train.values(), *_numbered(folder / "test").values(), *([config] if config.is_file() else [])]

    def load(self, root: Path, /) -> Arrays:
        """Return all clients' samples; raises InputError for a file that is not as PFLlib writes it."""
        folder = root / self.path
        parts = {part: _numbered(folder / part) for part in ("train", "test")}
        if strange := sorted(set(parts["train"]) ^ set(parts["test"])):
            raise InputError(f"{folder}: client {strange[0]} has a file in one of train and test only")
        held = {part: {n: read_client(file) for n, file in files.items()} for part, files in parts.items()}
        x = {part: np.concatenate([one["x"] for one in found.values()]) for part, found in held.items()}
        y = {part: np.concatenate([one["y"] for one in found.values()]) for part, found in held.items()}
        owner = {
            part: np.repeat(list(found), [len(one["y"]) for one in found.values()]) for part, found in held.items()
        }
        clients = (owner["train"].astype(np.int64), owner["test"].astype(np.int64))
        classes = max(_classes(folder / "config.json"), 1 + max(int(labels.max(initial=0)) for labels in y.values()))
        return Arrays(x["train"], y["train"], x["test"], y["test"], classes, (0.0,), (1.0,), *clients)

    def describe(self, root: Path, /) -> About:
        """Return the same with the folder's name."""
        return replace(self.about, title=f"{self.about.title}: {(root / self.path).name}")


def _numbered(folder: Path) -> dict[int, Path]:
    """Return a folder's files 0.npz, 1.npz, ... by their numbers, ascending."""
    return dict(sorted((int(file.stem), file) for file in folder.glob("*.npz") if file.stem.isdecimal()))


def _classes(config: Path) -> int:
    """Return the number of classes that config.json states, 0 if it states none."""
    if not config.is_file():
        return 0
    try:
        stated = json.loads(config.read_text(encoding="utf-8")).get("num_classes", 0)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{config}: not the config.json that PFLlib writes ({' '.join(str(error).split())})") from None
    return stated if isinstance(stated, int) else 0


def read_client(path: Path) -> dict[str, NDArray[Any]]:
    """Return x and y (int64) of one client's file, without running anything that the file names.

    Raises InputError if the file is damaged, names anything but plain arrays, or holds something else.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as stream:
            shape, _, dtype = _header(stream)
            if shape != () or dtype.kind != "O":
                raise ValueError(f"data is an array of shape {shape} and type {dtype}")
            found = _Restricted(stream).load()
        (content,) = found.data
        x, y = (content[name].array() for name in ("x", "y"))
    except _Refused as error:
        raise InputError(f"{path}: refused: it names {error}, which no plain array needs; it may run code") from None
    except (OSError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError, EOFError, RecursionError) as error:
        raise InputError(f"{path}: not readable: {' '.join(str(error).split())}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, MemoryError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not what PFLlib writes, a dict of the arrays x and y ({reason})") from None
    if y.ndim != 1 or len(x) != len(y) or y.dtype.kind not in "iu":
        raise InputError(f"{path}: x is {x.shape}, y {y.shape} of {y.dtype}; want a whole number for each row of x")
    return {"x": x if x.dtype.kind == "f" or x.dtype == np.uint8 else x.astype(np.float32), "y": y.astype(np.int64)}


def _header(stream: BinaryIO | Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    major = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    return read[major](stream)


class _Refused(Exception):
    """A pickle names something else than what arrays are made of."""


# Stand-ins for what the pickle of an array names.  They are classes with a `__setstate__`, as otherwise a pickle could
# set their attributes; calling one makes a plain record.


@final
class _Dtype:
    """Stands in for numpy.dtype."""

    __slots__ = ("code",)

    def __init__(self, code: str, *_: object) -> None:
        self.code = str(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = {"<": "<", ">": ">"}.get(state[1], "") + self.code


@final
class _Array:
    """Stands in for numpy.ndarray and for what rebuilds one."""

    __slots__ = ("code", "data", "fortran", "shape")

    def __init__(self, *_: object) -> None:
        self.shape: tuple[int, ...] = ()
        self.code, self.fortran = "", False
        self.data: Any = b""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, dtype, self.fortran, self.data = state
        self.code = dtype.code

    def array(self) -> NDArray[Any]:
        """Return the array that this is a record of; raises ValueError if it is none of plain numbers."""
        if not re.fullmatch(r"[<>]?(b1|[iu][1248]|f[248])", self.code):
            raise ValueError(f"an array of type '{self.code}'")
        dtype = np.dtype(self.code)
        if not isinstance(self.data, bytes) or len(self.data) != dtype.itemsize * math.prod(self.shape):
            raise ValueError(f"an array of shape {self.shape} with another number of bytes")
        values = np.frombuffer(self.data, dtype).reshape(self.shape, order="F" if self.fortran else "C")
        return values.astype(dtype.newbyteorder("="))


@final
class _Encoded:
    """Stands in for _codecs.encode, by which old pickles write bytes."""

    def __new__(cls, text: str, *_: object) -> Any:
        return text.encode("latin-1")

    def __setstate__(self, state: object) -> None:
        raise _Refused("a state of bytes")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encoded,
}


@final
class _Restricted(pickle.Unpickler):
    """Reads pickles of plain arrays in plain containers, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; raises `_Refused` if there is none."""
        if (module, name) not in _STAND_INS:
            raise _Refused(f"{module}.{name}")
        return _STAND_INS[module, name]
