"""The one channel between server and clients: what passes here is counted, and nothing else passes."""

import json
import struct
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.method import Message, Rows, stack, tree_map

Direction = Literal["up", "down", "evaluation"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down", "evaluation")
_INDEX_BYTES = 4  # a row's label travels as a 32-bit integer
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Diverged(Exception):
    """A tensor or a loss is no longer finite: an outcome of the cell, not a fault."""


class Wire:
    """Carries messages and counts, per round and client, what each direction took.

    - `scalars`, `bytes`: of trainable tensors and tables, rows not present left out; bytes by the tensors' dtypes.
    - `index_bytes`: labels of the rows sent, at four bytes each.
    - `buffers`, `buffer_bytes`: scalars and bytes of batch norm's running statistics.

    The direction `evaluation` is the download that evaluating after a round takes, and is part of neither other.
    """

    def __init__(self, clients: int, buffers: frozenset[str]) -> None:
        self._clients, self._buffers = clients, buffers
        self._counts: dict[str, NDArray[np.int64]] = {}
        self.take()

    def carry(self, direction: Direction, clients: Sequence[int], message: Message) -> dict[str, Tensor | Rows]:
        """Return a message as the other side receives it: detached, rows not present blanked.

        The message is stacked over `clients`, so every tensor has that leading length.  Raises `Diverged` for an upload
        that is not finite.
        """
        received: dict[str, Tensor | Rows] = {}
        for name, entry in message.items():
            if isinstance(entry, Rows):
                values, present = entry.values.detach(), entry.present.detach()
                keep = present.view(*present.shape, *(1 for _ in values.shape[2:]))
                clean = torch.where(keep, values, torch.zeros_like(values))
                self._count_rows(direction, clients, clean, present)
                received[name] = Rows(clean, present)
            else:
                clean = entry.detach()
                self._count_tensor(direction, clients, name, clean)
                received[name] = clean
            if direction == "up" and clean.is_floating_point() and not bool(clean.sum().isfinite()):
                # A sum may overflow where no value is infinite.  It is asked first because it needs no memory.
                finite = clean.isfinite().flatten(1).all(1).tolist()
                if not all(finite):
                    sender = clients[finite.index(False)]
                    raise Diverged(f"client {sender} sent '{name}' with values that are not finite")
        return received

    def carry_one(self, direction: Direction, client: int, message: Message) -> dict[str, Tensor | Rows]:
        """Return one client's message, which is not stacked, as `carry` does."""
        return tree_map(itemgetter(0), self.carry(direction, [client], stack([message])))

    def take(self) -> dict[str, NDArray[np.int64]]:
        """Return the counts since the last call, (clients,) each under names such as "up/scalars", and start afresh."""
        counts = self._counts
        kinds = ("scalars", "bytes", "index_bytes", "buffers", "buffer_bytes")
        self._counts = {
            f"{direction}/{kind}": np.zeros(self._clients, np.int64) for direction in DIRECTIONS for kind in kinds
        }
        return counts

    def _count_tensor(self, direction: Direction, clients: Sequence[int], name: str, tensor: Tensor) -> None:
        scalars = tensor[0].numel()
        kind, kind_bytes = ("buffers", "buffer_bytes") if name in self._buffers else ("scalars", "bytes")
        self._add(f"{direction}/{kind}", clients, scalars)
        self._add(f"{direction}/{kind_bytes}", clients, scalars * tensor.element_size())

    def _count_rows(self, direction: Direction, clients: Sequence[int], values: Tensor, present: Tensor) -> None:
        rows = present.sum(1).cpu().numpy()
        scalars = rows * values[0, 0].numel()
        self._add(f"{direction}/scalars", clients, scalars)
        self._add(f"{direction}/bytes", clients, scalars * values.element_size())
        self._add(f"{direction}/index_bytes", clients, rows * _INDEX_BYTES)

    def _add(self, name: str, clients: Sequence[int], amount: int | NDArray[np.int64]) -> None:
        self._counts[name][list(clients)] += amount


# --- a message as bytes, for a server and clients that share no memory


def pack(message: Message) -> bytes:
    """Return one client's message as bytes: the length of a header, the header, and exactly what `Wire` counts.

    Of a table, that is the rows present and their labels, as 32-bit integers.  The header (JSON) says what is there.
    """
    header: list[tuple[str, int | None, list[tuple[str, list[int]]]]] = []
    tensors: list[Tensor]
    rows: int | None
    body: list[bytes] = []
    for name, entry in message.items():
        if isinstance(entry, Rows):
            labels = entry.present.nonzero().squeeze(1)
            tensors, rows = [entry.values[labels], labels.to(torch.int32)], len(entry.present)
        else:
            tensors, rows = [entry], None
        header.append((name, rows, [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]))
        body += [t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    said = json.dumps(header).encode()
    return struct.pack("<I", len(said)) + said + b"".join(body)


def unpack(data: bytes) -> dict[str, Tensor | Rows]:
    """Return the message that was packed, on the CPU; rows that are not present are zero."""
    start = _body(data)
    message: dict[str, Tensor | Rows] = {}
    for name, rows, described in json.loads(data[4:start]):
        tensors = []
        for word, shape in described:
            tensor = torch.empty(shape, dtype=_DTYPES[word])
            end = start + tensor.nbytes
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(np.frombuffer(data[start:end], np.uint8).copy()))
            tensors.append(tensor)
            start = end
        if rows is None:
            (message[name],) = tensors
            continue
        found, labels = tensors
        values, present = found.new_zeros(rows, *found.shape[1:]), torch.zeros(rows, dtype=torch.bool)
        values[labels.long()] = found
        present[labels.long()] = True
        message[name] = Rows(values, present)
    return message


def payload(data: bytes) -> int:
    """Return how many bytes of a packed message are no header."""
    return len(data) - _body(data)


def _body(data: bytes) -> int:
    (length,) = struct.unpack_from("<I", data)
    return 4 + int(length)
