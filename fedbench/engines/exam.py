"""Models of several clients examined at once: what `evaluation.examine` does for one of them."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.func import vmap

from fedbench.engines import Job, Model
from fedbench.engines.lowering import Answer, Lowering
from fedbench.evaluation import BLOCK, Examples, per_example
from fedbench.method import Batch, Message, stack, tree_map
from fedbench.net import Params
from fedbench.samples import padded


def chunks(sizes: Sequence[int], clients: int, samples: int) -> Iterator[list[int]]:
    """Yield which clients to examine together, given how many samples each has; those with most come first.

    At most so many `clients`, of which at most so many `samples` are computed at a time, padding included.  Clients
    without samples are left out.
    """
    order = sorted((number for number, size in enumerate(sizes) if size), key=lambda number: -sizes[number])
    while order:
        count = max(1, min(clients, samples // min(sizes[order[0]], BLOCK)))
        yield order[:count]
        order = order[count:]


def trial(job: Job) -> int:
    """Examine the job's first client, and return how many bytes a sample takes: twice what autograd would save of it.

    Raises whatever model and method raise under vmap.
    """
    net, data = job.net, job.data
    started = {name: tensor.detach()[None] for name, tensor in job.start(0).items()}
    params = {name: tensor.requires_grad_(name in net.parameters) for name, tensor in started.items()}
    down = tree_map(lambda tensor: tensor[None], job.received(0))
    lowering = Lowering.of(net, training=False)

    def saved(count: int) -> int:
        samples = torch.zeros(1, count, dtype=torch.int64, device=data.x.device)
        batch = Batch(*data.at(samples), torch.ones(1, count, dtype=net.dtype, device=net.device))
        return saved_bytes(lambda: _answers(job, lowering, params, down, batch, data.own[job.clients[:1]]))

    return max(1, saved(4) - saved(2))  # of two samples, without what is saved of the model


def saved_bytes(compute: Callable[[], object]) -> int:
    """Return how many bytes autograd saves of a computation."""
    saved: dict[int, UntypedStorage] = {}  # by address; kept, so that no two have the same one

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute()
    return sum(storage.nbytes() for storage in saved.values())


def examine_together(job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
    """Return what `Engine.examine` does for some clients; the first of them has the most samples."""
    if len(places) == 1:
        return {job.clients[place]: job.examine(place, model(job, place), split) for place in places}
    clients, models = [job.clients[place] for place in places], [model(job, place) for place in places]
    index = [split[client] for client in clients]
    lowering = Lowering.of(job.net, training=False)
    params = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    if lowering:
        params = {name: lowering.allocate(name, tensor) for name, tensor in params.items()}
    down = stack([job.received(place) for place in places])
    own = job.data.own[clients]
    blocks = []
    with torch.no_grad():
        for rows, batch in _blocks(job, index):
            here = {name: tensor[rows] for name, tensor in params.items()}
            told = tree_map(lambda tensor: tensor[rows], down)  # noqa: B023 (called at once)
            found = _answers(job, lowering, here, told, batch, own[rows])
            blocks.append({name: values.cpu().numpy() for name, values in found.items()})
    return {client: _joined(blocks, row, len(index[row])) for row, client in enumerate(clients)}


def _blocks(job: Job, index: Sequence[Tensor]) -> Iterator[tuple[slice, Batch]]:
    """Yield so many samples of all clients, then the next of those that have more, and which clients these are."""
    for first in range(0, len(index[0]), BLOCK):
        held = [samples[first : first + BLOCK] for samples in index if len(samples) > first]
        numbers, valid = padded(held, job.data.x.dtype)
        yield slice(0, len(held)), Batch(*job.data.at(numbers), valid)


def _joined(blocks: Sequence[Examples], row: int, size: int) -> Examples:
    """Return one client's arrays (size,) out of blocks' (clients, B)."""
    return {
        name: np.concatenate([block[name][row] for block in blocks if len(block[name]) > row])[:size]
        for name in blocks[0]
    }


def _answers(
    job: Job, lowering: Lowering | None, params: Params, down: Message, batch: Batch, own: Tensor
) -> dict[str, Tensor]:
    """Return the arrays of `Examples` (clients, B), all arguments being stacked over clients."""

    def one(params: Params, down: Message, batch: Batch, own: Tensor, answer: Answer) -> dict[str, Tensor]:
        net = job.net.knowing(params, batch.x, answer) if answer else job.net.remembering()
        return dict(per_example(job.method, net, params, down, batch, own))

    answer: Answer = lowering.run(params, [], batch.x) if lowering else ()
    found: dict[str, Tensor] = vmap(one)(params, down, batch, own, answer)
    return found
