"""Averaging: weights, counters, and which part of a model is shared."""

import pytest
import torch
from helpers import same, small_cnn
from torch import Tensor

from fedbench.averaging import Personal, average, check_personal, client_weights, is_personal
from fedbench.errors import InputError
from fedbench.method import Method, parameters
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedprox import FedProx
from fedbench.methods.fedrep import FedRep
from fedbench.methods.local import Local
from fedbench.models.cnn import CnnMnist
from fedbench.net import Net


def test_clients_count_by_size_or_equally() -> None:
    sizes = torch.tensor([10.0, 30.0])
    models = {"w": torch.tensor([[1.0], [3.0]])}
    assert average(models, client_weights("size", sizes))["w"].tolist() == [2.5]
    assert average(models, client_weights("uniform", sizes))["w"].tolist() == [2.0]


@pytest.mark.parametrize("rule", ["size", "uniform"])
def test_a_mean_lies_between_the_smallest_and_the_largest(rule: str) -> None:
    sizes = torch.tensor([3.0, 50.0, 7.0], dtype=torch.float64)
    stacked = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = client_weights("size" if rule == "size" else "uniform", sizes)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-15)
    mean = average({"w": stacked}, weights)["w"]
    assert bool(((stacked.amin(0) <= mean) & (mean <= stacked.amax(0))).all())


def test_equal_clients_stay_as_they_are() -> None:
    one = torch.randn(6, generator=torch.Generator().manual_seed(1))
    stacked = {"w": one.expand(4, 6), "n": torch.full((4,), 9)}
    mean = average(stacked, client_weights("uniform", torch.ones(4)))
    assert torch.equal(mean["w"], one)
    assert mean["n"].item() == 9
    sized = average(stacked, client_weights("size", torch.tensor([1.0, 2.0, 3.0, 7.0])))
    torch.testing.assert_close(sized["w"], one)


def test_one_client_is_copied_bit_for_bit() -> None:
    one = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    for rule in (client_weights("size", torch.tensor([7.0])), client_weights("uniform", torch.tensor([7.0]))):
        assert torch.equal(average({"w": one}, rule)["w"], one[0])


def test_counters_become_the_largest_and_stay_integers() -> None:
    merged = average({"n": torch.tensor([3, 8, 5])}, torch.tensor([0.5, 0.25, 0.25]))["n"]
    assert merged.dtype == torch.int64
    assert merged.item() == 8
    assert average({"n": torch.tensor([3, 8, 5])}, torch.tensor([0.5, 0.0, 0.5]))["n"].item() == 5


def test_the_order_of_clients_changes_nothing_but_rounding() -> None:
    stacked = torch.randn(5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sizes = torch.tensor([3.0, 50.0, 7.0, 1.0, 20.0], dtype=torch.float64)
    turned = torch.tensor([4, 2, 0, 1, 3])
    weights = client_weights("size", sizes)
    torch.testing.assert_close(
        average({"w": stacked}, weights)["w"],
        average({"w": stacked[turned]}, weights[turned])["w"],
        rtol=0,
        atol=1e-15,
    )


# --- what is shared


@pytest.fixture(scope="module")
def net() -> Net:
    return Net(CnnMnist, (1, 28, 28), 10)


CONVOLUTIONS = {f"body.conv{n}.{kind}" for n in (1, 2) for kind in ("weight", "bias")}
HIDDEN = {"body.fc1.weight", "body.fc1.bias"}
HEAD = {"head.fc2.weight", "head.fc2.bias"}


@pytest.mark.parametrize(
    ("personal", "shared"),
    [
        ("none", CONVOLUTIONS | HIDDEN | HEAD),
        ("head", CONVOLUTIONS | HIDDEN),
        ("dense", CONVOLUTIONS),
        ("all", set()),
        (("body.fc1", "head"), CONVOLUTIONS),
        (("body",), HEAD),
        (("body.conv1",), CONVOLUTIONS - {"body.conv1.weight", "body.conv1.bias"} | HIDDEN | HEAD),
        ((), CONVOLUTIONS | HIDDEN | HEAD),
    ],
    ids=str,
)
def test_the_personal_part_never_reaches_the_server(net: Net, personal: Personal, shared: set[str]) -> None:
    initial = net.init(0)
    for method in (FedPer(personal=personal), FedRep(personal=personal)):
        server = method.init_server(net, initial, 3, 0)
        kept = method.init_client(net, initial)
        assert set(server) == shared
        assert set(kept) == set(net.shapes) - shared
        assert list(method.start(net, kept, server)) == list(net.shapes)
        _, upload = method.reply(net, initial, kept, server, lambda: pytest.fail("needs no data"), {})
        assert set(upload) == shared
    assert {n for n in net.shapes if not is_personal(personal, net, n)} == shared


def test_a_path_is_a_module_and_not_the_beginning_of_a_name(net: Net) -> None:
    assert not any(is_personal(("body.fc",), net, name) for name in net.shapes)
    with pytest.raises(InputError, match=r"no module 'body\.fc'.*body\.fc1\.weight"):
        check_personal(("body.fc",), net)


@pytest.mark.parametrize("method", [FedPer(personal="heads"), FedRep(personal="heads"), FedPer(personal=("nowhere",))])
def test_an_unknown_personal_part_is_refused(net: Net, method: Method) -> None:
    with pytest.raises(InputError, match=r"heads|nowhere"):
        method.check(net)


@pytest.mark.parametrize("method", [FedAvg(), FedProx(), FedPer(), FedRep()], ids=lambda m: type(m).__name__)
def test_private_buffers_stay_with_the_client(method: Method) -> None:
    net = Net(small_cnn, (1, 5, 5), 3)
    local = net.keep_private(frozenset(net.buffers))
    assert any("running_mean" in name for name in method.init_server(net, net.init(0), 2, 0))
    assert not any("running" in name or "tracked" in name for name in method.init_server(local, net.init(0), 2, 0))
    assert set(net.buffers) <= set(method.init_client(local, net.init(0)))


def test_local_shares_nothing(net: Net) -> None:
    initial = net.init(0)
    assert Local().init_server(net, initial, 3, 0) == {}
    assert same(Local().start(net, Local().init_client(net, initial), {}), initial)


def test_what_arrives_replaces_what_was_kept_only_where_it_is_shared(net: Net) -> None:
    method = FedPer(personal="head")
    mine, arrived = net.init(1), {name: tensor for name, tensor in net.init(2).items() if name not in HEAD}
    started = method.start(net, method.init_client(net, mine), arrived)
    assert all(torch.equal(started[name], mine[name]) for name in HEAD)
    assert all(torch.equal(started[name], tensor) for name, tensor in arrived.items())


def test_a_merge_uses_the_sizes_of_those_who_sent() -> None:
    net = Net(CnnMnist, (1, 16, 16), 2)
    uploads: dict[str, Tensor] = {name: torch.stack([t, 3 * t]) for name, t in net.init(0).items()}
    sizes = torch.tensor([10.0, 30.0])
    for method, factor in ((FedAvg("size"), 2.5), (FedAvg("uniform"), 2.0)):
        merged = parameters(method.merge(net, {}, uploads, torch.tensor([4, 6]), sizes))
        for name, tensor in net.init(0).items():
            torch.testing.assert_close(merged[name], factor * tensor)
