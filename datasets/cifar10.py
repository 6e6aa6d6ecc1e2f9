"""CIFAR-10 from the files that torchvision uses: 50,000 + 10,000 small photographs, 3x32x32."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbench.data import About, Arrays
from fedbench.published import Download, Published, images, obtain, unpack, verify

ARCHIVE = Download(
    "cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
)
FOLDER = "cifar-10-batches-py"
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}


@dataclass(frozen=True)
class Cifar10(Published):
    """50,000 training and 10,000 test photographs of 10 classes, 3x32x32 as uint8, in the order of the files.

    Read from cifar-10-batches-py in the data folder, where torchvision puts it, or from cifar10.npz beside it.  The
    mean and standard deviation are those of ImageNet, as in the FedProto code; training photographs are randomly
    cropped (after padding by 4) and flipped.
    """

    name: ClassVar[str] = "cifar10"
    about: ClassVar[About] = About(
        title="CIFAR-10: 50,000 + 10,000 photographs",
        source=f"{ARCHIVE.urls[0]}, md5 {ARCHIVE.md5}",
        licence="none stated by its authors",
        citation="A. Krizhevsky: Learning multiple layers of features from tiny images. "
        "Technical report, University of Toronto, 2009",
    )
    decoding: ClassVar[int] = 1

    def originals(self, root: Path, /) -> list[Path]:
        """Return the files of the unpacked archive."""
        return [root / FOLDER / name for name in MD5]

    def fetch(self, root: Path, /) -> None:
        """Unpack the archive, downloaded if it is not there."""
        archive = obtain(ARCHIVE, root, f"put cifar10.npz (x_train, y_train, x_test, y_test) into {root}")
        unpack(archive, {f"{FOLDER}/{name}": root / FOLDER / name for name in MD5})

    def read(self, root: Path, /) -> Mapping[str, NDArray[Any]]:
        """Return images (N, 32, 32, 3) and labels."""
        for file in self.originals(root):
            verify(file, MD5)  # before anything is unpickled
        from torchvision.datasets import CIFAR10

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, about how these files were written long ago
            train, test = CIFAR10(root, train=True), CIFAR10(root, train=False)
        return {
            "x_train": train.data,
            "y_train": np.asarray(train.targets),
            "x_test": test.data,
            "y_test": np.asarray(test.targets),
        }

    def arrays(self, held: Mapping[str, NDArray[Any]], where: str, /) -> Arrays:
        """Return the data set."""
        return Arrays(
            **images(held, where, 3),
            classes=10,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            augment="crop_flip",
        )
