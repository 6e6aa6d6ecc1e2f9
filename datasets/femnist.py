"""Handwritten digits and letters of 62 classes, from one of three published forms of NIST's Special Database 19."""

import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedbench.data import About, Arrays
from fedbench.errors import InputError
from fedbench.published import Download, Published, idx_file, images, obtain, read_idx, unpack

CLASSES = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NPZ = "put femnist.npz (x_train, y_train, x_test, y_test)"
_SD19_PAPER = "P. J. Grother: NIST Special Database 19, handprinted forms and characters database. NIST, 1995"


@dataclass(frozen=True)
class Femnist(Published):
    """Digits and letters of 62 classes (0-9, A-Z, a-z in this order), grey levels as uint8.

    - `source`: `sd19`, `leaf` or `emnist`; `any` is femnist.npz in the data folder if that is there, else the first of
      the three whose files are (else `emnist`, which is the smallest to download).  They differ in size, ink and more,
      so `fedbench data where femnist` and every report say which it was.
    - `test_part`: of `sd19`, the part that test images come from.  `hsf_0` is the FedProto code's choice; by NIST's
      description train_* contains it, so that test images may be training images too, and `hsf_4` is NIST's own test
      part.

    Where they are in the data folder:

    - `sd19`: by_class, as by_class.zip unpacks, 1x128x128, dark ink on white.  As in the FedProto code a class's
      training images are the first 2,200 files of train_*, its test images the first 300 of `test_part`; unlike there,
      where the label of a class depends on the file system, folders and files are sorted by name.
    - `leaf`: femnist_leaf/train/*.json and femnist_leaf/test/*.json, as LEAF's preprocess.sh writes them, 1x28x28, dark
      ink on white; the partition `natural` makes each writer a client.
    - `emnist`: EMNIST/raw, as torchvision leaves it, compressed or not, 1x28x28, light ink on black, upright.

    The mean and standard deviation are those of MNIST, as in the FedProto code.
    """

    name: ClassVar[str] = "femnist"
    about: ClassVar[About] = About(
        title="FEMNIST: handwritten digits and letters",
        source="NIST SD19 by_class, LEAF, or EMNIST ByClass",
        licence="public domain (NIST SD19)",
        citation=_SD19_PAPER,
    )
    decoding: ClassVar[int] = 1

    source: Literal["any", "sd19", "leaf", "emnist"] = "any"
    test_part: Literal["hsf_0", "hsf_4"] = "hsf_0"

    def npz(self, root: Path) -> Path | None:
        """Return femnist.npz if it is there and no form was asked for by its name."""
        return super().npz(root) if self.source == "any" else None

    def describe(self, root: Path, /) -> About:
        """Return what the form that is read is."""
        return super().describe(root) if self.npz(root) else self._form(root).about

    def originals(self, root: Path, /) -> list[Path]:
        """Return the files of the form."""
        return self._form(root).files(root)

    def fetch(self, root: Path, /) -> None:
        """Get the files of the form."""
        missing = next(file for file in self.originals(root) if not file.is_file())
        self._form(root).fetch(root, missing)

    def read(self, root: Path, /) -> Mapping[str, NDArray[Any]]:
        """Return images and labels of the form, and for `leaf` the writers."""
        return self._form(root).read(root)

    def arrays(self, held: Mapping[str, NDArray[Any]], where: str, /) -> Arrays:
        """Return the data set."""
        return Arrays(**images(held, where, 1), classes=len(CLASSES), mean=(0.1307,), std=(0.3081,))

    def _form(self, root: Path) -> "_Form":
        forms = {"sd19": _Sd19(self.test_part), "leaf": _Leaf(), "emnist": _Emnist()}
        if self.source != "any":
            return forms[self.source]
        return next((form for form in forms.values() if (root / form.folder).is_dir()), forms["emnist"])


class _Form(ABC):
    """One of the forms in which the images are published."""

    folder: ClassVar[str]
    about: ClassVar[About]

    @abstractmethod
    def files(self, root: Path) -> list[Path]:
        """Return all files that are read; of files that are not there, at least one."""

    @abstractmethod
    def fetch(self, root: Path, missing: Path) -> None:
        """Get the files; raises InputError, which names the missing one, if that is not possible."""

    @abstractmethod
    def read(self, root: Path) -> Mapping[str, NDArray[Any]]:
        """Return what they hold, under the names that an .npz has."""


@dataclass(frozen=True)
class _Sd19(_Form):
    folder: ClassVar[str] = "by_class"
    archive: ClassVar[Download] = Download(
        "by_class.zip", "79572b1694a8506f2b722c7be54130c4", ("https://s3.amazonaws.com/nist-srd/SD19/by_class.zip",)
    )
    about: ClassVar[About] = About(
        title="FEMNIST as the FedProto code has it: NIST SD19 by_class, 128x128, dark ink on white",
        source=f"{archive.urls[0]}, md5 {archive.md5}",
        licence="public domain (a work of the United States government)",
        citation=_SD19_PAPER,
    )
    side: ClassVar[int] = 128
    train_files: ClassVar[int] = 2200
    test_files: ClassVar[int] = 300

    test_part: str

    def files(self, root: Path) -> list[Path]:
        return [file for part in ("train", "test") for images in self._by_class(root, part) for file in images]

    def fetch(self, root: Path, missing: Path) -> None:
        if (root / self.folder).is_dir():
            raise InputError(f"{missing}: no such file; unpack {self.archive.urls[0]} anew in {root}, or {NPZ} there")
        archive = obtain(self.archive, root, f"put its folder {self.folder} into {root}, or {NPZ} there")
        with zipfile.ZipFile(archive) as packed:
            names = packed.namelist()
        found: dict[str, list[str]] = {}
        for name in names:
            folder, _, file = name.rpartition("/")
            found.setdefault(folder, []).append(file)
        wanted = [
            f"{folder}/{file}"
            for part in ("train", "test")
            for folder in self._folders(part)
            for file in self._chosen(found.get(folder, []), part)
        ]
        unpack(archive, {name: root / name for name in wanted})

    def read(self, root: Path) -> Mapping[str, NDArray[Any]]:
        held = {}
        for part in ("train", "test"):
            by_class = self._by_class(root, part)
            held[f"y_{part}"] = np.repeat(np.arange(len(by_class)), [len(files) for files in by_class])
            x = held[f"x_{part}"] = np.empty((len(held[f"y_{part}"]), self.side, self.side), np.uint8)
            for row, file in enumerate(file for files in by_class for file in files):
                x[row] = self._image(file)
        return held

    def _folders(self, part: str) -> list[str]:
        """Return the folder of each class: hexadecimal codes in the order of the characters, which is theirs too."""
        codes = [f"{ord(character):x}" for character in CLASSES]
        return [f"{self.folder}/{code}/{f'train_{code}' if part == 'train' else self.test_part}" for code in codes]

    def _chosen(self, names: Iterable[str], part: str) -> list[str]:
        pictures = sorted(name for name in names if name.endswith(".png"))
        return pictures[: self.train_files if part == "train" else self.test_files]

    def _by_class(self, root: Path, part: str) -> list[list[Path]]:
        chosen = []
        for folder in (root / name for name in self._folders(part)):
            names = self._chosen(os.listdir(folder) if folder.is_dir() else [], part)
            chosen.append([folder / name for name in names or ["*.png"]])
        return chosen

    def _image(self, file: Path) -> NDArray[np.uint8]:
        from PIL import Image

        try:
            with Image.open(file) as picture:
                pixels = np.asarray(picture.convert("L"))
        except (OSError, SyntaxError, ValueError) as error:
            raise InputError(f"{file}: not a readable image ({' '.join(str(error).split())})") from None
        if pixels.shape != (self.side, self.side):
            raise InputError(f"{file}: {pixels.shape[1]}x{pixels.shape[0]} pixels; want {self.side}x{self.side}")
        return pixels


@dataclass(frozen=True)
class _Leaf(_Form):
    folder: ClassVar[str] = "femnist_leaf"
    about: ClassVar[About] = About(
        title="FEMNIST of LEAF: 28x28, dark ink on white, with writers",
        source="made by https://github.com/TalwalkarLab/leaf, data/femnist/preprocess.sh; no published checksum",
        licence="public domain (NIST SD19); LEAF's code is BSD 2-clause",
        citation=f"S. Caldas et al.: LEAF: a benchmark for federated settings. arXiv 1812.01097, 2018; {_SD19_PAPER}",
    )

    def files(self, root: Path) -> list[Path]:
        return [file for part in ("train", "test") for file in self._files(root, part)]

    def fetch(self, root: Path, missing: Path) -> None:
        raise InputError(
            f"{missing}: no such file, and it cannot be downloaded (it has no published checksum either); make it with "
            "LEAF's data/femnist/preprocess.sh -t sample (https://github.com/TalwalkarLab/leaf) and put data/train and "
            f"data/test into {root / self.folder}, or use source 'emnist', or {NPZ} into {root}"
        )

    def read(self, root: Path) -> Mapping[str, NDArray[Any]]:
        held: dict[str, NDArray[Any]] = {}
        writers: dict[str, int] = {}
        for part in ("train", "test"):
            rows = [row for file in self._files(root, part) for row in self._writers(file)]
            if not rows:
                raise InputError(f"{root / self.folder / part}: no writers in any file")
            for writer in sorted({writer for writer, _, _ in rows}):
                writers.setdefault(writer, len(writers))
            held[f"x_{part}"] = np.concatenate([x for _, x, _ in rows])
            held[f"y_{part}"] = np.concatenate([y for _, _, y in rows])
            held[f"client_{part}"] = np.repeat([writers[w] for w, _, _ in rows], [len(y) for _, _, y in rows])
        return held

    def _files(self, root: Path, part: str) -> Sequence[Path]:
        folder = root / self.folder / part
        return sorted(folder.glob("*.json")) or [folder / "*.json"]

    def _writers(self, file: Path) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
        """Yield each writer's name, images (samples, 28, 28) and labels."""
        try:
            data = json.loads(file.read_bytes())["user_data"]
            for writer, samples in data.items():
                yield writer, *self._samples(samples, f"{file}: writer {writer}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}: not a whole file of LEAF's ({type(error).__name__}: {error})") from None

    def _samples(self, samples: Mapping[str, Any], where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        x, y = np.asarray(samples["x"], np.float64).reshape(-1, 28, 28), np.asarray(samples["y"])
        if len(x) != len(y) or y.dtype.kind not in "iu":
            raise InputError(f"{where}: {len(x)} images, {len(y)} labels of type {y.dtype}; want whole numbers")
        if not ((y >= 0) & (y < len(CLASSES))).all():
            raise InputError(f"{where}: labels {y.min()} to {y.max()}; want 0 to {len(CLASSES) - 1}")
        levels = np.rint(x * 255)  # they were bytes, divided by 255
        if not (np.abs(levels - x * 255) < 1e-2).all() or not ((levels >= 0) & (levels <= 255)).all():
            raise InputError(f"{where}: pixels are not grey levels 0, 1/255, ..., 1 (NaN or something else)")
        return levels.astype(np.uint8), y.astype(np.int64)


@dataclass(frozen=True)
class _Emnist(_Form):
    folder: ClassVar[str] = "EMNIST/raw"
    archive: ClassVar[Download] = Download(
        "EMNIST/raw/gzip.zip",
        "58c8d27c78d21e728a6bc7b3cc06412e",
        ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
    )
    about: ClassVar[About] = About(
        title="EMNIST ByClass in place of FEMNIST: 28x28, light ink on black, without writers",
        source=f"{archive.urls[0]}, md5 {archive.md5}",
        licence="public domain (NIST SD19); its authors ask to be cited",
        citation="G. Cohen, S. Afshar, J. Tapson, A. van Schaik: EMNIST: extending MNIST to handwritten letters. "
        f"IJCNN, 2017; {_SD19_PAPER}",
    )
    samples: ClassVar[Mapping[str, int]] = {"train": 697_932, "test": 116_323}

    def files(self, root: Path) -> list[Path]:
        return [file for part in self.samples for file in self._pair(root, part)]

    def fetch(self, root: Path, missing: Path) -> None:
        offline = f"put what it holds ({missing.name} is missing) beside it, or {NPZ} into {root}"
        archive = obtain(self.archive, root, offline)
        names = [f"{name}.gz" for part in self.samples for name in self._names(part)]
        unpack(archive, {f"gzip/{name}": root / self.folder / name for name in names})

    def read(self, root: Path) -> Mapping[str, NDArray[Any]]:
        held: dict[str, NDArray[Any]] = {}
        for part, samples in self.samples.items():
            for name, file in zip("xy", self._pair(root, part), strict=True):
                values = read_idx(file)
                want = (samples, 28, 28) if name == "x" else (samples,)
                if values.shape != want:
                    raise InputError(f"{file}: holds {values.shape}; want {want} as in EMNIST ByClass, {part}")
                # The images lie on their side, mirrored.
                held[f"{name}_{part}"] = values.transpose(0, 2, 1) if name == "x" else values
        return held

    def _pair(self, root: Path, part: str) -> list[Path]:
        return [idx_file(root / self.folder, name) for name in self._names(part)]

    def _names(self, part: str) -> list[str]:
        return [f"emnist-byclass-{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
