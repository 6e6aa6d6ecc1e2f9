"""Anybody's own data: one .npz file with arrays x and y."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedbench.data import ALONE, About, Arrays, DataSource, by_part, read_npz, validate
from fedbench.errors import InputError


@dataclass(frozen=True)
class ArrayFile(DataSource):
    """An .npz file with x_train, y_train, x_test, y_test, or with x and y, of which each client gives test samples.

    x holds rows of numbers (samples, features) or images (samples, H, W), (samples, C, H, W), or with
    `channels: last` (samples, H, W, C); uint8 or floating, other numbers become float32.  y holds whole numbers from
    0.  client, client_train and client_test, where present, name the client of each sample (partition `natural`).

    - `path`: absolute, or relative to the folder of the user's data.
    - `mean`, `std`: one number, or one per channel: (x - mean) / std, uint8 after division by 255.
    - `augment`: `crop_flip` for photographs.
    """

    about: ClassVar[About] = About(title="your own arrays", source="a local file", licence="as the file's owner says")
    decoding: ClassVar[int] = 1

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
        parts = by_part(held, str(file), refuse_others=True)
        for name in ("x_train", "x_test"):
            parts[name] = self._samples(parts[name], f"{file}: {name if name in held else 'x'}")
        classes = 1 + max(int(parts[name].max(initial=0)) for name in ("y_train", "y_test"))
        arrays = Arrays(**parts, classes=classes, mean=self.mean, std=self.std, augment=self.augment)
        if "x" in held:
            validate(arrays, str(file), {meant: name for name, meant in ALONE.items()})
        return arrays

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
