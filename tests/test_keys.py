"""Random numbers that are hashes: the same everywhere, and random enough."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fedbench import keys

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published generator: add the constant, then mix (Steele, Lea and Flood 2014)."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("key", [0, 1, -1, 1234567, keys.derive(3, "order", 7)])
def test_bits_are_the_stream_of_splitmix64(key: int) -> None:
    wanted = [splitmix64((key + n * 0x9E3779B97F4A7C15) & MASK) for n in range(5)]
    assert [number & MASK for number in keys.bits(key, 5).tolist()] == wanted


def test_first_numbers_of_splitmix64_are_the_published_ones() -> None:
    # The output for seed 1234567 on which public implementations of prng.di.unimi.it/splitmix64.c agree.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [number & MASK for number in keys.bits(1234567, 4).tolist()] == published


def test_a_key_given_as_a_tensor_is_the_same_key() -> None:
    key = keys.derive(5, "step", 2, 0, 11)
    assert torch.equal(keys.bits(key, 100), keys.bits(torch.tensor(key), 100))


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert torch.equal(keys.bits(9, 50)[:20], keys.bits(9, 20))


def test_any_difference_gives_another_key() -> None:
    parts: list[tuple[int | str, ...]] = [(), (0,), (0, 0), (1,), (-2,), (1, 2), (2, 1), (12,), ("a",), ("b",)]
    parts += [("a", "b"), ("ab",), ("b", "a"), (0, "a"), ("a", 0), ("1",), (1, "order", 0, 1), (1, "order", 1, 0)]
    made = [keys.derive(*p) for p in parts]
    assert len(set(made)) == len(parts)
    assert all(-(2**63) <= key < 2**63 for key in made)


def test_a_key_can_be_made_in_two_parts() -> None:
    for parts in ((3, "step", 1, 7), (-4, "order", 0), ("x",), (2**63, 5)):
        for cut in range(len(parts) + 1):
            assert keys.extend(keys.derive(*parts[:cut]), *parts[cut:]) == keys.derive(*parts)


def test_many_keys_of_a_run_are_all_different() -> None:
    runs = itertools.product(range(3), ("order", "step"), range(10), range(10), range(10))
    assert len({keys.derive(*run) for run in runs}) == 3 * 2 * 1000


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    drawn = keys.uniform(keys.derive("uniform"), 100_000)
    assert drawn.dtype == torch.float64
    assert 0 <= float(drawn.min()) < 1e-3
    assert 1 - 1e-3 < float(drawn.max()) < 1
    counts = torch.histc(drawn, 20, 0, 1)
    # Chi squared with 19 degrees of freedom: above 43.8 once in a thousand.
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 43.8


def test_neighbouring_keys_are_not_correlated() -> None:
    a, b = (keys.uniform(keys.derive(0, "step", client), 20_000) for client in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.03
    serial = torch.corrcoef(torch.stack([a[:-1], a[1:]]))[0, 1]
    assert abs(float(serial)) < 0.03


@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_permutation_holds_every_place_once(n: int) -> None:
    assert sorted(keys.permutation(3, n).tolist()) == list(range(n))


def test_all_orders_of_three_are_equally_likely() -> None:
    orders = [tuple(keys.permutation(keys.derive("p", i), 3).tolist()) for i in range(3000)]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert sum((count - 500) ** 2 / 500 for count in counts) < 20.5  # 5 degrees of freedom: once in a thousand


def test_bits_under_vmap_are_those_of_each_key_alone() -> None:
    some = torch.tensor([keys.derive(i) for i in range(4)])

    def draw(key: Tensor) -> Tensor:
        return keys.bits(key, 8)

    assert torch.equal(torch.func.vmap(draw)(some), torch.stack([keys.bits(int(key), 8) for key in some]))


def test_keys_do_not_depend_on_the_process() -> None:
    code = "from fedbench import keys; print(keys.derive(1, 'order', 2), keys.bits(7, 3).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{keys.derive(1, 'order', 2)} {keys.bits(7, 3).tolist()}"
