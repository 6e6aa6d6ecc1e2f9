"""Accuracies: per client, honest about ties, refusals and easier questions; and the official code's running ones."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TwoParts, plain_mlp
from torch import Tensor, nn

from fedbench import ClientArrays, simulate
from fedbench.evaluation import Examples, all_metrics, client_metrics, examine, predict
from fedbench.method import Rows
from fedbench.methods.fedproto import FedProto, cumulative, last_batch_mean, nearest
from fedbench.methods.local import Local
from fedbench.net import Net
from fedbench.samples import from_clients

NOBODY: list[list[int]] = [[]]


def perfect(classes: int) -> nn.Module:
    """Return a model that answers with the largest of its inputs: one input per class."""
    head = nn.Linear(classes, classes, bias=False)
    head.weight.data = torch.eye(classes)
    return TwoParts(nn.Identity(), head)


def one_hot(labels: Sequence[int], classes: int = 3) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.eye(classes, dtype=np.float32)[list(labels)]


def marked(right: int, wrong: int, own: Sequence[int] = (0, 1, 2)) -> ClientArrays:
    """Return a client on which `perfect` answers this many test samples rightly and wrongly."""
    labels = np.resize([0, 1, 2], right + wrong)
    shown = np.concatenate([labels[:right], (labels[right:] + 1) % 3])
    return ClientArrays(one_hot(own), np.asarray(own), one_hot(shown.tolist()), labels)


# --- field test 1, 19, 21


def test_accuracy_is_that_of_each_client_alone() -> None:
    outcome = simulate(Local(), perfect(3), [marked(20, 0), marked(0, 20)], rounds=1, participants=NOBODY)
    accuracy = outcome.metrics["test/accuracy"][0]
    assert accuracy.tolist() == [1.0, 0.0]
    assert np.std(accuracy) == 0.5


def test_pooled_accuracy_and_the_mean_over_clients_are_different_numbers() -> None:
    outcome = simulate(Local(), perfect(3), [marked(90, 0), marked(0, 10)], rounds=1, participants=NOBODY)
    accuracy, sizes = outcome.metrics["test/accuracy"][0], outcome.sizes["test"]
    assert sizes.tolist() == [90, 10]
    assert np.average(accuracy, weights=sizes) == pytest.approx(0.9)
    assert np.mean(accuracy) == 0.5


@pytest.mark.parametrize("method", [Local(), FedProto()], ids=("local", "fedproto"))
def test_a_client_without_test_samples_has_no_accuracy(method: Local | FedProto) -> None:
    clients = [marked(3, 1), marked(0, 0), marked(4, 0)]
    outcome = simulate(method, perfect(3), clients, rounds=2)
    assert outcome.sizes["test"].tolist() == [4, 0, 4]
    assert outcome.status == "completed"
    for name in ("test/accuracy", "test/loss", "local/accuracy", "test/accuracy/head_own"):
        assert np.isnan(outcome.metrics[name]).tolist() == [[False, True, False]] * 2


def test_metrics_exist_only_where_somebody_has_samples() -> None:
    none, some = marked(2, 2), marked(3, 1)
    held_out = some._replace(x_validation=some.x_train[:2], y_validation=some.y_train[:2])
    without = simulate(FedProto(), perfect(3), [none, some], rounds=2)
    assert not any(name.startswith("validation/") for name in without.metrics)
    both = simulate(FedProto(), perfect(3), [none, held_out], rounds=2)
    assert both.sizes["validation"].tolist() == [0, 2]
    assert np.isnan(both.metrics["validation/accuracy"]).tolist() == [[True, False]] * 2
    for outcome in (without, both):
        assert all(np.isfinite(values).any(axis=1).all() for values in outcome.metrics.values())


# --- ties and refusals


@pytest.mark.parametrize(
    ("scores", "answer"),
    [
        ([1.0, 3.0, 2.0], 1),
        ([2.0, 5.0, 5.0], 1),
        ([7.0, 7.0, 7.0], 0),
        ([-math.inf, -4.0, -4.0], 1),
        ([-math.inf, -math.inf, -math.inf], -1),
        ([math.nan, 0.0, 1.0], -1),
    ],
)
def test_ties_go_to_the_lowest_class_and_no_score_is_no_answer(scores: list[float], answer: int) -> None:
    assert predict(torch.tensor([scores])).tolist() == [answer]


def prototypes(values: list[list[float]], present: list[bool] | None = None) -> Rows:
    return Rows(torch.tensor(values), torch.tensor(present or [True] * len(values)))


def test_equal_distances_go_to_the_lowest_of_the_own_classes() -> None:
    centres = prototypes([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    own = torch.tensor([False, True, False, True])
    apart = nearest("mse", torch.zeros(1, 2), centres, own, None)
    assert apart.tolist() == [[math.inf, 0.5, math.inf, 0.5]]
    assert predict(-apart).tolist() == [1]


def test_a_class_without_a_prototype_is_never_the_answer() -> None:
    centres = prototypes([[0.0, 0.0], [9.0, 9.0]], [False, True])
    assert predict(-nearest("mse", torch.zeros(1, 2), centres, torch.tensor([True, True]), None)).tolist() == [1]
    nobody = prototypes([[0.0, 0.0], [9.0, 9.0]], [False, False])
    assert predict(-nearest("mse", torch.zeros(1, 2), nobody, torch.tensor([True, True]), None)).tolist() == [-1]


def test_the_official_constant_hands_far_embeddings_to_a_foreign_class() -> None:
    centres = prototypes([[0.0, 0.0], [20.0, 20.0], [11.0, 11.0]])
    own = torch.tensor([False, True, True])
    embedding = torch.tensor([[9.0, 9.0], [0.5, 0.5], [11.0, 11.0]])
    official = nearest("mse", embedding, centres, own, 100.0)
    assert official.tolist() == [[100.0, 121.0, 4.0], [100.0, 380.25, 110.25], [100.0, 81.0, 0.0]]
    assert predict(-official).tolist() == [2, 0, 2]
    assert predict(-nearest("mse", embedding, centres, own, None)).tolist() == [2, 2, 2]


def test_a_client_without_any_own_prototype_answers_with_a_foreign_class_only_in_the_official_code() -> None:
    centres = prototypes([[0.0], [1.0], [2.0]], [True, True, False])
    own = torch.tensor([False, False, True])
    embedding = torch.tensor([[1.0]])
    assert predict(-nearest("mse", embedding, centres, own, 100.0)).tolist() == [0]
    assert predict(-nearest("mse", embedding, centres, own, None)).tolist() == [-1]


# --- what one client's model answers


def answers(method: Local | FedProto, client: ClientArrays, down: dict[str, Rows]) -> Examples:
    data = from_clients([client], 3, torch.float32, torch.device("cpu"))
    model = perfect(3)
    net = Net(lambda shape, classes: model, (3,), 3)
    return examine(method, net, net.init(0), down, data, data.test[0], data.own[0])


def test_the_head_is_scored_among_all_classes_and_among_the_own_ones_apart() -> None:
    # The model says 2 where the label is 1; a client that holds only 0 and 1 has 2 ruled out, and ties go to 0.
    shown = np.array([[0.0, 0.5, 1.0], [1.0, 0.0, 0.0]], np.float32)
    client = ClientArrays(one_hot([0, 1]), np.array([0, 1]), shown, np.array([1, 0]))
    found = answers(Local(), client, {})
    assert list(found) == ["correct/head", "correct/head_own", "loss"]
    assert found["correct/head"].tolist() == [False, True]
    assert found["correct/head_own"].tolist() == [True, True]
    wanted = torch.nn.functional.cross_entropy(torch.from_numpy(shown), torch.tensor([1, 0]), reduction="none")
    np.testing.assert_allclose(found["loss"], wanted)
    assert found["loss"].dtype == np.float64


def test_a_perfect_head_with_permuted_prototypes_scores_one_and_zero() -> None:
    client = ClientArrays(one_hot([0, 1, 2]), np.arange(3), one_hot([0, 1, 2, 2]), np.array([0, 1, 2, 2]))
    permuted = {"prototypes": Rows(torch.eye(3)[[1, 2, 0]], torch.ones(3, dtype=torch.bool))}
    metrics = client_metrics([answers(FedProto(), client, permuted)])
    assert metrics["accuracy/head"].tolist() == [1.0]
    assert metrics["accuracy/prototype_own"].tolist() == [0.0]
    assert metrics["accuracy/prototype_all"].tolist() == [0.0]
    true = {"prototypes": Rows(torch.eye(3), torch.ones(3, dtype=torch.bool))}
    assert client_metrics([answers(FedProto(), client, true)])["accuracy/prototype_all"].tolist() == [1.0]


def test_own_classes_are_an_easier_question_than_all() -> None:
    client = ClientArrays(one_hot([0, 1]), np.array([0, 1]), one_hot([2, 2]), np.array([0, 1]))
    centres = {"prototypes": Rows(torch.eye(3), torch.ones(3, dtype=torch.bool))}
    found = answers(FedProto(), client, centres)
    assert found["correct/prototype_own"].tolist() == [True, False]  # a tie between 0 and 1
    assert found["correct/prototype_all"].tolist() == [False, False]


@pytest.mark.parametrize(
    ("options", "headline"),
    [
        ({"prediction": "head"}, "head"),
        ({"prediction": "prototype", "candidates": "own"}, "prototype_own"),
        ({"prediction": "prototype", "candidates": "all"}, "prototype_all"),
    ],
)
def test_the_headline_is_chosen_and_all_accuracies_are_logged(options: dict[str, Any], headline: str) -> None:
    clients = [marked(9, 6, (0, 1)), marked(6, 9, (1, 2))]
    outcome = simulate(FedProto(**options), plain_mlp, clients, rounds=2, batch_size=1)
    for name in ("head", "head_own", "prototype_own", "prototype_all"):
        assert np.isfinite(outcome.metrics[f"test/accuracy/{name}"]).all()
    np.testing.assert_array_equal(outcome.metrics["test/accuracy"], outcome.metrics[f"test/accuracy/{headline}"])


def test_more_samples_than_one_chunk_are_all_counted() -> None:
    outcome = simulate(Local(), perfect(3), [marked(2000, 500)], rounds=1, participants=NOBODY)
    assert outcome.metrics["test/accuracy"].tolist() == [[0.8]]


# --- the official code's cumulative accuracies

TOTALS, HEAD, PROTOTYPE = (50, 40, 80), (45, 30, 60), (40, 33, 66)


def test_hand_case_of_true_and_cumulative_accuracies() -> None:
    true_head, true_prototype = (np.array(hits) / TOTALS for hits in (HEAD, PROTOTYPE))
    assert (true_head.mean(), true_prototype.mean()) == pytest.approx((0.8, 0.816667), abs=1e-6)
    assert (true_head.std(), true_prototype.std()) == pytest.approx((0.070711, 0.011785), abs=1e-6)
    legacy_head, legacy_prototype = cumulative(HEAD, PROTOTYPE, TOTALS)
    assert legacy_head == pytest.approx([0.9, 0.821429, 0.8], abs=1e-6)
    assert legacy_prototype == pytest.approx([0.85, 0.822222, 0.805882], abs=1e-6)
    assert (np.mean(legacy_head), np.mean(legacy_prototype)) == pytest.approx((0.840476, 0.826035), abs=1e-6)
    assert (np.std(legacy_head), np.std(legacy_prototype)) == pytest.approx((0.042989, 0.018212), abs=1e-6)


def test_cumulative_accuracies_can_be_undone() -> None:
    _, legacy = cumulative(HEAD, PROTOTYPE, TOTALS)
    hits = np.array(legacy) * 2 * np.cumsum(TOTALS)
    np.testing.assert_allclose(hits, np.rint(hits), atol=1e-9)
    assert np.diff(hits, prepend=0).round().tolist() == [a + b for a, b in zip(HEAD, PROTOTYPE, strict=True)]


def test_two_equal_clients_all_right_and_all_wrong_are_one_and_a_half_in_the_official_code() -> None:
    assert cumulative([20, 0], [20, 0], [20, 20])[1] == [1.0, 0.5]


def test_what_is_perfect_is_perfect_under_both_rules() -> None:
    assert cumulative([5, 7], [5, 7], [5, 7]) == ([1.0, 1.0], [1.0, 1.0])


def test_cumulative_accuracies_are_logged_under_their_own_names() -> None:
    rng = np.random.default_rng(0)
    clients = [
        ClientArrays(rng.normal(size=(9, 3)), np.resize([0, 1, 2], 9), rng.normal(size=(t, 3)), np.resize([0, 1, 2], t))
        for t in TOTALS
    ]
    outcome = simulate(FedProto(), plain_mlp, clients, rounds=1)
    hits = {
        name: np.rint(outcome.metrics[f"test/accuracy/{name}"][0] * TOTALS).astype(int).tolist()
        for name in ("head", "prototype_own")
    }
    wanted_head, wanted_prototype = cumulative(hits["head"], hits["prototype_own"], TOTALS)
    assert outcome.metrics["test/accuracy/cumulative/head"][0].tolist() == pytest.approx(wanted_head)
    assert outcome.metrics["test/accuracy/cumulative/prototype"][0].tolist() == pytest.approx(wanted_prototype)
    assert wanted_head != pytest.approx(outcome.metrics["test/accuracy/head"][0].tolist())


def test_cumulative_of_a_client_without_test_samples_is_that_so_far() -> None:
    head, prototype = cumulative([3, 0], [1, 0], [4, 0])
    assert head == [0.75, 0.5]
    assert prototype == [0.5, 0.5]
    assert all(math.isnan(values[0]) for values in cumulative([0], [0], [0]))


@pytest.mark.parametrize(("count", "tail"), [(1, 1), (63, 63), (64, 64), (65, 1), (130, 2)])
def test_the_official_prototype_loss_is_that_of_the_last_batch_of_64(count: int, tail: int) -> None:
    values = np.arange(count, dtype=np.float64)
    assert last_batch_mean(values) == values[-tail:].mean()


def test_the_last_batch_of_nothing_is_no_number() -> None:
    assert math.isnan(last_batch_mean(np.zeros(0)))


# --- the metrics of examples


def test_metrics_are_means_over_each_clients_examples() -> None:
    examples: list[Examples] = [
        {"correct/head": np.array([True, True, False, True]), "loss": np.array([1.0, 2.0, 3.0, 6.0])},
        {},
        {"correct/head": np.array([False]), "loss": np.array([0.5])},
    ]
    metrics = client_metrics(examples)
    assert list(metrics) == ["accuracy", "accuracy/head", "loss"]
    np.testing.assert_array_equal(metrics["accuracy"], [0.75, np.nan, 0.0])
    np.testing.assert_array_equal(metrics["loss"], [3.0, np.nan, 0.5])


def test_without_any_example_there_are_no_metrics() -> None:
    assert client_metrics([{}, {}]) == {}
    assert all_metrics(FedProto(), [{}, {}]) == {}


def test_evaluating_moves_nothing() -> None:
    norm = nn.BatchNorm1d(3)
    model = TwoParts(nn.Sequential(norm, nn.Dropout(0.5)), nn.Linear(3, 3))
    net = Net(lambda shape, classes: model, (3,), 3)
    data = from_clients([marked(50, 10)], 3, torch.float32, torch.device("cpu"))
    params: dict[str, Tensor] = net.init(0)
    before = {name: tensor.clone() for name, tensor in params.items()}
    first = examine(Local(), net, params, {}, data, data.test[0], data.own[0])
    again = examine(Local(), net, params, {}, data, data.test[0].flip(0), data.own[0])
    assert all(torch.equal(params[name], before[name]) for name in params)
    np.testing.assert_array_equal(first["correct/head"], again["correct/head"][::-1])
    np.testing.assert_allclose(first["loss"], again["loss"][::-1], atol=1e-6)
