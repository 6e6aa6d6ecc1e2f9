"""Anybody's own data: one .npz file with arrays x and y."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedbench.data import About, Arrays, DataSource, read_npz
from fedbench.errors import InputError

LAYOUTS = "x_train, y_train, x_test, y_test (and client_train, client_test), or x, y (and client)"


@dataclass(frozen=True)
class ArrayFile(DataSource):
    """An .npz file with x_train, y_train, x_test, y_test, or with x and y, of which each client gives test samples.

    x holds rows of numbers (samples, features) or images (samples, H, W), (samples, C, H, W), or with
    `channels: last` (samples, H, W, C); uint8 or floating, other numbers become float32.  y holds whole numbers from
    0.  client, client_train and client_test, where present, name the client of each sample (partition `given` without
    a path).  Other arrays in the file are ignored.

    - `path`: absolute, or relative to the folder of the user's data.
    - `mean`, `std`: one number, or one per channel: (x - mean) / std, uint8 after division by 255.
    - `augment`: `crop_flip` for photographs.
    """

    about: ClassVar[About] = About(title="your own arrays", source="a local file", licence="as the file's owner says")

    path: str
    channels: Literal["first", "last"] = "first"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: Literal["none", "crop_flip"] = "none"

    def files(self, root: Path, /) -> list[Path]:
        """Return the one file."""
        return [root / self.path]

    def load(self, root: Path, /) -> Arrays:
        """Return the arrays; raises InputError naming the file if they are not there or have no usable type."""
        file = root / self.path
        held = read_npz(file)
        if "x_train" not in held:
            held = {{"x": "x_train", "y": "y_train", "client": "client_train"}.get(k, k): v for k, v in held.items()}
        if not {"x_train", "y_train"} <= held.keys() or ("x_test" in held) != ("y_test" in held):
            raise InputError(f"{file}: holds {', '.join(sorted(held)) or 'nothing'}; want {LAYOUTS}")
        x = {k: self._samples(held[k], f"{file}: {k}") for k in ("x_train", "x_test") if k in held}
        y = {
            k: _whole(held[k], f"{file}: {k}")
            for k in ("y_train", "y_test", "client_train", "client_test")
            if k in held
        }
        return Arrays(
            x_train=x["x_train"],
            y_train=y["y_train"],
            x_test=x.get("x_test", x["x_train"][:0]),
            y_test=y.get("y_test", y["y_train"][:0]),
            classes=1 + max((int(y[k].max()) for k in ("y_train", "y_test") if k in y and len(y[k])), default=0),
            mean=self.mean,
            std=self.std,
            client_train=y.get("client_train"),
            client_test=y.get("client_test"),
            augment=self.augment,
        )

    def _samples(self, x: NDArray[Any], where: str) -> NDArray[Any]:
        if x.dtype.kind not in "buif":
            raise InputError(f"{where} is {x.dtype}; want numbers")
        if x.dtype != np.uint8 and x.dtype.kind != "f":
            x = x.astype(np.float32)
        if x.ndim == 3:
            return x[:, None]
        if x.ndim == 4 and self.channels == "last":
            return np.ascontiguousarray(np.moveaxis(x, 3, 1))
        return x


def _whole(values: NDArray[Any], where: str) -> NDArray[np.int64]:
    if values.dtype.kind not in "ui":
        raise InputError(f"{where} is {values.dtype}; want whole numbers from 0")
    return values.astype(np.int64)
