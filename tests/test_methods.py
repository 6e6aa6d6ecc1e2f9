"""What every registered method keeps, and the exact identities between methods."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Seen, assert_same_results, blobs, plain_mlp, same, small_cnn, small_mlp, watch

from fedbench import ClientArrays, plugins, simulate, testing
from fedbench.datasets.mnist_mini import MnistMini
from fedbench.errors import InputError
from fedbench.method import Method, Rows
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedprox import FedProx
from fedbench.methods.fedrep import FedRep
from fedbench.methods.fesem import FeSEM
from fedbench.methods.local import Local
from fedbench.models.cnn import CnnMnist
from fedbench.models.mlp import Mlp
from fedbench.settings import Optimizer, Training

IMAGES = (1, 5, 5)
TRAINING = Training(rounds=3, batch_size=4)


def odd_clients() -> list[ClientArrays]:
    """Return clients that each lack classes, one of them with a single training sample."""
    return blobs((7, 12, 1, 9), shape=IMAGES)


def every_method() -> list[Any]:
    """Return every registered method with its defaults and with each preset."""
    cases: list[Any] = []
    seen: list[Method] = []
    for name in plugins.names("methods"):
        presets: Mapping[str, Mapping[str, Any]] = plugins.load("methods", name).presets
        for preset, options in {"": {}, **presets}.items():
            made = plugins.build("methods", name, options)
            if made not in seen:
                seen.append(made)
                cases.append(pytest.param(made, id=f"{name} {preset}".strip()))
    return cases


@pytest.fixture(params=["loop", "vectorised"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_all_eight_rows_of_the_comparison_are_registered() -> None:
    shipped = {"local", "fedavg", "fedprox", "fedper", "fedrep", "fesem", "fedproto"}
    assert shipped <= set(plugins.names("methods"))


@pytest.mark.parametrize("check", testing.CHECKS, ids=str)
@pytest.mark.parametrize("method", every_method())
def test_every_registered_method_keeps_what_every_method_keeps(method: Method, check: testing.Check) -> None:
    check(method)


def test_an_unknown_hyperparameter_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match=r"^suite.yaml: methods.mine: unknown key 'no_such_thing'"):
        plugins.build("methods", "fedavg", {"no_such_thing": 1}, where="suite.yaml: methods.mine")


def test_arrays_of_the_clients_are_not_changed() -> None:
    clients, fresh = odd_clients(), odd_clients()
    simulate(FedProto(), small_cnn, clients, training=TRAINING)
    for given, wanted in zip(clients, fresh, strict=True):
        for a, b in zip(given[:4], wanted[:4], strict=True):
            np.testing.assert_array_equal(a, b)


# --- identities, bit for bit

RAGGED: dict[str, Any] = {
    "rounds": 3,
    "epochs": 2,
    "batch_size": 4,
    "optimizer": Optimizer(lr=0.05, momentum=0.9, weight_decay=1e-3),
}


def pair(a: Method, b: Method, clients: list[ClientArrays] | None = None, **settings: Any) -> tuple[Seen, Seen]:
    """Run two methods on the same problem, which has dropout, momentum, weight decay and ragged clients."""
    given = clients or blobs()
    one, two = (watch(m, small_mlp, given, **RAGGED | settings) for m in (a, b))
    return one, two


def assert_same_run(a: Seen, b: Seen) -> None:
    """Fail unless both runs trained and evaluated the same models and measured the same where they measured alike."""
    assert a.models.keys() == b.models.keys()
    assert all(same(params, b.models[key]) for key, params in a.models.items())
    common = sorted(a.outcome.metrics.keys() & b.outcome.metrics.keys())
    assert {"test/accuracy", "test/accuracy/head", "test/loss", "local/accuracy", "train/loss"} <= set(common)
    assert_same_results(a.outcome, b.outcome, common)


def assert_other_run(a: Seen, b: Seen) -> None:
    last = max(number for number, _ in a.stage("evaluated"))
    assert not same(a.models[last, "evaluated", 0], b.models[last, "evaluated", 0])


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedprox_without_its_pull_is_fedavg(weights: Any, participation: float, engine: Any) -> None:
    run: dict[str, Any] = {"participation": participation, "engine": engine}
    one, two = pair(FedProx(weights, mu=0.0), FedAvg(weights), **run)
    assert_same_run(one, two)
    assert_same_results(one.outcome, two.outcome, list(two.outcome.traffic))
    assert_other_run(*pair(FedProx(weights), FedAvg(weights), **run))


@pytest.mark.parametrize("regulariser", ["sample", "prototype"])
@pytest.mark.parametrize("distance", ["mse", "squared_l2", "l2", "l1", "emd"])
def test_fedproto_without_its_pull_is_local(distance: Any, regulariser: Any, engine: Any) -> None:
    method = FedProto(lam=0.0, distance=distance, regulariser=regulariser)
    assert_same_run(*pair(method, Local(), engine=engine))


def test_fedproto_is_local_in_its_first_round_only(engine: Any) -> None:
    one, two = pair(FedProto(lam=7.0), Local(), engine=engine)
    for client in range(4):
        assert same(one.models[1, "trained", client], two.models[1, "trained", client])
        assert not same(one.models[2, "trained", client], two.models[2, "trained", client])
    first = ["train/loss", "local/loss", "local/accuracy"]
    for name in first:
        np.testing.assert_array_equal(one.outcome.metrics[name][0], two.outcome.metrics[name][0])


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("init", ["kmeans++", "random"])
def test_fesem_with_one_centre_is_fedavg(weights: Any, init: Any, engine: Any) -> None:
    one, two = pair(FeSEM(k=1, init=init, weights=weights), FedAvg(weights), engine=engine)
    assert_same_run(one, two)
    assert_same_results(one.outcome, two.outcome, list(two.outcome.traffic))
    assert_other_run(*pair(FeSEM(k=1, weights="uniform"), FedAvg("size"), engine=engine))


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_one_client_alone_is_local_under_fedavg(weights: Any, engine: Any) -> None:
    assert_same_run(*pair(FedAvg(weights), Local(), blobs((11,)), engine=engine))


def test_one_client_without_momentum_is_uninterrupted_training() -> None:
    run: dict[str, Any] = {"batch_size": 4, "shuffle": False, "optimizer": Optimizer(momentum=0.0, weight_decay=0.01)}
    short, long = ({"rounds": 6, "epochs": 1}, {"rounds": 1, "epochs": 6})
    one = watch(FedAvg(), plain_mlp, blobs((11,)), **run, **short)
    two = watch(FedAvg(), plain_mlp, blobs((11,)), **run, **long)
    assert same(one.models[6, "evaluated", 0], two.models[1, "evaluated", 0])


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_fedper_with_nothing_personal_is_fedavg_and_with_all_personal_local(weights: Any, engine: Any) -> None:
    one, two = pair(FedPer(weights, personal="none"), FedAvg(weights), engine=engine)
    assert_same_run(one, two)
    assert_same_results(one.outcome, two.outcome, list(two.outcome.traffic))
    one, two = pair(FedPer(weights, personal="all"), Local(), engine=engine)
    assert_same_run(one, two)
    assert not one.outcome.traffic["up/scalars"].any()


def test_identities_hold_with_batch_norm_and_images_too(engine: Any) -> None:
    for a, b in (
        (FedProx(mu=0.0), FedAvg()),
        (FedProto(lam=0.0), Local()),
        (FeSEM(k=1), FedAvg("uniform")),
        (FedPer(personal="none"), FedAvg()),
        (FedPer(personal="all"), Local()),
    ):
        for batch_norm in ("average", "local"):
            run: dict[str, Any] = {"rounds": 2, "batch_size": 4, "batch_norm": batch_norm, "engine": engine}
            one, two = (watch(m, small_cnn, odd_clients(), **run) for m in (a, b))
            assert_same_run(one, two)


# --- what goes over the wire with the paper's network

LABELS = ((0, 1, 4), (2, 7), (1, 3, 5, 8))


def digits() -> list[ClientArrays]:
    """Return three clients with as many classes as `LABELS` says, and images of noise."""
    rng = np.random.default_rng(0)
    made = []
    for labels in LABELS:
        y = np.resize(labels, 2 * len(labels))
        x = rng.normal(size=(len(y), 1, 28, 28)).astype(np.float32)
        made.append(ClientArrays(x, y, x[:2], y[:2]))
    return made


@pytest.mark.parametrize(
    ("method", "each"),
    [
        (FedAvg(), [21_840] * 3),
        (FedProx(), [21_840] * 3),
        (FeSEM(), [21_840] * 3),
        (FedPer(personal="dense"), [5_280] * 3),
        (FedRep(personal="dense"), [5_280] * 3),
        (FedPer(), [21_330] * 3),
        (FedProto(), [150, 100, 200]),
        (Local(), [0] * 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_uploaded_scalars_of_the_papers_network(method: Method, each: list[int]) -> None:
    outcome = simulate(method, CnnMnist, digits(), classes=10, rounds=2)
    assert outcome.traffic["up/scalars"].tolist() == [each, each]
    assert outcome.traffic["up/bytes"].tolist() == [[4 * n for n in each]] * 2
    assert not outcome.traffic["up/buffers"].any()
    if isinstance(method, FedProto):
        # Labels are counted apart; nothing is there to download in round 1, and then the prototypes of all 8 classes.
        assert outcome.traffic["up/index_bytes"].tolist() == [[4 * len(labels) for labels in LABELS]] * 2
        assert outcome.traffic["down/scalars"].tolist() == [[0] * 3, [8 * 50] * 3]
    else:
        assert not outcome.traffic["up/index_bytes"].any()
        np.testing.assert_array_equal(outcome.traffic["down/scalars"], outcome.traffic["up/scalars"])


@pytest.mark.parametrize("aggregation", ["weighted", "eq6"])
def test_prototypes_that_are_weighted_send_their_counts_too(aggregation: Any) -> None:
    outcome = simulate(FedProto(aggregation=aggregation), CnnMnist, digits(), classes=10, rounds=1)
    assert outcome.traffic["up/scalars"].tolist() == [[51 * len(labels) for labels in LABELS]]
    assert outcome.traffic["up/index_bytes"].tolist() == [[8 * len(labels) for labels in LABELS]]


def test_bytes_of_messages_that_are_serialised_stay_near_the_counted_ones() -> None:
    for method in (FedAvg(), FedProto()):
        seen = watch(method, CnnMnist, digits(), classes=10, rounds=1)
        for client in range(3):
            message = {}
            for name, entry in seen.uploads[0].items():
                here = entry.values[client][entry.present[client]] if isinstance(entry, Rows) else entry[client]
                message[name] = here.clone()
            file = io.BytesIO()
            torch.save(message, file)
            counted = int(seen.outcome.traffic["up/scalars"][0, client]) * 4
            assert counted <= file.getbuffer().nbytes <= counted + 2000 + 500 * len(message)


# --- mixed architectures


def mixed(*channels: int) -> list[Callable[[tuple[int, ...], int], CnnMnist]]:
    return [lambda shape, classes, c=c: CnnMnist(shape, classes, channels=c) for c in channels]  # type: ignore[misc]


@pytest.mark.parametrize("method", [FedAvg(), FedProx(), FeSEM(), FedPer(), FedRep()], ids=lambda m: type(m).__name__)
def test_methods_that_average_refuse_mixed_architectures(method: Method) -> None:
    with pytest.raises(InputError) as caught:
        simulate(method, mixed(18, 20, 22), digits(), classes=10, rounds=1)
    line = str(caught.value)
    assert line.startswith(type(method).__name__)
    assert "body.conv2.bias' is " in line
    assert "(18,) in model 0" in line or "(2, 18) in model 0" in line
    assert "(20,) in model 1" in line or "(2, 20) in model 1" in line


@pytest.mark.parametrize("method", [FedProto(), Local()], ids=lambda m: type(m).__name__)
def test_methods_that_send_no_weights_accept_mixed_architectures(method: Method) -> None:
    seen = watch(method, mixed(18, 20, 22), digits(), classes=10, rounds=2)
    assert seen.outcome.status == "completed"
    channels = [seen.models[2, "evaluated", client]["body.conv2.bias"].shape[0] for client in range(3)]
    assert channels == [18, 20, 22]
    assert np.isfinite(seen.outcome.metrics["test/loss"]).all()


def test_prototypes_of_different_widths_are_refused() -> None:
    def narrow(shape: tuple[int, ...], classes: int) -> CnnMnist:
        return CnnMnist(shape, classes, width=30)

    with pytest.raises(InputError, match=r"'prototypes' is \(10, 50\) in model 0 and \(10, 30\) in model 1"):
        simulate(FedProto(), [CnnMnist, narrow], digits(), classes=10, rounds=1)


def test_averaging_only_what_has_one_shape_accepts_mixed_architectures() -> None:
    method = FedPer(personal=("body.conv2", "body.fc1", "head"))
    outcome = simulate(method, mixed(18, 22), digits(), classes=10, rounds=1)
    assert outcome.traffic["up/scalars"].tolist() == [[260] * 3]


# --- against centralised training


def test_fedavg_near_iid_comes_close_to_centralised_training() -> None:
    digits = MnistMini().load(Path())
    x, x_test = ((images / np.float32(255) - 0.1307) / 0.3081 for images in (digits.x_train, digits.x_test))
    rng = np.random.default_rng(0)
    owner = np.empty(len(x), np.int64)
    for label in range(10):  # Dirichlet with 100: nearly the same mixture of classes at each of ten clients
        held = np.flatnonzero(digits.y_train == label)
        owner[held] = rng.choice(10, len(held), p=rng.dirichlet([100.0] * 10))
    clients = [ClientArrays(x[owner == i], digits.y_train[owner == i], x_test, digits.y_test) for i in range(10)]
    settings: dict[str, Any] = {"batch_size": 20, "optimizer": Optimizer(lr=0.02, momentum=0.5)}
    many = simulate(FedAvg(), Mlp, clients, rounds=20, evaluate_every=20, **settings)
    together = [ClientArrays(x, digits.y_train, x_test, digits.y_test)]
    one = simulate(Local(), Mlp, together, rounds=1, epochs=2, **settings)
    assert many.work["steps"].sum(0).mean() == pytest.approx(one.work["steps"].sum(), rel=0.05)
    federated, central = many.metrics["test/accuracy"][-1, 0], one.metrics["test/accuracy"][-1, 0]
    assert central > 0.8
    assert abs(federated - central) < 0.02
