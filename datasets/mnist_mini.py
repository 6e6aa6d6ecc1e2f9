"""A small balanced piece of real MNIST that comes with the package, so that a first run needs no download."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedbench.data import About, Arrays, DataSource, read_npz

FILE = Path(__file__).with_name("mnist_mini.npz")


@dataclass(frozen=True)
class MnistMini(DataSource):
    """4,000 training and 2,000 test digits, 400 and 200 of each class; 1x28x28 grey levels as uint8.

    The mean and standard deviation are those of the whole MNIST training set, as in the FedProto code.
    """

    about: ClassVar[About] = About(
        title="MNIST mini: 4,000 + 2,000 handwritten digits",
        source="the first 400 training and 200 test images of each class of MNIST (datasets/make_mnist_mini.py)",
        licence="CC BY-SA 3.0 (as MNIST)",
        citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner: Gradient-based learning applied to document "
        "recognition. Proceedings of the IEEE 86(11), 1998",
    )

    def files(self, _root: Path, /) -> list[Path]:
        """Return the one file beside this module."""
        return [FILE]

    def load(self, _root: Path, /) -> Arrays:
        """Return the digits; raises InputError if the file of the installation is damaged."""
        held = read_npz(FILE)
        return Arrays(
            x_train=held["x_train"],
            y_train=held["y_train"].astype("int64"),
            x_test=held["x_test"],
            y_test=held["y_test"].astype("int64"),
            classes=10,
            mean=(0.1307,),
            std=(0.3081,),
        )
