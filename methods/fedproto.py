"""FedProto (Tan et al., arXiv 2105.00243): clients exchange class prototypes instead of weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, final

import torch
from annotated_types import Ge, Gt
from numpy.typing import NDArray
from torch import Tensor

from fedbench.method import Batch, Log, Loss, Message, Method, Rows, cross_entropy, rows
from fedbench.net import Net, Params

Distance = Literal["mse", "squared_l2", "l2", "l1", "emd"]


@final
@dataclass(frozen=True)
class FedProto(Method):
    """Every client keeps its own model and pulls its embeddings towards the prototypes that all holders agree on.

    Where the paper and its official code differ, the preset names say whose choice an option is:

    - `lam`: weight of the prototype term; it means nothing without the name of the distance.
    - `distance`: mean over dimensions (official), or sum, of squared differences; Euclidean (paper, eq. 8); L1; or
      earth mover's, the mean absolute difference of the sorted coordinates.
    - `regulariser`: distance of every sample's embedding to its class's global prototype, averaged over the batch
      (official); or of the batch's own class prototypes to the global ones, summed over classes (paper, eq. 8).  A
      class without a global prototype adds zero.
    - `prototypes`: local prototypes are the mean of the embeddings seen in the last local epoch, in training mode
      while the weights move (official), or of a final pass over the local data (paper, eq. 3).
    - `aggregation`: plain mean over the holders of a class (official), mean weighted by their samples, or eq. 6 as
      printed, which divides that weighted mean once more by the number of holders.  All but the first send the counts.
    - `prediction`: the headline accuracy comes from the head, or from the nearest global prototype among `candidates`:
      the client's own classes (official) or all.  All three are always logged.
    - `far`: distance given to classes that cannot be chosen, infinite if not set; 100 in the official code, so that an
      embedding beyond it is given to the lowest such class.
    """

    mixed_models = True
    presets = {
        "paper": {
            "distance": "l2",
            "regulariser": "prototype",
            "prototypes": "final",
            "aggregation": "eq6",
            "prediction": "prototype",
            "candidates": "all",
        },
        "official": {
            "distance": "mse",
            "regulariser": "sample",
            "prototypes": "training",
            "aggregation": "mean",
            "prediction": "prototype",
            "candidates": "own",
            "far": 100.0,
        },
    }

    lam: Annotated[float, Ge(0), Log(0.01, 10)] = 1.0
    distance: Distance = "mse"
    regulariser: Literal["sample", "prototype"] = "sample"
    prototypes: Literal["training", "final"] = "training"
    aggregation: Literal["mean", "weighted", "eq6"] = "mean"
    prediction: Literal["head", "prototype"] = "head"
    candidates: Literal["own", "all"] = "own"
    far: Annotated[float, Gt(0)] | None = None

    # --- server

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        """Return a table (classes, width) of prototypes of which none is there yet."""
        values = torch.zeros(net.classes, net.width, dtype=net.dtype, device=net.device)
        return {"prototypes": Rows(values, torch.zeros(net.classes, dtype=torch.bool, device=net.device))}

    def send(self, server: Message, client: int | Tensor) -> Message:
        """Send all global prototypes to everybody."""
        return server

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        """Return the aggregated prototypes; a class that nobody reported keeps its last one."""
        local, old = rows(uploads, "prototypes"), rows(server, "prototypes")
        counts = rows(uploads, "counts").values if "counts" in uploads else local.present.to(local.values.dtype)
        merged = aggregate(local, counts, literal=self.aggregation == "eq6")
        values = torch.where(merged.present[:, None], merged.values, old.values)
        return {"prototypes": Rows(values, merged.present | old.present)}

    # --- client

    def init_client(self, net: Net, initial: Params) -> Params:
        """Keep the whole model."""
        return initial

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        """Go on from the own model."""
        return kept

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        """Return cross-entropy plus lam times the distance to the global prototypes."""
        ce, embedding = cross_entropy(net, params, batch)
        pull = self._pull(embedding, batch, rows(down, "prototypes"))
        return Loss(ce + self.lam * pull, {"ce": ce, "proto": pull}, embedding)

    def init_memory(self, net: Net) -> dict[str, Tensor]:
        """Return sums (classes, width) of embeddings and counts (classes,) of samples."""
        return {
            "sums": torch.zeros(net.classes, net.width, dtype=net.dtype, device=net.device),
            "counts": torch.zeros(net.classes, dtype=net.dtype, device=net.device),
        }

    def observe(self, memory: dict[str, Tensor], batch: Batch, seen: Tensor) -> dict[str, Tensor]:
        """Add the batch's embeddings to the running sums."""
        members = _membership(batch, len(memory["counts"]))
        return {"sums": memory["sums"] + members.T @ seen, "counts": memory["counts"] + members.sum(0)}

    def reply(
        self,
        net: Net,
        params: Params,
        kept: Params,
        down: Message,
        data: Callable[[], Batch],
        memory: dict[str, Tensor],
    ) -> tuple[Params, Message]:
        """Keep the model and send the local prototypes of the classes that were seen."""
        if self.prototypes == "final":
            batch = data()
            memory = self.observe(self.init_memory(net), batch, net(params, batch.x)[0])
        present = memory["counts"] > 0
        values = memory["sums"] / memory["counts"].clamp(min=1)[:, None]
        upload: dict[str, Tensor | Rows] = {"prototypes": Rows(values, present)}
        if self.aggregation != "mean":
            upload["counts"] = Rows(memory["counts"], present)
        return params, upload

    def _pull(self, embedding: Tensor, batch: Batch, target: Rows) -> Tensor:
        """Return the prototype term, per sample (B,) or one number for the batch."""
        if self.regulariser == "sample":
            apart = distance(self.distance, embedding, target.values[batch.y])
            return torch.where(target.present[batch.y], apart, 0)
        members = _membership(batch, len(target.present))
        counts = members.sum(0)
        local = members.T @ embedding / counts.clamp(min=1)[:, None]
        apart = distance(self.distance, local, target.values)
        return torch.where(target.present & (counts > 0), apart, 0).sum()

    # --- evaluation

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        """Return the head's logits and the nearness to the global prototypes, the headline first."""
        embedding, logits = net(params, x)
        prototypes = rows(down, "prototypes")
        to_all = nearest(self.distance, embedding, prototypes, torch.ones_like(own), self.far)
        to_own = torch.where(own, to_all, math.inf if self.far is None else self.far)
        named = {"head": logits, "prototype_own": -to_own, "prototype_all": -to_all}
        headline = "head" if self.prediction == "head" else f"prototype_{self.candidates}"
        return {headline: named.pop(headline), **named}

    def summaries(self, examples: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, list[float]]:
        """Return what the official code prints: its cumulative accuracies and the last test batch's loss."""
        head = [int(client["correct/head"].sum()) for client in examples]
        prototype = [int(client["correct/prototype_own"].sum()) for client in examples]
        cumulative_head, cumulative_prototype = cumulative(head, prototype, [len(c["correct/head"]) for c in examples])
        return {
            "accuracy/cumulative/head": cumulative_head,
            "accuracy/cumulative/prototype": cumulative_prototype,
            "last_batch/proto": [last_batch_mean(client["loss/proto"]) for client in examples],
        }


def distance(name: Distance, a: Tensor, b: Tensor) -> Tensor:
    """Return the distance over the last dimension of two broadcastable tensors."""
    if name == "mse":
        return (a - b).square().mean(-1)
    if name == "squared_l2":
        return (a - b).square().sum(-1)
    if name == "l2":
        length: Tensor = torch.linalg.vector_norm(
            a - b, dim=-1
        )  # whose gradient at zero is zero, unlike that of a square root
        return length
    if name == "l1":
        return (a - b).abs().sum(-1)
    return (a.sort(-1).values - b.sort(-1).values).abs().mean(-1)


def nearest(name: Distance, embedding: Tensor, prototypes: Rows, candidates: Tensor, far: float | None) -> Tensor:
    """Return distances (B, classes) to the prototypes; `far` for classes without one or not among the candidates."""
    apart = distance(name, embedding[:, None], prototypes.values[None])
    return torch.where(candidates & prototypes.present, apart, math.inf if far is None else far)


def aggregate(local: Rows, counts: Tensor, literal: bool = False) -> Rows:
    """Return global prototypes of local ones (P, classes, width), weighted by counts (P, classes).

    `literal` divides once more by the number of holders, as eq. 6 of the paper is printed.
    """
    weights = torch.where(local.present, counts, 0)
    total = (weights[..., None] * local.values).sum(0)
    values = total / weights.sum(0).clamp(min=1)[:, None]
    holders = local.present.sum(0)
    if literal:
        values = values / holders.clamp(min=1)[:, None]
    return Rows(values, holders > 0)


def cumulative(head: Sequence[int], prototype: Sequence[int], totals: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the accuracies as the official code prints them: its counters are never reset.

    Takes the correct answers of the head and of the prototypes and the number of test samples, per client.  Each list
    entry is a running average over the clients so far and over both passes, so its spread is far below the true one.
    """
    hits = [0, *accumulate(a + b for a, b in zip(head, prototype, strict=True))]
    seen = [0, *accumulate(2 * t for t in totals)]
    after_head = [_ratio(hits[i] + head[i], seen[i] + totals[i]) for i in range(len(totals))]
    return after_head, [_ratio(*pair) for pair in zip(hits[1:], seen[1:], strict=True)]


def last_batch_mean(values: NDArray[Any], size: int = 64) -> float:
    """Return the mean over the last batch of a test set, which is all that the official code reports of it."""
    tail = values[(len(values) - 1) // size * size :]
    return float(tail.mean()) if len(tail) else math.nan


def _ratio(hits: int, seen: int) -> float:
    return hits / seen if seen else math.nan


def _membership(batch: Batch, classes: int) -> Tensor:
    """Return (B, classes): 1 where a valid sample is of the class."""
    labels = torch.arange(classes, device=batch.y.device)
    return (batch.y[:, None] == labels).to(batch.valid.dtype) * batch.valid[:, None]
