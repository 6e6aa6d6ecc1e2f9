"""MNIST from the files that torchvision uses: 60,000 + 10,000 handwritten digits, 1x28x28 grey levels."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from fedbench.data import About, Arrays
from fedbench.published import Download, Published, idx_file, images, obtain, read_idx, verify

FOLDER = "MNIST/raw"
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    # The same unpacked, as torchvision leaves them.
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class Mnist(Published):
    """60,000 training and 10,000 test digits, 1x28x28 grey levels as uint8, in the order of the files.

    Read from MNIST/raw in the data folder, where torchvision puts them, compressed or not, or from mnist.npz beside it.
    The mean and standard deviation are those of the training set, as in the FedProto code.
    """

    name: ClassVar[str] = "mnist"
    about: ClassVar[About] = About(
        title="MNIST: 60,000 + 10,000 handwritten digits",
        source=f"{MIRRORS[0]}, md5 " + ", ".join(f"{MD5[f'{name}.gz']} {name}.gz" for name in NAMES.values()),
        licence="CC BY-SA 3.0",
        citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner: Gradient-based learning applied to document "
        "recognition. Proceedings of the IEEE 86(11), 1998",
    )
    decoding: ClassVar[int] = 1

    def originals(self, root: Path, /) -> list[Path]:
        """Return the four files."""
        return [idx_file(root / FOLDER, name) for name in NAMES.values()]

    def fetch(self, root: Path, /) -> None:
        """Download the files that are missing."""
        offline = f"put mnist.npz (x_train, y_train, x_test, y_test) into {root}, or use the data set mnist_mini"
        for file in self.originals(root):
            if not file.is_file():
                urls = tuple(mirror + file.name for mirror in MIRRORS)
                obtain(Download(f"{FOLDER}/{file.name}", MD5[file.name], urls), root, offline)

    def read(self, root: Path, /) -> Mapping[str, NDArray[Any]]:
        """Return images and labels."""
        held = {}
        for (part, _), file in zip(NAMES.items(), self.originals(root), strict=True):
            verify(file, MD5)
            held[part] = read_idx(file)
        return held

    def arrays(self, held: Mapping[str, NDArray[Any]], where: str, /) -> Arrays:
        """Return the data set."""
        return Arrays(**images(held, where, 1), classes=10, mean=(0.1307,), std=(0.3081,))
