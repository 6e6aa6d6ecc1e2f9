"""FeSEM, multi-center federated learning (Xie et al., arXiv 2005.01026)."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
from annotated_types import Ge
from torch import Tensor

from fedbench import keys
from fedbench.averaging import average
from fedbench.data import read_npz
from fedbench.errors import InputError
from fedbench.method import Batch, Choice, Message, Method, parameters
from fedbench.net import Net, Params


@final
@dataclass(frozen=True)
class FeSEM(Method):
    """The server keeps K centres; every client trains from the centre nearest to its last local model.

    In round 1 all clients train from one common model, and the centres are chosen among the results.  Every round ends
    with an E-step (every participant joins the centre at the smallest squared distance between trainable parameters;
    ties go to the lowest) and an M-step (every centre becomes the mean of the participants that joined it; a centre
    without any stays).  Batch norm's buffers are averaged with the parameters but never enter the distance.

    - `k`: number of centres.  The FedProto comparison does not state its own.
    - `init`: the first centres are models of clients drawn by k-means++, or evenly, or are given in the file `centres`
      (.npz, one array (K, ...) per parameter and buffer).
    - `weights`: members count equally (the paper), or in proportion to their training samples.
    - `layers`: the distance looks at all layers (the paper), or at the head only (the authors' code: at one layer).
    """

    presets = {
        "paper": {"init": "kmeans++", "weights": "uniform", "layers": "all"},
        "official": {"init": "random", "weights": "uniform", "layers": "head"},
        "table1": {"init": "kmeans++", "weights": "uniform", "layers": "all"},
    }

    k: Annotated[int, Ge(1), Choice(1, 2, 3, 4)] = 2
    init: Literal["kmeans++", "random", "given"] = "kmeans++"
    centres: str = ""
    weights: Literal["size", "uniform"] = "uniform"
    layers: Literal["all", "head"] = "all"

    def check(self, net: Net) -> None:
        """Raise `InputError` if given centres do not fit the model."""
        if (self.init == "given") != bool(self.centres):
            raise InputError("fesem: 'centres' names a file exactly when init is 'given'")
        if self.init == "given":
            read_centres(Path(self.centres), net, self.k)

    @staticmethod
    def located(options: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], str | None]:
        """Return the options with the path of given centres made absolute, and that file's sha256, or None."""
        if not options.get("centres"):
            return dict(options), None
        path = base / Path(options["centres"]).expanduser()
        try:
            return {**options, "centres": str(path)}, hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise InputError(f"centres: cannot read '{path}': {error.strerror}") from error

    # --- server

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        """Return K copies of the common model, everybody assigned to the first, and no centre chosen yet."""
        if self.k > clients:
            raise InputError(f"fesem: k is {self.k}, more centres than the {clients} clients")
        return {
            **_named({n: t.expand(self.k, *t.shape) for n, t in _shared(net, initial).items()}),
            "assignment": torch.zeros(clients, dtype=torch.int64, device=net.device),
            "chosen": torch.zeros((), dtype=torch.bool, device=net.device),
            "seed": torch.tensor(seed, device=net.device),
        }

    def send(self, server: Message, client: int | Tensor) -> Message:
        """Send the client its centre."""
        state = parameters(server)
        mine = state["assignment"][client]
        return {name: centre[mine] for name, centre in _centres(state).items()}

    def offers(self, server: Message, client: int) -> Sequence[Message]:
        """Offer all centres to a client that has joined none."""
        centres = _centres(parameters(server))
        return [{name: centre[k] for name, centre in centres.items()} for k in range(self.k)]

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        """Return the server after one E-step and one M-step."""
        models, state = parameters(uploads), parameters(server)
        looked_at = [n for n in net.parameters if n in models and (self.layers == "all" or n in net.head)]
        centres = _centres(state) if state["chosen"] else self._choose(net, models, looked_at, int(state["seed"]))
        joined = squared_distances(models, centres, looked_at).argmin(1)
        moved = self._move(centres, models, joined, sizes)
        assignment = state["assignment"].index_copy(0, clients, joined)
        return {**state, **_named(moved), "assignment": assignment, "chosen": torch.ones_like(state["chosen"])}

    def _choose(self, net: Net, models: Params, looked_at: list[str], seed: int) -> Params:
        if self.init == "given":
            return read_centres(Path(self.centres), net, self.k, like=models)
        drawn = keys.uniform(keys.derive(seed, "fesem"), self.k).tolist()
        picked: list[int] = []
        for u in drawn:
            apart = torch.ones(len(next(iter(models.values()))), dtype=torch.float64)
            if picked:
                chosen = {name: models[name][picked] for name in looked_at}
                nearest = squared_distances(models, chosen, looked_at).amin(1).double().cpu()
                apart = (nearest > 0).double() if self.init == "random" else nearest
            picked.append(_draw(apart, u))
        return {name: tensor[picked] for name, tensor in models.items()}

    def _move(self, centres: Params, models: Params, joined: Tensor, sizes: Tensor) -> Params:
        """Return the M-step: every centre at the mean of its members."""
        raw = sizes if self.weights == "size" else torch.ones_like(sizes)
        moved = [{name: centre[k] for name, centre in centres.items()} for k in range(self.k)]
        for k in range(self.k):
            weights = torch.where(joined == k, raw, 0)
            if weights.sum() > 0:
                moved[k] = average(models, weights / weights.sum())
        return {name: torch.stack([centre[name] for centre in moved]) for name in centres}

    # --- client

    def init_client(self, net: Net, initial: Params) -> Params:
        """Keep only what the batch-norm policy makes private."""
        return {name: tensor for name, tensor in initial.items() if name in net.private}

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        """Start from the received centre."""
        mine = {**kept, **parameters(down)}
        return {name: mine[name] for name in net.shapes}

    def reply(
        self,
        net: Net,
        params: Params,
        kept: Params,
        down: Message,
        data: Callable[[], Batch],
        memory: dict[str, Tensor],
    ) -> tuple[Params, Message]:
        """Send the whole model."""
        return self.init_client(net, params), _shared(net, params)


def squared_distances(models: Params, centres: Params, names: list[str]) -> Tensor:
    """Return (P, K): squared Euclidean distances over the named tensors of models (P, ...) and centres (K, ...)."""
    columns = []
    for k in range(len(next(iter(centres.values())))):
        terms = [(models[name] - centres[name][k]).flatten(1).square_().sum(1) for name in names]
        columns.append(torch.stack(terms).sum(0))
    return torch.stack(columns, 1)


def read_centres(path: Path, net: Net, k: int, like: Params | None = None) -> Params:
    """Return the centres (K, ...) stored in a file; raises `InputError` if it is unreadable or does not fit."""
    try:
        centres = {name: torch.from_numpy(array) for name, array in read_npz(path).items()}
    except InputError as error:
        raise InputError(f"centres: cannot read {error}") from error
    for name, shape in net.shapes.items():
        found = tuple(centres[name].shape) if name in centres else "missing"
        if found != (k, *shape):
            raise InputError(f"centres: '{name}' in '{path}' is {found}, wanted {(k, *shape)}")
    if like is None:
        return centres
    return {name: centres[name].to(tensor) for name, tensor in like.items()}


def _draw(weights: Tensor, u: float) -> int:
    """Return an index drawn in proportion to weights (P,), evenly if all are zero."""
    weights = weights if weights.sum() > 0 else torch.ones_like(weights)
    reached = weights.cumsum(0)
    return int(
        torch.searchsorted(reached, torch.tensor([u], dtype=torch.float64) * reached[-1], right=True).clamp(
            max=len(weights) - 1
        )
    )


def _shared(net: Net, params: Params) -> Params:
    return {name: tensor for name, tensor in params.items() if name not in net.private}


def _named(centres: Params) -> Params:
    return {f"centre/{name}": tensor for name, tensor in centres.items()}


def _centres(state: Params) -> Params:
    return {name.removeprefix("centre/"): tensor for name, tensor in state.items() if name.startswith("centre/")}
