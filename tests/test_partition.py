"""Partitions: the published draws, number for number, and what every partition promises."""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedbench import data
from fedbench.data import Arrays
from fedbench.datasets.mnist_mini import MnistMini
from fedbench.errors import InputError
from fedbench.options import make
from fedbench.partition import (
    Given,
    Iid,
    NWayKShot,
    Partition,
    Partitioner,
    content,
    draw,
    draw_for_tuning,
)
from fedbench.settings import MOST

GOLDEN = Path(__file__).parent / "golden"
CASES = [(name, i) for name, count in (("mnist", 3), ("cifar10", 3), ("femnist", 2)) for i in range(count)]


def labelled(y_train: Sequence[int] | NDArray[Any], y_test: Sequence[int] | NDArray[Any], **more: Any) -> Arrays:
    """Return a data set of which only the labels matter."""
    train, test = np.asarray(y_train, np.int64), np.asarray(y_test, np.int64)
    classes = 1 + int(max(train.max(), test.max(initial=0)))
    x_train, x_test = np.zeros((len(train), 1), np.uint8), np.zeros((len(test), 1), np.uint8)
    return Arrays(x_train, train, x_test, test, **{"classes": classes, **more})


def balanced(classes: int, train: int, test: int) -> Arrays:
    return labelled(np.tile(np.arange(classes), train), np.tile(np.arange(classes), test))


def golden(name: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]], Arrays]:
    """Return a reference case, its arrays, and the labels it was computed on."""
    case = json.loads((GOLDEN / f"partition_{name}" / "case.json").read_text())
    held = data.read_npz(GOLDEN / f"partition_{name}" / "arrays.npz")
    if name != "femnist":
        return case, held, labelled(held["train_labels"], held["test_labels"])
    # FEMNIST is a layout only: a pool of clients * slot samples of each of the 62 classes, class after class.
    train, test = (np.repeat(np.arange(62), 20 * width) for width in (110, 15))
    return case, held, labelled(train, test)


def official(name: str, **options: Any) -> NWayKShot:
    base: dict[str, Any] = {"k": 100, "noise": "uniform", "assignment": "slots"}
    if name == "mnist":
        base |= {"k_noise": "narrow", "test_shots": 40}
    return NWayKShot(**base | options)


def mini() -> Arrays:
    return data.load(MnistMini(), Path())


def all_rows(*parts: tuple[NDArray[np.int64], ...]) -> NDArray[np.int64]:
    return np.concatenate([rows for part in parts for rows in part])


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_official_draws_number_for_number(name: str, setting: int) -> None:
    case, held, arrays = golden(name)
    want = case["settings"][setting]
    partitioner = official(name, n=want["ways"], k=want["shots"], stdev=want["stdev"], clients=want["num_users"])
    partition = draw(partitioner, arrays, want["seed"])
    assert partition.card["n"] == want["n"] == held[f"s{setting}/n"].tolist()
    assert partition.card["k"] == want["k"] == held[f"s{setting}/k"].tolist()
    assert partition.card["per_client"]["classes"] == want["classes"]
    assert partition.card["sha256"]["train"] == want["sha256_train"]
    assert partition.card["sha256"]["test"] == want["sha256_test"]
    for part, lists in (("train", partition.train), ("test", partition.test)):
        np.testing.assert_array_equal(all_rows(lists), held[f"s{setting}/{part}_index"])
        start = held[f"s{setting}/{part}_start"]
        assert [len(rows) for rows in lists] == np.diff(start).tolist()
    assert partition.card["totals"]["train"] == want["train_total"]
    assert partition.card["totals"]["test"] == want["test_total"]


def test_published_hashes_of_the_mnist_partition() -> None:
    _, _, arrays = golden("mnist")
    card = draw(official("mnist", n=3, stdev=2), arrays, 1234).card
    assert card["n"] == [5, 5, 4, 3, 2, 2, 2, 3, 5, 3, 5, 3, 4, 4, 5, 4, 2, 2, 4, 4]
    assert card["k"] == [99, 99, 99, 99, 100, 99, 100, 100, 99, 99, 100, 99, 99, 100, 99, 100, 99, 99, 99, 100]
    assert card["per_client"]["classes"][:3] == [[0, 1, 4, 7, 9], [0, 1, 2, 6, 8], [0, 3, 6, 8]]
    assert card["sha256"]["train"] == "50c5413597fe9f5f5098e17bc28b4a87872f32aa15a4e018ba88fbf306bd3521"
    assert card["sha256"]["test"] == "1f45030393bd5372d134e14a8b557c869549d975f1487b8925c71353465ed058"


@pytest.mark.parametrize(
    ("n", "stdev", "total"), [(3, 2, 71), (4, 2, 78), (5, 2, 98), (3, 1, 59), (4, 1, 79), (5, 1, 99), (4, 3, 86)]
)
def test_known_sums_of_n(n: int, stdev: int, total: int) -> None:
    drawn, _, _ = official("cifar10", n=n, stdev=stdev).shots(10, 1234)
    assert drawn.sum() == total


def test_different_settings_with_the_same_range_draw_the_same_classes() -> None:
    a = official("mnist", n=3, stdev=3).shots(10, 1234)
    b = official("mnist", n=4, stdev=2).shots(10, 1234)
    assert a[0].tolist() == b[0].tolist()
    assert a[2] == b[2]


def test_classes_of_femnist_hardly_overlap() -> None:
    _, _, held = official("femnist", n=3, stdev=1).shots(62, 1234)
    holders = np.bincount([label for labels in held for label in labels], minlength=62)
    assert np.count_nonzero(holders) == 37
    assert np.count_nonzero(holders == 1) == 19


def test_slots_are_refused_when_they_run_over() -> None:
    _, _, arrays = golden("mnist")
    assert draw(official("mnist", n=3, stdev=2, clients=22), arrays, 1234).clients == 22
    with pytest.raises(InputError, match=r"23 slots of test_shots 40 want 920 samples of class 5, available 892"):
        draw(official("mnist", n=3, stdev=2, clients=23), arrays, 1234)
    with pytest.raises(InputError, match=r"50 slots of train_shots_max 110 want 5500 .* class 5, available 5421"):
        draw(official("mnist", n=3, stdev=2, clients=50, test_shots=1), arrays, 1234)


def test_slots_may_not_overlap() -> None:
    _, _, arrays = golden("mnist")
    with pytest.raises(InputError, match=r"partition\.k: .* more than a slot of partition\.train_shots_max 99"):
        draw(official("mnist", n=3, stdev=2, train_shots_max=99), arrays, 1234)


def test_slots_for_small_k_are_a_prefix_of_those_for_large_k() -> None:
    _, _, arrays = golden("mnist")
    small, large = (draw(official("mnist", n=2, stdev=0, k=k), arrays, 0) for k in (10, 20))
    for few, many in zip(small.train, large.train, strict=True):
        assert set(few.tolist()) < set(many.tolist())
    assert all_rows(small.test).tolist() == all_rows(large.test).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"partition\.k.*0"),
        ({"n": 0}, r"partition\.n.*0"),
        ({"n": 11}, r"partition\.n: 11 is more than the 10 classes"),
        ({"stdev": -1}, r"partition\.stdev"),
        ({"stdev": 1, "noise": "uniform", "k_noise": "narrow"}, r"partition\.stdev: 1 leaves no k from 20 to 19"),
        ({"stdev": 1.5, "noise": "uniform"}, r"partition\.stdev: 1\.5 .* whole number"),
        ({"n": 10, "stdev": 0, "noise": "uniform"}, r"partition\.n: 10 .* leaves no n from 10 to 9"),
        ({"k": 2, "stdev": 4, "noise": "uniform"}, r"partition\.k: 2 with stdev 4 goes down to -1"),
        ({"clients": 0}, r"partition\.clients"),
        ({"test_shots": -1}, r"partition\.test_shots"),
        ({"validation": 1.0}, r"partition\.validation"),
        ({"noise": "normal"}, r"partition\.noise"),
        ({"assignment": "slot"}, r"partition\.assignment"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        draw(NWayKShot(**{"n": 3, "k": 20} | options), balanced(10, 400, 200), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(InputError, match=f"partition_seeds: {seed}; want 0 to 4294967295"):
        draw(Iid(clients=2), balanced(2, 4, 2), seed)


def test_narrow_noise_with_stdev_1_is_refused_on_mnist() -> None:
    _, _, arrays = golden("mnist")
    with pytest.raises(InputError, match=r"partition\.stdev: 1 leaves no k .* k_noise 'wide'"):
        draw(official("mnist", n=3, stdev=1), arrays, 1234)


def test_a_suite_checks_the_same_options() -> None:
    assert make(NWayKShot, {"n": 3, "k": 20, "stdev": 2}, "partition") == NWayKShot(n=3, k=20, stdev=2)
    for wrong in ({"n": 3, "k": True}, {"n": 3}, {"n": 3, "k": 20, "shot": 1}, {"n": 3.5, "k": 20}):
        with pytest.raises(InputError, match=r"^partition"):
            make(NWayKShot, wrong, "partition")


def test_gaussian_noise_has_the_stated_mean_and_bounds() -> None:
    n, k, held = NWayKShot(n=5, k=100, stdev=2, clients=4000).shots(10, 0)
    assert n.min() == 2
    assert n.max() == 10
    assert abs(n.mean() - 5) < 0.15
    assert abs(k.mean() - 100) < 0.15
    assert abs(k.std() - 2) < 0.15
    assert all(labels == sorted(set(labels)) and len(labels) == count for labels, count in zip(held, n, strict=True))
    low, few, _ = NWayKShot(n=1, k=1, stdev=3, clients=1000).shots(4, 0)
    assert (low.min(), low.max(), few.min()) == (1, 4, 1)


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_without_deviation_all_clients_are_alike(noise: Any) -> None:
    n, k, _ = NWayKShot(n=3, k=7, noise=noise).shots(10, 5)
    assert set(n.tolist()) == {3}
    assert set(k.tolist()) == {7}


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
@pytest.mark.parametrize("n", [3, 4, 5])
def test_mnist_mini_can_be_dealt_to_20_clients(noise: Any, n: int) -> None:
    arrays = mini()
    partitioner = NWayKShot(n=n, k=20, stdev=2, noise=noise, test_shots=10)
    for seed in [1234, *range(20)]:
        partition = draw(partitioner, arrays, seed)
        assert partition.clients == 20
        assert partition.card["shrunk"] == []


def test_no_client_can_hold_more_of_mnist_mini_than_there_is() -> None:
    """With every client holding every class, 20 of each of 400, and 10 of each of 200, is exactly what exists."""
    partition = draw(NWayKShot(n=10, k=20, test_shots=10), mini(), 0)
    assert sorted(all_rows(partition.train).tolist()) == list(range(4000))
    assert sorted(all_rows(partition.test).tolist()) == list(range(2000))


def test_a_shortage_is_refused_with_class_wanted_and_available() -> None:
    with pytest.raises(InputError, match=r"2000 training samples of class 0 wanted, available 400"):
        draw(NWayKShot(n=10, k=100), mini(), 0)
    with pytest.raises(InputError, match=r"800 test samples of class 0 wanted, available 200"):
        draw(NWayKShot(n=10, k=20, test_shots=40), mini(), 0)
    with pytest.raises(InputError, match=r"6 training and test samples of class 0 wanted, available 5"):
        draw(NWayKShot(n=2, k=2, clients=2, test_shots=1), labelled([0, 1] * 5, []), 0)


def test_shrinking_shares_a_class_evenly_and_says_so() -> None:
    arrays = labelled([0] * 50 + [1] * 8, [0] * 50 + [1] * 50)
    partition = draw(NWayKShot(n=2, k=4, clients=3, shortage="shrink"), arrays, 0)
    assert [len(rows) for rows in partition.train] == [7, 7, 6]
    assert partition.card["per_client"]["samples"] == [[4, 3], [4, 3], [4, 2]]
    assert partition.card["shrunk"] == [{"samples": "training", "class": 1, "wanted": 12, "available": 8}]


def test_shrinking_leaves_small_wishes_whole() -> None:
    arrays = labelled([0] * 200 + [1] * 200, [0, 1] * 100)
    partition = draw(NWayKShot(n=2, k=60, stdev=30, clients=5, test_shots=0, shortage="shrink"), arrays, 4)
    assert partition.card["k"] == [12, 41, 78, 70, 26]
    assert partition.card["per_client"]["samples"] == [[got, got] for got in (12, 41, 61, 60, 26)]


def test_shrinking_takes_no_class_from_a_client() -> None:
    with pytest.raises(InputError, match=r"6 training samples of class 1 wanted, available 2; a holder would get none"):
        draw(NWayKShot(n=2, k=2, clients=3, shortage="shrink"), labelled([0] * 50 + [1] * 2, [0, 1]), 0)


def test_shrinking_may_leave_clients_without_test_samples_and_counts_them() -> None:
    arrays = labelled([0, 1] * 50, [0, 1])
    card = draw(NWayKShot(n=2, k=2, clients=3, shortage="shrink"), arrays, 0).card
    assert card["per_client"]["test"] == [2, 0, 0]
    assert card["totals"]["clients_without_test"] == 2
    assert [entry["samples"] for entry in card["shrunk"]] == ["test", "test"]


def test_without_test_arrays_test_samples_come_out_of_training() -> None:
    arrays = labelled(np.tile(np.arange(4), 50), [])
    partition = draw(NWayKShot(n=3, k=6, clients=5, test_shots=2), arrays, 1)
    assert partition.card["test_pool"] == "train"
    assert [len(rows) for rows in partition.test] == [6] * 5
    rows = all_rows(partition.train, partition.test)
    assert len(set(rows.tolist())) == len(rows) == 5 * 3 * 8
    shrunk = draw(NWayKShot(n=4, k=12, clients=5, test_shots=3, shortage="shrink"), arrays, 1)
    assert shrunk.card["totals"]["train"] == 4 * 40
    assert shrunk.card["totals"]["test"] == 4 * 10
    with pytest.raises(InputError, match=r"partition\.assignment: 'slots' wants .* test samples"):
        draw(official("cifar10", n=3, k=6), arrays, 1)


def test_demand_takes_other_samples_with_another_seed() -> None:
    a, b = (draw(NWayKShot(n=10, k=5, clients=2), mini(), seed) for seed in (0, 1))
    assert set(all_rows(a.train).tolist()) != set(all_rows(b.train).tolist())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_promises_of_every_partition(data: st.DataObject) -> None:
    """Rows are disjoint, labels are the true ones, sizes are as drawn, and the draw repeats."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    labels = np.random.default_rng(seed).integers(0, 6, 600)
    arrays = labelled(labels, labels[: data.draw(st.sampled_from([0, 300]))], classes=6)
    partitioner: Partitioner = data.draw(
        st.one_of(
            st.builds(
                NWayKShot,
                n=st.integers(1, 6),
                k=st.integers(1, 30),
                stdev=st.floats(0, 4),
                clients=st.integers(1, 20),
                test_shots=st.integers(0, 10),
                shortage=st.just("shrink"),
                validation=st.sampled_from([0.0, 0.2, 0.9]),
            ),
            st.builds(Iid, clients=st.integers(1, 100), validation=st.sampled_from([0.0, 0.3])),
        )
    )
    partition = draw(partitioner, arrays, seed)
    pool = arrays.y_test if len(arrays.y_test) else arrays.y_train
    rows = all_rows(partition.train, partition.validation, *([] if len(arrays.y_test) else [partition.test]))
    assert len(set(rows.tolist())) == len(rows)
    assert len(set(all_rows(partition.test).tolist())) == partition.card["totals"]["test"]
    assert min(len(mine) for mine in partition.train) > 0
    for i in range(partition.clients):
        both = np.concatenate([partition.train[i], partition.validation[i]])
        if partitioner.validation and len(both) > 1:
            assert len(partition.validation[i]) == min(max(1, round(partitioner.validation * len(both))), len(both) - 1)
        if isinstance(partitioner, NWayKShot):
            assert len(set(arrays.y_train[both].tolist())) == partition.card["n"][i]
            assert set(pool[partition.test[i]].tolist()) <= set(arrays.y_train[both].tolist())
    assert draw(partitioner, arrays, seed).hash == partition.hash == partition.card["hash"]


def test_validation_is_cut_from_every_class_in_proportion() -> None:
    whole = draw(NWayKShot(n=4, k=20, clients=4), balanced(4, 100, 100), 7)
    cut = draw(NWayKShot(n=4, k=20, clients=4, validation=0.25), balanced(4, 100, 100), 7)
    for rows, kept, taken in zip(whole.train, cut.train, cut.validation, strict=True):
        assert sorted(rows.tolist()) == sorted([*kept.tolist(), *taken.tolist()])
        assert np.bincount(taken % 4).tolist() == [5, 5, 5, 5]
    assert all_rows(whole.test).tolist() == all_rows(cut.test).tolist()
    assert all(len(rows) == 0 for rows in whole.validation)


def test_validation_of_the_smallest_clients() -> None:
    arrays = labelled([0, 1], [0, 1])
    single = draw(Iid(clients=2, validation=0.5), arrays, 0)
    assert [len(rows) for rows in single.train] == [1, 1]
    assert [len(rows) for rows in single.validation] == [0, 0]
    double = draw(Iid(clients=1, validation=0.01), arrays, 0)
    assert [len(double.train[0]), len(double.validation[0])] == [1, 1]
    most = draw(Iid(clients=1, validation=0.99), arrays, 0)
    assert [len(most.train[0]), len(most.validation[0])] == [1, 1]


def test_tuning_has_the_same_clients_without_test_samples() -> None:
    for arrays in (balanced(4, 60, 20), balanced(4, 60, 0)):
        partitioner = NWayKShot(n=2, k=10, clients=4, test_shots=3)
        final = draw(partitioner, arrays, 5)
        tuning = draw_for_tuning(partitioner, arrays, 5, 0.25)
        assert [len(rows) for rows in tuning.validation] == [5] * 4
        assert not any(map(len, tuning.test))
        for train, held, whole in zip(tuning.train, tuning.validation, final.train, strict=True):
            assert sorted([*train, *held]) == sorted(whole)
        card = tuning.card
        assert (card["hash"], card["test_pool"]) == (tuning.hash, final.card["test_pool"])
        assert (card["totals"]["test"], card["per_client"]["validation"]) == (0, [5] * 4)


def test_tuning_keeps_validation_samples_that_are_there(tmp_path: Path) -> None:
    arrays = balanced(2, 10, 4)
    drawn = draw_for_tuning(Iid(clients=2, validation=0.5), arrays, 5, 0.1)
    assert [len(rows) for rows in drawn.validation] == [5, 5]
    rows = {"train": [[0, 1], [4]], "validation": [[2, 3], [5]], "test": [[0], [1]]}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    listed = draw_for_tuning(Given(path="rows.json"), arrays, 5, 0.1, tmp_path)
    assert [rows.tolist() for rows in listed.validation] == [[2, 3], [5]]
    with pytest.raises(InputError, match="no client has a second training sample"):
        draw_for_tuning(Iid(clients=20), arrays, 5, 0.5)


def test_iid_covers_the_data_in_equal_parts() -> None:
    partition = draw(Iid(clients=7), mini(), 3)
    assert sorted(all_rows(partition.train).tolist()) == list(range(4000))
    assert sorted(all_rows(partition.test).tolist()) == list(range(2000))
    assert {len(rows) for rows in partition.train} == {571, 572}
    assert partition.card["totals"]["entropy_bits"] == pytest.approx(np.log2(10), abs=0.02)


def test_iid_without_test_arrays_holds_out_a_fraction() -> None:
    arrays = labelled([0, 1] * 50, [])
    partition = draw(Iid(clients=5, test_fraction=0.2, validation=0.25), arrays, 3)
    assert partition.card["per_client"]["test"] == [4] * 5
    assert partition.card["per_client"]["validation"] == [4] * 5
    assert sorted(all_rows(partition.train, partition.validation, partition.test).tolist()) == list(range(100))


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (Iid(clients=4001), r"partition\.clients: 4001 is more than the 4000 training samples"),
        (NWayKShot(n=2, k=40, clients=1000), "training samples of class"),
        (NWayKShot(n=2, k=40, clients=1000, assignment="slots"), "slots of train_shots_max 110"),
        (NWayKShot(n=5, k=1, clients=4000, shortage="shrink"), "training samples of class"),
        (NWayKShot(n=5, k=1, clients=MOST), f"partition.clients: {MOST} is more than the 4000 training samples"),
        (NWayKShot(n=5, k=1, stdev=1e300), "samples of class"),
    ],
)
def test_what_is_not_feasible_is_refused_at_once(partitioner: Partitioner, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(InputError, match=message):
        draw(partitioner, mini(), 0)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    "partitioner",
    [
        NWayKShot(n=3, k=5, stdev=1, clients=10_000, validation=0.2, test_shots=2),
        NWayKShot(n=3, k=5, noise="uniform", clients=10_000, assignment="slots", train_shots_max=6, test_shots=2),
        Iid(clients=10_000, validation=0.1),
    ],
)
def test_ten_thousand_clients_take_seconds(partitioner: Partitioner) -> None:
    arrays = labelled(np.tile(np.arange(5), 60_000), np.tile(np.arange(5), 20_000))
    start = time.perf_counter()
    partition = draw(partitioner, arrays, 0)
    assert time.perf_counter() - start < 5
    assert partition.clients == 10_000
    assert min(len(rows) for rows in partition.train) > 0


@pytest.mark.parametrize("partitioner", [NWayKShot(n=3, k=20, stdev=2, test_shots=10, validation=0.1), Iid()])
def test_a_draw_depends_on_its_seed_only(partitioner: Partitioner) -> None:
    arrays = mini()
    first = draw(partitioner, arrays, 5)
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 (the state that must not matter)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    second = draw(partitioner, arrays, 5)
    assert first.hash == second.hash
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]  # noqa: NPY002
    assert draw(partitioner, arrays, 6).hash != first.hash


@pytest.mark.parametrize(
    ("partitioner", "start"),
    [
        (NWayKShot(n=3, k=20, stdev=2, test_shots=10, validation=0.1), "689d26929744d051"),
        (NWayKShot(n=3, k=100, stdev=2, noise="uniform", shortage="shrink"), "c03b4d6057f0f385"),
        (Iid(validation=0.1), "eaf9959d6634d06b"),
    ],
)
def test_partitions_stay_what_they_are(partitioner: Partitioner, start: str) -> None:
    """Stored results name these: a change here needs a new protocol version."""
    assert draw(partitioner, mini(), 1234).hash[:16] == start


def test_a_draw_depends_on_labels_and_not_on_pixels() -> None:
    arrays = mini()
    blank = labelled(arrays.y_train, arrays.y_test)
    assert draw(Iid(), arrays, 0).hash == draw(Iid(), blank, 0).hash


def test_the_card_counts_what_a_reader_must_know() -> None:
    # Client 0 trains on class 0 only and is tested on class 1 twice; client 1 has no test samples.
    arrays = labelled([0, 0, 1, 1, 1, 1], [0, 1, 1, 0], client_train=np.array([0, 0, 1, 1, 1, 1]))
    arrays = labelled(
        arrays.y_train, arrays.y_test, client_train=arrays.client_train, client_test=np.array([0, 0, 0, 0])
    )
    card = draw(Given(), arrays, 8).card
    assert card["name"] == "given"
    assert card["seed"] == 8
    assert card["options"] == {"validation": 0.0, "path": None, "test_fraction": 0.2}
    assert card["per_client"] == {
        "train": [2, 4],
        "validation": [0, 0],
        "test": [4, 0],
        "classes": [[0], [1]],
        "samples": [[2], [4]],
        "entropy_bits": [0.0, 0.0],
        "test_of_unseen_class": [2, 0],
    }
    assert card["totals"] == {
        "train": 6,
        "validation": 0,
        "test": 4,
        "clients": 2,
        "clients_without_test": 1,
        "test_of_unseen_class": 2,
        "clients_with_unseen_class": 1,
        "entropy_bits": 0.0,
    }
    assert json.loads(json.dumps(card, allow_nan=False)) == card


def test_entropy_is_that_of_the_training_labels() -> None:
    arrays = labelled([0, 0, 0, 1, 2, 3, 2, 3], [], client_train=np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    card = draw(Given(test_fraction=0), arrays, 0).card
    assert card["per_client"]["entropy_bits"] == pytest.approx([0.811278124, 1.0])
    assert card["per_client"]["test"] == [0, 0]


def test_the_hash_tells_clients_and_parts_apart() -> None:
    rows = [np.array([0, 1]), np.array([2])]
    moved = [np.array([0]), np.array([1, 2])]
    empty = [np.array([], np.int64)] * 2
    parts = [(rows, empty, empty), (moved, empty, empty), (empty, rows, empty), (empty, empty, rows)]
    hashes = {Partition(tuple(a), tuple(b), tuple(c), {}).hash for a, b, c in parts}
    assert len(hashes) == 4


def test_a_stored_partition_comes_back_whole(tmp_path: Path) -> None:
    partition = draw(NWayKShot(n=3, k=20, stdev=2, test_shots=10, validation=0.1), mini(), 1234)
    left_over = tmp_path / "deep" / "store.part"
    left_over.mkdir(parents=True)
    (left_over / "junk").write_text("of a killed run")
    partition.save(tmp_path / "deep" / "store")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["store"]
    back = Partition.load(tmp_path / "deep" / "store")
    assert back.hash == partition.hash
    assert back.card == partition.card
    for part in ("train", "validation", "test"):
        for mine, its in zip(getattr(partition, part), getattr(back, part), strict=True):
            assert its.dtype == np.int64
            np.testing.assert_array_equal(mine, its)


def test_a_damaged_stored_partition_is_refused(tmp_path: Path) -> None:
    partition = draw(Iid(clients=3), balanced(3, 10, 5), 0)
    for name in ("gone", "cut", "card", "other"):
        partition.save(tmp_path / name)
    (tmp_path / "gone" / "index.npz").unlink()
    index = tmp_path / "cut" / "index.npz"
    index.write_bytes(index.read_bytes()[:-40])
    (tmp_path / "card" / "card.json").write_text("{")
    draw(Iid(clients=3), balanced(3, 10, 5), 1).save(tmp_path / "new")
    (tmp_path / "new" / "index.npz").rename(tmp_path / "other" / "index.npz")
    for name in ("gone", "cut", "card", "other", "never"):
        with pytest.raises(InputError, match=f"{name}: the stored partition is damaged"):
            Partition.load(tmp_path / name)


def write(path: Path, **parts: Any) -> str:
    path.write_text(json.dumps(parts))
    return path.name


def test_given_rows_from_json(tmp_path: Path) -> None:
    name = write(tmp_path / "mine.json", train=[[4, 0], [1]], test=[[1], []], validation=[[], [2]])
    partition = draw(Given(path=name), labelled([0, 1, 1, 0, 0], [0, 1]), 0, tmp_path)
    assert [rows.tolist() for rows in partition.train] == [[4, 0], [1]]
    assert [rows.tolist() for rows in partition.validation] == [[], [2]]
    assert [rows.tolist() for rows in partition.test] == [[1], []]
    assert partition.card["options"]["path"] == "mine.json"
    assert partition.card["totals"]["clients_without_test"] == 1


def test_given_rows_from_a_stored_partition(tmp_path: Path) -> None:
    arrays = mini()
    first = draw(NWayKShot(n=3, k=20, stdev=2, test_shots=10, validation=0.2), arrays, 4)
    first.save(tmp_path / "stored")
    again = draw(Given(path="stored/index.npz"), arrays, 0, tmp_path)
    assert again.hash == first.hash
    draw(Iid(clients=4), arrays, 4).save(tmp_path / "whole")
    cut = draw(Given(path="whole/index.npz", validation=0.1), arrays, 0, tmp_path)
    assert [len(rows) for rows in cut.validation] == [100] * 4


def test_given_rows_without_test_are_held_out(tmp_path: Path) -> None:
    name = write(tmp_path / "mine.json", train=[[0, 1, 2, 3], [4, 5]])
    partition = draw(Given(path=name, test_fraction=0.25), labelled([0] * 6, []), 0, tmp_path)
    assert partition.card["per_client"]["train"] == [3, 1]
    assert partition.card["per_client"]["test"] == [1, 1]
    for wrong, message in (([[0], [6]], "row 6 is not among the 6"), ([], "no clients")):
        write(tmp_path / "wrong.json", train=wrong)
        with pytest.raises(InputError, match=rf"wrong\.json: {message}"):
            draw(Given(path="wrong.json"), labelled([0] * 6, []), 0, tmp_path)
    with pytest.raises(InputError, match=r"lists no test samples, but the data set has some"):
        draw(Given(path=name), labelled([0] * 6, [0]), 0, tmp_path)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": [[0, 1], [1]], "test": [[], []]}, "training sample 1 is given out 2 times"),
        ({"train": [[0], [9]], "test": [[], []]}, "row 9 is not among the 4 training samples"),
        ({"train": [[0], [-1]], "test": [[], []]}, "row -1 is not among"),
        ({"train": [[0], []], "test": [[], []]}, "client 1 of 2 has no training samples"),
        ({"train": [[0], [1]], "test": [[0], [0]]}, "test sample 0 is given out 2 times"),
        ({"train": [[0], [1]], "test": [[0]]}, "1 client in test, 2 in train"),
        ({"train": [], "test": []}, "no clients"),
        ({"train": [[0.5]], "test": [[]]}, "not lists of rows"),
        ({"train": 3, "test": [[]]}, "not lists of rows"),
        ({"train": [[0, True], [2]], "test": [[], []]}, "not lists of rows .*not true or false"),
        ({"test": [[]]}, "'train' is missing"),
        ({"train": [[0]], "tset": [[]]}, "unknown key 'tset'; did you mean 'test'"),
        ({"train": [[0]], "test": [[]], "validation": [[1]]}, r"partition\.validation: 0\.5, but"),
    ],
)
def test_given_rows_that_make_no_partition(parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    name = write(tmp_path / "mine.json", **parts)
    validation = 0.5 if "validation" in parts else 0.0
    with pytest.raises(InputError, match=message) as caught:
        draw(Given(path=name, validation=validation), labelled([0, 1, 0, 1], [0, 1]), 0, tmp_path)
    assert "mine.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_given_files_that_cannot_be_read(tmp_path: Path) -> None:
    arrays = labelled([0, 1], [])
    with pytest.raises(InputError, match=r"no\.json"):
        draw(Given(path="no.json"), arrays, 0, tmp_path)
    (tmp_path / "bad.json").write_text("[1, 2")
    with pytest.raises(InputError, match=r"bad\.json: not lists of rows"):
        draw(Given(path="bad.json"), arrays, 0, tmp_path)
    (tmp_path / "list.json").write_text("[[0], [1]]")
    with pytest.raises(InputError, match=r"list\.json: want a mapping"):
        draw(Given(path="list.json"), arrays, 0, tmp_path)
    (tmp_path / "twice.json").write_text('{"train": [[0]], "train": [[1]]}')
    with pytest.raises(InputError, match=r"twice\.json: .*key 'train' comes twice"):
        draw(Given(path="twice.json"), arrays, 0, tmp_path)
    np.savez(tmp_path / "bad.npz", train_index=np.arange(2), train_start=np.array([0, 1, 5]))
    with pytest.raises(InputError, match=r"bad\.npz: .*train_start does not divide train_index"):
        draw(Given(path="bad.npz"), arrays, 0, tmp_path)


def test_the_data_sets_own_clients() -> None:
    arrays = labelled([0, 1, 0, 1, 0], [], client_train=np.array([9, 2, 9, 9, 2]))
    partition = draw(Given(test_fraction=0.0), arrays, 0)
    assert [rows.tolist() for rows in partition.train] == [[1, 4], [0, 2, 3]]
    with pytest.raises(InputError, match=r"^partition\.path: is missing"):
        draw(Given(), labelled([0, 1], []), 0)
    stranger = labelled([0, 1], [0], client_train=np.array([1, 1]), client_test=np.array([4]))
    with pytest.raises(InputError, match="client 4 has test samples but no training samples"):
        draw(Given(), stranger, 0)


def test_a_given_file_is_identified_by_its_content(tmp_path: Path) -> None:
    write(tmp_path / "a.json", train=[[0]])
    write(tmp_path / "b.json", train=[[0]])
    write(tmp_path / "c.json", train=[[1]])
    a, b, c = (content(Given(path=f"{name}.json"), tmp_path) for name in "abc")
    assert a == b != c
    assert content(Iid()) is None
    assert content(Given()) is None
    with pytest.raises(InputError, match=r"partition\.path: no file .*d\.json"):
        content(Given(path="d.json"), tmp_path)
