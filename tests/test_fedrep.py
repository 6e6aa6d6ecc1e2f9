"""FedPer and FedRep: what stays with the client, and what stands still while the rest trains."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, flat, part, plain_mlp, same, small_cnn, small_mlp, watch

from fedbench import simulate
from fedbench.method import Method, parameters
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedrep import FedRep
from fedbench.net import Net
from fedbench.settings import Optimizer

HEAD = frozenset({"head.fc.weight", "head.fc.bias"})
BODY = frozenset({"body.1.weight", "body.1.bias"})
MOVING = [
    Optimizer(lr=0.1, momentum=0.9, weight_decay=0.1),
    Optimizer(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, weight_decay_bias=0.0),
    Optimizer("adam", lr=0.1, weight_decay=0.1),
]
both = pytest.mark.parametrize("method", [FedPer(), FedRep()], ids=("fedper", "fedrep"))


@pytest.fixture(params=["loop", "vectorised"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- what is shared


@both
def test_uploads_hold_the_body_and_nothing_of_the_head(method: Method) -> None:
    seen = watch(method, small_mlp, blobs(), rounds=2)
    for message in [*seen.uploads, *seen.servers]:
        assert set(message) == BODY
    assert seen.outcome.traffic["up/scalars"].tolist() == [[6 * 6 + 6] * 4] * 2


@both
def test_after_a_round_bodies_are_equal_and_heads_differ(method: Method) -> None:
    seen = watch(method, small_mlp, blobs(), rounds=2, init="common")
    for number in (1, 2):
        models = [seen.models[number, "evaluated", client] for client in range(4)]
        assert all(same(part(models[0], BODY), part(model, BODY)) for model in models)
        assert not any(same(part(a, HEAD), part(b, HEAD)) for i, a in enumerate(models) for b in models[:i])


@both
def test_the_body_is_the_mean_and_the_head_the_clients_own(method: FedPer | FedRep) -> None:
    seen = watch(method, small_mlp, blobs(), rounds=1)
    weights = torch.tensor([7.0, 12, 5, 9]) if method.weights == "size" else torch.ones(4)
    trained = [seen.models[1, "trained", client] for client in range(4)]
    mean = sum(w * flat(part(m, BODY)) for w, m in zip(weights / weights.sum(), trained, strict=True))
    for client in range(4):
        model = seen.models[1, "evaluated", client]
        torch.testing.assert_close(flat(part(model, BODY)), mean, rtol=0, atol=1e-6)
        assert same(part(model, HEAD), part(trained[client], HEAD))


@both
def test_the_head_of_one_client_is_nothing_to_the_others_until_bodies_are_averaged(method: Method) -> None:
    states = [Net(plain_mlp, (6,), 4).init(client) for client in range(4)]
    other = [{**states[0], "head.fc.weight": states[0]["head.fc.weight"] * 3}, *states[1:]]
    one, two = (watch(method, plain_mlp, blobs(), rounds=2, initial=given) for given in (states, other))
    assert not same(one.models[1, "trained", 0], two.models[1, "trained", 0])
    for client in (1, 2, 3):
        torch.testing.assert_close(
            flat(one.models[1, "trained", client]), flat(two.models[1, "trained", client]), rtol=0, atol=1e-7
        )
        assert not same(one.models[2, "trained", client], two.models[2, "trained", client])
    absent: dict[str, Any] = {"rounds": 3, "participants": [[1, 2, 3], [1, 3], [2]]}
    one, two = (watch(method, plain_mlp, blobs(), initial=given, **absent) for given in (states, other))
    for key, params in one.models.items():
        assert same(params, two.models[key]) == (key[2] != 0)


@both
def test_a_client_that_took_no_part_keeps_its_head_and_gets_the_new_body(method: Method) -> None:
    seen = watch(method, small_mlp, blobs(), rounds=2, participants=[[0, 1, 2, 3], [0, 1]])
    before, after = (seen.models[number, "evaluated", 3] for number in (1, 2))
    assert same(part(before, HEAD), part(after, HEAD))
    assert not same(part(before, BODY), part(after, BODY))
    assert same(part(after, BODY), part(seen.models[2, "evaluated", 0], BODY))


def test_the_two_parts_of_fedper_train_together() -> None:
    (client,) = blobs((8,))
    run: dict[str, Any] = {"rounds": 1, "batch_size": 4, "classes": 4}
    one, two = (watch(method, small_mlp, [client], **run) for method in (FedPer(), FedAvg()))
    assert same(one.models[1, "trained", 0], two.models[1, "trained", 0])


# --- the two phases of FedRep


@pytest.mark.parametrize("optimizer", MOVING, ids=str)
def test_the_frozen_part_does_not_move(optimizer: Optimizer, engine: Any) -> None:
    run: dict[str, Any] = {"rounds": 2, "batch_size": 4, "optimizer": optimizer, "engine": engine}
    seen = watch(FedRep(head_epochs=2, body_epochs=2), small_mlp, blobs(), **run)
    for client in range(4):
        received = seen.models[1, "evaluated", client]
        middle, end = (seen.models[2, f"phase/{name}", client] for name in ("head", "body"))
        assert same(part(received, BODY), part(middle, BODY))
        assert not same(part(received, HEAD), part(middle, HEAD))
        assert same(part(middle, HEAD), part(end, HEAD))
        assert not same(part(middle, BODY), part(end, BODY))
        assert same(end, seen.models[2, "trained", client])


@pytest.mark.parametrize("optimizer", MOVING, ids=str)
def test_without_body_epochs_the_body_stays_the_first_one_for_ever(optimizer: Optimizer, engine: Any) -> None:
    run: dict[str, Any] = {"batch_size": 4, "optimizer": optimizer, "engine": engine}
    method = FedRep(head_epochs=2, body_epochs=0)  # four clients of equal weight: their mean is exact
    start = watch(method, small_mlp, blobs(), rounds=1, participants=[[]], **run).models[0, "evaluated", 0]
    seen = watch(method, small_mlp, blobs(), rounds=3, **run)
    for (number, _), params in seen.stage("evaluated").items():
        assert same(part(params, BODY), part(start, BODY))
        assert number == 0 or not same(part(params, HEAD), part(start, HEAD))


def test_without_head_epochs_the_heads_stay_as_drawn() -> None:
    method = FedRep(head_epochs=0, body_epochs=1)
    start = watch(method, small_mlp, blobs(), rounds=1, participants=[[]]).stage("evaluated")
    seen = watch(method, small_mlp, blobs(), rounds=2)
    for client in range(4):
        assert same(part(seen.models[2, "evaluated", client], HEAD), part(start[0, client], HEAD))
    assert not same(part(seen.models[2, "evaluated", 0], BODY), part(start[0, 0], BODY))


def test_without_any_epochs_nothing_happens() -> None:
    seen = watch(FedRep(head_epochs=0, body_epochs=0), small_mlp, blobs(), rounds=2)
    assert seen.outcome.work["steps"].tolist() == [[0] * 4] * 2
    assert same(seen.models[1, "evaluated", 0], seen.models[2, "evaluated", 0])
    assert not any(name.startswith("train/") for name in seen.outcome.metrics)


def test_phases_take_the_epochs_of_the_method_and_not_of_the_suite() -> None:
    outcome = simulate(FedRep(head_epochs=3, body_epochs=2), small_mlp, blobs(), rounds=1, epochs=7, batch_size=4)
    assert outcome.work["steps"].tolist() == [[5 * steps for steps in (2, 3, 2, 3)]]


@pytest.mark.parametrize(("preset", "epochs"), [("paper", (10, 1)), ("official", (10, 1)), ("table1", (1, 1))])
def test_presets_of_the_phases(preset: str, epochs: tuple[int, int]) -> None:
    method = FedRep(**FedRep.presets[preset])
    assert (method.head_epochs, method.body_epochs) == epochs
    assert method.weights == "uniform"


def test_each_phase_has_a_fresh_optimiser() -> None:
    # A body phase of one full-batch step starts without momentum, so it is a plain step at the head phase's end.
    optimizer = Optimizer(lr=0.1, momentum=0.9)
    run: dict[str, Any] = {"rounds": 1, "batch_size": 100, "dtype": "float64", "optimizer": optimizer}
    clients = blobs()
    seen = watch(FedRep(head_epochs=4, body_epochs=1), plain_mlp, clients, **run)
    net = Net(plain_mlp, (6,), 4, torch.float64)
    for number, client in enumerate(clients):
        middle = {n: t.requires_grad_() for n, t in seen.models[1, "phase/head", number].items()}
        x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
        loss = torch.nn.functional.cross_entropy(net(middle, x)[1], y)
        slopes = torch.autograd.grad(loss, [middle[name] for name in sorted(BODY)])
        for name, slope in zip(sorted(BODY), slopes, strict=True):
            torch.testing.assert_close(
                seen.models[1, "trained", number][name], middle[name].detach() - 0.1 * slope, rtol=0, atol=1e-14
            )


def test_freezing_parameters_does_not_freeze_running_statistics() -> None:
    seen = watch(FedRep(body_epochs=0), small_cnn, blobs(shape=(1, 5, 5)), rounds=1, batch_size=4)
    counts = [int(seen.models[1, "trained", client]["body.1.num_batches_tracked"]) for client in range(4)]
    assert counts == [2, 3, 2, 3]
    assert int(parameters(seen.servers[0])["body.1.num_batches_tracked"]) == 3


def test_a_personal_part_that_is_all_or_nothing() -> None:
    everything = simulate(FedRep(personal="all"), small_mlp, blobs(), rounds=2)
    assert not everything.traffic["up/scalars"].any()
    nothing = watch(FedRep(personal="none"), small_mlp, blobs(), rounds=2)
    assert same(nothing.models[2, "evaluated", 0], nothing.models[2, "evaluated", 3])
    assert np.isfinite(nothing.outcome.metrics["train/loss/head"]).all()
