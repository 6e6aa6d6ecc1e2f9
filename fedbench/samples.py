"""All samples of a federation in one place on the device, and who holds which."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbench import keys
from fedbench.data import Arrays, read_npz
from fedbench.errors import InputError
from fedbench.partition import Partition


class ClientArrays(NamedTuple):
    """One client's data for `simulate`: inputs (N, ...) of any real dtype and labels (N,); validation is optional."""

    x_train: NDArray[np.generic]
    y_train: NDArray[np.integer]
    x_test: NDArray[np.generic]
    y_test: NDArray[np.integer]
    x_validation: NDArray[np.generic] | None = None
    y_validation: NDArray[np.integer] | None = None


@dataclass(frozen=True)
class Samples:
    """A pool of inputs (N, *shape), ready for the model, and labels (N,), with every client's indices into it.

    - `train`, `validation`, `test`: one int64 index tensor per client.
    - `own`: (clients, classes) bool, the classes in each client's training set.
    - `augment`: training augmentation; `fill`: (channels,) the value of a black pixel after normalising.
    """

    x: Tensor
    y: Tensor
    classes: int
    train: list[Tensor]
    validation: list[Tensor]
    test: list[Tensor]
    own: Tensor
    augment: str
    fill: Tensor

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.train)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (*index.shape, *shape) and labels (*index.shape) of the samples `index` int64."""
        flat = index.flatten()  # `index_select` copies whole samples, `x[index]` looks up every value
        x, y = self.x.index_select(0, flat), self.y.index_select(0, flat)
        return x.view(*index.shape, *self.shape), y.view(index.shape)


def training_batch(data: Samples, index: Tensor, step_keys: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels as `Samples.at` does, augmented if the data are.

    `index` is (clients, B), or (B,) for one client; `step_keys` are the keys of the clients' steps.
    """
    x, y = data.at(index)
    if data.augment == "none":
        return x, y
    key = torch.tensor(step_keys, device=x.device) ^ keys.derive("augment")
    drawn = keys.bits(key, 3 * index.shape[-1])
    return _cropped(x.view(-1, *data.shape), drawn.view(-1, 3), data.fill).view(x.shape), y


def _cropped(x: Tensor, drawn: Tensor, fill: Tensor) -> Tensor:
    """Return images (N, C, H, W) moved by up to 4 pixels over black, and flipped or not, as `drawn` (N, 3) says.

    The distribution of torchvision's RandomCrop with padding 4 and RandomHorizontalFlip.
    """
    count, channels, height, width = x.shape
    padded = fill.view(1, -1, 1, 1).expand(count, channels, height + 8, width + 8).clone()
    padded[:, :, 4:-4, 4:-4] = x
    rows = drawn[:, :1] % 9 + torch.arange(height, device=x.device)
    columns = drawn[:, 1:2] % 9 + torch.arange(width, device=x.device)
    columns = torch.where(drawn[:, 2:] % 2 == 1, columns.flip(1), columns)
    images = torch.arange(count, device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def from_arrays(arrays: Arrays, partition: Partition, dtype: torch.dtype, device: torch.device) -> Samples:
    """Return a data set under a partition: only the samples that somebody holds, normalised and shifted once."""
    test_in_train = partition.card["test_pool"] == "train"
    train_used = [*partition.train, *partition.validation, *(partition.test if test_in_train else ())]
    test_used = [] if test_in_train else list(partition.test)
    kept_train, kept_test = _union(train_used), _union(test_used)
    x = (
        np.concatenate([arrays.x_train[kept_train], arrays.x_test[kept_test]])
        if len(kept_test)
        else arrays.x_train[kept_train]
    )
    y = np.concatenate([arrays.y_train[kept_train], arrays.y_test[kept_test]])

    def places(indices: Sequence[NDArray[np.int64]], kept: NDArray[np.int64], offset: int) -> list[Tensor]:
        return [torch.from_numpy(np.searchsorted(kept, index) + offset).to(device) for index in indices]

    test = (
        places(partition.test, kept_train, 0) if test_in_train else places(partition.test, kept_test, len(kept_train))
    )
    train, validation = (places(lists, kept_train, 0) for lists in (partition.train, partition.validation))
    mean, std = (torch.tensor(v, dtype=dtype) for v in (arrays.mean, arrays.std))
    pool, fill = _normalised(torch.from_numpy(x), mean, std, dtype).to(device), (-mean / std).to(device)
    if partition.shift is not None:
        rows = torch.from_numpy(np.concatenate([kept_train, kept_test + len(arrays.y_train)])).to(device)
        count = len(arrays.y_train) + len(arrays.y_test)
        drawn = keys.bits(keys.derive(partition.card["seed"], "noise"), count).to(device)
        for (noise, degrees), *parts in zip(partition.shift.tolist(), train, validation, test, strict=True):
            mine = torch.cat(parts)
            pool[mine] = _shifted(pool[mine], noise, degrees, fill, drawn[rows[mine]])
    labels = torch.from_numpy(y).to(device)
    return _pooled(pool, labels, arrays.classes, train, validation, test, arrays.augment, fill)


def first(arrays: Arrays, dtype: torch.dtype, device: torch.device) -> Samples:
    """Return the first training sample of a data set, as one client's."""
    mean, std = (torch.tensor(v, dtype=dtype) for v in (arrays.mean, arrays.std))
    # Copies, since torch warns of memory that it may not write to, which is that of a mapped file.
    x = _normalised(torch.from_numpy(arrays.x_train[:1].copy()), mean, std, dtype).to(device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    y = torch.from_numpy(arrays.y_train[:1].copy()).to(device)
    return _pooled(x, y, arrays.classes, [torch.zeros_like(y)], [nothing], [nothing])


def _shifted(x: Tensor, noise: float, degrees: float, fill: Tensor, sample_keys: Tensor) -> Tensor:
    """Return inputs (N, *shape) turned about their middle, over black, and with normal noise of a deviation.

    `sample_keys` (N,) int64 are those of the noise: one and the same sample always gets the same.
    """
    if degrees:
        black = fill.view(1, -1, 1, 1)
        cos, sin = (f(math.radians(degrees)) for f in (math.cos, math.sin))
        height, width = x.shape[2:]
        # `affine_grid` measures both axes from -1 to 1, whatever their lengths.
        turn = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]]).to(x)
        grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        x = F.grid_sample(x - black, grid, align_corners=False) + black
    if noise:
        uniform = keys.uniform(sample_keys, x[0].numel()) + 2.0**-54  # never 0
        x = x + noise * math.sqrt(2) * torch.special.erfinv(2 * uniform - 1).to(x.dtype).view(x.shape)
    return x


def from_clients(
    clients: Sequence[ClientArrays], classes: int | None, dtype: torch.dtype, device: torch.device
) -> Samples:
    """Return the pool of arrays given client by client; raises `InputError` for arrays that do not fit together."""
    if not isinstance(clients, Sequence) or not clients:
        raise InputError("clients: want a list of ClientArrays(x_train, y_train, x_test, y_test), one for each")
    xs: list[NDArray[np.generic]] = []
    ys: list[NDArray[np.integer]] = []
    places: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    offset = 0
    for number, client in enumerate(clients):
        for split in ("train", "validation", "test"):
            x, y = _given(client, split, number)
            if x is None or y is None:
                x, y = xs[0][:0], ys[0][:0]
            if y.shape != x.shape[:1] or (xs and x.shape[1:] != xs[0].shape[1:]):
                raise InputError(
                    f"client {number}: x_{split} {x.shape} and y_{split} {y.shape} do not fit together or with client 0"
                )
            xs.append(x)
            ys.append(y)
            places[split].append(torch.arange(offset, offset + len(x), device=device))
            offset += len(x)
    x_all = torch.from_numpy(np.concatenate(xs)).to(device, dtype)
    y_all = torch.from_numpy(np.concatenate(ys).astype(np.int64)).to(device)
    found = int(y_all.max()) + 1
    if int(y_all.min()) < 0 or found > (classes or found):
        raise InputError(
            f"clients: labels run from {int(y_all.min())} to {found - 1}, outside 0 to {(classes or found) - 1}"
        )
    if not bool(x_all.isfinite().all()):
        raise InputError("clients: inputs hold NaN or infinite values")
    return _pooled(x_all, y_all, classes or found, places["train"], places["validation"], places["test"])


def _given(
    client: object, split: str, number: int
) -> tuple[NDArray[np.generic], NDArray[np.integer]] | tuple[None, None]:
    """Return one split of a client's data, None and None if there is none."""
    if not isinstance(client, ClientArrays):
        kind = type(client).__name__
        raise InputError(f"clients: number {number} is a {kind}; want ClientArrays(x_train, y_train, x_test, y_test)")
    given = [getattr(client, f"{kind}_{split}") for kind in ("x", "y")]
    if split == "validation" and given[0] is None and given[1] is None:
        return None, None
    try:
        x, y = (np.asarray(values) for values in given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"client {number}: {split} is no array: {' '.join(str(error).split())}") from None
    for name, array, kinds, want in (("x", x, "buif", "numbers"), ("y", y, "iu", "whole numbers from 0")):
        if array.dtype.kind not in kinds or not array.ndim:
            said = f"{array.dtype}" if array.ndim else "a single value"
            raise InputError(f"client {number}: {name}_{split} is {said}; want {want}, one entry for each sample")
    return x, y


def _pooled(
    x: Tensor,
    y: Tensor,
    classes: int,
    train: list[Tensor],
    validation: list[Tensor],
    test: list[Tensor],
    augment: str = "none",
    fill: Tensor | None = None,
) -> Samples:
    own = torch.zeros(len(train), classes, dtype=torch.bool, device=x.device)
    for number, index in enumerate(train):
        own[number, y[index]] = True
    return Samples(x, y, classes, train, validation, test, own, augment, torch.zeros(1) if fill is None else fill)


def part(data: Samples, client: int | None) -> Samples:
    """Return what one client sees: its own samples; or what the server (None) does: how many each client trains on."""
    nothing = [index[:0] for index in data.train]
    if client is None:
        counts = [torch.zeros_like(index) for index in data.train]
        return replace(
            data, x=data.x[:0], y=data.y[:0], train=counts, validation=nothing, test=nothing, own=data.own & False
        )
    rows = torch.unique(torch.cat([data.train[client], data.validation[client], data.test[client]]))

    def held(split: list[Tensor]) -> list[Tensor]:
        return [
            torch.searchsorted(rows, index if number == client else index[:0]) for number, index in enumerate(split)
        ]

    own = torch.zeros_like(data.own)
    own[client] = data.own[client]
    train, validation, test = held(data.train), held(data.validation), held(data.test)
    return replace(data, x=data.x[rows], y=data.y[rows], own=own, train=train, validation=validation, test=test)


def save(data: Samples, file: Path) -> None:
    """Write samples as an .npz file of plain arrays."""
    held: dict[str, NDArray[Any]] = {name: getattr(data, name).cpu().numpy() for name in ("x", "y", "own", "fill")}
    for name in _SPLITS:
        split: list[Tensor] = getattr(data, name)
        held[f"{name}_index"] = torch.cat(split).cpu().numpy()
        held[f"{name}_sizes"] = np.array([len(index) for index in split])
    held |= {"classes": np.array(data.classes), "augment": np.array(data.augment)}
    np.savez(file, allow_pickle=False, **held)


def load(file: Path) -> Samples:
    """Read what `save` wrote; raises `InputError` if the file is damaged."""
    held = read_npz(file)

    def split(name: str) -> list[Tensor]:
        return list(torch.split(torch.from_numpy(held[f"{name}_index"]), held[f"{name}_sizes"].tolist()))

    x, y, own, fill = (torch.from_numpy(held[name]) for name in ("x", "y", "own", "fill"))
    train, validation, test = map(split, _SPLITS)
    return Samples(x, y, int(held["classes"]), train, validation, test, own, str(held["augment"]), fill)


_SPLITS = ("train", "validation", "test")


def padded(split: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices of several clients' samples, padded with sample 0, and which are valid; (clients, B) both."""
    index = nn.utils.rnn.pad_sequence(list(split), batch_first=True)
    sizes = [len(samples) for samples in split]
    valid = torch.ones(index.shape, dtype=dtype, device=index.device)
    if min(sizes) < max(sizes):
        places = torch.arange(max(sizes), device=index.device)
        valid = (places < torch.tensor(sizes, device=index.device)[:, None]).to(dtype)
    return index, valid


def _union(indices: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.unique(np.concatenate(indices)) if indices else np.empty(0, np.int64)


def _normalised(x: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (x - mean) / std per channel (dimension 1), of x / 255 where x holds bytes."""
    values = x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype)
    per_channel = (len(mean), *(1 for _ in values.shape[2:])) if values.dim() > 1 else (len(mean),)
    return (values - mean.view(per_channel)) / std.view(per_channel)
