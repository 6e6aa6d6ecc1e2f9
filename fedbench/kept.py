"""What a federation keeps beside its numbers if it is asked to: what its last models make of all test samples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from fedbench import evaluation
from fedbench.method import Message, Method, Rows
from fedbench.net import Net, Params
from fedbench.samples import Samples
from fedbench.wire import Wire

Kind = Literal["embeddings", "confusion"]
"""What may be kept."""

_CHUNK = 1024  # points whose distances to all others are in memory together


@final
class Last:
    """Remembers the models that were evaluated last, and the state that the server had then.

    - `nets`: each client's net.
    """

    def __init__(self, method: Method, nets: Mapping[int, Net], data: Samples) -> None:
        self._method = method
        self._nets = nets
        self._data = data
        self._params: dict[int, Params] = {}
        self._server: Message = {}

    def look(self, stage: str, client: int, params: Params) -> None:
        """Remember a client's model; see `setups.Setup.probe`."""
        if stage == "evaluated":
            self._params[client] = params

    def watch(self, uploads: Message, server: Message) -> None:
        """Remember the server's state; see `setups.Setup.watch_merge`."""
        self._server = server

    def arrays(self, kinds: Sequence[Kind]) -> dict[str, NDArray[np.generic]]:
        """Return what was asked for.

        Embeddings:

        - "embeddings" (N, width) float32 of every client's own test samples under its own last model, "labels" (N,)
          and "clients" (N,) int64.
        - "table/<name>" (P, width) float32: the server's tables with a row for each class, such as prototypes, as far
          as there are rows; "table/<name>/labels" (P,) int64: whose they are.

        Clients with models of different widths keep none.

        - "confusion" (clients, classes, classes + 1) int32: how many of a client's own test samples of each class
          (rows) its last model takes for each class, and, last, for none (columns), by the method's headline accuracy.
        """
        kept = self._embeddings() if "embeddings" in kinds else {}
        return {**kept, "confusion": self._confusion()} if "confusion" in kinds else kept

    def _confusion(self) -> NDArray[np.int32]:
        data = self._data
        table = np.zeros((data.clients, data.classes, data.classes + 1), np.int32)
        for client, params in self._params.items():
            net, index = self._nets[client], data.test[client]
            wire = Wire(data.clients, frozenset(net.buffers))
            down = wire.carry_one("evaluation", client, self._method.send(self._server, client))
            given = evaluation.answers(self._method, net, params, down, data, index, data.own[client])
            np.add.at(table[client], (data.y[index].cpu().numpy(), given), 1)  # -1, no class, is the last column
        return table

    def _embeddings(self) -> dict[str, NDArray[np.generic]]:
        widths = {net.width for net in self._nets.values()}
        if len(widths) > 1:
            return {}
        embedded = {client: self._embedded(client) for client in sorted(self._params)}
        index = self._data.test
        kept: dict[str, NDArray[np.generic]] = {
            "embeddings": np.concatenate(list(embedded.values())).astype(np.float32),
            "labels": np.concatenate([self._data.y[index[client]].cpu().numpy() for client in embedded]),
            "clients": np.repeat(list(embedded), [len(rows) for rows in embedded.values()]),
        }
        for name, table in self._tables(widths.pop()):
            there = table.present.cpu().numpy()
            if not there.any():
                continue
            kept[f"table/{name}"] = table.values.cpu().numpy()[there].astype(np.float32)
            kept[f"table/{name}/labels"] = np.flatnonzero(there)
        return kept

    def _embedded(self, client: int) -> NDArray[np.generic]:
        net = self._nets[client]
        with torch.no_grad():
            parts = torch.split(self._data.at(self._data.test[client])[0], evaluation.BLOCK)
            rows: NDArray[np.generic] = torch.cat([net(self._params[client], x)[0] for x in parts]).cpu().numpy()
        return rows

    def _tables(self, width: int) -> Iterator[tuple[str, Rows]]:
        for name, entry in self._server.items():
            if isinstance(entry, Rows) and entry.values.shape == (self._data.classes, width):
                yield name, entry


def silhouettes(kept: Mapping[str, NDArray[np.generic]], clients: int) -> dict[str, NDArray[np.float64]]:
    """Return "test/silhouette/class" and "test/silhouette/client" (clients,), the means over each one's test samples.

    A sample's silhouette, from -1 to 1, is high if its embedding is closer to those of its own kind (the same class,
    or the same client) than to those of the nearest other kind, among all clients' samples.
    """
    owners = kept["clients"].astype(np.int64)
    found = {}
    for kind in ("class", "client"):
        labels = kept["labels" if kind == "class" else "clients"]
        values = silhouette(kept["embeddings"].astype(np.float64), labels.astype(np.int64))
        found[f"test/silhouette/{kind}"] = np.array(
            [values[owners == client].mean() if (owners == client).any() else np.nan for client in range(clients)]
        )
    return found


def silhouette(points: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return each point's silhouette (Rousseeuw 1987) under Euclidean distance, from points (N, d) and labels (N,).

    Zero for a point that is alone with its label, and for all if there is a single label.
    """
    kinds, own = np.unique(labels, return_inverse=True)
    if len(kinds) < 2:
        return np.zeros(len(points))
    members = np.eye(len(kinds))[own]
    sizes = members.sum(axis=0)
    centred = points - points.mean(axis=0)
    norms = (centred**2).sum(axis=1)
    values = []
    for start in range(0, len(points), _CHUNK):
        rows = slice(start, start + _CHUNK)
        # Centred, so that little is lost where a square is the difference of larger ones.
        squares = norms[rows, None] + norms[None] - 2 * centred[rows] @ centred.T
        sums = np.sqrt(np.maximum(squares, 0)) @ members
        mine = own[rows]
        place = np.arange(len(mine))
        within = sums[place, mine] / np.maximum(sizes[mine] - 1, 1)
        means = sums / sizes
        means[place, mine] = np.inf
        nearest = means.min(axis=1)
        larger = np.maximum(np.maximum(within, nearest), np.finfo(np.float64).tiny)
        values.append(np.where(sizes[mine] > 1, (nearest - within) / larger, 0.0))
    return np.concatenate(values)
