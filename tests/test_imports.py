"""Partitions that other packages made: PFLlib's files, read without running them, and what flwr-datasets deals."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedbench import data
from fedbench.data import Arrays
from fedbench.datasets.pfllib import PFLlib, read_client
from fedbench.errors import InputError
from fedbench.partition import Flower, Natural, content, draw


def client(seed: int, count: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(count, 1, 4, 4)).astype(np.float32), "y": rng.integers(0, 3, count)}


def save(path: Path, held: object) -> Path:
    """Write a file as PFLlib does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, data=held)  # type: ignore[arg-type]  # as PFLlib does
    return path


def save_pickle(path: Path, pickled: bytes) -> Path:
    """Write an archive with the given pickle where PFLlib's has one."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|O", "fortran_order": False, "shape": ()})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", head.getvalue() + pickled)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, sizes in (("train", (9, 4, 6)), ("test", (3, 2, 1))):
        for number, size in enumerate(sizes):
            save(tmp_path / "MNIST" / part / f"{number}.npz", client(10 * number + size, size))
    (tmp_path / "MNIST" / "config.json").write_text(json.dumps({"num_clients": 3, "num_classes": 5, "alpha": 0.1}))
    return tmp_path


def test_pfllibs_clients_come_out_as_they_went_in(folder: Path) -> None:
    source = PFLlib(path="MNIST")
    arrays = data.load(source, folder)
    partition = draw(Natural(), arrays, 0)
    assert arrays.classes == 5
    for number, (train, test) in enumerate(zip((9, 4, 6), (3, 2, 1), strict=True)):
        for rows, x, y, size in (
            (partition.train[number], arrays.x_train, arrays.y_train, train),
            (partition.test[number], arrays.x_test, arrays.y_test, test),
        ):
            want = client(10 * number + size, size)
            np.testing.assert_array_equal(x[rows], want["x"])
            np.testing.assert_array_equal(y[rows], want["y"])
    before = data.fingerprint(source, folder)
    save(folder / "MNIST" / "train" / "1.npz", client(0, 4))
    assert data.fingerprint(source, folder) != before
    assert source.describe(folder).title.endswith("MNIST")


def test_ten_clients_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in range(11):
        for part in ("train", "test"):
            held = {"x": np.full((2, 3), number, np.float32), "y": np.zeros(2, np.int64)}
            save(tmp_path / part / f"{number}.npz", held)
    arrays = data.load(PFLlib(path="."), tmp_path)
    assert arrays.client_train is not None
    np.testing.assert_array_equal(arrays.x_train[:, 0], arrays.client_train)


@pytest.mark.parametrize("protocol", [0, 2, 3, 4])
@pytest.mark.parametrize("kind", ["<f4", ">f8", "|u1", "<i4"])
def test_every_way_in_which_numpy_has_pickled_arrays(protocol: int, kind: str, tmp_path: Path) -> None:
    x = np.asfortranarray(np.arange(12).reshape(4, 3).astype(kind))
    held = np.array({"x": x, "y": np.arange(4, dtype=np.int32)}, dtype=object)
    pickled = pickle.dumps(held, protocol=protocol)
    for module in (b"numpy._core.multiarray", b"numpy.core.multiarray"):
        named = pickled if protocol == 4 else pickled.replace(b"numpy._core.multiarray", module)
        found = read_client(save_pickle(tmp_path / "0.npz", named))
        np.testing.assert_array_equal(found["x"], x)
        assert found["x"].dtype == {"<i4": np.float32, ">f8": np.float64}.get(kind, np.dtype(kind))
        assert found["y"].tolist() == [0, 1, 2, 3]
        assert found["y"].dtype == np.int64


class Evil:
    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """Loaded as PFLlib loads it, each of these makes a file."""
    trace = tmp_path / "trace"
    command = f"open({str(trace)!r}, 'w').close()"
    attacks: list[object] = [
        Evil(os.system, f"touch {trace}"),
        Evil(exec, command),
        {"x": Evil(eval, command), "y": np.zeros(1, np.int64)},
        {"x": np.array([Evil(exec, command)], dtype=object), "y": np.zeros(1, np.int64)},
        Evil(getattr, np.zeros(1), "tofile"),
        Evil(pickle.loads, pickle.dumps(Evil(exec, command))),
    ]
    for attack in attacks:
        path = save(tmp_path / "0.npz", np.array(attack, dtype=object))
        with pytest.raises(InputError, match=r"0\.npz: refused: it names \S+, which no plain array needs") as caught:
            read_client(path)
        assert "\n" not in str(caught.value)
        assert not trace.exists()
    save(tmp_path / "0.npz", np.array(attacks[1], dtype=object))
    with np.load(tmp_path / "0.npz", allow_pickle=True) as held:
        held["data"]
    assert trace.exists()


def test_stand_ins_cannot_be_changed_by_a_file(tmp_path: Path) -> None:
    """A pickle may set the state of whatever it names; of a class that would be for good."""
    changed = b"cnumpy\nndarray\n(N}S'array'\nS'gone'\nstb."
    with pytest.raises(InputError):
        read_client(save_pickle(tmp_path / "0.npz", changed))
    encode = b"c_codecs\nencode\n(N}S'x'\nS'gone'\nstb."
    with pytest.raises(InputError):
        read_client(save_pickle(tmp_path / "0.npz", encode))
    assert read_client(save(tmp_path / "0.npz", client(0, 2)))["y"].tolist() == client(0, 2)["y"].tolist()


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"x": np.zeros((2, 3))}, "not what PFLlib writes, a dict of the arrays x and y"),
        ([np.zeros(3), np.zeros(3)], "not what PFLlib writes"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(3, np.int64)}, r"x is \(2, 3\), y \(3,\) of int64"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(2)}, "want a whole number for each row"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2, np.int64)}, "an array of type '<U1'"),
        ({"x": ([1, 2], [3, 4]), "y": np.zeros(2, np.int64)}, "not what PFLlib writes"),
        (np.zeros(3), r"data is an array of shape \(3,\)"),
    ],
)
def test_files_that_hold_something_else(held: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_client(save(tmp_path / "0.npz", held))
    assert "\n" not in str(caught.value)


def test_damaged_files_are_named(folder: Path) -> None:
    first = folder / "MNIST" / "train" / "0.npz"
    whole = first.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"junk"):
        first.write_bytes(broken)
        with pytest.raises(InputError, match=r"train/0\.npz: not readable"):
            data.load(PFLlib(path="MNIST"), folder)
    first.write_bytes(whole)
    (folder / "MNIST" / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json: not the config"):
        data.load(PFLlib(path="MNIST"), folder)
    (folder / "MNIST" / "test" / "2.npz").unlink()
    with pytest.raises(InputError, match="client 2 has a file in one of train and test only"):
        data.load(PFLlib(path="MNIST"), folder)
    with pytest.raises(InputError, match=r"elsewhere/train/0\.npz"):
        data.load(PFLlib(path="elsewhere"), folder)


# --- flwr-datasets


def have_flwr_datasets() -> bool:
    try:
        metadata.version("flwr-datasets")
    except metadata.PackageNotFoundError:
        return False
    return True


needed = pytest.mark.skipif(
    not have_flwr_datasets(), reason="wants flwr-datasets: pip install 'fedbench-suite[flwr-datasets]'"
)


def labelled(train: int = 600, test: int = 120) -> Arrays:
    y = np.arange(train + test) % 4
    x = np.zeros((train + test, 1), np.uint8)
    return Arrays(x[:train], y[:train], x[train:], y[train:], 4, client_train=np.arange(train) // 100)


@pytest.mark.skipif(have_flwr_datasets(), reason="flwr-datasets is installed")
def test_without_flwr_datasets_there_is_one_line() -> None:
    partitioner = Flower(partitioner="IidPartitioner", options={"num_partitions": 3})
    with pytest.raises(InputError, match=r"pip install 'fedbench-suite\[flwr-datasets\]'"):
        content(partitioner)
    with pytest.raises(InputError, match="flwr-datasets"):
        draw(partitioner, labelled(), 0)


@needed
@pytest.mark.parametrize(
    ("name", "options", "clients"),
    [
        ("IidPartitioner", {"num_partitions": 5}, 5),
        ("DirichletPartitioner", {"num_partitions": 6, "alpha": 0.5}, 6),
        ("ShardPartitioner", {"num_partitions": 6, "num_shards_per_partition": 2}, 6),
        ("PathologicalPartitioner", {"num_partitions": 4, "num_classes_per_partition": 2}, 4),
        ("LinearPartitioner", {"num_partitions": 4}, 4),
        ("NaturalIdPartitioner", {"partition_by": "client"}, 6),
    ],
)
def test_partitioners_of_flwr_datasets(name: str, options: dict[str, Any], clients: int) -> None:
    partitioner = Flower(partitioner=name, options=options)
    partition = draw(partitioner, labelled(), 3)
    rows = np.concatenate(partition.train)
    assert partition.clients == clients
    assert len(set(rows.tolist())) == len(rows)
    assert set(rows.tolist()) <= set(range(600))
    assert sorted(np.concatenate(partition.test).tolist()) == list(range(120))
    assert partition.card["totals"]["test_of_unseen_class"] == 0
    assert partition.card["flwr_datasets"] == metadata.version("flwr-datasets")
    assert content(partitioner) == f"flwr-datasets {metadata.version('flwr-datasets')}"
    assert draw(partitioner, labelled(), 3).hash == partition.hash


@needed
def test_the_partition_seed_is_the_partitioners() -> None:
    options = {"num_partitions": 6, "alpha": 0.5}
    hashes = {
        draw(Flower(partitioner="DirichletPartitioner", options=options), labelled(), seed).hash for seed in (1, 2)
    }
    assert len(hashes) == 2
    fixed = Flower(partitioner="DirichletPartitioner", options={**options, "seed": 7})
    same = [draw(fixed, labelled(), seed) for seed in (1, 2)]
    for one, other in zip(same[0].train, same[1].train, strict=True):
        np.testing.assert_array_equal(one, other)


@needed
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DirichletPartition", {}, "unknown partitioner 'DirichletPartition'; did you mean 'DirichletPartitioner'"),
        ("DirichletPartitioner", {"num_partition": 3}, "unknown option 'num_partition'; did you mean 'num_partitions'"),
        ("DirichletPartitioner", {"num_partitions": 3}, "partition.options: DirichletPartitioner of flwr-datasets: "),
        ("IidPartitioner", {"num_partitions": 0}, "partition.options: IidPartitioner of flwr-datasets: "),
        (
            "DirichletPartitioner",
            {"num_partitions": 100, "alpha": 0.01, "min_partition_size": 6},
            "partition.options: DirichletPartitioner of flwr-datasets: ",
        ),
    ],
)
def test_what_flwr_datasets_refuses_is_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        draw(Flower(partitioner=name, options=options), labelled(), 0)
    assert "\n" not in str(caught.value)
