"""Accuracy and loss of every client on its own samples, from per-example answers."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedbench.contract import check_loss, check_scores, check_valid, checked_summaries, is_own
from fedbench.method import Batch, Message, Method
from fedbench.net import Net, Params
from fedbench.samples import Samples

Examples = dict[str, NDArray[Any]]
"""One client's per-example arrays, float64: `correct/<score>`, which are 1, 0 or, if the score is, NaN, the headline
first; `loss` and `loss/<part>`."""

FloatTable = dict[str, NDArray[np.float64]]
"""Metrics (clients,) by name."""

BLOCK = 1024
"""The most samples of one client that are examined together."""


def examine(
    method: Method, net: Net, params: Params, down: Message, data: Samples, index: Tensor, own: Tensor
) -> Examples:
    """Return what one client's model answers on the samples `index`, in evaluation mode.

    Beside the method's own scores there is `head_own`, the head's answer among the client's own classes, because
    choosing among a few classes is an easier task than choosing among all.  Without samples there is nothing.
    """
    if not len(index):
        return {}
    net = net.remembering()  # scores and loss ask for the same embeddings and logits
    params = {name: net.laid_out(tensor) for name, tensor in params.items()}
    chunks: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for part in torch.split(index, BLOCK):
            valid = torch.ones(len(part), dtype=data.x.dtype, device=part.device)
            x, y = data.at(part)
            batch = Batch(net.laid_out(x), y, valid)
            for name, values in per_example(method, net, params, down, batch, own):
                chunks.setdefault(name, []).append(values)
            check_valid(method, valid)
    return {name: torch.cat(values).cpu().numpy() for name, values in chunks.items()}


def answers(
    method: Method, net: Net, params: Params, down: Message, data: Samples, index: Tensor, own: Tensor
) -> NDArray[np.int64]:
    """Return the class (B,) that one client's model gives each of the samples `index`, by the method's headline score.

    -1 where no class has a score.
    """
    params = {name: net.laid_out(tensor) for name, tensor in params.items()}
    given = [np.zeros(0, np.int64)]
    with torch.no_grad():
        for part in torch.split(index, BLOCK) if len(index) else ():
            scores = method.scores(net, params, down, net.laid_out(data.at(part)[0]), own)
            given.append(predict(next(iter(scores.values()))).cpu().numpy())
    return np.concatenate(given)


def per_example(
    method: Method, net: Net, params: Params, down: Message, batch: Batch, own: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the arrays (B,) of `Examples` for a batch of one client.

    Raises `InputError` for scores and losses of the wrong kind, shape or name.
    """
    scores = method.scores(net, params, down, batch.x, own)
    check_scores(method, scores, len(batch.y), net.classes)
    for name, values in scores.items():
        yield f"correct/{name}", _correct(values, batch.y)
    if "head" in scores:
        yield "correct/head_own", _correct(torch.where(own, scores["head"], -math.inf), batch.y)
    loss = method.loss(net, params, batch, down)
    check_loss(method, loss, len(batch.y))
    for name, values in {"loss": loss.total, **{f"loss/{part}": v for part, v in loss.parts.items()}}.items():
        yield name, values.expand(len(batch.y)).double()


def predict(scores: Tensor) -> Tensor:
    """Return the class with the highest score (B,), the lowest on ties; -1 where no class has any."""
    best, answer = scores.max(1)
    return torch.where(best > -math.inf, answer, -1)


def _correct(scores: Tensor, y: Tensor) -> Tensor:
    """Return 1 where the answer is the label and else 0 (B,), but NaN where a score is NaN, which is no answer."""
    best, answer = scores.max(1)  # NaN if any is
    right = (answer == y) & (best > -math.inf)
    return torch.where(best.isnan(), math.nan, right.double())


def all_metrics(method: Method, examples: Sequence[Examples]) -> dict[str, NDArray[np.float64]]:
    """Return what `client_metrics` does, and the method's own further metrics; `InputError` if these are wrong."""
    filled = next((client for client in examples if client), None)
    if filled is None:
        return {}
    empty = {name: values[:0] for name, values in filled.items()}
    told = [
        {name: values == 1 if name.startswith("correct/") else values for name, values in (client or empty).items()}
        for client in examples
    ]
    return {**client_metrics(examples), **checked_summaries(method, method.summaries(told), len(told))}


def client_metrics(examples: Sequence[Examples]) -> dict[str, NDArray[np.float64]]:
    """Return the metrics (clients,) of every client's examples: accuracies and mean losses, NaN for an empty set.

    `accuracy` is the method's headline, `accuracy/<score>` each of its scores; `loss` and `loss/<part>` are means.  An
    accuracy is NaN, too, where a score of an example is.
    """
    filled = [client for client in examples if client]
    if not filled:
        return {}
    metrics = {}
    for name in filled[0]:
        metrics[name.replace("correct/", "accuracy/")] = np.array([_mean(client.get(name)) for client in examples])
    headline = next(iter(metrics))
    return {"accuracy": metrics[headline], **metrics}


def without_answer(metrics: Mapping[str, float]) -> str:
    """Return the first score, or nothing, that is NaN for some of a client's samples, by the client's own metrics."""
    bad = (name for name, value in metrics.items() if is_own(name) and "accuracy/" in name and np.isnan(value))
    return next(bad, "").removeprefix("accuracy/")


def _mean(values: NDArray[Any] | None) -> float:
    return float(values.mean()) if values is not None and len(values) else math.nan
