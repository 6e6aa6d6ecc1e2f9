"""Skewed partitions: feasible or refused at once, skewed as stated, disjoint, covering, and shifted in their inputs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedbench import samples
from fedbench.data import Arrays
from fedbench.errors import InputError
from fedbench.options import make, option_names
from fedbench.partition import (
    PARTITIONERS,
    Dirichlet,
    FeatureShift,
    Given,
    Natural,
    Partition,
    Partitioner,
    Quantity,
    Shards,
    draw,
    draw_for_tuning,
)
from fedbench.settings import MOST


def labelled(y_train: Any, y_test: Any, classes: int, **more: Any) -> Arrays:
    train, test = np.asarray(y_train, np.int64), np.asarray(y_test, np.int64)
    x_train, x_test = np.zeros((len(train), 1), np.uint8), np.zeros((len(test), 1), np.uint8)
    return Arrays(x_train, train, x_test, test, classes, **more)


def balanced(classes: int, train: int, test: int) -> Arrays:
    return labelled(np.tile(np.arange(classes), train), np.tile(np.arange(classes), test), classes)


MNIST_LIKE = balanced(10, 6000, 1000)
CIFAR100_LIKE = balanced(100, 500, 100)


def rows_of(lists: tuple[NDArray[np.int64], ...]) -> list[int]:
    return sorted(np.concatenate(lists).tolist())


# --- field tests 14 and 15: a valid partition or a clear error, at once


@pytest.mark.timeout(60)  # others loop here for ever
@pytest.mark.parametrize("sizes", ["unbalanced", "balanced"])
@pytest.mark.parametrize(
    ("options", "arrays"),
    [
        ({"clients": 100, "alpha": 0.1, "min_samples": 40}, MNIST_LIKE),
        ({"clients": 1000, "alpha": 0.1, "min_samples": 40}, MNIST_LIKE),
        ({"clients": 500, "alpha": 0.3}, CIFAR100_LIKE),
        ({"clients": 10_000, "alpha": 1.0, "min_samples": 1}, MNIST_LIKE),
        ({"clients": 1000, "alpha": 1e-6, "min_samples": 60}, MNIST_LIKE),
    ],
)
def test_what_others_never_finish_is_dealt_at_once(options: dict[str, Any], arrays: Arrays, sizes: Any) -> None:
    partition = draw(Dirichlet(**options, sizes=sizes), arrays, 0)
    assert rows_of(partition.train) == list(range(len(arrays.y_train)))
    assert rows_of(partition.test) == list(range(len(arrays.y_test)))
    assert min(map(len, partition.train)) >= options.get("min_samples", 10)
    assert partition.card["totals"]["test_of_unseen_class"] == 0


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (Dirichlet(alpha=1.0, clients=10_000), "10 for each of 10000 clients is 100000, more than the 60000 .* most 6"),
        (Dirichlet(alpha=1.0, clients=60_001), "partition.clients: 60001 is more than the 60000 training samples"),
        (Quantity(sigma=1.0, clients=2, min_samples=40_000), "partition.min_samples: 40000 .* want min_samples of at"),
        (Shards(clients=10_000, shards=7), "partition.shards: 7 for each of 10000 clients .* at most 8571 clients"),
        (FeatureShift(noise=0.1, clients=60_001), "partition.clients: 60001"),
        (FeatureShift(noise=0.1, clients=MOST), f"partition.clients: {MOST} is more than the 60000 training samples"),
    ],
)
def test_what_cannot_be_is_refused_at_once(partitioner: Partitioner, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        draw(partitioner, MNIST_LIKE, 0)
    assert "\n" not in str(caught.value)


# --- field tests 16 and 17


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sizes", ["unbalanced", "balanced"])
def test_entropy_rises_with_alpha(sizes: Any, seed: int) -> None:
    arrays = labelled(np.random.default_rng(7).integers(0, 10, 20_000), np.arange(2000) % 10, 10)
    drawn = [draw(Dirichlet(alpha=alpha, sizes=sizes), arrays, seed) for alpha in (0.1, 0.5, 1.0, 10.0, 100.0)]
    entropies = [partition.card["totals"]["entropy_bits"] for partition in drawn]
    assert entropies == sorted(set(entropies))
    assert entropies[0] < 1.6
    assert entropies[-1] > 3.25
    for partition in drawn:  # indices refer to the true labels
        of_true = []
        for rows in partition.train:
            shares = np.bincount(arrays.y_train[rows], minlength=10) / len(rows)
            of_true.append(-sum(share * np.log2(share) for share in shares if share))
        assert np.mean(of_true) == pytest.approx(partition.card["totals"]["entropy_bits"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_promises_of_skewed_partitions(data: st.DataObject) -> None:
    """Disjoint, covering, tested on classes that are trained on, and the same again."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    y = np.random.default_rng(seed).integers(0, data.draw(st.integers(1, 6)), 300)
    arrays = labelled(y, y[: data.draw(st.sampled_from([0, 100]))], 7)
    shared: dict[str, Any] = {"clients": st.integers(1, 60)}
    small: dict[str, Any] = {**shared, "min_samples": st.integers(1, 5)}
    partitioner: Partitioner = data.draw(
        st.one_of(
            st.builds(
                Dirichlet, alpha=st.floats(1e-6, 1e6), sizes=st.sampled_from(["unbalanced", "balanced"]), **small
            ),
            st.builds(Shards, shards=st.integers(1, 5), **shared),
            st.builds(Quantity, alpha=st.floats(1e-6, 1e6), **small),
            st.builds(Quantity, sigma=st.floats(0, 50), **small),
            st.builds(FeatureShift, noise=st.floats(0.1, 1), **shared),
        )
    )
    partition = draw(partitioner, arrays, seed)
    held_out = () if len(arrays.y_test) else partition.test
    assert rows_of((*partition.train, *held_out)) == list(range(300))
    pool = arrays.y_test if len(arrays.y_test) else arrays.y_train
    assert min(map(len, partition.train)) > 0
    if len(arrays.y_test):
        assert rows_of(partition.test) == list(range(100))
        for train, test in zip(partition.train, partition.test, strict=True):
            assert set(pool[test].tolist()) <= set(arrays.y_train[train].tolist())
    else:
        unseen = [
            sum(label not in set(arrays.y_train[train].tolist()) for label in pool[test].tolist())
            for train, test in zip(partition.train, partition.test, strict=True)
        ]
        assert partition.card["per_client"]["test_of_unseen_class"] == unseen
    assert draw(partitioner, arrays, seed).hash == partition.hash
    assert json.loads(json.dumps(partition.card, allow_nan=False)) == partition.card


def test_test_samples_follow_training_samples() -> None:
    partition = draw(Dirichlet(alpha=0.5, clients=10, sizes="balanced"), MNIST_LIKE, 3)
    for train, test in zip(partition.train, partition.test, strict=True):
        there, here = (np.bincount(MNIST_LIKE.y_train[rows], minlength=10) / len(rows) for rows in (train, test))
        np.testing.assert_allclose(here, there, atol=0.01)
    alike = draw(Dirichlet(alpha=0.5, clients=10, test="iid"), MNIST_LIKE, 3)
    assert {len(rows) for rows in alike.test} == {1000}
    assert alike.card["totals"]["test_of_unseen_class"] > 0
    assert alike.card["options"]["test"] == "iid"
    with pytest.raises(InputError, match="'iid' wants a data set with test samples"):
        draw(Dirichlet(alpha=0.5, clients=2, test="iid"), balanced(2, 100, 0), 3)


def test_test_samples_of_a_class_that_nobody_trains_on_are_left_out() -> None:
    partition = draw(Shards(clients=2), labelled([0, 1] * 10, [0, 1, 2] * 4, 3), 0)
    assert partition.card["totals"]["test"] == 8
    assert partition.card["totals"]["test_of_unseen_class"] == 0


def test_balanced_clients_are_equal_and_unbalanced_ones_are_not() -> None:
    even = draw(Dirichlet(alpha=0.1, clients=7, sizes="balanced"), MNIST_LIKE, 0)
    assert {len(rows) for rows in even.train} == {8571, 8572}
    odd = draw(Dirichlet(alpha=0.1, clients=7), MNIST_LIKE, 0)
    assert max(map(len, odd.train)) > 2 * min(map(len, odd.train))


def test_moved_samples_are_counted() -> None:
    card = draw(Dirichlet(alpha=0.1, clients=1000, min_samples=40), MNIST_LIKE, 0).card
    assert card["draws"] == 10
    assert 0 < card["moved"] < 60_000
    assert draw(Dirichlet(alpha=100, clients=10), MNIST_LIKE, 0).card["moved"] == 0


def test_shards_give_few_classes() -> None:
    partition = draw(Shards(clients=100, shards=2), MNIST_LIKE, 5)
    assert {len(rows) for rows in partition.train} == {600}
    assert max(map(len, partition.card["per_client"]["classes"])) <= 2
    many = draw(Shards(clients=3, shards=7), balanced(4, 100, 50), 5)
    assert max(map(len, many.train)) - min(map(len, many.train)) <= 7


@pytest.mark.parametrize("law", [{"sigma": 1.5}, {"alpha": 0.3}])
def test_quantity_changes_sizes_and_not_labels(law: dict[str, Any]) -> None:
    partition = draw(Quantity(clients=10, min_samples=200, **law), MNIST_LIKE, 1)
    sizes = [len(rows) for rows in partition.train]
    assert min(sizes) >= 200
    assert max(sizes) > 5 * min(sizes)
    assert partition.card["totals"]["entropy_bits"] > 3.2
    test = [len(rows) for rows in partition.test]
    np.testing.assert_allclose(np.divide(test, sizes), 1 / 6, rtol=0.35)


def test_quantity_without_spread_is_equal_sizes() -> None:
    assert {len(rows) for rows in draw(Quantity(clients=7, sigma=0.0), MNIST_LIKE, 0).train} == {8571, 8572}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quantity", {}, "partition: a partition by quantity wants one of alpha"),
        ("quantity", {"alpha": 1.0, "sigma": 1.0}, "wants one of alpha"),
        ("feature_shift", {}, "wants noise or rotation above 0"),
        ("dirichlet", {}, "partition.alpha: is missing"),
        ("dirichlet", {"alpha": 0}, "partition.alpha"),
        ("dirichlet", {"alpha": 1, "min_samples": 0}, "partition.min_samples"),
        ("dirichlet", {"alpha": 1, "sizes": "even"}, "partition.sizes"),
        ("dirichlet", {"alpha": 1, "rotation": 181}, "partition.rotation"),
        ("shards", {"shards": 0}, "partition.shards"),
        ("natural", {"clients": 0}, "partition.clients"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make(PARTITIONERS[name], options, "partition")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("partitioner", "start"),
    [
        (Dirichlet(alpha=0.3, validation=0.1), "3461f6f852e5ea1a"),
        (Dirichlet(alpha=0.3, sizes="balanced"), "7f77d2f1141a516f"),
        (Dirichlet(alpha=0.1, clients=1000, min_samples=40), "c9f4fc234b874dd5"),
        (Shards(), "b7f6af989b37ca0a"),
        (Quantity(sigma=1.0), "d5296563f20a0336"),
        (Quantity(alpha=1.0), "cef2319fcc959d76"),
        (FeatureShift(noise=0.5), "79d744e2ea098bfa"),
    ],
)
def test_partitions_stay_what_they_are(partitioner: Partitioner, start: str) -> None:
    """Stored results name these: a change here needs a new protocol version."""
    assert draw(partitioner, MNIST_LIKE, 1234).hash[:16] == start


def test_the_page_on_partitions_has_every_rule_and_option() -> None:
    page = (Path(__file__).parents[1] / "docs" / "partitions.md").read_text(encoding="utf-8")
    for name, kind in PARTITIONERS.items():
        missing = [word for word in (name, *option_names(kind)) if f"`{word}`" not in page]
        assert not missing


# --- shifted inputs


def images(test: int = 40) -> Arrays:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (200 + test, 2, 6, 8)).astype(np.uint8)
    y = np.arange(200 + test) % 4
    return Arrays(x[:200], y[:200], x[200:], y[200:], 4, mean=(0.4, 0.5), std=(0.2, 0.25))


def pools(partition: Partition, arrays: Arrays) -> tuple[samples.Samples, samples.Samples]:
    """Return the samples as they are and without the shift."""
    about = (torch.float64, torch.device("cpu"))
    return (
        samples.from_arrays(arrays, partition, *about),
        samples.from_arrays(arrays, replace(partition, shift=None), *about),
    )


def moved(partition: Partition, arrays: Arrays, client: int, part: str) -> Tensor:
    shifted, plain = pools(partition, arrays)
    return (shifted.x - plain.x)[getattr(shifted, part)[client]]


def test_noise_has_each_clients_deviation_in_training_and_testing() -> None:
    arrays = images()
    partition = draw(FeatureShift(noise=2.0, clients=5, validation=0.2), arrays, 3)
    assert sorted(partition.card["noise"]) == [0.0, 0.5, 1.0, 1.5, 2.0]
    for client, deviation in enumerate(partition.card["noise"]):
        for part in ("train", "validation", "test"):
            added = moved(partition, arrays, client, part)
            assert float(added.std()) == pytest.approx(deviation, rel=0.15)
            assert float(added.mean()) == pytest.approx(0, abs=0.2 * deviation + 1e-12)


def test_a_sample_has_the_same_noise_while_tuning() -> None:
    arrays = images()
    partitioner = FeatureShift(noise=2.0, clients=3)
    final, tuning = draw(partitioner, arrays, 3), draw_for_tuning(partitioner, arrays, 3, 0.25)
    noise: dict[int, Tensor] = {}
    for partition in (final, tuning):
        for part in ("train", "validation"):
            for client, rows in enumerate(getattr(partition, part)):
                for row, added in zip(rows.tolist(), moved(partition, arrays, client, part), strict=True):
                    assert torch.equal(noise.setdefault(row, added), added)
    assert len(noise) == 200


def test_rotation_turns_images_and_leaves_the_middle_client_alone() -> None:
    arrays = images()
    square = replace(arrays, x_train=arrays.x_train[..., :6], x_test=arrays.x_test[..., :6])
    partition = draw(FeatureShift(rotation=90.0, clients=3), square, 1)
    assert sorted(partition.card["rotation"]) == [-90.0, 0.0, 90.0]
    shifted, plain = pools(partition, square)
    for client, degrees in enumerate(partition.card["rotation"]):
        for part in ("train", "test"):
            mine = getattr(shifted, part)[client]
            turned = torch.rot90(plain.x[mine], round(degrees / 90), (2, 3))
            torch.testing.assert_close(shifted.x[mine], turned, atol=1e-6, rtol=0)


def test_what_turns_in_from_outside_is_black() -> None:
    arrays = images()
    bright = replace(arrays, x_train=np.full_like(arrays.x_train, 255))
    shifted, _ = pools(draw(FeatureShift(rotation=45.0, clients=2), bright, 1), bright)
    corner = shifted.x[shifted.train[0][0], :, 0, 0]
    torch.testing.assert_close(corner, shifted.fill)
    middle = shifted.x[shifted.train[0][0], :, 3, 4]
    torch.testing.assert_close(middle, torch.tensor([(1 - 0.4) / 0.2, (1 - 0.5) / 0.25], dtype=torch.float64))


def test_shift_comes_on_top_of_any_skew_and_is_part_of_the_hash(tmp_path: Path) -> None:
    arrays = images()
    plain, shifted = (draw(Dirichlet(alpha=1.0, clients=4, noise=noise), arrays, 2) for noise in (0.0, 0.5))
    assert rows_of(plain.train[:1]) == rows_of(shifted.train[:1])
    assert plain.hash != shifted.hash
    shifted.save(tmp_path / "stored")
    back = Partition.load(tmp_path / "stored")
    assert back.shift is not None
    assert shifted.shift is not None
    np.testing.assert_array_equal(back.shift, shifted.shift)
    with pytest.raises(InputError, match=r"index\.npz: is of a partition that shifts inputs"):
        draw(Given(path="stored/index.npz"), arrays, 0, tmp_path)
    with pytest.raises(InputError, match=r"partition\.rotation: samples of shape \(1,\) are no images"):
        draw(Shards(clients=2, rotation=10.0), balanced(2, 10, 2), 0)


# --- natural clients


def writers() -> Arrays:
    names = np.repeat([5, 2, 9, 7], [10, 1, 6, 3])
    return labelled(np.arange(20) % 3, [], 3, client_train=names)


def test_natural_clients_are_those_of_the_data() -> None:
    arrays = writers()
    partition = draw(Natural(test_fraction=0.0), arrays, 0)
    assert [rows.tolist() for rows in partition.train] == [
        [10],
        list(range(10)),
        [17, 18, 19],
        list(range(11, 17)),
    ]
    assert partition.hash == draw(Given(test_fraction=0.0), arrays, 0).hash
    assert draw(Natural(), arrays, 0).hash == draw(Given(), arrays, 0).hash


def test_small_natural_clients_are_left_out_and_counted() -> None:
    card = draw(Natural(min_samples=3, test_fraction=0.0), writers(), 0).card
    assert card["per_client"]["train"] == [10, 3, 6]
    assert (card["named"], card["too_small"]) == (4, 1)
    some = {tuple(draw(Natural(clients=2), writers(), seed).card["per_client"]["train"]) for seed in range(20)}
    assert len(some) > 3
    with pytest.raises(InputError, match=r"clients: 4, but the data set names 4 clients, of whom 3 have .*samples 2"):
        draw(Natural(clients=4, min_samples=2), writers(), 0)
    with pytest.raises(InputError, match="of whom 0 have"):
        draw(Natural(min_samples=11), writers(), 0)
    with pytest.raises(InputError, match="does not name clients of its own"):
        draw(Natural(), balanced(2, 10, 2), 0)


def test_natural_clients_keep_their_test_samples() -> None:
    arrays = labelled([0, 1, 0, 1], [0, 1, 1], 2, client_train=np.array([3, 3, 8, 8]), client_test=np.array([8, 3, 8]))
    partition = draw(Natural(), arrays, 0)
    assert [rows.tolist() for rows in partition.test] == [[1], [0, 2]]
