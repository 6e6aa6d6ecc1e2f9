"""FedProx: the pull is squared, towards the received model, and part of what is differentiated."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, copied, flat, plain_mlp, same, small_cnn, watch
from torch import Tensor, nn

from fedbench.method import Batch, Loss
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedprox import FedProx, squared_distance
from fedbench.net import Net, Params
from fedbench.settings import Optimizer


def problem(dtype: torch.dtype = torch.float32) -> tuple[Net, Params, Params, Batch]:
    """Return a net, a model, the model that was received, and a batch."""
    net = Net(plain_mlp, (6,), 4, dtype)
    (client,) = blobs((8,))
    x, y = torch.from_numpy(client.x_train).to(dtype), torch.from_numpy(client.y_train)
    return net, net.init(1), net.init(0), Batch(x, y, torch.ones(8, dtype=dtype))


def slope(loss: Loss, params: Params) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss.total.mean(), list(params.values()))])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=("float32", "float64")
)
def test_the_pull_is_mu_times_the_way_back(dtype: torch.dtype, tolerance: float) -> None:
    net, params, received, batch = problem(dtype)
    params = {name: tensor.requires_grad_() for name, tensor in params.items()}
    with_pull = slope(FedProx(mu=0.3).loss(net, params, batch, received), params)
    without = slope(FedAvg().loss(net, params, batch, received), params)
    away = torch.cat([(params[name] - received[name]).detach().flatten() for name in params])
    torch.testing.assert_close(with_pull - without, 0.3 * away, rtol=0, atol=tolerance)


def test_the_loss_is_cross_entropy_plus_half_mu_times_the_squared_distance() -> None:
    net, params, received, batch = problem(torch.float64)
    loss = FedProx(mu=0.3).loss(net, params, batch, received)
    away = float((flat(params) - flat(received)).square().sum())
    assert loss.parts["prox"].item() == pytest.approx(0.15 * away)
    wanted = nn.functional.cross_entropy(net(params, batch.x)[1], batch.y, reduction="none")
    torch.testing.assert_close(loss.parts["ce"], wanted)
    torch.testing.assert_close(loss.total, wanted + 0.15 * away)


def test_there_is_no_pull_at_the_received_model_whatever_mu() -> None:
    net, _, received, batch = problem()
    params = {name: tensor.clone().requires_grad_() for name, tensor in received.items()}
    slopes = [slope(FedProx(mu=mu).loss(net, params, batch, received), params) for mu in (0.0, 1.0, 1000.0)]
    assert torch.equal(slopes[0], slopes[1])
    assert torch.equal(slopes[0], slopes[2])
    first = [watch(FedProx(mu=mu), plain_mlp, blobs(), rounds=1, batch_size=100) for mu in (0.0, 1.0, 1000.0)]
    for seen in first[1:]:
        assert same(seen.models[1, "trained", 2], first[0].models[1, "trained", 2])


def test_the_distance_covers_parameters_and_not_buffers() -> None:
    net = Net(small_cnn, (1, 5, 5), 4)
    params, received = net.init(1), net.init(0)
    wanted = sum(float((params[name] - received[name]).square().sum()) for name in net.parameters)
    params["body.1.running_mean"] += 1000
    params["body.1.num_batches_tracked"] += 1000
    assert squared_distance(net, params, received).item() == pytest.approx(wanted, rel=1e-5)


def test_two_steps_are_those_of_the_equation() -> None:
    (client,) = blobs((8,))
    model = plain_mlp((6,), 4).double()
    start = copied(model.state_dict())
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 4, "shuffle": False, "dtype": "float64", "classes": 4}
    rate, mu = 0.1, 0.7
    plain = Optimizer(lr=rate, momentum=0.0)
    seen = watch(FedProx(mu=mu), model, [client], optimizer=plain, **settings)
    x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
    for index in torch.split(torch.arange(8), 4):
        loss = nn.functional.cross_entropy(model(x[index]), y[index])
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (name, weight), g in zip(model.named_parameters(), slopes, strict=True):
                weight.sub_(rate * (g + mu * (weight - start[name])))
    torch.testing.assert_close(flat(seen.models[1, "trained", 0]), flat(copied(model.state_dict())), rtol=0, atol=1e-13)


def test_with_momentum_the_pull_is_part_of_the_gradient() -> None:
    (client,) = blobs((8,))
    model = plain_mlp((6,), 4).double()
    start = copied(model.state_dict())
    settings: dict[str, Any] = {"batch_size": 4, "epochs": 2, "shuffle": False, "dtype": "float64", "classes": 4}
    seen = watch(
        FedProx(mu=0.7), model, [client], rounds=1, optimizer=Optimizer(lr=0.1, momentum=0.9, nesterov=True), **settings
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, nesterov=True)
    x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
    for index in 2 * torch.split(torch.arange(8), 4):
        optimizer.zero_grad()
        away = torch.stack([(w - start[name]).square().sum() for name, w in model.named_parameters()]).sum()
        torch.autograd.backward(nn.functional.cross_entropy(model(x[index]), y[index]) + 0.35 * away)
        optimizer.step()
    torch.testing.assert_close(flat(seen.models[1, "trained", 0]), flat(copied(model.state_dict())), rtol=0, atol=1e-13)


def test_the_anchor_is_the_model_received_in_each_round() -> None:
    clients = blobs((8, 12))
    model = plain_mlp((6,), 4).double()
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": False, "dtype": "float64", "classes": 4}
    method, optimizer = FedProx("uniform", mu=0.7), Optimizer(lr=0.1, momentum=0.9)
    seen = watch(method, model, clients, rounds=3, optimizer=optimizer, **settings)
    shared = copied(model.state_dict())
    for number in (1, 2, 3):
        ends = []
        for client in clients:
            model.load_state_dict(shared)
            fresh = torch.optim.SGD(model.parameters(), 0.1, 0.9)
            x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
            for index in torch.split(torch.arange(len(y)), 4):
                fresh.zero_grad()
                away = torch.stack([(w - shared[name]).square().sum() for name, w in model.named_parameters()]).sum()
                torch.autograd.backward(nn.functional.cross_entropy(model(x[index]), y[index]) + 0.35 * away)
                fresh.step()
            ends.append(copied(model.state_dict()))
        shared = {name: (ends[0][name] + ends[1][name]) / 2 for name in shared}
        torch.testing.assert_close(flat(seen.models[number, "evaluated", 0]), flat(shared), rtol=0, atol=1e-12)


def test_the_way_from_the_received_model_shrinks_as_mu_grows() -> None:
    run: dict[str, Any] = {"batch_size": 4, "optimizer": Optimizer(lr=1e-3)}
    start = flat(watch(FedAvg(), plain_mlp, blobs(), rounds=1, participants=[[]]).models[0, "evaluated", 0])
    lengths = []
    for mu in (0.0, 1.0, 10.0, 100.0, 1000.0):
        seen = watch(FedProx(mu=mu), plain_mlp, blobs(), rounds=1, epochs=20, **run)
        lengths.append(float((flat(seen.models[1, "trained", 1]) - start).norm()))
    assert all(stronger < weaker for weaker, stronger in pairwise(lengths))
    assert 0 < lengths[-1] < lengths[0] / 10


def test_the_received_weights_do_not_move_during_local_training() -> None:
    seen = watch(FedProx(mu=1.0), plain_mlp, blobs(), rounds=2, participants=[[0], [1]], batch_size=4)
    assert same(seen.models[1, "trained", 0], seen.models[1, "evaluated", 3])
    term = seen.outcome.metrics["train/loss/prox"]
    assert term[0, 0] > 0
    assert term[1, 1] > 0
    assert np.isnan(term[0, 1:]).all()
    assert (seen.outcome.metrics["test/loss/prox"] == 0).all(), "a client that starts from the model is at its anchor"


def test_the_default_pulls() -> None:
    assert FedProx().mu > 0
