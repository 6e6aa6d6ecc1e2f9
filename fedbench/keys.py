"""Random numbers without a generator: every draw is a hash of what it is for.

A key is a 64-bit integer made of (seed, purpose, round, client, ...).  The n-th number under a key is a hash of the key
and n, so that no draw depends on which client, cell, method or engine ran before it.  The hash is the finaliser of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) on a Weyl sequence, the same in plain Python and on tensors of any
device, and under `torch.func.vmap`.
"""

import zlib

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """Return the int64 with the bits of `value`, since torch has no arithmetic on unsigned 64-bit integers."""
    return value - (1 << 64) if value >> 63 else value


def derive(*parts: int | str) -> int:
    """Return the key (a signed 64-bit integer) of a sequence of numbers and words; any difference gives another key."""
    return extend(0, *parts)


def extend(key: int, *parts: int | str) -> int:
    """Return the key of a longer sequence, given that of its beginning."""
    key &= _MASK
    for part in parts:
        number = zlib.crc32(part.encode()) | 1 << 63 if isinstance(part, str) else part
        key = _mix((key ^ (number & _MASK)) * _GAMMA + _GAMMA)
    return _signed(key)


def bits(key: int | Tensor, n: int, device: torch.device | str | None = None) -> Tensor:
    """Return n hashed integers (int64, all 64 bits random) of a key; of keys in a tensor (K,), a table (K, n)."""
    if isinstance(key, Tensor):
        device, key = key.device, key[..., None]
    counter = torch.arange(1, n + 1, dtype=torch.int64, device=device)
    return _mix_tensor(counter * _signed(_GAMMA) + key)


def uniform(key: int | Tensor, n: int, device: torch.device | str | None = None) -> Tensor:
    """Return n numbers in [0, 1) as float64 with 53 random bits."""
    return _shift(bits(key, n, device), 11).to(torch.float64) * 2.0**-53


def permutation(key: int, n: int, device: torch.device | str | None = None) -> Tensor:
    """Return a random order of 0..n-1 (int64)."""
    return torch.argsort(bits(key, n, device), stable=True)


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ z >> 30) * _MIX_1 & _MASK
    z = (z ^ z >> 27) * _MIX_2 & _MASK
    return z ^ z >> 31


def _mix_tensor(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)).mul_(_signed(_MIX_1))
    z = (z ^ _shift(z, 27)).mul_(_signed(_MIX_2))
    return z ^ _shift(z, 31)


def _shift(z: Tensor, n: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of a signed integer copies the sign."""
    return (z >> n).bitwise_and_((1 << (64 - n)) - 1)
