"""Data sets: reading, checking and identifying them, with the shipped digits and with files as users have them."""

import gzip
import runpy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedbench import data, samples
from fedbench.data import About, Arrays, DataSource
from fedbench.datasets.arrays import ArrayFile
from fedbench.datasets.mnist_mini import MnistMini
from fedbench.errors import InputError
from fedbench.options import make
from fedbench.partition import draw
from fedbench.partitioners.iid import Iid

GOLDEN = Path(__file__).parent / "golden"
MAKER = Path(__file__).parents[1] / "datasets" / "make_mnist_mini.py"


def small(**changes: Any) -> Arrays:
    arrays = Arrays(
        x_train=np.arange(24, dtype=np.float32).reshape(6, 4),
        y_train=np.array([0, 1, 2, 0, 1, 2]),
        x_test=np.ones((3, 4), np.float32),
        y_test=np.array([0, 1, 2]),
        classes=3,
    )
    return replace(arrays, **changes)


def save(path: Path, **arrays: NDArray[Any]) -> Path:
    np.savez(path, allow_pickle=True, **arrays)
    return path


def test_samples_are_made_of_mapped_arrays_without_a_warning() -> None:
    arrays = small()
    for values in (arrays.x_train, arrays.y_train, arrays.x_test, arrays.y_test):
        values.setflags(write=False)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # warnings are errors here, but torch warns but once
    try:
        one = samples.first(arrays, torch.float32, torch.device("cpu"))
        whole = samples.from_arrays(arrays, draw(Iid(clients=2), arrays, 0), torch.float32, torch.device("cpu"))
    finally:
        torch.set_warn_always(before)
    assert one.x.tolist() == [[0, 1, 2, 3]]
    assert sorted(whole.x[:, 0].tolist()) == [0, 1, 1, 1, 4, 8, 12, 16, 20]


def test_mnist_mini_is_balanced_real_mnist() -> None:
    arrays = data.load(MnistMini(), Path("nowhere"))
    assert arrays.x_train.shape == (4000, 1, 28, 28)
    assert arrays.x_test.shape == (2000, 1, 28, 28)
    assert arrays.x_train.dtype == np.uint8
    assert arrays.shape == (1, 28, 28)
    assert np.bincount(arrays.y_train).tolist() == [400] * 10
    assert np.bincount(arrays.y_test).tolist() == [200] * 10
    assert np.bincount(arrays.y_train[:100]).tolist() == [10] * 10
    # The stored digits keep their place in MNIST's own files, whose labels the reference case holds.
    held = data.read_npz(MnistMini().files(Path())[0])
    labels = data.read_npz(GOLDEN / "partition_mnist" / "arrays.npz")
    for part in ("train", "test"):
        rows = held[f"row_{part}"].astype(np.int64)
        assert len(set(rows.tolist())) == len(rows)
        np.testing.assert_array_equal(labels[f"{part}_labels"][rows], held[f"y_{part}"])
    # MNIST's usual mean and deviation fit them: normalised pixels have mean near 0 and deviation near 1.
    x = (arrays.x_train / 255 - arrays.mean[0]) / arrays.std[0]
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02


def test_mnist_mini_is_small_and_says_where_it_is_from() -> None:
    (file,) = MnistMini().files(Path())
    assert file.stat().st_size < 1_500_000
    assert "LeCun" in MnistMini.about.citation
    assert MnistMini.about.licence


def test_mnist_mini_can_be_made_again() -> None:
    raw = data.data_root() / "MNIST" / "raw"
    if not raw.is_dir():
        pytest.skip(
            "needs MNIST: set FEDBENCH_DATA to a folder filled by torchvision.datasets.MNIST(folder, download=True)"
        )
    made = runpy.run_path(str(MAKER))["make"](raw)
    held = data.read_npz(MnistMini().files(Path())[0])
    assert made.keys() == held.keys()
    for name in made:
        np.testing.assert_array_equal(made[name], held[name])


def test_make_mnist_mini_reads_plain_and_compressed_files(tmp_path: Path) -> None:
    read_idx = runpy.run_path(str(MAKER))["read_idx"]
    content = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(6))
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    for name in ("plain", "packed"):
        assert read_idx(tmp_path, name).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_data_root_is_the_given_folder_else_the_environment_else_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", "elsewhere")
    assert data.data_root(Path("here")) == Path("here")
    assert data.data_root() == Path("elsewhere")
    monkeypatch.delenv("FEDBENCH_DATA")
    assert data.data_root() == Path("data")


def test_fingerprint_follows_content_and_not_names(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", x=np.zeros((2, 1)), y=np.zeros(2, int))
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes())
    save(tmp_path / "c.npz", x=np.ones((2, 1)), y=np.zeros(2, int))
    a, b, c = (data.fingerprint(ArrayFile(path=f"{name}.npz"), tmp_path) for name in "abc")
    assert a == b
    assert a != c
    assert len(a) == 64


def test_fingerprint_depends_on_where_one_file_ends(tmp_path: Path) -> None:
    names = ("ab", "c", "a", "bc")
    for name in names:
        (tmp_path / name).write_text(name)
    ab, c, a, bc = (tmp_path / name for name in names)
    assert data.hash_files([ab, c]) != data.hash_files([a, bc])


@pytest.mark.parametrize("use", [data.fingerprint, data.load])
def test_missing_file_is_named_with_the_folder(use: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mine\.npz: no such file; put it there.*data \(now "):
        use(ArrayFile(path="mine.npz"), tmp_path)


def test_truncated_and_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole.npz", x=np.random.default_rng(0).random((500, 8)), y=np.zeros(500, int))
    content = whole.read_bytes()
    middle = len(content) // 2
    bad = {
        "half": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
        "empty": b"",
        "text": b"x,y\n1,2\n",
    }
    for name, wrong in bad.items():
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(InputError, match=rf"{name}: not a readable \.npz") as caught:
            data.load(ArrayFile(path=name), tmp_path)
        assert "\n" not in str(caught.value)
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"single\.npy: not a readable"):
        data.read_npz(tmp_path / "single.npy")


def test_python_objects_are_never_unpickled(tmp_path: Path) -> None:
    save(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1, int))
    with pytest.raises(InputError, match=r"objects\.npz: not a readable"):
        data.load(ArrayFile(path="objects.npz"), tmp_path)


def test_arrays_from_a_split_file(tmp_path: Path) -> None:
    x = np.arange(2 * 3 * 4 * 2, dtype=np.uint8).reshape(2, 3, 4, 2)
    save(tmp_path / "d.npz", x_train=x, y_train=np.array([0, 3], np.uint8), x_test=x[:1], y_test=np.array([1]))
    arrays = data.load(ArrayFile(path="d.npz", channels="last", mean=(0.1, 0.2), std=(1, 2)), tmp_path)
    assert arrays.shape == (2, 3, 4)
    assert arrays.x_train[1, 1, 2, 3] == x[1, 2, 3, 1]
    assert arrays.x_train.dtype == np.uint8
    assert arrays.classes == 4
    assert arrays.y_train.dtype == np.int64
    assert arrays.y_test.tolist() == [1]
    assert arrays.mean == (0.1, 0.2)
    first = data.load(ArrayFile(path="d.npz"), tmp_path)
    assert first.shape == (3, 4, 2)


def test_arrays_from_one_table_with_clients(tmp_path: Path) -> None:
    save(tmp_path / "d.npz", x=np.arange(6).reshape(3, 2), y=np.array([1, 0, 1]), client=np.array([5, 5, 7]))
    arrays = data.load(ArrayFile(path=str(tmp_path / "d.npz")), Path("unused"))
    assert arrays.x_train.dtype == np.float32
    assert arrays.x_train.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert len(arrays.y_test) == len(arrays.x_test) == 0
    assert arrays.client_train is not None
    assert arrays.client_train.tolist() == [5, 5, 7]


def test_grey_images_get_a_channel(tmp_path: Path) -> None:
    save(tmp_path / "d.npz", x=np.zeros((2, 5, 6), np.uint8), y=np.zeros(2, int))
    assert data.load(ArrayFile(path="d.npz"), tmp_path).shape == (1, 5, 6)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(1)}, "holds a; want x_train"),
        ({"x": np.zeros((1, 1)), "y": np.zeros(1)}, ": y is float64; want whole numbers"),
        ({"x": np.array([["a"]]), "y": np.zeros(1, int)}, ": x is <U1; want numbers"),
        ({"x": np.zeros((1, 1)), "y": np.zeros(1, int), "x_test": np.zeros((1, 1))}, "want x_train"),
        ({"x": np.zeros((2, 1)), "y": np.array([0, -1])}, ": y has labels -1 to 0; want whole numbers from 0"),
        ({"x": np.array([[0.0], [np.nan]]), "y": np.zeros(2, int)}, "not finite .* in row 1"),
        ({"x": np.array([[0.0], [1e300]]), "y": np.zeros(2, int)}, ": x has numbers beyond those of float32 in row 1"),
        (
            {"x": np.zeros((1, 1)), "y": np.zeros(1, int), "client": np.array([-1])},
            ": client has -1; want whole numbers",
        ),
        ({"x": np.zeros((0, 1)), "y": np.zeros(0, int)}, ": x is empty"),
        (
            {"x": np.zeros((3, 1)), "y": np.zeros(2, int)},
            r": y has shape \(2,\); want \(3,\), one label for each row of x$",
        ),
        ({"x": np.zeros((2, 1)), "y": np.zeros(2, int), "client": np.zeros(1, int)}, ": client has shape"),
        ({"x": np.zeros((1, 1)), "y": np.zeros(1, int), "clients": np.zeros(1)}, "'clients'; did you mean 'client'"),
        ({"x_train": np.zeros((1, 1)), "y_train": np.zeros(1, int), "x": np.zeros(1)}, "unknown array 'x'; "),
        ({"x": np.float64(1), "y": np.zeros(1, int)}, "x is a single number"),
        ({"x": np.zeros((1, 1)), "y": np.array([10**9])}, "labels up to 1000000000; want them numbered from 0"),
        ({"y": np.zeros(1, int)}, "holds y; want x_train"),
    ],
)
def test_files_that_are_no_data_set(arrays: dict[str, NDArray[Any]], message: str, tmp_path: Path) -> None:
    save(tmp_path / "d.npz", **arrays)
    with pytest.raises(InputError, match=message) as caught:
        data.load(ArrayFile(path="d.npz"), tmp_path)
    assert str(tmp_path / "d.npz") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": np.array([0, 1, 3])}, "y_test has labels 0 to 3; want 0 to 2"),
        ({"y_train": np.zeros(6, np.int32)}, "y_train is int32; labels are int64"),
        ({"y_train": np.zeros((6, 1), np.int64)}, r"y_train has shape \(6, 1\)"),
        ({"x_test": np.ones((3, 5), np.float32)}, r"samples of x_test have shape \(5,\), of x_train \(4,\)"),
        ({"x_test": np.full((3, 4), np.inf)}, "x_test is not finite .* in row 0"),
        ({"x_train": np.zeros((6, 4), np.int64)}, "x_train is int64; want uint8 or floating"),
        ({"x_train": np.zeros(6)}, r"x_train has shape \(6,\); want \(samples, ...\)"),
        ({"mean": (0.0, 1.0)}, r"mean is \[0.0, 1.0\]; want 1 or 4"),
        ({"std": (0.0,)}, "std is .*; want numbers above 0"),
        ({"augment": "crop_flip"}, "'crop_flip' wants images"),
        ({"client_train": np.zeros(6, np.int64)}, "client_test is missing"),
        ({"client_train": np.zeros(6)}, "client_train has shape .* float64"),
    ],
)
def test_arrays_that_are_no_data_set(changes: dict[str, Any], message: str) -> None:
    data.validate(small(), "mine")
    with pytest.raises(InputError, match=f"^mine: .*{message}"):
        data.validate(small(**changes), "mine")


def test_a_source_without_files_is_checked_too() -> None:
    @dataclass(frozen=True)
    class Noise(DataSource):
        about: ClassVar[About] = About("noise", "made up", "none")
        labels: int = 3

        def files(self, _root: Path, /) -> list[Path]:
            return []

        def load(self, _root: Path, /) -> Arrays:
            return small(classes=self.labels)

    assert data.load(Noise(), Path()).classes == 3
    with pytest.raises(InputError, match=r"^Noise: y_train has labels 0 to 2; want 0 to 1"):
        data.load(Noise(labels=2), Path())


def test_a_folder_is_no_file_of_arrays(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r": is a folder; want a file in the folder with your data"):
        data.fingerprint(ArrayFile(path="."), tmp_path)


def test_options_are_checked_as_in_a_suite() -> None:
    assert make(ArrayFile, {"path": "a.npz", "mean": [0.5]}, "dataset").mean == (0.5,)
    with pytest.raises(InputError, match=r"dataset\.channels"):
        make(ArrayFile, {"path": "a.npz", "channels": "middle"}, "dataset")
    with pytest.raises(InputError, match=r"dataset\.path"):
        make(ArrayFile, {}, "dataset")


def test_a_plugin_that_cannot_read_its_file_is_bad_input(tmp_path: Path) -> None:
    class Broken(DataSource):
        about = About("title", "source", "licence")

        def files(self, root: Path, /) -> list[Path]:
            return [root / "file.csv"]

        def load(self, root: Path, /) -> Arrays:
            raise IndexError("too many indices")

    (tmp_path / "file.csv").write_text("")
    with pytest.raises(InputError, match=r"file\.csv: Broken cannot read it: IndexError: too many indices"):
        data.load(Broken(), tmp_path)
