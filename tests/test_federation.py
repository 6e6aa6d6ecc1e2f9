"""Rounds through the Python door: who starts from what, who takes part, what is measured, and how a run ends early."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    TwoParts,
    assert_same_results,
    blobs,
    copied,
    flat,
    part,
    plain_mlp,
    results,
    same,
    small_cnn,
    small_mlp,
    watch,
)
from torch import nn

from fedbench import ClientArrays, federation, simulate
from fedbench.data import Arrays
from fedbench.errors import InputError
from fedbench.method import Method
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fesem import FeSEM
from fedbench.methods.local import Local
from fedbench.models.mlp import Mlp
from fedbench.net import Net, Params
from fedbench.partition import Iid, draw
from fedbench.settings import Optimizer, Training

NOBODY: list[list[int]] = [[]]


def first_models(method: Method, model: Any, clients: list[ClientArrays], **settings: Any) -> dict[int, Params]:
    """Return the models from which the clients would start round 1."""
    seen = watch(method, model, clients, rounds=1, participants=NOBODY, **settings)
    return {client: params for (_, client), params in seen.stage("evaluated").items()}


# --- where everybody starts


def test_a_module_brings_its_own_weights_and_keeps_them() -> None:
    torch.manual_seed(3)
    model = plain_mlp((6,), 4)
    before = copied(model.state_dict())
    for init in ("common", "per_client"):
        first = first_models(FedAvg(), model, blobs(), classes=4, init=init)
        assert all(same(params, before) for params in first.values())
    trained = watch(FedAvg(), model, blobs(), rounds=2)
    assert not same(trained.models[2, "evaluated", 0], before)
    assert same(copied(model.state_dict()), before)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_clients_of_a_method_that_averages_start_from_identical_weights() -> None:
    for init in ("common", "per_client"):
        first = first_models(FedAvg(), plain_mlp, blobs(), init=init)
        assert all(same(first[0], params) for params in first.values())


def test_only_the_shared_part_is_common_from_the_start() -> None:
    first = first_models(FedPer(personal="head"), plain_mlp, blobs())
    head = frozenset(name for name in first[0] if name.startswith("head."))
    body = frozenset(first[0]) - head
    assert all(same(part(first[0], body), part(params, body)) for params in first.values())
    weights = [params["head.fc.weight"] for params in first.values()]
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_clients_can_have_draws_of_their_own_or_one_in_common() -> None:
    own, common = (first_models(Local(), plain_mlp, blobs(), init=init) for init in ("per_client", "common"))
    assert all(same(common[0], params) for params in common.values())
    assert same(common[0], own[0])
    assert not any(same(own[i], own[j]) for i in range(4) for j in range(i))


def test_initial_states_can_be_given_for_all_or_one_each() -> None:
    states = [copied(plain_mlp((6,), 4).state_dict()) for _ in range(4)]
    each = first_models(Local(), plain_mlp, blobs(), initial=states)
    assert all(same(each[i], states[i]) for i in range(4))
    everybody = first_models(Local(), plain_mlp, blobs(), initial=states[2])
    assert all(same(params, states[2]) for params in everybody.values())
    server = first_models(FedAvg(), plain_mlp, blobs(), initial=states)
    assert all(same(params, states[0]) for params in server.values())


def test_given_states_are_not_changed_by_training() -> None:
    states = [copied(small_cnn((1, 5, 5), 4).state_dict()) for _ in range(4)]
    before = [copied(state) for state in states]
    for method in (Local(), FedAvg(), FedProto()):
        simulate(method, small_cnn, blobs(shape=(1, 5, 5)), initial=states, rounds=2)
        assert all(same(a, b) for a, b in zip(states, before, strict=True))


def test_the_first_model_can_be_measured_before_any_training() -> None:
    clients = blobs()
    model = plain_mlp((6,), 4)
    outcome = simulate(FedAvg(), model, clients, rounds=1, participants=NOBODY)
    for number, client in enumerate(clients):
        guesses = model(torch.from_numpy(client.x_test)).argmax(1).numpy()
        assert outcome.metrics["test/accuracy"][0, number] == (guesses == client.y_test).mean()


# --- who takes part


def took_part(outcome: federation.Outcome) -> list[list[int]]:
    return [np.flatnonzero(steps).tolist() for steps in outcome.work["steps"]]


def test_a_fraction_of_the_clients_is_drawn_anew_in_every_round() -> None:
    outcome = simulate(FedAvg(), plain_mlp, blobs([4] * 10), rounds=30, participation=0.3, batch_size=4)
    chosen = took_part(outcome)
    assert [len(clients) for clients in chosen] == [3] * 30
    assert len({tuple(clients) for clients in chosen}) > 10
    counts = np.bincount(np.concatenate(chosen), minlength=10)
    assert counts.min() >= 2
    assert counts.max() <= 18


def test_all_methods_get_the_same_participants() -> None:
    run: dict[str, Any] = {"rounds": 6, "participation": 0.5}
    chosen = [took_part(simulate(m, plain_mlp, blobs(), **run)) for m in (Local(), FedAvg(), FeSEM(), FedProto())]
    assert chosen[0] == chosen[1] == chosen[2] == chosen[3]
    assert chosen[0] != took_part(simulate(Local(), plain_mlp, blobs(), seed=1, **run))


def test_a_small_fraction_still_draws_somebody() -> None:
    assert [len(c) for c in took_part(simulate(FedAvg(), plain_mlp, blobs(), rounds=3, participation=0.01))] == [1] * 3


@pytest.mark.parametrize("method", [Local(), FedAvg(), FeSEM(), FedProto()], ids=lambda m: type(m).__name__)
def test_evaluation_covers_all_clients_however_few_take_part(method: Method) -> None:
    outcome = simulate(method, plain_mlp, blobs(), rounds=4, participation=0.25)
    assert [len(chosen) for chosen in took_part(outcome)] == [1] * 4
    some = {name for name, table in outcome.metrics.items() if np.isnan(table).any()}
    assert {"test/accuracy", "test/loss"} <= outcome.metrics.keys() - some
    assert {name.partition("/")[0] for name in some} == {"local", "train"}  # whose names say that it is participants


def test_participants_can_be_given_and_the_others_stay_as_they_are() -> None:
    given = [[2, 0], [1], [3]]
    seen = watch(Local(), plain_mlp, blobs(), rounds=3, participants=given)
    assert took_part(seen.outcome) == [[0, 2], [1], [3]]
    models = seen.stage("evaluated")
    for number, clients in enumerate(given, 1):
        for client in range(4):
            if number > 1:
                assert same(models[number, client], models[number - 1, client]) == (client not in clients)
    np.testing.assert_array_equal(np.isnan(seen.outcome.metrics["train/loss"]), seen.outcome.work["steps"] == 0)


def test_only_participants_send_and_are_averaged() -> None:
    seen = watch(FedAvg("uniform"), plain_mlp, blobs(), rounds=2, participants=[[1, 3], [2]])
    sent = seen.outcome.traffic["up/scalars"]
    assert ((sent > 0) == [[False, True, False, True], [False, False, True, False]]).all()
    assert ((seen.outcome.traffic["down/scalars"] > 0) == (sent > 0)).all()
    mean = (flat(seen.models[1, "trained", 1]) + flat(seen.models[1, "trained", 3])) / 2
    torch.testing.assert_close(flat(seen.models[1, "evaluated", 0]), mean, rtol=0, atol=1e-6)
    assert same(seen.models[2, "evaluated", 0], seen.models[2, "trained", 2])


def test_evaluation_covers_all_clients_whoever_took_part() -> None:
    outcome = simulate(FedAvg(), plain_mlp, blobs(), rounds=4, participation=0.25)
    assert np.isfinite(outcome.metrics["test/accuracy"]).all()
    assert np.isfinite(outcome.metrics["test/loss"]).all()
    local = np.isfinite(outcome.metrics["local/accuracy"])
    np.testing.assert_array_equal(local, outcome.work["steps"] > 0)


def test_a_client_without_training_samples_never_takes_part_but_is_evaluated() -> None:
    clients = blobs()
    clients[1] = clients[1]._replace(x_train=clients[1].x_train[:0], y_train=clients[1].y_train[:0])
    seen = watch(FedAvg(), plain_mlp, clients, rounds=2)
    assert took_part(seen.outcome) == [[0, 2, 3]] * 2
    assert np.isfinite(seen.outcome.metrics["test/accuracy"]).all()
    without = watch(FedAvg(), plain_mlp, blobs(), rounds=2, participants=[[0, 2, 3]] * 2)
    assert same(seen.models[2, "evaluated", 1], without.models[2, "evaluated", 1])


def test_a_round_without_anybody_changes_nothing() -> None:
    outcome = simulate(FedAvg(), plain_mlp, blobs(), rounds=3, participants=[[0, 1], [], [2]])
    np.testing.assert_array_equal(outcome.metrics["test/loss"][0], outcome.metrics["test/loss"][1])
    assert outcome.traffic["up/scalars"][1].tolist() == [0] * 4
    assert outcome.metrics["test/loss"][1, 0] != outcome.metrics["test/loss"][2, 0]


# --- what is measured


def test_an_outcome_is_a_value_of_arrays_by_round_and_client() -> None:
    outcome = simulate(FedProto(), small_mlp, blobs(), rounds=3)
    assert outcome.status == "completed"
    assert outcome.message == ""
    assert all(values.shape == (3, 4) and values.dtype == np.float64 for values in outcome.metrics.values())
    assert all(values.shape == (3, 4) and values.dtype == np.int64 for values in outcome.traffic.values())
    assert all(values.shape == (3, 4) and values.dtype == np.float64 for values in outcome.work.values())
    assert {name: sizes.tolist() for name, sizes in outcome.sizes.items()} == {
        "train": [7, 12, 5, 9],
        "validation": [0] * 4,
        "test": [6] * 4,
    }
    assert 0 < outcome.seconds["training"] + outcome.seconds["evaluation"] <= outcome.seconds["total"]
    assert (outcome.work["seconds"] > 0).all()
    assert_same_results(outcome, pickle.loads(pickle.dumps(outcome)))  # noqa: S301


def test_steps_and_samples_are_counted() -> None:
    outcome = simulate(FedAvg(), plain_mlp, blobs(), rounds=2, epochs=3, batch_size=4, last_batch="drop")
    assert outcome.work["steps"].tolist() == [[3, 9, 3, 6]] * 2
    assert outcome.work["samples"].tolist() == [[12, 36, 12, 24]] * 2


@pytest.mark.parametrize(("every", "measured"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_evaluation_can_be_sparse_but_always_covers_the_last_round(every: int, measured: list[int]) -> None:
    outcome = simulate(FedProto(), plain_mlp, blobs(), rounds=5, evaluate_every=every)
    dense = simulate(FedProto(), plain_mlp, blobs(), rounds=5)
    assert outcome.metrics.keys() == dense.metrics.keys()
    rows = [number - 1 for number in measured]
    others = [row for row in range(5) if row not in rows]
    for name, values in outcome.metrics.items():
        if name.startswith("train/"):
            np.testing.assert_array_equal(values, dense.metrics[name])
            continue
        np.testing.assert_array_equal(values[rows], dense.metrics[name][rows])
        assert np.isnan(values[others]).all()
    for name, counts in outcome.traffic.items():
        wanted = dense.traffic[name].copy()
        if name.startswith("evaluation/"):
            wanted[others] = 0
        np.testing.assert_array_equal(counts, wanted)


def test_the_local_accuracy_is_that_before_merging() -> None:
    clients = blobs(test=40)
    seen = watch(FedAvg(), plain_mlp, clients, rounds=2, optimizer=Optimizer(lr=0.3))
    net = Net(plain_mlp, (6,), 4)
    for stage, name in (("trained", "local/accuracy"), ("evaluated", "test/accuracy")):
        for number, client in enumerate(clients):
            guesses = net(seen.models[2, stage, number], torch.from_numpy(client.x_test))[1].argmax(1).numpy()
            assert seen.outcome.metrics[name][1, number] == pytest.approx((guesses == client.y_test).mean())
    assert (seen.outcome.metrics["local/accuracy"] != seen.outcome.metrics["test/accuracy"]).any()


def test_both_doors_lead_to_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    y = np.resize(np.arange(3), 60)
    x = rng.integers(0, 256, (60, 1, 5, 5), dtype=np.uint8)
    arrays = Arrays(x[:45], y[:45], x[45:], y[45:], 3, (0.4,), (0.2,))
    partition = draw(Iid(clients=3, validation=0.2), arrays, 7)
    rounds: list[tuple[int, int]] = []
    training = Training(rounds=2, batch_size=4)
    inner = federation.run(
        FedAvg(),
        [small_cnn],
        arrays,
        partition,
        training,
        seed=5,
        on_round=lambda done, total: rounds.append((done, total)),
    )
    assert rounds == [(1, 2), (2, 2)]
    scaled = (torch.from_numpy(x).float() / 255 - 0.4) / 0.2
    clients = [
        ClientArrays(
            scaled[:45][train].numpy(),
            y[:45][train],
            scaled[45:][test].numpy(),
            y[45:][test],
            scaled[:45][held].numpy(),
            y[:45][held],
        )
        for train, test, held in zip(partition.train, partition.test, partition.validation, strict=True)
    ]
    assert_same_results(inner, simulate(FedAvg(), small_cnn, clients, training=training, seed=5))
    assert np.isfinite(inner.metrics["validation/accuracy"]).all()


def test_a_run_can_be_stopped_after_any_round_but_the_last() -> None:
    rng = np.random.default_rng(0)
    y = np.resize(np.arange(3), 60)
    arrays = Arrays(rng.normal(size=(60, 5)).astype(np.float32), y, np.zeros((0, 5), np.float32), y[:0], 3)
    partition = draw(Iid(clients=3, validation=0.2), arrays, 7)
    training = Training(rounds=4, batch_size=4)
    whole = federation.run(FedAvg(), [plain_mlp], arrays, partition, training, seed=5)
    for last in (1, 3, 4):
        asked: list[tuple[int, float]] = []

        def stop(number: int, metrics: Any, last: int = last, asked: list[Any] = asked) -> bool:
            asked.append((number, metrics["validation/accuracy"].mean()))
            return number == last

        cut = federation.run(FedAvg(), [plain_mlp], arrays, partition, training, seed=5, stop=stop)
        assert (cut.status, cut.message) == (("stopped", f"round {last}") if last < 4 else ("completed", ""))
        for name, table in whole.metrics.items():
            np.testing.assert_array_equal(cut.metrics[name], table[:last])
        means = whole.metrics["validation/accuracy"].mean(axis=1)
        assert asked == list(enumerate(means[: min(last, 3)], 1))


def test_a_validation_loss_that_is_not_finite_is_divergence() -> None:
    small, y = blobs(sizes=(8,))[0], np.array([0, 1])
    huge = np.full((2, 6), 3e38, np.float32)
    clients = [ClientArrays(small.x_train, small.y_train, small.x_test[:0], small.y_test[:0], huge, y)]
    outcome = simulate(FedAvg(), plain_mlp, clients, rounds=2)
    assert (outcome.status, outcome.message) == ("diverged", "round 1: the validation loss is not finite for client 0")


def test_settings_can_be_given_together_or_one_by_one() -> None:
    together = Training(rounds=2, batch_size=3, optimizer=Optimizer(lr=0.2))
    one_by_one = simulate(FedAvg(), plain_mlp, blobs(), rounds=2, batch_size=3, optimizer=Optimizer(lr=0.2))
    assert_same_results(simulate(FedAvg(), plain_mlp, blobs(), training=together), one_by_one)
    over = simulate(FedAvg(), plain_mlp, blobs(), training=Training(rounds=9, batch_size=3), rounds=1)
    assert over.work["steps"].shape == (1, 4)


# --- mixed architectures


def test_architectures_go_to_blocks_of_clients() -> None:
    models = [partial(Mlp, hidden=(width, 5)) for width in (3, 4)]
    seen = watch(FedProto(), models, blobs([6] * 5), rounds=2)
    widths = [seen.models[2, "evaluated", client]["body.1.weight"].shape[0] for client in range(5)]
    assert widths == [3, 3, 3, 4, 4]
    assert seen.outcome.traffic["up/scalars"].tolist() == [[10] * 5] * 2


def test_equal_architectures_in_groups_give_the_numbers_of_one_group() -> None:
    for method in (FedAvg(), FedProto(), FedPer()):
        one, two = simulate(method, small_mlp, blobs(), rounds=2), simulate(method, [small_mlp] * 2, blobs(), rounds=2)
        assert_same_results(one, two)


# --- divergence


def with_a_bad_client() -> list[ClientArrays]:
    """Return four clients of which the last one's training inputs are finite but make any training overflow."""
    clients = blobs()
    return [*clients[:3], clients[3]._replace(x_train=1e30 * np.asarray(clients[3].x_train, np.float32))]


LATE: dict[str, Any] = {"rounds": 5, "batch_size": 2, "participants": [[0, 1], [1, 2], [0, 3], [0, 1], [0]]}


@pytest.mark.parametrize("method", [Local(), FedAvg(), FedPer(), FeSEM(), FedProto()], ids=lambda m: type(m).__name__)
def test_divergence_in_a_round_keeps_the_rounds_before(method: Method) -> None:
    outcome = simulate(method, plain_mlp, with_a_bad_client(), **LATE)
    assert outcome.status == "diverged"
    assert outcome.message.startswith("round 3: client 3")
    before = simulate(method, plain_mlp, with_a_bad_client(), **LATE | {"rounds": 2})
    assert before.status == "completed"
    for name, values in results(before).items():
        np.testing.assert_array_equal(results(outcome)[name], values, err_msg=name)


def test_divergence_names_what_was_not_finite() -> None:
    sent = simulate(FedAvg(), plain_mlp, with_a_bad_client(), **LATE)
    assert "sent 'body.1.weight' with values that are not finite" in sent.message
    lost = simulate(Local(), plain_mlp, with_a_bad_client(), **LATE)
    assert lost.message == "round 3: client 3's training loss is nan"


def test_divergence_in_the_last_step_shows_in_the_evaluation() -> None:
    run: dict[str, Any] = {"rounds": 2, "batch_size": 100, "optimizer": Optimizer(lr=1e38)}
    outcome = simulate(Local(), plain_mlp, blobs(), **run)
    assert outcome.status == "diverged"
    assert outcome.message == "round 1: the test loss is not finite for client 0"
    assert outcome.metrics == {}
    assert outcome.sizes["train"].tolist() == [7, 12, 5, 9]


def test_a_first_model_that_overflows_may_recover() -> None:
    model = TwoParts(norm := nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 4))  # statistics of the last batch alone
    norm.running_mean = torch.full((6,), 3e38)
    norm.running_var = torch.full((6,), 1e-30)
    outcome = simulate(Local(), model, blobs(), rounds=1, batch_size=100)
    assert not np.isfinite(outcome.initial["test/loss"]).any()
    assert outcome.status == "completed"
    assert np.isfinite(outcome.metrics["test/loss"]).all()


# --- batch norm


def normed(features: int = 2) -> Callable[[tuple[int, ...], int], nn.Module]:
    return lambda shape, classes: TwoParts(nn.BatchNorm1d(features), nn.Linear(features, classes))


def shifted(shift: float, size: int = 64, seed: int = 0) -> ClientArrays:
    """Return a client whose inputs are N(shift, 1)."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(shift, 1, (size, 2)).astype(np.float32), np.resize([0, 1], size)
    return ClientArrays(x, y, x, y)


MEAN, VAR, COUNT = "body.running_mean", "body.running_var", "body.num_batches_tracked"


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_batch_norm_statistics_are_averaged_with_the_weights_of_the_method(weights: Any) -> None:
    clients = [shifted(0, 16), shifted(10, 48)]
    # Two full-batch steps: the running mean becomes m * (1 - 0.9 ** 2).
    seen = watch(FedAvg(weights), normed(), clients, rounds=1, epochs=2, batch_size=64)
    means = [torch.from_numpy(c.x_train.mean(0)) * (1 - 0.9**2) for c in clients]
    for client in (0, 1):
        torch.testing.assert_close(seen.models[1, "trained", client][MEAN], means[client])
        share = 0.75 if weights == "size" else 0.5
        merged = seen.models[1, "evaluated", client]
        torch.testing.assert_close(merged[MEAN], (1 - share) * means[0] + share * means[1])
        local = [seen.models[1, "trained", c][VAR] for c in (0, 1)]
        torch.testing.assert_close(merged[VAR], (1 - share) * local[0] + share * local[1])


@pytest.mark.parametrize("method", [FedAvg(), FedPer(), FeSEM(k=1)], ids=lambda m: type(m).__name__)
def test_batch_norm_statistics_can_stay_with_each_client(method: Method) -> None:
    clients = [shifted(0), shifted(10)]
    seen = watch(method, normed(), clients, rounds=2, batch_size=64, batch_norm="local")
    for client in (0, 1):
        wanted = torch.from_numpy(clients[client].x_train.mean(0)) * (1 - 0.9**2)
        torch.testing.assert_close(seen.models[2, "evaluated", client][MEAN], wanted)
    weights = [seen.models[2, "evaluated", client]["body.weight"] for client in (0, 1)]
    assert torch.equal(*weights)
    for kind in ("buffers", "buffer_bytes"):
        assert not any(seen.outcome.traffic[f"{way}/{kind}"].any() for way in ("up", "down", "evaluation"))


@pytest.mark.parametrize("batch_norm", ["average", "local"])
@pytest.mark.parametrize("method", [FedAvg(), Local(), FeSEM(k=2)], ids=lambda m: type(m).__name__)
def test_the_counter_of_batches_stays_an_integer(method: Method, batch_norm: str) -> None:
    clients = [shifted(0, 4), shifted(10, 16)]  # 1 and 4 steps an epoch
    seen = watch(method, normed(), clients, rounds=2, batch_size=4, batch_norm=batch_norm)
    counts = [seen.models[2, "evaluated", client][COUNT] for client in (0, 1)]
    assert all(count.dtype == torch.int64 for count in counts)
    averaged = isinstance(method, FedAvg) and batch_norm == "average"
    assert [int(count) for count in counts] == ([8, 8] if averaged else [2, 8])


def test_no_statistics_leak_from_client_to_client() -> None:
    for method in (FedAvg(), Local()):
        near, far = (
            watch(method, normed(), [shifted(0), shifted(shift)], rounds=2, batch_size=16, batch_norm="local")
            for shift in (10, 1000)
        )
        for name in (MEAN, VAR, COUNT):
            assert torch.equal(near.models[2, "evaluated", 0][name], far.models[2, "evaluated", 0][name])


def test_the_order_of_two_clients_changes_nothing() -> None:
    # Sums of two commute exactly; without shuffling and dropout a client's number plays no part in its training.
    pair = [shifted(0, 16, seed=1), shifted(3, 48, seed=2)]
    for batch_norm in ("average", "local"):
        run: dict[str, Any] = {"rounds": 3, "batch_size": 8, "shuffle": False, "init": "common"}
        one, two = (simulate(FedAvg(), normed(), p, batch_norm=batch_norm, **run) for p in (pair, pair[::-1]))
        for name, values in results(one).items():
            np.testing.assert_array_equal(values, results(two)[name][:, ::-1], err_msg=name)


# --- what bad input gets


def refused(method: Method, model: Any, clients: list[ClientArrays], **settings: Any) -> str:
    """Return the one line with which `simulate` refuses something."""
    with pytest.raises(InputError) as caught:
        simulate(method, model, clients, **settings)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rounds": 0}, ["rounds", "0"]),
        ({"rouns": 3}, ["rouns", "rounds"]),
        ({"participation": 5.0}, ["participation", "5.0"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"batch_norm": "both"}, ["batch_norm", "average", "both"]),
        ({"dtype": "float16"}, ["dtype", "float32", "float16"]),
        ({"optimizer": Optimizer(lr=-0.1)}, ["optimizer.lr", "-0.1"]),
        ({"shuffle": 1}, ["shuffle", "true or false"]),
        ({"rounds": 2, "participants": [[0]]}, ["participants", "1 lists for 2 rounds"]),
        ({"rounds": 1, "participants": [[4]]}, ["participants", "round 1", "0 to 3"]),
        ({"rounds": 1, "participants": [[1, 1]]}, ["participants", "[1, 1]", "different"]),
        ({"initial": []}, ["initial", "0 states for 4 clients"]),
        ({"classes": 3}, ["labels", "0 to 2"]),
    ],
    ids=lambda value: str(value),
)
def test_a_bad_setting_is_one_clear_line(settings: dict[str, Any], words: list[str]) -> None:
    line = refused(FedAvg(), plain_mlp, blobs(), **settings)
    assert all(word in line for word in words), line


def test_a_state_that_does_not_fit_is_refused() -> None:
    wrong = plain_mlp((5,), 4).state_dict()
    line = refused(FedAvg(), plain_mlp, blobs(), initial=[plain_mlp((6,), 4).state_dict()] * 3 + [wrong])
    assert "client 3" in line
    assert "body.1.weight" in line
    assert "(6, 5)" in line


def test_clients_that_do_not_fit_together_are_refused() -> None:
    clients = blobs()
    short = clients[1]._replace(y_train=clients[1].y_train[:-1])
    wide = clients[1]._replace(x_test=np.zeros((6, 7), np.float32))
    column = clients[1]._replace(y_test=clients[1].y_test[:, None])
    for bad, split in ((short, "train"), (wide, "test"), (column, "test")):
        line = refused(FedAvg(), plain_mlp, [clients[0], bad])
        assert "client 1" in line
        assert f"x_{split}" in line
    hole = clients[1]._replace(x_train=np.full_like(clients[1].x_train, np.nan))
    assert "NaN" in refused(FedAvg(), plain_mlp, [clients[0], hole])
    negative = clients[1]._replace(y_train=clients[1].y_train - 3)
    assert "labels" in refused(FedAvg(), plain_mlp, [clients[0], negative])
    others: list[Any] = [[], {}, None, 3]
    for other in others:
        assert "want a list of ClientArrays" in refused(FedAvg(), plain_mlp, other)


def test_data_of_other_types_are_refused() -> None:
    good: Any = blobs()[1]
    words: list[tuple[Any, str]] = [
        (tuple(good), "clients: number 1 is a tuple; want ClientArrays(x_train"),
        (good._replace(y_train=good.y_train.astype(float)), "client 1: y_train is float64; want whole numbers from 0"),
        (good._replace(y_test=good.y_test.astype(str)), "client 1: y_test is <U21; want whole numbers from 0"),
        (good._replace(x_train=good.x_train.astype(complex)), "client 1: x_train is complex128; want numbers"),
        (good._replace(x_test=None), "client 1: x_test is object; want numbers"),
        (good._replace(x_train=[[1, 2], [3]]), "client 1: train is no array"),
        (good._replace(x_train=3.0), "client 1: x_train is float64; want"),
        (good._replace(y_validation=good.y_test), "client 1: x_validation is object; want numbers"),
    ]
    for bad, said in words:
        line = refused(FedAvg(), plain_mlp, [blobs()[0], bad])
        assert said in line or "single value" in line
    plain: list[Any] = [*blobs()]
    lists = [client._replace(x_train=client.x_train.tolist(), y_train=client.y_train.tolist()) for client in plain]
    assert_same_results(
        simulate(FedAvg(), plain_mlp, lists, rounds=2), simulate(FedAvg(), plain_mlp, blobs(), rounds=2)
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"engine": "fast"}, "engine: unknown engine 'fast'; known: auto, loop, vectorised"),
    ({"engine": 3}, "engine: 3; want auto, loop, vectorised"),
    ({"device": "cuda:99"}, "device cuda:99: not on this machine, which has cpu"),
    ({"device": None, "threads": 0}, "threads: 0; want a whole number from 1"),
    ({"device": 1.5}, "device 1.5: not on this machine"),
    ({"device": "hpu"}, "device hpu: not on this machine"),  # for which torch asks for a package
    ({"threads": True}, "threads: True; want a whole number from 1"),
    ({"seed": -1}, "seed: -1; want a whole number from 0"),
    ({"seed": 0.5}, "seed: 0.5; want a whole number from 0"),
    ({"seed": None}, "seed: None; want a whole number from 0"),
    ({"classes": 0}, "classes: 0; want a whole number from 1"),
    ({"classes": "4"}, "classes: '4'; want a whole number from 1"),
    ({"rounds": -1}, "simulate.rounds: should be greater than or equal to 1, not -1"),
    ({"rounds": "3"}, 'simulate.rounds: should be a whole number, not "3"'),
    ({"rounds": np.int64(-1)}, "simulate.rounds: should be greater than or equal to 1, not -1"),
    ({"rounds": torch.tensor(3)}, "simulate.rounds: tensor(3); want a number, text, or a mapping of such"),
    ({"dtype": torch.float64}, "simulate.dtype: torch.float64; want a number, text, or a mapping of such"),
    ({"training": {"rounds": 3}}, "training: {'rounds': 3}; want fedbench.settings.Training"),
    ({"participants": 3}, "participants: 3 for 1 rounds"),
    ({"participants": [3]}, "participants: round 1 has 3; want different clients from 0 to 3"),
    ({"participants": [[0.5]]}, "participants: round 1 has [0.5]; want different clients from 0 to 3"),
    ({"participants": [["a"]]}, "participants: round 1 has ['a']; want different clients from 0 to 3"),
    ({"initial": 3}, "initial: 3; want one state_dict for all clients, or a list of one for each"),
    ({"initial": {"a": 1}}, "initial: {'a': 1}; want one state_dict"),
]


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=[said for _, said in WRONG])
def test_arguments_of_other_types_are_refused(settings: dict[str, Any], said: str) -> None:
    assert said in refused(FedAvg(), plain_mlp, blobs(), **{"rounds": 1, **settings})


def test_numbers_may_be_those_of_numpy() -> None:
    plain = simulate(FedAvg(), plain_mlp, blobs(), seed=3, rounds=2, batch_size=5, optimizer={"lr": 0.25})
    given: dict[str, Any] = {"rounds": np.int64(2), "batch_size": np.int32(5), "optimizer": {"lr": np.float32(0.25)}}
    assert_same_results(plain, simulate(FedAvg(), plain_mlp, blobs(), seed=np.int64(3), **given))  # type: ignore[arg-type]
    given["optimizer"] = Optimizer(lr=np.float32(0.25))  # type: ignore[arg-type]
    assert_same_results(plain, simulate(FedAvg(), plain_mlp, blobs(), training=Training(**given), seed=3))


def test_wrong_models_are_refused() -> None:
    assert "body" in refused(FedAvg(), nn.Linear(6, 4), blobs())
    assert "head" in refused(FedAvg(), plain_mlp((6,), 3), blobs())
    assert "shape (6,)" in refused(FedAvg(), plain_mlp((5,), 4), blobs())
    others: list[Any] = [[], None, "mlp", [plain_mlp((6,), 4)], {}]
    for other in others:
        assert "want an nn.Module, a callable" in refused(FedAvg(), other, blobs())
    assert "cannot be made" in refused(FedAvg(), lambda shape, classes: shape[7], blobs())
    assert "5 architectures for 4 clients" in refused(FedProto(), [plain_mlp] * 5, blobs())


def test_a_method_refuses_a_model_without_its_personal_part() -> None:
    line = refused(FedPer(personal=("body.fc1",)), plain_mlp, blobs())
    assert "body.fc1" in line
    assert "body.1.weight" in line


def test_the_accuracy_before_round_1_is_part_of_the_outcome() -> None:
    """With lr so small that nothing moves, every round measures what was measured before the first."""
    outcome = simulate(FedAvg(), Mlp, blobs(), rounds=2, optimizer=Optimizer(lr=1e-30, momentum=0.0))
    assert set(outcome.initial) == {name for name in outcome.metrics if name.startswith("test/")}
    np.testing.assert_array_equal(outcome.initial["test/accuracy"], outcome.metrics["test/accuracy"][1])


@pytest.mark.parametrize(
    ("method", "message"),
    [(FedAvg(weights="foo"), "weights"), (FedProto(lam=-3.0), "lam"), (FedAvg, "no instance")],  # type: ignore[arg-type]
)
def test_hyperparameters_are_checked_as_in_a_suite(method: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(method, plain_mlp, blobs(), rounds=1)


@pytest.mark.parametrize(
    "optimizer", [Optimizer("adam", momentum=0.9), Optimizer("adam", nesterov=True), {"name": "adam", "momentum": 0.5}]
)
def test_an_optimizer_is_not_given_what_it_has_not(optimizer: Any) -> None:
    with pytest.raises(InputError, match=r"^simulate\.optimizer\.\w+: \S+ is for sgd, adam has none; leave it out"):
        simulate(FedAvg(), plain_mlp, blobs(), rounds=1, optimizer=optimizer)
