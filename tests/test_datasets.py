"""The data sets with files of their own: read, verified, fetched, cached, with small copies of every published form."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torchvision
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from fedbench import cli, data, data_commands, published
from fedbench.data import Arrays
from fedbench.datasets import cifar10, fed_heart, femnist, mnist
from fedbench.datasets.arrays import ArrayFile
from fedbench.datasets.cifar10 import Cifar10
from fedbench.datasets.fed_heart import FedHeart
from fedbench.datasets.femnist import CLASSES, Femnist
from fedbench.datasets.mnist import Mnist
from fedbench.datasets.mnist_mini import MnistMini
from fedbench.errors import InputError
from fedbench.partition import Given, NWayKShot, draw
from fedbench.published import Download, Published

HERE = "set FEDBENCH_DATA to a folder with it; `fedbench data where NAME` says where the files go"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads fail as without a network, unless a test has a server of its own."""

    def fail(_download: Download, _target: Path) -> None:
        raise OSError("Temporary failure in name resolution")

    monkeypatch.setattr(published, "retrieve", fail)
    monkeypatch.delenv("FEDBENCH_CACHE", raising=False)


RETRIEVE = published.retrieve


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def idx(values: NDArray[np.uint8]) -> bytes:
    shape = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + shape + values.tobytes()


def save(path: Path, **arrays: NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **arrays)
    return path


def refuses(source: data.DataSource, root: Path, message: str) -> str:
    """Check that loading is refused with one line that matches, and return it."""
    with pytest.raises(InputError, match=message) as caught:
        data.load(source, root)
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- MNIST


@pytest.fixture
def digits(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> dict[str, NDArray[Any]]:
    """Put 40 + 20 made-up digits into tmp_path, as published."""
    held = {
        "x_train": rng.integers(0, 256, (40, 28, 28), np.uint8),
        "y_train": (np.arange(40) % 10).astype(np.uint8),
        "x_test": rng.integers(0, 256, (20, 28, 28), np.uint8),
        "y_test": (np.arange(20) % 10).astype(np.uint8),
    }
    sums: dict[str, str] = {}
    for part, name in mnist.NAMES.items():
        content = gzip.compress(idx(held[part]))
        path = tmp_path / mnist.FOLDER / f"{name}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        sums |= {name: md5(idx(held[part])), path.name: md5(content)}
    monkeypatch.setattr(mnist, "MD5", sums)
    return held


def test_mnist_is_read_compressed_and_unpacked(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    arrays = data.load(Mnist(), tmp_path)
    np.testing.assert_array_equal(arrays.x_train, digits["x_train"][:, None])
    np.testing.assert_array_equal(arrays.y_test, digits["y_test"])
    assert arrays.y_train.dtype == np.int64
    assert (arrays.shape, arrays.classes, arrays.mean, arrays.std) == ((1, 28, 28), 10, (0.1307,), (0.3081,))
    packed = data.fingerprint(Mnist(), tmp_path)
    for file in Mnist().files(tmp_path):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
    assert data.fingerprint(Mnist(), tmp_path) == packed
    for file in Mnist().files(tmp_path):
        file.unlink()
    np.testing.assert_array_equal(data.load(Mnist(), tmp_path).x_test, arrays.x_test)


def test_checksums_are_torchvisions() -> None:
    assert {name: mnist.MD5[name] for name, _ in torchvision.datasets.MNIST.resources} == dict(
        torchvision.datasets.MNIST.resources
    )
    assert list(mnist.MIRRORS) == torchvision.datasets.MNIST.mirrors
    theirs = torchvision.datasets.CIFAR10
    assert theirs.base_folder == cifar10.FOLDER
    assert Download(theirs.filename, theirs.tgz_md5, (theirs.url,)) == cifar10.ARCHIVE
    assert dict([*theirs.train_list, *theirs.test_list, (theirs.meta["filename"], theirs.meta["md5"])]) == cifar10.MD5
    emnist = femnist._Emnist.archive
    assert (emnist.md5, emnist.urls) == (torchvision.datasets.EMNIST.md5, (torchvision.datasets.EMNIST.url,))


def test_a_truncated_file_is_named(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    file = Mnist().files(tmp_path)[0]
    file.write_bytes(file.read_bytes()[:-100])
    line = refuses(Mnist(), tmp_path, "train-images.*md5 .*, published was .*: it is truncated or altered")
    assert str(file) in line
    assert mnist.MD5[file.name] in line


def test_swapped_files_are_named_with_what_they_are(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    _, train, _, test = Mnist().files(tmp_path)
    content = train.read_bytes()
    train.write_bytes(test.read_bytes())
    test.write_bytes(content)
    refuses(Mnist(), tmp_path, "train-labels-idx1-ubyte.gz: md5 .*: it is t10k-labels-idx1-ubyte.gz; remove it")


@pytest.mark.parametrize("cut", [-1, 20, 3, 0])
def test_an_idx_file_is_whole_or_refused(tmp_path: Path, cut: int) -> None:
    content = idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    for name, packed in {
        "plain": content[:cut],
        "a.gz": gzip.compress(content)[:cut],
        "b.gz": gzip.compress(content[:cut]),
    }.items():
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(InputError, match=rf"{name}: not a whole idx file of bytes"):
            published.read_idx(tmp_path / name)


# --- CIFAR-10


class OldPickler(pickle._Pickler):
    """Writes arrays as the numpy of 2009 did."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.dtype):
            return np.dtype, ("u1", 0, 1), (3, "|", None, None, None, -1, -1, 0)
        return NotImplemented


def pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    OldPickler(stream, protocol=2).dump(value)
    return stream.getvalue()


@pytest.fixture
def photographs(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Return the contents of made-up CIFAR-10 files, 4 photographs each, put into tmp_path as published."""
    files = {
        name: pickled({"data": rng.integers(0, 256, (4, 3072), np.uint8), "labels": [n, 1, 2, 3]})
        for n, name in enumerate(list(cifar10.MD5)[:6])
    }
    files["batches.meta"] = pickled({"label_names": ["one"]})
    sums = {name: md5(content) for name, content in files.items()}
    monkeypatch.setattr(cifar10, "MD5", sums)
    theirs = torchvision.datasets.CIFAR10
    monkeypatch.setattr(theirs, "train_list", [[name, sums[name]] for name in list(files)[:5]])
    monkeypatch.setattr(theirs, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(theirs, "meta", theirs.meta | {"md5": sums["batches.meta"]})
    (tmp_path / cifar10.FOLDER).mkdir()
    for name, content in files.items():
        (tmp_path / cifar10.FOLDER / name).write_bytes(content)
    return files


def test_cifar10_is_read_from_torchvisions_files(tmp_path: Path, photographs: dict[str, bytes]) -> None:
    arrays = data.load(Cifar10(), tmp_path)
    assert arrays.x_train.shape == (20, 3, 32, 32)
    assert arrays.x_test.shape == (4, 3, 32, 32)
    assert arrays.y_train.tolist() == [0, 1, 2, 3, 1, 1, 2, 3, 2, 1, 2, 3, 3, 1, 2, 3, 4, 1, 2, 3]
    assert arrays.augment == "crop_flip"
    third = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)[2]
    assert arrays.x_train[2].ravel().tolist() == third.tolist()


def test_cifar10s_archive_is_unpacked(
    tmp_path: Path, photographs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / cifar10.ARCHIVE.path
    with tarfile.open(archive, "w:gz") as tape:
        tape.add(tmp_path / cifar10.FOLDER, cifar10.FOLDER)
    for name in photographs:
        (tmp_path / cifar10.FOLDER / name).unlink()
    refuses(Cifar10(), tmp_path, "cifar-10-python.tar.gz: md5 .*: it is truncated or altered")
    known = Download(cifar10.ARCHIVE.path, md5(archive.read_bytes()), cifar10.ARCHIVE.urls)
    monkeypatch.setattr(cifar10, "ARCHIVE", known)
    assert len(data.load(Cifar10(), tmp_path).y_train) == 20
    assert {file.name for file in (tmp_path / cifar10.FOLDER).iterdir()} == set(photographs)


def test_an_altered_batch_is_never_unpickled(tmp_path: Path, photographs: dict[str, bytes]) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    (tmp_path / cifar10.FOLDER / "test_batch").write_bytes(pickle.dumps(Trap()))
    refuses(Cifar10(), tmp_path, "test_batch: md5 .* it is truncated or altered")
    assert not (tmp_path / "trapped").exists()


# --- the .npz that takes the files' place


def test_an_npz_with_the_name_of_the_data_set_takes_precedence(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    files = data.fingerprint(Mnist(), tmp_path)
    assert Mnist().describe(tmp_path) == Mnist.about
    npz = save(tmp_path / "mnist.npz", **{name: values[:10] for name, values in digits.items()})
    assert len(data.load(Mnist(), tmp_path).y_train) == 10
    assert data.fingerprint(Mnist(), tmp_path) == hashlib.sha256(npz.read_bytes()).hexdigest() != files
    about = Mnist().describe(tmp_path)
    assert about.title == f"{Mnist.about.title} (mnist.npz)"
    assert about.source.startswith("mnist.npz in place of https://")
    assert about.licence == Mnist.about.licence


@pytest.mark.parametrize("order", ["last", "first"])
def test_an_npz_may_have_its_channels_anywhere(tmp_path: Path, rng: np.random.Generator, order: str) -> None:
    x = rng.integers(0, 256, (6, 3, 8, 8), np.uint8)
    given = np.moveaxis(x, 1, 3) if order == "last" else x
    y = np.arange(6)
    save(tmp_path / "cifar10.npz", x_train=given, y_train=y, x_test=given[:2], y_test=y[:2], lossless_train=y > 1)
    np.testing.assert_array_equal(data.load(Cifar10(), tmp_path).x_train, x)


@pytest.mark.parametrize(
    ("source", "arrays", "message"),
    [
        (
            Mnist(),
            {"x": np.zeros((2, 28, 28), np.uint8), "y": np.array([0, 10])},
            "y_train has labels 0 to 10; want 0 to 9",
        ),
        (
            Mnist(),
            {"x": np.zeros((2, 784), np.uint8), "y": np.zeros(2, int)},
            r"x_train has shape \(2, 784\); want images with 1",
        ),
        (Mnist(), {"x": np.full((2, 28, 28), np.nan), "y": np.zeros(2, int)}, "not finite .* in row 0"),
        (Cifar10(), {"x": np.zeros((2, 32, 32), np.uint8), "y": np.zeros(2, int)}, "want images with 3 channels"),
        (
            Femnist(),
            {"x": np.zeros((2, 28, 28), np.uint8), "y": np.array([0, -1])},
            "y_train has labels -1 to 0; want 0 to 61",
        ),
        (Femnist(), {"a": np.zeros(2)}, "holds a; want x_train"),
    ],
)
def test_an_npz_that_is_not_the_data_set(
    source: Published, arrays: dict[str, NDArray[Any]], message: str, tmp_path: Path
) -> None:
    npz = save(tmp_path / f"{source.name}.npz", **arrays)
    assert str(npz) in refuses(source, tmp_path, message)
    npz.write_bytes(npz.read_bytes()[:-30])
    assert str(npz) in refuses(source, tmp_path, "not a readable .npz")


# --- FEMNIST


def png(path: Path, level: int, side: int = 128) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (level, level, level)).save(path)


def sd19(root: Path) -> Path:
    """Make by_class with three training and two test files of every class; the grey level says which."""
    for label, character in reversed(list(enumerate(CLASSES))):
        folder = root / "by_class" / f"{ord(character):x}"
        for number in reversed(range(3)):
            png(folder / f"train_{folder.name}" / f"train_{folder.name}_{number:05}.png", 4 * label + number)
        for part in ("hsf_0", "hsf_4"):
            for number in range(2):
                png(folder / part / f"{part}_{number:05}.png", 4 * label + (part == "hsf_4"))
        (folder / f"train_{folder.name}.mit").write_text("not an image")
    return root / "by_class"


def leaf(root: Path, **changes: Any) -> Path:
    """Make LEAF's files: writers b (in the first file) and a, the number in their label and in their pixels."""
    samples = {"b": {"x": [[0.0] * 784, [1.0] * 784], "y": [0, 61]}, "a": {"x": [[77 / 255] * 784], "y": [5]}} | changes
    for part in ("train", "test"):
        for writer, held in samples.items():
            path = root / "femnist_leaf" / part / f"all_data_{1 - (writer == 'b')}_{part}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"users": [writer], "num_samples": [len(held["y"])], "user_data": {writer: held}}
            path.write_text(json.dumps(content))
    return root / "femnist_leaf"


def emnist(root: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> dict[str, NDArray[Any]]:
    """Put 7 + 5 made-up EMNIST images into the folder, as torchvision leaves them but compressed."""
    monkeypatch.setattr(femnist._Emnist, "samples", {"train": 7, "test": 5})
    held: dict[str, NDArray[Any]] = {}
    for part, count in femnist._Emnist.samples.items():
        held[f"x_{part}"] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        held[f"y_{part}"] = np.arange(count, dtype=np.uint8)
        for name, file in zip("xy", femnist._Emnist()._pair(root, part), strict=True):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(gzip.compress(idx(held[f"{name}_{part}"])))
    return held


def test_sd19_has_its_labels_in_sorted_order(tmp_path: Path) -> None:
    sd19(tmp_path)
    arrays = data.load(Femnist(), tmp_path)
    assert arrays.shape == (1, 128, 128)
    assert arrays.classes == 62
    assert arrays.y_train.tolist() == np.repeat(np.arange(62), 3).tolist()
    assert arrays.x_train[:, 0, 0, 0].tolist() == [4 * label + number for label in range(62) for number in range(3)]
    assert arrays.x_test[:, 0, 5, 9].tolist() == (4 * np.repeat(np.arange(62), 2)).tolist()
    other = data.load(Femnist(test_part="hsf_4"), tmp_path)
    assert other.x_test[:, 0, 0, 0].tolist() == (4 * np.repeat(np.arange(62), 2) + 1).tolist()
    assert data.fingerprint(Femnist(), tmp_path) != data.fingerprint(Femnist(test_part="hsf_4"), tmp_path)
    assert sorted(CLASSES, key=lambda character: f"{ord(character):x}") == list(CLASSES)


def test_sd19_takes_the_first_files_of_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (femnist._Sd19.train_files, femnist._Sd19.test_files) == (2200, 300)
    monkeypatch.setattr(femnist._Sd19, "train_files", 2)
    monkeypatch.setattr(femnist._Sd19, "test_files", 1)
    sd19(tmp_path)
    arrays = data.load(Femnist(source="sd19"), tmp_path)
    assert arrays.x_train[:4, 0, 0, 0].tolist() == [0, 1, 4, 5]
    assert len(arrays.y_test) == 62


def test_a_bad_image_of_sd19_is_named(tmp_path: Path) -> None:
    folder = sd19(tmp_path)
    file = folder / "41" / "train_41" / "train_41_00001.png"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert str(file) in refuses(Femnist(), tmp_path, "not a readable image")
    png(file, 0, side=28)
    assert str(file) in refuses(Femnist(), tmp_path, "28x28 pixels; want 128x128")
    for name in (folder / "7a" / "hsf_0").iterdir():
        name.unlink()
    file.write_bytes(whole)
    assert str(folder / "7a" / "hsf_0" / "*.png") in refuses(Femnist(), tmp_path, "no such file; unpack .*by_class.zip")


def test_sd19_is_unpacked_from_its_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = sd19(tmp_path / "there")
    archive = tmp_path / "by_class.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in there.rglob("*.*"):
            packed.write(file, file.relative_to(tmp_path / "there"))
    refuses(Femnist(source="sd19"), tmp_path, "by_class.zip: md5 ")
    monkeypatch.setattr(
        femnist._Sd19, "archive", Download("by_class.zip", md5(archive.read_bytes()), ("http://there",))
    )
    got, want = (data.load(Femnist(source="sd19"), root) for root in (tmp_path, tmp_path / "there"))
    np.testing.assert_array_equal(got.x_train, want.x_train)
    assert not (tmp_path / "by_class" / "30" / "hsf_4").exists()


def test_leafs_writers_are_clients(tmp_path: Path) -> None:
    leaf(tmp_path)
    arrays = data.load(Femnist(), tmp_path)
    assert arrays.x_train.dtype == np.uint8
    assert arrays.x_train[:, 0, 3, 4].tolist() == [0, 255, 77]
    assert arrays.y_train.tolist() == [0, 61, 5]
    assert arrays.client_train is not None
    assert arrays.client_train.tolist() == [1, 1, 0]
    partition = draw(Given(), arrays, 0)
    assert [rows.tolist() for rows in partition.train] == [[2], [0, 1]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"x": [[0.0] * 784], "y": [62]}, "writer a: labels 62 to 62; want 0 to 61"),
        ({"x": [[0.0] * 784], "y": [1, 2]}, "writer a: 1 images, 2 labels"),
        ({"x": [[0.0] * 784], "y": [0.5]}, "writer a: 1 images, 1 labels of type float64"),
        ({"x": [[float("nan")] * 784], "y": [1]}, "writer a: pixels are not grey levels"),
        ({"x": [[0.3] * 784], "y": [1]}, "writer a: pixels are not grey levels"),
        ({"x": [[2.0] * 784], "y": [1]}, "writer a: pixels are not grey levels"),
        ({"x": [[0.0] * 783], "y": [1]}, "not a whole file of LEAF's"),
        ({"y": []}, "not a whole file of LEAF's .KeyError: 'x'"),
    ],
)
def test_bad_samples_of_leaf_are_named(tmp_path: Path, samples: Any, message: str) -> None:
    leaf(tmp_path, a=samples)
    assert "all_data_1_train.json: " in refuses(Femnist(), tmp_path, message)


def test_a_truncated_file_of_leaf_is_named(tmp_path: Path) -> None:
    file = leaf(tmp_path) / "test" / "all_data_0_test.json"
    file.write_text(file.read_text()[:-20])
    assert str(file) in refuses(Femnist(), tmp_path, "not a whole file of LEAF's .JSONDecodeError")


def test_emnist_is_upright(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    held = emnist(tmp_path, rng, monkeypatch)
    arrays = data.load(Femnist(), tmp_path)
    np.testing.assert_array_equal(arrays.x_train[:, 0], held["x_train"].transpose(0, 2, 1))
    assert arrays.y_test.tolist() == [0, 1, 2, 3, 4]
    assert arrays.classes == 62
    assert arrays.client_train is None


def test_files_of_emnist_that_are_not_its_own_are_named(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = emnist(tmp_path, rng, monkeypatch)
    train, labels, test, _ = Femnist().files(tmp_path)
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-4])
    refuses(Femnist(), tmp_path, "train-labels.*: not a whole idx file")
    labels.write_bytes(gzip.compress(idx(np.full(7, 62, np.uint8))))
    refuses(Femnist(), tmp_path, "EMNIST.* y_train has labels 62 to 62; want 0 to 61")
    labels.write_bytes(whole)
    train.write_bytes(test.read_bytes())
    refuses(Femnist(), tmp_path, r"train-images.*: holds \(5, 28, 28\); want \(7, 28, 28\) as in EMNIST ByClass, train")
    assert len(held["y_train"]) == 7


def test_emnists_archive_is_unpacked(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    held = emnist(tmp_path / "there", rng, monkeypatch)
    archive = tmp_path / "EMNIST" / "raw" / "gzip.zip"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("gzip/emnist-letters-mapping.txt", "")
        for file in Femnist().files(tmp_path / "there")[1:]:
            packed.write(file, f"gzip/{file.name}")
    known = Download("EMNIST/raw/gzip.zip", md5(archive.read_bytes()), ("http://there",))
    monkeypatch.setattr(femnist._Emnist, "archive", known)
    refuses(Femnist(), tmp_path, "gzip.zip: cannot be unpacked .*emnist-byclass-train-images-idx3-ubyte.gz")
    with zipfile.ZipFile(archive, "a") as packed:
        first = Femnist().files(tmp_path / "there")[0]
        packed.write(first, f"gzip/{first.name}")
    known = Download("EMNIST/raw/gzip.zip", md5(archive.read_bytes()), ("http://there",))
    monkeypatch.setattr(femnist._Emnist, "archive", known)
    assert data.load(Femnist(), tmp_path).y_train.tolist() == held["y_train"].tolist()


def test_the_form_of_femnist_is_chosen_and_said(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def title(source: Femnist) -> str:
        assert data.load(source, tmp_path).classes == 62
        return source.describe(tmp_path).title

    emnist(tmp_path, rng, monkeypatch)
    assert title(Femnist()).startswith("EMNIST ByClass in place of FEMNIST: 28x28, light ink")
    leaf(tmp_path)
    assert title(Femnist()).startswith("FEMNIST of LEAF: 28x28, dark ink")
    sd19(tmp_path)
    assert title(Femnist()).startswith("FEMNIST as the FedProto code has it: NIST SD19 by_class, 128x128, dark ink")
    save(tmp_path / "femnist.npz", x=np.zeros((3, 28, 28), np.uint8), y=np.arange(3))
    assert title(Femnist()) == "FEMNIST: handwritten digits and letters (femnist.npz)"
    assert title(Femnist(source="emnist")).startswith("EMNIST")
    assert title(Femnist(source="leaf")).startswith("FEMNIST of LEAF")
    sources: Sequence[Femnist] = (Femnist(), *(Femnist(source=form) for form in ("sd19", "leaf", "emnist")))
    assert len({data.fingerprint(source, tmp_path) for source in sources}) == 4


# --- fed_heart


def patients(rng: np.random.Generator, missing: float = 0.1) -> dict[str, NDArray[Any]]:
    """Return 90 made-up patients of three hospitals."""
    x = rng.integers(1, 200, (90, 13)).astype(float)
    x[rng.random(x.shape) < missing] = np.nan
    return {"x": x, "y": np.arange(90) // 3 % 2, "client": np.arange(90) % 3}


def test_fed_heart_splits_every_hospital(tmp_path: Path, rng: np.random.Generator) -> None:
    held = patients(rng)
    save(tmp_path / "fed_heart.npz", **held)
    arrays = data.load(FedHeart(), tmp_path)
    assert arrays.client_train is not None
    assert arrays.client_test is not None
    for hospital in range(3):
        for disease in range(2):
            train = ((arrays.client_train == hospital) & (arrays.y_train == disease)).sum()
            test = ((arrays.client_test == hospital) & (arrays.y_test == disease)).sum()
            assert (train, test) == (12, 3)
    assert len(data.load(FedHeart(test_every=3), tmp_path).y_test) == 30
    assert len(draw(Given(), arrays, 0).train) == 3


def test_fed_heart_fills_and_scales_with_training_patients_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    held = patients(rng)
    save(tmp_path / "fed_heart.npz", **held)
    arrays = data.load(FedHeart(), tmp_path)
    assert np.isfinite(arrays.x_train).all()
    np.testing.assert_allclose(arrays.x_train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(arrays.x_train.std(axis=0), 1, atol=1e-5)
    # By hand: the first finding.
    test = np.zeros(90, bool)
    for hospital in range(3):
        for disease in range(2):
            test[np.flatnonzero((held["client"] == hospital) & (held["y"] == disease))[4::5]] = True
    first = held["x"][:, 0]
    first = np.where(np.isnan(first), np.median(first[~test & ~np.isnan(first)]), first)
    first = (first - first[~test].mean()) / first[~test].std()
    np.testing.assert_allclose(arrays.x_train[:, 0], first[~test], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(arrays.x_test[:, 0], first[test], rtol=1e-5, atol=1e-6)
    # Other test patients change nothing for the training patients.
    held["x"][test] *= 100
    save(tmp_path / "fed_heart.npz", **held)
    again = data.load(FedHeart(), tmp_path)
    np.testing.assert_array_equal(again.x_train, arrays.x_train)
    assert abs(again.x_test).max() > 100


def test_no_blood_pressure_is_zero(tmp_path: Path, rng: np.random.Generator) -> None:
    held = patients(rng, missing=0)
    column = fed_heart.FINDINGS.index("chol")
    loads = []
    for value in (0, np.nan):
        held["x"][::7, column] = value
        save(tmp_path / "fed_heart.npz", **held)
        loads.append(data.load(FedHeart(), tmp_path).x_train)
    np.testing.assert_array_equal(loads[0], loads[1])


def test_fed_heart_takes_a_given_split(tmp_path: Path, rng: np.random.Generator) -> None:
    held = patients(rng)
    parts = {f"{name}_train": held[name][:60] for name in held} | {f"{name}_test": held[name][60:] for name in held}
    save(tmp_path / "fed_heart.npz", **parts)
    arrays = data.load(FedHeart(), tmp_path)
    assert arrays.y_test.tolist() == held["y"][60:].tolist()
    np.testing.assert_allclose(arrays.x_train.mean(axis=0), 0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((90, 12))}, "want 13 floating columns"),
        ({"x": np.zeros((90, 13), int)}, "x is int64 of shape .* want 13 floating columns"),
        ({"x": np.full((90, 13), np.inf)}, "x is infinite in row 0"),
        ({"x": np.full((90, 13), np.nan)}, "age is missing in every training row"),
        ({"y": np.full(90, 2)}, "y_train has labels 2 to 2; want 0 to 1"),
        ({"client": np.zeros(89, int)}, "want x, y and client of the same length"),
    ],
)
def test_fed_heart_refuses(change: dict[str, Any], message: str, tmp_path: Path, rng: np.random.Generator) -> None:
    npz = save(tmp_path / "fed_heart.npz", **(patients(rng) | change))
    assert str(npz) in refuses(FedHeart(), tmp_path, message)


def test_fed_heart_reads_the_hospitals_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / fed_heart.FOLDER).mkdir()
    sums = {}
    for number, name in enumerate(fed_heart.MD5):
        rows = [f"{30 + i}.0,{'?' if i == 1 else i}.0,1,{100 + i},?,0,1,1,1,{i},1,0,3,{i % 5}" for i in range(6)]
        rows = [row.replace("?.0", "?").replace(",?,0", ",200,0" if number == 0 else ",?,0") for row in rows]
        content = "\n".join(rows).encode()
        (tmp_path / fed_heart.FOLDER / name).write_bytes(content)
        sums[name] = md5(content)
    monkeypatch.setattr(fed_heart, "MD5", sums)
    held = FedHeart().read(tmp_path)
    assert held["x"].shape == (24, 13)
    assert held["y"].tolist() == [0, 1, 1, 1, 1, 0] * 4
    assert held["client"].tolist() == np.repeat(np.arange(4), 6).tolist()
    assert np.isnan(held["x"][1, 1])
    assert np.isnan(held["x"][6:, 4]).all()
    assert held["x"][:6, 4].tolist() == [200] * 6
    assert np.isfinite(data.load(FedHeart(), tmp_path).x_test).all()
    (tmp_path / fed_heart.FOLDER / "processed.va.data").write_bytes(b"1,2")
    refuses(FedHeart(), tmp_path, "processed.va.data: md5 .*: it is truncated or altered")


# --- without a network, and with one


@pytest.mark.parametrize(
    ("source", "file", "checksum", "alternative"),
    [
        (Mnist(), "MNIST/raw/train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "data set mnist_mini"),
        (Cifar10(), "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "put cifar10.npz"),
        (Femnist(), "EMNIST/raw/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e", "put femnist.npz"),
        (Femnist(source="sd19"), "by_class.zip", "79572b1694a8506f2b722c7be54130c4", "put femnist.npz"),
        (Femnist(source="leaf"), "femnist_leaf/train/*.json", "no published checksum", "use source 'emnist'"),
        (FedHeart(), "fed_heart/processed.cleveland.data", "2d91a8ff69cfd9616aa47b59d6f843db", "put fed_heart.npz"),
    ],
)
def test_a_missing_file_is_named_with_checksum_place_and_alternatives(
    source: data.DataSource, file: str, checksum: str, alternative: str, tmp_path: Path
) -> None:
    line = refuses(source, tmp_path / "data", "no such file")
    assert line.startswith(str(tmp_path / "data" / file))
    for part in (checksum, alternative, str(tmp_path / "data"), "https://"):
        assert part in line
    with pytest.raises(InputError, match="no such file"):
        data.fingerprint(source, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as serving:
        Thread(target=serving.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}/"
        finally:
            serving.shutdown()


@contextlib.contextmanager
def silence() -> Iterator[str]:
    """Open a port on which nobody ever answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


def closed() -> str:
    """Return the address of a port that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{bound.getsockname()[1]}/"


def test_missing_files_are_downloaded_and_verified(
    tmp_path: Path, digits: dict[str, NDArray[Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published, "retrieve", RETRIEVE)
    with server(tmp_path / mnist.FOLDER) as there:
        monkeypatch.setattr(mnist, "MIRRORS", (closed(), there))
        arrays = data.load(Mnist(), tmp_path / "new")
    np.testing.assert_array_equal(arrays.x_test[:, 0], digits["x_test"])
    assert len(list((tmp_path / "new" / mnist.FOLDER).iterdir())) == 4
    assert f"downloading {there}train-images-idx3-ubyte.gz" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"something else", None])
def test_a_download_that_is_not_what_was_published_leaves_nothing(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "retrieve", RETRIEVE)
    (tmp_path / "there").mkdir()
    if content:
        (tmp_path / "there" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with server(tmp_path / "there") as there:
        monkeypatch.setattr(mnist, "MIRRORS", (there,))
        refuses(Mnist(), tmp_path / "here", f"no download .*{'gives another file than' if content else '404'}")
    assert [path for path in (tmp_path / "here").rglob("*") if path.is_file()] == []


def test_servers_that_never_answer_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "retrieve", RETRIEVE)
    monkeypatch.setattr(published, "PROBE", 0.3)
    with silence() as one, silence() as two:
        monkeypatch.setattr(mnist, "MIRRORS", (one, two))
        begin = time.monotonic()
        refuses(Mnist(), tmp_path, "no such file, and no download .*(no answer|timed out)")
        assert time.monotonic() - begin < 10


SUITE = """
dataset: mnist
model: mlp
partition: {name: iid, clients: 2}
training: {rounds: 1}
methods: [local]
"""


@pytest.mark.parametrize("network", ["refused", "silent"])
@pytest.mark.parametrize("arguments", [("run", "suite.yaml", "--data", "mine"), ("data", "fetch", "mnist")])
def test_without_a_network_a_command_ends_and_says_what_is_missing(
    network: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(silence()) if network == "silent" else closed()
        mine = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        mine |= {"https_proxy": proxy, "http_proxy": proxy, "FEDBENCH_DATA": "mine"}
        command = [sys.executable, "-m", "fedbench", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=mine, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fedbench: mine/MNIST/raw/train-images-idx3-ubyte.gz: no such file, and no download (")
    assert "f68b3c2dcbeaaa9fbdd348bbdeb94873" in line


def test_a_report_says_which_files_were_used(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (60, 8, 8), np.uint8)
    npz = save(tmp_path / "mine" / "femnist.npz", x=x, y=np.arange(60) % 3)
    (tmp_path / "suite.yaml").write_text(SUITE.replace("mnist", "femnist"))
    arguments = ["run", str(tmp_path / "suite.yaml"), "--data", str(npz.parent), "--out", str(tmp_path / "runs")]
    assert CliRunner().invoke(cli.app, [*arguments, "--workers", "1", "--tracking-uri", "none"]).exit_code == 0
    report = (tmp_path / "runs" / "suite" / "report.md").read_text()
    assert "digits and letters (femnist.npz); femnist.npz in place of NIST SD19" in report
    assert f"sha256 {hashlib.sha256(npz.read_bytes()).hexdigest()[:16]}" in report


# --- the cache


def big(tmp_path: Path, rng: np.random.Generator, **more: NDArray[Any]) -> ArrayFile:
    """Return a source whose file is large enough to be cached."""
    x = rng.integers(0, 256, (2000, 3, 32, 32), np.uint8)
    save(tmp_path / "mine.npz", x=x, y=np.arange(2000) % 10, **more)
    return ArrayFile(path="mine.npz", mean=(0.1, 0.2, 0.3), std=(1.0,), augment="crop_flip")


def kept(root: Path) -> list[Path]:
    return [path for path in data.cache_folder(root).glob("arrayfile-*") if path.is_dir()]


def test_large_arrays_are_mapped_from_one_copy(tmp_path: Path, rng: np.random.Generator) -> None:
    source = big(tmp_path, rng, client=np.arange(2000) % 5)
    arrays, fresh = data.load(source, tmp_path), source.load(tmp_path)
    assert len(kept(tmp_path)) == 1
    assert isinstance(arrays.x_train.base, np.memmap)
    assert not arrays.x_train.flags.writeable
    for name in ("x_train", "y_train", "x_test", "y_test", "client_train"):
        np.testing.assert_array_equal(getattr(arrays, name), getattr(fresh, name))
        assert getattr(arrays, name).dtype == getattr(fresh, name).dtype
    for name in ("classes", "mean", "std", "augment", "client_test"):
        assert getattr(arrays, name) == getattr(fresh, name)


def test_a_file_is_decoded_once(tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    source = big(tmp_path, rng)
    data.load(source, tmp_path)
    monkeypatch.setattr(ArrayFile, "load", lambda *_: pytest.fail("decoded again"))
    data.load(source, tmp_path)
    with pytest.raises(pytest.fail.Exception):
        data.load(ArrayFile(path="mine.npz"), tmp_path)  # other options


def test_workers_that_start_at_once_share_the_copy(tmp_path: Path, rng: np.random.Generator) -> None:
    big(tmp_path, rng)
    code = (
        "from pathlib import Path; import numpy as np; from fedbench import data\n"
        "from fedbench.datasets.arrays import ArrayFile\n"
        "arrays = data.load(ArrayFile(path='mine.npz'), Path())\n"
        "print(arrays.x_train[:, 0, 0, 0].sum(), isinstance(arrays.x_train.base, np.memmap))"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, text=True, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    seen = [worker.communicate()[0].split() for worker in workers]
    total = ArrayFile(path="mine.npz").load(tmp_path).x_train[:, 0, 0, 0].sum()
    assert seen == [[str(total), "True"]] * 3
    assert len(kept(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["x_train.npy", "rest.json", "y_train.npy"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, rng: np.random.Generator, damage: str) -> None:
    source = big(tmp_path, rng)
    data.load(source, tmp_path)
    file = kept(tmp_path)[0] / damage
    file.write_bytes(file.read_bytes()[:-50])
    np.testing.assert_array_equal(data.load(source, tmp_path).x_train, source.load(tmp_path).x_train)
    assert len(kept(tmp_path)) == 1


def test_other_content_is_decoded_again_and_bad_content_never_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    source = big(tmp_path, rng)
    first = data.load(source, tmp_path)
    big(tmp_path, rng)
    assert (data.load(source, tmp_path).x_train != first.x_train).any()
    file = tmp_path / "mine.npz"
    file.write_bytes(file.read_bytes()[:-1000])
    refuses(source, tmp_path, "mine.npz: not a readable")
    assert len(kept(tmp_path)) == 2


def test_a_cache_that_cannot_be_written_to_is_done_without(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = big(tmp_path, rng)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "file" / "cache"))
    assert len(data.load(source, tmp_path).y_train) == 2000
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "elsewhere"))
    data.load(source, tmp_path)
    assert len(kept(tmp_path)) == 1
    assert not (tmp_path / "cache").exists()


def test_a_hash_is_remembered_until_the_file_changes(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, file = big(tmp_path, rng), tmp_path / "mine.npz"
    want = hashlib.sha256(file.read_bytes()).hexdigest()
    assert data.fingerprint(source, tmp_path) == want
    assert not list(tmp_path.glob("cache/*.sha256"))  # the file is too young for its times to tell
    monkeypatch.setattr(data, "_SETTLED", -1.0)
    assert data.fingerprint(source, tmp_path) == want
    with monkeypatch.context() as patched:
        patched.setattr(data, "hash_files", lambda _: pytest.fail("hashed again"))
        assert data.fingerprint(source, tmp_path) == want
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert data.fingerprint(source, tmp_path) == hashlib.sha256(content).hexdigest() != want


def test_small_files_leave_no_cache(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    data.load(Mnist(), tmp_path)
    data.fingerprint(Mnist(), tmp_path)
    assert not data.cache_folder(tmp_path).exists()


# --- the commands


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(data_commands.app, arguments)
    if isinstance(result.exception, InputError):
        raise result.exception
    return result.exit_code, result.output


def test_list_says_what_is_here(tmp_path: Path) -> None:
    sd19(tmp_path)
    code, text = command("list", "--data", str(tmp_path))
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert code == 0
    assert {"mnist", "cifar10", "femnist", "fed_heart", "mnist_mini", "arrays"} <= lines.keys()
    assert lines["mnist"].split()[1] == "missing"
    assert "here     FEMNIST as the FedProto code has it" in lines["femnist"]


def test_where_names_files_and_what_they_are(tmp_path: Path) -> None:
    assert f"data: {tmp_path}\ncache: {tmp_path}/cache (0 MiB)" in command("where", "--data", str(tmp_path))[1]
    _, text = command("where", "cifar10", "--data", str(tmp_path))
    for part in ("c58f30108f718f92721af3b95e74349a", "Krizhevsky", "data_batch_1 (missing)", "licence: none stated"):
        assert part in text
    _, text = command("where", "femnist", "--set", "source=leaf", "--data", str(tmp_path))
    assert "TalwalkarLab/leaf" in text
    sd19(tmp_path)
    assert "and 302 more" in command("where", "femnist", "--data", str(tmp_path))[1]


def test_verify_reads_past_the_cache(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    x = np.concatenate([digits["x_train"], digits["x_test"]])
    save(tmp_path / "femnist.npz", x_train=x[:40], y_train=digits["y_train"], x_test=x[38:], y_test=np.zeros(22, int))
    code, text = command("verify", "--data", str(tmp_path))
    assert code == 0
    assert "mnist: ok, 40 training and 20 test samples of 1x28x28; 10 classes" in text
    assert "2 of the test samples equal a training sample; no training sample of class 10, 11" in text
    assert "mnist_mini: ok" in text
    assert "cifar10" not in text
    file = Mnist().files(tmp_path)[2]
    file.write_bytes(file.read_bytes()[:-1])
    code, text = command("verify", "--data", str(tmp_path))
    assert code == 2
    assert f"fedbench: mnist: {file}: md5" in text
    assert "femnist: ok" in text
    assert command("verify", "cifar10", "--data", str(tmp_path)) == (
        2,
        f"fedbench: cifar10: {tmp_path}/cifar-10-batches-py/data_batch_1: no such file; "
        "see `fedbench data where cifar10`, `fedbench data fetch cifar10`\n",
    )


def test_fetch_says_what_it_needs(tmp_path: Path, digits: dict[str, NDArray[Any]]) -> None:
    assert "mnist: " in command("fetch", "mnist", "--data", str(tmp_path))[1]
    with pytest.raises(InputError, match=r"cifar-10-python\.tar\.gz: no such file"):
        command("fetch", "cifar10", "--data", str(tmp_path))
    for arguments, message in {
        ("mnits",): "did you mean 'mnist'",
        ("femnist", "--set", "source"): "write key=value",
        ("femnist", "--set", "source=lef"): "femnist.source",
        ("arrays",): "arrays.path: is missing",
    }.items():
        with pytest.raises(InputError, match=message):
            command("fetch", *arguments, "--data", str(tmp_path))


# --- the real files


def real(source: data.DataSource, name: str, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Arrays:
    """Return a data set from the user's data; the test is skipped if it is not there."""
    root = data.data_root()
    if not all(file.is_file() for file in source.files(root)):
        pytest.skip(f"needs {name}: {HERE.replace('NAME', name)}")
    monkeypatch.setenv("FEDBENCH_CACHE", str(cache))
    return data.load(source, root)


def test_real_mnist_gives_the_reference_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = real(Mnist(), "mnist", monkeypatch, tmp_path)
    assert arrays.x_train.shape == (60000, 1, 28, 28)
    assert arrays.x_test.shape == (10000, 1, 28, 28)
    partitioner = NWayKShot(n=3, k=100, stdev=2, noise="uniform", k_noise="narrow", assignment="slots", test_shots=40)
    partition = draw(partitioner, arrays, 1234)
    assert partition.card["sha256"]["train"] == "50c5413597fe9f5f5098e17bc28b4a87872f32aa15a4e018ba88fbf306bd3521"
    assert partition.card["sha256"]["test"] == "1f45030393bd5372d134e14a8b557c869549d975f1487b8925c71353465ed058"
    mini = MnistMini().load(Path())
    assert (arrays.x_train[arrays.y_train == 3][0] == mini.x_train[mini.y_train == 3][0]).all()
    x = arrays.x_train / np.float32(255)
    assert (round(float(x.mean()), 4), round(float(x.std()), 4)) == (0.1307, 0.3081)


def test_real_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = real(Cifar10(), "cifar10", monkeypatch, tmp_path)
    assert arrays.x_train.shape == (50000, 3, 32, 32)
    assert arrays.x_test.shape == (10000, 3, 32, 32)
    assert np.bincount(arrays.y_train).tolist() == [5000] * 10
    assert np.bincount(arrays.y_test).tolist() == [1000] * 10
    assert arrays.y_train[:5].tolist() == [6, 9, 9, 4, 1]
    means = arrays.x_train[::7].mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-3)
    draw(NWayKShot(n=5, k=100, stdev=1, noise="uniform", assignment="slots"), arrays, 1234)


def test_real_femnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = real(Femnist(), "femnist", monkeypatch, tmp_path)
    assert set(np.unique(arrays.y_train).tolist()) == set(range(62))
    assert arrays.shape in ((1, 28, 28), (1, 128, 128))
    card = draw(NWayKShot(n=3, k=100, stdev=1, noise="uniform", shortage="shrink"), arrays, 1234).card
    held = np.bincount(np.concatenate(card["per_client"]["classes"]), minlength=62)
    assert ((held > 0).sum(), (held == 1).sum()) == (37, 19)


def test_real_fed_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = real(FedHeart(), "fed_heart", monkeypatch, tmp_path)
    partition = draw(Given(), arrays, 0)
    sizes: Mapping[str, list[int]] = partition.card["per_client"]
    assert [a + b for a, b in zip(sizes["train"], sizes["test"], strict=True)] == [303, 294, 123, 200]
    assert np.isfinite(arrays.x_test).all()
    assert arrays.shape == (13,)
