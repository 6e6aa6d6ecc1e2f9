"""Local training: torch's optimisers step by step, and which sample is in which batch."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TwoParts, assert_same_results, blobs, copied, flat, plain_mlp, same, small_mlp, watch
from torch import nn

from fedbench import simulate
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedrep import FedRep
from fedbench.methods.local import Local
from fedbench.net import Net, Params
from fedbench.samples import Samples, from_clients
from fedbench.settings import MOST, Optimizer, Training
from fedbench.trainer import Step, Updater, client_masks, plan, step_masks

# --- the optimiser


def tensors() -> Params:
    draw = torch.Generator().manual_seed(0)
    shapes = {"conv.weight": (3, 2, 2, 2), "conv.bias": (3,), "fc.weight": (4, 3), "fc.bias": (4,)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def follow(ours: Optimizer, theirs: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], steps: int = 6) -> None:
    """Take steps with both on the same gradients, and compare after each."""
    params, reference = tensors(), {name: torch.nn.Parameter(t) for name, t in tensors().items()}
    bias_decay = ours.weight_decay if ours.weight_decay_bias is None else ours.weight_decay_bias
    groups = [
        {"params": [t for n, t in reference.items() if "bias" not in n], "weight_decay": ours.weight_decay},
        {"params": [t for n, t in reference.items() if "bias" in n], "weight_decay": bias_decay},
    ]
    optimizer, updater = theirs(groups), Updater(ours, params, list(params))
    draw = torch.Generator().manual_seed(1)
    start = copied(params)
    for taken in range(steps):
        slopes = {n: torch.randn(t.shape, generator=draw, dtype=torch.float64) for n, t in params.items()}
        for name, tensor in reference.items():
            tensor.grad = slopes[name].clone()
        optimizer.step()
        updater.update([slopes[name] for name in updater.names], taken)
        for name, tensor in reference.items():
            torch.testing.assert_close(params[name], tensor.detach(), rtol=0, atol=1e-14)
    assert all(not torch.equal(params[name], start[name]) for name in params)


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(momentum=0.0),
        Optimizer(momentum=0.9),
        Optimizer(momentum=0.9, nesterov=True),
        Optimizer(lr=0.3, momentum=0.5, weight_decay=0.1),
        Optimizer(momentum=0.9, nesterov=True, weight_decay=0.1, weight_decay_bias=0.0),
        Optimizer(momentum=0.9, weight_decay=0.0, weight_decay_bias=0.2),
    ],
    ids=str,
)
def test_sgd_is_that_of_torch_step_by_step(optimizer: Optimizer) -> None:
    settings: dict[str, Any] = {"lr": optimizer.lr, "momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
    follow(optimizer, lambda groups: torch.optim.SGD(groups, **settings))


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer("adam", lr=0.01),
        Optimizer("adam", lr=0.1, weight_decay=0.1),
        Optimizer("adam", lr=0.1, weight_decay=0.1, weight_decay_bias=0.0),
    ],
    ids=str,
)
def test_adam_is_that_of_torch_step_by_step(optimizer: Optimizer) -> None:
    follow(optimizer, lambda groups: torch.optim.Adam(groups, lr=optimizer.lr))


def test_tensors_stacked_over_clients_take_the_step_of_each_alone() -> None:
    for optimizer in (Optimizer(momentum=0.9, weight_decay=0.1), Optimizer("adam")):
        alone = [tensors(), {name: 2 * t for name, t in tensors().items()}]
        together = {name: torch.stack([a[name] for a in alone]) for name in alone[0]}
        updaters = [Updater(optimizer, params, list(params)) for params in (*alone, together)]
        for step in range(3):
            slopes = [[torch.sin(t + step + number) for t in tensors().values()] for number in range(2)]
            for updater, slope in zip(updaters[:2], slopes, strict=True):
                updater.update(slope, step)
            updaters[2].update([torch.stack(pair) for pair in zip(*slopes, strict=True)], step)
        assert all(torch.equal(together[n][i], alone[i][n]) for n in together for i in range(2))


def test_weight_decay_of_biases_can_be_switched_off_in_training() -> None:
    # With a learning rate too small to matter otherwise, decay alone moves the weights.
    optimizer = Optimizer(lr=1e-6, momentum=0.0, weight_decay=1e5, weight_decay_bias=0.0)
    seen = watch(Local(), plain_mlp, blobs(), rounds=1, batch_size=100, optimizer=optimizer)
    untouched = watch(Local(), plain_mlp, blobs(), rounds=1, participants=[[0]], optimizer=optimizer)
    before, after = untouched.models[1, "evaluated", 1], seen.models[1, "evaluated", 1]
    for name in before:
        moved = after[name] / before[name]
        wanted = 1.0 if name.endswith("bias") else 0.9
        torch.testing.assert_close(moved, torch.full_like(moved, wanted), rtol=0, atol=1e-3)


# --- the batches


def planned(training: Training, sizes: tuple[int, ...] = (7, 10, 3), client: int = 0, **where: int) -> list[Step]:
    """Return the steps of a client of a federation with these numbers of training samples."""
    data = federation(sizes)
    net = Net(plain_mlp, data.shape, data.classes)
    key = {"seed": 0, "round_number": 1} | where
    return plan(Local().phases(net, training.epochs), data, training, key["seed"], key["round_number"], client)


def federation(sizes: tuple[int, ...]) -> Samples:
    return from_clients(blobs(sizes), 4, torch.float32, torch.device("cpu"))


def lists(steps: list[Step]) -> list[list[int]]:
    return [step.samples.tolist() for step in steps]


@pytest.mark.parametrize(
    ("last_batch", "size", "batch", "lengths"),
    [
        ("keep", 7, 3, [3, 3, 1]),
        ("drop", 7, 3, [3, 3]),
        ("drop_single", 7, 3, [3, 3]),
        ("keep", 8, 3, [3, 3, 2]),
        ("drop", 8, 3, [3, 3]),
        ("drop_single", 8, 3, [3, 3, 2]),
        ("drop", 6, 3, [3, 3]),
        ("keep", 3, 10, [3]),
        ("drop", 3, 10, [3]),  # never a silent round of zero steps
        ("drop_single", 3, 10, [3]),
        ("drop_single", 1, 10, [1]),
        ("drop", 1, 1, [1]),
        ("drop_single", 3, 1, [1, 1, 1]),
    ],
)
def test_what_happens_to_the_last_batch(last_batch: Any, size: int, batch: int, lengths: list[int]) -> None:
    steps = planned(Training(batch_size=batch, last_batch=last_batch), (size, 4))
    assert [len(step.samples) for step in steps] == lengths
    seen = [sample for step in steps for sample in step.samples.tolist()]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(size))


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    steps = planned(Training(epochs=3, batch_size=4), client=1)
    epochs = [[i for s in steps if s.epoch == epoch for i in s.samples.tolist()] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [epochs_sorted := sorted(epochs[0])] * 3
    assert len(epochs_sorted) == 10
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_shuffling_samples_come_as_stored() -> None:
    steps = planned(Training(epochs=2, batch_size=4, shuffle=False))
    assert lists(steps) == [[0, 1, 2, 3], [4, 5, 6]] * 2


def test_orders_differ_between_rounds_seeds_and_clients() -> None:
    training = Training(batch_size=100)
    sizes = (30, 30, 30)
    orders = {
        tuple((step.samples - step.samples.min()).tolist())
        for where in ({}, {"seed": 1}, {"round_number": 2})
        for client in range(3)
        for step in planned(training, sizes, client, **where)
    }
    assert len(orders) == 9


def test_a_plan_does_not_depend_on_the_other_clients() -> None:
    training = Training(epochs=2, batch_size=4)
    alone = planned(training, (9,), 0)
    among = planned(training, (9, 40, 1, 7), 0)
    assert lists(alone) == lists(among)
    assert [step.key for step in alone] == [step.key for step in among]


def test_every_step_has_dropout_masks_of_its_own() -> None:
    training = Training(epochs=2, batch_size=4)
    made = [
        step.key
        for client in range(3)
        for number in (1, 2)
        for step in planned(training, client=client, round_number=number)
    ]
    assert len(made) == 2 * 2 * (2 + 3 + 1)
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("entries", [1, 500, 1 << 22])
def test_masks_are_those_of_each_step_however_many_are_drawn_at_once(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbench.trainer._MASK_ENTRIES", entries)
    data = federation((10, 7))
    net = Net(lambda _shape, _classes: TwoParts(nn.Dropout(0.5), nn.Linear(6, 4)), data.shape, 4)
    plans = [plan(Local().phases(net, 2), data, Training(batch_size=4), 0, 1, client) for client in (0, 1)]
    assert [len(steps) for steps in plans] == [6, 4]
    together = list(step_masks(net, plans))
    for client, steps in enumerate(plans):
        for place, (step, (mask,)) in enumerate(zip(steps, client_masks(net, steps), strict=True)):
            assert torch.equal(mask, net.masks(torch.tensor([step.key]), len(step.samples))[0][0])
            assert torch.equal(mask, together[place][0][client, : len(step.samples)])


def test_phases_follow_each_other_with_orders_of_their_own() -> None:
    data = federation((8,))
    net = Net(plain_mlp, data.shape, data.classes)
    method = FedRep(head_epochs=2, body_epochs=1)
    steps = plan(method.phases(net, 7), data, Training(epochs=7, batch_size=4), 0, 1, 0)
    assert [(step.phase, step.epoch) for step in steps] == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 2), (1, 2)]
    assert len({tuple(a + b) for a, b in pairwise(lists(steps))}) > 1


# --- whole rounds


def test_a_client_smaller_than_a_batch_trains_on_one_batch_of_all_it_has() -> None:
    for last_batch in ("keep", "drop", "drop_single"):
        seen = watch(FedAvg(), plain_mlp, blobs((3, 20)), rounds=1, batch_size=10, last_batch=last_batch)
        assert seen.outcome.work["steps"].tolist() == [[1, 2]]
        assert seen.outcome.work["samples"].tolist() == [[3, 20]]
        start = Net(plain_mlp, (6,), 4).init(0)
        assert not same(seen.models[1, "trained", 0], start)
        assert np.isfinite(seen.outcome.metrics["train/loss"]).all()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Optimizer(lr=0.1, momentum=0.9), lambda params: torch.optim.SGD(params, 0.1, 0.9)),
        (
            Optimizer(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
            lambda params: torch.optim.SGD(params, 0.1, 0.9, nesterov=True, weight_decay=0.05),
        ),
        (Optimizer("adam", lr=0.01, weight_decay=0.1), lambda params: torch.optim.Adam(params, 0.01, weight_decay=0.1)),
    ],
    ids=("momentum", "nesterov", "adam"),
)
def test_training_is_that_of_a_plain_torch_loop_with_a_fresh_optimiser_each_round(ours: Any, theirs: Any) -> None:
    (client,) = blobs((11,))
    model = plain_mlp((6,), 4).double()
    settings: dict[str, Any] = {
        "batch_size": 4,
        "epochs": 2,
        "shuffle": False,
        "dtype": "float64",
        "optimizer": ours,
        "classes": 4,
    }
    seen = watch(Local(), model, [client], rounds=3, **settings)
    x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
    for number in range(1, 4):
        optimizer = theirs(model.parameters())
        losses = []
        for _ in range(2):
            for batch in torch.split(torch.arange(11), 4):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
                torch.autograd.backward(loss)
                optimizer.step()
                losses.append(loss.item())
        torch.testing.assert_close(
            flat(seen.models[number, "trained", 0]), flat(copied(model.state_dict())), rtol=0, atol=1e-12
        )
        # Every batch counts equally, the shorter one too.
        assert seen.outcome.metrics["train/loss"][number - 1, 0] == pytest.approx(np.mean(losses), abs=1e-12)


def test_momentum_does_not_survive_a_round_but_does_survive_an_epoch() -> None:
    one: dict[str, Any] = {
        "clients": blobs((8,)),
        "batch_size": 8,
        "shuffle": False,
        "optimizer": Optimizer(momentum=0.9),
    }
    rounds = watch(Local(), plain_mlp, rounds=2, **one).models[2, "trained", 0]
    epochs = watch(Local(), plain_mlp, rounds=1, epochs=2, **one).models[1, "trained", 0]
    assert not torch.allclose(flat(rounds), flat(epochs), atol=1e-5)
    one["optimizer"] = Optimizer(momentum=0.0)
    rounds = watch(Local(), plain_mlp, rounds=2, **one).models[2, "trained", 0]
    epochs = watch(Local(), plain_mlp, rounds=1, epochs=2, **one).models[1, "trained", 0]
    assert same(rounds, epochs)


def test_phases_report_their_own_mean_loss() -> None:
    outcome = simulate(FedRep(head_epochs=3, body_epochs=1), small_mlp, blobs(), rounds=1, batch_size=4)
    head, body, both = (outcome.metrics[f"train/{name}"] for name in ("loss/head", "loss/body", "loss"))
    np.testing.assert_allclose(both, (3 * head + body) / 4, rtol=1e-12)
    assert outcome.work["steps"].tolist() == [[4 * steps for steps in (2, 3, 2, 3)]]
    assert outcome.work["samples"].tolist() == [[4 * size for size in (7, 12, 5, 9)]]


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_batch_may_be_larger_than_any_client_and_takes_no_memory_for_that(engine: Any) -> None:
    whole, larger = (
        simulate(FedAvg(), small_mlp, blobs(), rounds=1, batch_size=size, engine=engine) for size in (12, MOST)
    )
    assert_same_results(whole, larger)
