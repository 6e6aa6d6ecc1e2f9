"""FedProto: every option against values worked out by hand."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TwoParts, blobs, plain_mlp, same, small_cnn, small_mlp, watch
from torch import Tensor, nn

from fedbench import ClientArrays, simulate
from fedbench.evaluation import predict
from fedbench.method import Batch, Rows, rows
from fedbench.methods.fedproto import FedProto, aggregate, distance
from fedbench.net import Net
from fedbench.settings import Optimizer

Distances = ("mse", "squared_l2", "l2", "l1", "emd")


def identity_net(width: int, classes: int = 4) -> Net:
    """Return a net whose embedding is its input and whose head says nothing, so that losses can be worked out."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model = TwoParts(nn.Identity(), head)
    return Net(lambda shape, count: model, (width,), classes, torch.float64)


def batch_of(h: Tensor, y: Sequence[int], valid: Sequence[float] | None = None) -> Batch:
    return Batch(h, torch.tensor(y), torch.tensor(valid or [1.0] * len(y), dtype=torch.float64))


def table(values: Sequence[Sequence[float]], present: Sequence[bool] | None = None) -> dict[str, Rows]:
    flags = torch.tensor(present or [True] * len(values))
    return {"prototypes": Rows(torch.tensor(values, dtype=torch.float64), flags)}


def pull(method: FedProto, h: Tensor, y: Sequence[int], down: dict[str, Rows]) -> Tensor:
    """Return the prototype term of a batch, averaged over it."""
    net = identity_net(h.shape[1], len(down["prototypes"].values))
    return method.loss(net, net.init(0), batch_of(h, y), down).parts["proto"].mean()


def points(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# --- distances


@pytest.mark.parametrize(
    ("name", "value"),
    [("mse", 14 / 3), ("squared_l2", 14.0), ("l2", math.sqrt(14)), ("l1", 6.0), ("emd", 2.0)],
)
def test_distances_to_the_origin(name: Any, value: float) -> None:
    assert distance(name, torch.tensor([3.0, 1.0, -2.0]), torch.zeros(3)).item() == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "value"), [("mse", 4.0), ("squared_l2", 8.0), ("l2", math.sqrt(8)), ("l1", 4.0), ("emd", 0.0)]
)
def test_the_earth_mover_does_not_mind_the_order_of_coordinates(name: Any, value: float) -> None:
    assert distance(name, torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0])).item() == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "value"), [("mse", 1.0), ("squared_l2", 512.0), ("l2", 22.627417), ("l1", 512.0), ("emd", 1.0)]
)
def test_distances_of_512_dimensions_that_each_differ_by_one(name: Any, value: float) -> None:
    a = torch.arange(512.0, dtype=torch.float64)
    assert distance(name, a, a + 1).item() == pytest.approx(value, rel=1e-7)


@pytest.mark.parametrize("name", Distances)
def test_the_gradient_of_a_distance_at_zero_is_zero(name: Any) -> None:
    a = points([1.0, 2.0, 3.0])
    distance(name, a, a.detach().clone()).sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert a.grad.tolist() == [[0.0, 0.0, 0.0]]


# --- the loss


def test_the_loss_is_cross_entropy_plus_lam_times_the_distance() -> None:
    net = identity_net(2)
    h = points([1.0, 2.0], [3.0, 0.0])
    loss = FedProto(lam=0.5).loss(net, net.init(0), batch_of(h, [0, 1]), table([[0, 0], [3, 4], [0, 0], [0, 0]]))
    assert loss.parts["ce"].tolist() == pytest.approx([math.log(4)] * 2)
    assert loss.parts["proto"].tolist() == [2.5, 8.0]
    assert loss.parts["proto"].mean().item() == 5.25
    torch.testing.assert_close(loss.total, loss.parts["ce"] + 0.5 * loss.parts["proto"])


def test_a_class_without_a_prototype_adds_zero_but_counts_in_the_mean() -> None:
    h = points([1.0, 2.0], [3.0, 0.0])
    term = pull(FedProto(), h, [0, 1], table([[0, 0], [9, 9]], [True, False]))
    assert term.item() == 1.25
    (slope,) = torch.autograd.grad(term, h)
    assert slope.tolist() == [[0.5, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("regulariser", ["sample", "prototype"])
@pytest.mark.parametrize("name", Distances)
def test_without_any_prototype_only_the_cross_entropy_is_left(name: Any, regulariser: Any) -> None:
    h = points([1.0, 2.0], [3.0, 0.0], [0.0, 0.0])
    term = pull(FedProto(distance=name, regulariser=regulariser), h, [0, 1, 1], table([[0, 0], [0, 0]], [False, False]))
    assert term.item() == 0
    assert torch.autograd.grad(term, h)[0].tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("regulariser", ["sample", "prototype"])
@pytest.mark.parametrize("name", Distances)
def test_embeddings_on_their_prototypes_feel_nothing(name: Any, regulariser: Any) -> None:
    h = points([1.0, 2.0], [3.0, 0.0])
    term = pull(FedProto(distance=name, regulariser=regulariser), h, [0, 1], table([[1, 2], [3, 0]]))
    assert term.item() == 0
    assert torch.autograd.grad(term, h)[0].tolist() == [[0.0, 0.0]] * 2


def test_the_mean_square_is_the_squared_length_over_the_dimensions_and_its_slope_follows() -> None:
    width, count, lam = 7, 5, 0.3
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(count, width, generator=draw, dtype=torch.float64).requires_grad_()
    centres = torch.randn(4, width, generator=draw, dtype=torch.float64)
    y = [0, 3, 1, 1, 2]
    net, down = identity_net(width), {"prototypes": Rows(centres, torch.ones(4, dtype=torch.bool))}
    mean, length = (pull(FedProto(distance=name), h, y, down) for name in ("mse", "squared_l2"))
    torch.testing.assert_close(mean, length / width)
    total = FedProto(lam=lam).loss(net, net.init(0), batch_of(h, y), down).total.mean()
    (slope,) = torch.autograd.grad(total, h)  # the head's weights are zero: no slope from the cross-entropy
    torch.testing.assert_close(slope, 2 * lam * (h.detach() - centres[y]) / (count * width))


@pytest.mark.parametrize(
    ("name", "value"),
    [  # the batch's prototypes are (2, 1) of class 0 and (5, 5) of class 1; the global ones (2, 3) and (1, 2)
        ("mse", 2.0 + 12.5),
        ("squared_l2", 4.0 + 25.0),
        ("l2", 2.0 + 5.0),
        ("l1", 2.0 + 7.0),
        ("emd", 1.0 + 3.5),
    ],
)
def test_the_papers_regulariser_compares_prototypes_and_sums_over_classes(name: Any, value: float) -> None:
    h = points([1.0, 0.0], [5.0, 5.0], [3.0, 2.0])
    method = FedProto(distance=name, regulariser="prototype")
    assert pull(method, h, [0, 1, 0], table([[2, 3], [1, 2], [7, 7]])).item() == pytest.approx(value)
    only_first = table([[2, 3], [1, 2], [7, 7]], [True, False, True])
    assert pull(method, h, [0, 1, 0], only_first).item() == pytest.approx(
        {"mse": 2.0, "squared_l2": 4.0, "l2": 2.0, "l1": 2.0, "emd": 1.0}[name]
    )


def test_samples_of_one_class_that_cancel_out_feel_only_the_per_sample_regulariser() -> None:
    h = points([1.0], [-1.0])
    assert pull(FedProto(regulariser="sample"), h, [0, 0], table([[0]])).item() == 1
    assert pull(FedProto(regulariser="prototype"), h, [0, 0], table([[0]])).item() == 0


@pytest.mark.parametrize("regulariser", ["sample", "prototype"])
def test_padded_examples_count_nothing(regulariser: Any) -> None:
    net, down = identity_net(2, 2), table([[0, 0], [3, 4]])
    method = FedProto(regulariser=regulariser)
    plain = batch_of(points([1.0, 2.0], [3.0, 0.0]), [0, 1])
    padded = batch_of(points([1.0, 2.0], [3.0, 0.0], [50.0, 50.0]), [0, 1, 0], [1, 1, 0])

    def term(batch: Batch) -> float:
        part = method.loss(net, net.init(0), batch, down).parts["proto"]
        return ((part * batch.valid).sum() / batch.valid.sum() if part.dim() else part).item()

    assert term(padded) == pytest.approx(term(plain))
    memories = [method.observe(method.init_memory(net), b, b.x.detach()) for b in (plain, padded)]
    assert all(torch.equal(memories[0][name], memories[1][name]) for name in memories[0])


# --- training


def test_from_the_second_round_on_the_term_is_there_and_moves_the_body() -> None:
    run: dict[str, Any] = {"rounds": 2, "batch_size": 4}
    with_pull, without = (watch(FedProto(lam=lam), plain_mlp, blobs(), **run) for lam in (1.0, 0.0))
    term = with_pull.outcome.metrics["train/loss/proto"]
    assert (term[0] == 0).all()
    assert (term[1] > 0).all()
    for client in range(4):
        a, b = (seen.models[2, "trained", client]["body.1.weight"] for seen in (with_pull, without))
        assert not torch.equal(a, b)


def test_the_slope_of_the_body_is_not_that_of_the_cross_entropy_alone() -> None:
    net = Net(plain_mlp, (6,), 4)
    params = {name: tensor.requires_grad_() for name, tensor in net.init(0).items()}
    (client,) = blobs((8,))
    batch = Batch(torch.from_numpy(client.x_train), torch.from_numpy(client.y_train), torch.ones(8))
    down = {"prototypes": Rows(torch.ones(4, 6), torch.ones(4, dtype=torch.bool))}
    body = params["body.1.weight"]
    slopes = [
        torch.autograd.grad(FedProto(lam=lam).loss(net, params, batch, down).total.mean(), body)[0] for lam in (0.0, 1)
    ]
    apart = slopes[1] - slopes[0]
    h = net(params, batch.x)[0]
    (wanted,) = torch.autograd.grad((h - 1).square().mean(), body)
    torch.testing.assert_close(apart, wanted, rtol=1e-4, atol=1e-6)
    assert bool((wanted != 0).any())


def test_a_stronger_pull_brings_embeddings_nearer_to_the_prototypes() -> None:
    terms = []
    for lam in (0.0, 1.0, 10.0):
        outcome = simulate(FedProto(lam=lam), plain_mlp, blobs((20, 20, 20)), rounds=15, batch_size=4)
        terms.append(outcome.metrics["test/loss/proto"][-1].mean())
    assert terms[0] > terms[1] > terms[2] > 0


def test_a_class_that_nobody_sent_yet_pulls_nobody() -> None:
    # Client 1 alone holds class 2 and takes part only in round 2.
    clients = blobs((8, 8), held=[(0, 1), (1, 2)])
    seen = watch(FedProto(lam=5.0), plain_mlp, clients, classes=4, rounds=2, participants=[[0], [1]], batch_size=8)
    first, second = (rows(server, "prototypes") for server in seen.servers)
    assert first.present.tolist() == [True, True, False, False]
    assert not first.values[2:].any()
    assert second.present.tolist() == [True, True, True, False]
    assert torch.equal(second.values[0], first.values[0]), "a class that nobody sent this time keeps its last prototype"
    only = clients[1]._replace(x_train=clients[1].x_train[1::2], y_train=clients[1].y_train[1::2])
    assert set(only.y_train.tolist()) == {2}
    run: dict[str, Any] = {"classes": 4, "rounds": 2, "participants": [[0], [1]], "batch_size": 8}
    free, pulled = (watch(FedProto(lam=lam), plain_mlp, [clients[0], only], **run) for lam in (0.0, 5.0))
    assert same(free.models[2, "trained", 1], pulled.models[2, "trained", 1])
    assert pulled.outcome.metrics["train/loss/proto"][1, 1] == 0


# --- local prototypes


def test_a_final_pass_is_the_mean_embedding_of_the_trained_model() -> None:
    clients = blobs(shape=(1, 5, 5))
    seen = watch(FedProto(prototypes="final"), small_cnn, clients, rounds=2, batch_size=4)
    net = Net(small_cnn, (1, 5, 5), 4)
    for number in (1, 2):
        sent = rows(seen.uploads[number - 1], "prototypes")
        for i, client in enumerate(clients):
            embedding = net(seen.models[number, "trained", i], torch.from_numpy(client.x_train))[0]
            for label in range(4):
                mine = torch.from_numpy(client.y_train == label)
                assert bool(sent.present[i, label]) == bool(mine.any())
                if mine.any():
                    torch.testing.assert_close(sent.values[i, label], embedding[mine].mean(0))


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_a_training_pass_is_the_mean_of_what_the_last_epoch_saw_while_the_weights_moved(last_batch: Any) -> None:
    (client,) = blobs((11,))
    model = plain_mlp((6,), 4).double()
    run: dict[str, Any] = {"batch_size": 4, "epochs": 2, "shuffle": False, "dtype": "float64", "last_batch": last_batch}
    seen = watch(FedProto(), model, [client], classes=4, rounds=1, optimizer=Optimizer(lr=0.2, momentum=0.9), **run)
    x, y = torch.from_numpy(client.x_train).double(), torch.from_numpy(client.y_train)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, 0.9)
    sums, counts = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    body = model.get_submodule("body")
    for epoch in range(2):
        for index in torch.split(torch.arange(11), 4):
            if last_batch == "drop" and len(index) < 4:
                continue
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[index]), y[index]))
            if epoch == 1:
                sums.index_add_(0, y[index], body(x[index]).detach())
                counts.index_add_(0, y[index], torch.ones(len(index), dtype=torch.float64))
            optimizer.step()
    sent = rows(seen.uploads[0], "prototypes")
    torch.testing.assert_close(sent.values[0, :2], sums[:2] / counts[:2, None])
    assert int(counts.sum()) == (11 if last_batch == "keep" else 8)


def test_training_and_final_prototypes_differ_by_dropout_and_by_moving_weights() -> None:
    still: dict[str, Any] = {"rounds": 1, "batch_size": 100, "optimizer": Optimizer(lr=1e-30)}
    moving = still | {"batch_size": 4, "optimizer": Optimizer(lr=0.3)}
    for model, run, equal in ((plain_mlp, still, True), (plain_mlp, moving, False), (dropped_mlp, still, False)):
        a, b = (
            rows(watch(FedProto(prototypes=how), model, blobs(), **run).uploads[0], "prototypes").values
            for how in ("training", "final")
        )
        assert torch.allclose(a, b, atol=1e-6) == equal


def dropped_mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model with dropout inside its body."""
    return TwoParts(nn.Sequential(nn.Linear(shape[0], 6), nn.Dropout(0.5)), nn.Linear(6, classes))


def test_classes_whose_samples_were_all_dropped_are_not_sent() -> None:
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    client = ClientArrays(x, np.array([0, 0, 0, 0, 1]), x, np.array([0, 0, 0, 0, 1]))
    run: dict[str, Any] = {"rounds": 1, "batch_size": 4, "last_batch": "drop", "shuffle": False}
    cases: list[tuple[Any, list[bool]]] = [("training", [True, False]), ("final", [True, True])]
    for how, present in cases:
        seen = watch(FedProto(prototypes=how), plain_mlp, [client], **run)
        assert rows(seen.uploads[0], "prototypes").present.tolist() == [present]
        assert rows(seen.servers[0], "prototypes").present.tolist() == present


def test_a_message_holds_prototypes_and_nothing_else() -> None:
    seen = watch(FedProto(), small_mlp, blobs(), rounds=2)
    assert all(list(message) == ["prototypes"] for message in [*seen.uploads, *seen.servers])
    weighted = watch(FedProto(aggregation="weighted"), small_mlp, blobs(), rounds=2)
    assert all(list(message) == ["prototypes", "counts"] for message in weighted.uploads)
    assert all(list(message) == ["prototypes"] for message in weighted.servers)


def test_the_counts_that_are_sent_are_those_of_the_samples() -> None:
    seen = watch(FedProto(aggregation="weighted"), small_mlp, blobs((5, 8)), classes=4, rounds=1, epochs=3)
    counts = rows(seen.uploads[0], "counts")
    assert counts.values.tolist() == [[3, 2, 0, 0], [0, 4, 4, 0]]
    assert counts.present.tolist() == [[True, True, False, False], [False, True, True, False]]


# --- aggregation


def local(values: Any, present: Any) -> Rows:
    return Rows(torch.tensor(values, dtype=torch.float64), torch.tensor(present))


def merged(aggregation: Any, prototypes: Rows, counts: Any) -> Rows:
    """Merge what clients sent, as the server does."""
    count, classes, width = prototypes.values.shape
    net = Net(lambda shape, n: TwoParts(nn.Identity(), nn.Linear(width, n)), (width,), classes, torch.float64)
    method = FedProto(aggregation=aggregation)
    server = method.init_server(net, net.init(0), count, 0)
    uploads = {"prototypes": prototypes}
    if aggregation != "mean":
        uploads["counts"] = Rows(torch.tensor(counts, dtype=torch.float64), prototypes.present)
    sizes = torch.ones(count, dtype=torch.float64)
    return rows(method.merge(net, server, uploads, torch.arange(count), sizes), "prototypes")


@pytest.mark.parametrize(("aggregation", "value"), [("mean", 0.5), ("weighted", 0.9), ("eq6", 0.45)])
def test_ninety_samples_at_one_and_ten_at_zero(aggregation: Any, value: float) -> None:
    sent = local([[[1.0]], [[0.0]]], [[True], [True]])
    assert merged(aggregation, sent, [[90], [10]]).values.item() == pytest.approx(value)


@pytest.mark.parametrize(
    ("aggregation", "value"), [("weighted", [3.0, 2.0]), ("eq6", [1.5, 1.0]), ("mean", [2.0, 4.0])]
)
def test_thirty_samples_and_ten(aggregation: Any, value: list[float]) -> None:
    sent = local([[[4.0, 0.0]], [[0.0, 8.0]]], [[True], [True]])
    assert merged(aggregation, sent, [[30], [10]]).values.tolist() == [value]


@pytest.mark.parametrize("counts", [[[1], [1]], [[90], [10]], [[3], [500]]])
def test_the_plain_mean_does_not_look_at_counts(counts: Any) -> None:
    sent = local([[[1.0, 3.0]], [[3.0, 5.0]]], [[True], [True]])
    assert merged("mean", sent, counts).values.tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "eq6"])
def test_a_single_holder_is_copied_and_an_absent_class_has_no_entry(aggregation: Any) -> None:
    sent = local([[[1.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]], [[True, False], [False, False]])
    result = merged(aggregation, sent, [[7, 0], [0, 0]])
    assert result.values.tolist() == [[1.0, 3.0], [0.0, 0.0]]
    assert result.present.tolist() == [True, False]


def test_the_printed_equation_divides_once_more_by_the_number_of_holders() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(5, 3, 4, generator=draw, dtype=torch.float64)
    present = torch.tensor([[True, True, False], [True, False, False], [True] * 3, [False, True, True], [True] * 3])
    counts = torch.tensor([[9, 2, 0], [4, 0, 0], [1, 1, 8], [0, 3, 3], [6, 6, 6]])
    sent, holders = Rows(values, present), present.sum(0)[:, None]
    literal, weighted = (merged(a, sent, counts.tolist()).values for a in ("eq6", "weighted"))
    torch.testing.assert_close(literal, weighted / holders)
    equal = present.long() * 5
    torch.testing.assert_close(merged("eq6", sent, equal.tolist()).values, merged("mean", sent, None).values / holders)


def test_the_order_of_clients_and_a_client_without_class_zero_change_no_mean() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(4, 3, 2, generator=draw, dtype=torch.float64)
    present = torch.tensor([[False, True, True], [True, True, False], [True, False, True], [False, True, False]])
    counts = torch.tensor([[0, 2, 5], [3, 1, 0], [4, 0, 9], [0, 7, 0]])
    turned = [3, 1, 0, 2]
    for aggregation in ("mean", "weighted", "eq6"):
        a = merged(aggregation, Rows(values, present), counts.tolist())
        b = merged(aggregation, Rows(values[turned], present[turned]), counts[turned].tolist())
        torch.testing.assert_close(a.values, b.values, rtol=0, atol=1e-14)
        assert a.present.all()
    mean = merged("mean", Rows(values, present), None).values
    torch.testing.assert_close(mean[1], (values[0, 1] + values[1, 1] + values[3, 1]) / 3)
    torch.testing.assert_close(mean[2], (values[0, 2] + values[2, 2]) / 2)


def test_values_of_absent_rows_never_enter() -> None:
    sent = local([[[99.0, 7.0]], [[2.0, 2.0]]], [[False], [True]])
    assert aggregate(sent, torch.tensor([[5.0], [1.0]])).values.tolist() == [[2.0, 2.0]]


# --- prediction


@pytest.mark.parametrize("name", Distances)
def test_prediction_uses_the_named_distance(name: Any) -> None:
    net = identity_net(3, 3)
    centres = table([[0, 0, 0], [3, 1, 2], [2, 2, 2]])
    x = torch.tensor([[1.0, 2.0, 3.0], [0.2, 0.1, 0.0]], dtype=torch.float64)
    scores = FedProto(distance=name).scores(net, net.init(0), centres, x, torch.ones(3, dtype=torch.bool))
    by_hand = [[distance(name, row, c).item() for c in centres["prototypes"].values] for row in x]
    assert (-scores["prototype_all"]).tolist() == by_hand
    assert predict(scores["prototype_all"]).tolist() == ([1, 0] if name == "emd" else [2, 0])


def test_candidates_are_the_own_classes_or_all() -> None:
    net = identity_net(1, 3)
    centres = table([[0], [5], [10]])
    x = torch.tensor([[1.0], [6.0]], dtype=torch.float64)
    own = torch.tensor([False, True, True])
    scores = FedProto(prediction="prototype").scores(net, net.init(0), centres, x, own)
    assert list(scores) == ["prototype_own", "head", "prototype_all"]
    assert predict(scores["prototype_own"]).tolist() == [1, 1]
    assert predict(scores["prototype_all"]).tolist() == [0, 1]
    everything = FedProto(prediction="prototype", candidates="all").scores(net, net.init(0), centres, x, own)
    assert list(everything) == ["prototype_all", "head", "prototype_own"]
    assert list(FedProto().scores(net, net.init(0), centres, x, own)) == ["head", "prototype_own", "prototype_all"]


def test_an_embedding_beyond_the_constant_is_given_away_by_the_official_code_only() -> None:
    net = identity_net(1, 3)
    x = torch.tensor([[15.1], [5.5]], dtype=torch.float64)  # the first one is more than 100 from both own prototypes
    centres, own = table([[0], [5], [4.5]]), torch.tensor([False, True, True])
    for options, answers in ((FedProto.presets["official"], [0, 1]), ({"prediction": "prototype"}, [1, 1])):
        scores = FedProto(**options).scores(net, net.init(0), centres, x, own)
        assert predict(scores["prototype_own"]).tolist() == answers


# --- presets


def test_presets_say_what_the_paper_writes_and_what_its_code_does() -> None:
    paper, official = (FedProto(**FedProto.presets[name]) for name in ("paper", "official"))
    assert paper == FedProto(1.0, "l2", "prototype", "final", "eq6", "prototype", "all", None)
    assert official == FedProto(1.0, "mse", "sample", "training", "mean", "prototype", "own", 100.0)


def test_presets_lead_to_different_results() -> None:
    run: dict[str, Any] = {"rounds": 3, "batch_size": 4}
    made = [watch(FedProto(**options), small_mlp, blobs(), **run) for options in ({}, *FedProto.presets.values())]
    default, paper, official = (seen.models[3, "trained", 0] for seen in made)
    assert not same(default, paper)
    assert same(default, official), "the official code trains as the defaults do; only its prediction is another"
    headlines = [next(n for n in FedProto(**FedProto.presets[p]).scores(*question())) for p in ("paper", "official")]
    assert headlines == ["prototype_all", "prototype_own"]


def question() -> tuple[Net, dict[str, Tensor], dict[str, Rows], Tensor, Tensor]:
    net = identity_net(1, 2)
    return net, net.init(0), table([[0], [1]]), torch.zeros(1, 1, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
