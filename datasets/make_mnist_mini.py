"""Make mnist_mini.npz from the raw files of MNIST, as torchvision stores them: `make_mnist_mini.py MNIST/raw OUT.npz`.

Takes the first 400 training and the first 200 test images of each class in file order, and deals them out in turn:
0, 1, ..., 9, 0, 1, ..., so that any stretch of the result is balanced.  `row_train` and `row_test` keep the position
of each image in MNIST's files.
"""

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
PER_CLASS = {"train": 400, "test": 200}
PREFIX = {"train": "train", "test": "t10k"}


def read_idx(folder: Path, name: str) -> NDArray[np.uint8]:
    """Return the array of an idx file, plain or compressed with gzip."""
    plain = folder / name
    data = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def make(raw: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of mnist_mini: x (samples, 1, 28, 28), y (samples,) uint8, row (samples,) uint16, per part."""
    arrays: dict[str, NDArray[Any]] = {}
    for part, count in PER_CLASS.items():
        images = read_idx(raw, f"{PREFIX[part]}-images-idx3-ubyte")
        labels = read_idx(raw, f"{PREFIX[part]}-labels-idx1-ubyte")
        firsts = [np.flatnonzero(labels == label)[:count] for label in range(CLASSES)]
        rows = np.stack(firsts, axis=1).ravel()
        arrays[f"x_{part}"] = images[rows][:, None]
        arrays[f"y_{part}"] = labels[rows]
        arrays[f"row_{part}"] = rows.astype(np.uint16)
    return arrays


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    np.savez_compressed(Path(sys.argv[2]), **make(Path(sys.argv[1])))  # type: ignore[arg-type]  # numpy's stub: allow_pickle
