"""FeSEM: the two steps by hand, the first centres, and the cases in which clustering degenerates."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TwoParts, blobs, copied, flat, plain_mlp, same, small_cnn, watch
from torch import Tensor, nn

from fedbench import ClientArrays, simulate
from fedbench.errors import InputError
from fedbench.method import parameters
from fedbench.methods.fesem import FeSEM, squared_distances
from fedbench.methods.local import Local
from fedbench.net import Net, Params
from fedbench.settings import Optimizer

WEIGHT = "head.weight"


def number_net() -> Net:
    """Return a net that is a single number."""
    model = TwoParts(nn.Identity(), nn.Linear(1, 1, bias=False))
    return Net(lambda shape, classes: model, (1,), 1, torch.float64)


def numbers(*values: float) -> Params:
    return {WEIGHT: torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)}


def server_with(method: FeSEM, clients: int, *centres: float) -> dict[str, Tensor]:
    """Return a server whose centres are these numbers."""
    net = number_net()
    fresh = parameters(method.init_server(net, net.init(0), clients, 0))
    return {**fresh, f"centre/{WEIGHT}": numbers(*centres)[WEIGHT], "chosen": torch.tensor(True)}


def merge(method: FeSEM, server: dict[str, Tensor], models: Params, who: list[int], sizes: list[float]) -> Params:
    weights = torch.tensor(sizes, dtype=torch.float64)
    return parameters(method.merge(number_net(), server, models, torch.tensor(who), weights))


def centres_of(server: Params) -> list[float]:
    return server[f"centre/{WEIGHT}"].flatten().tolist()


# --- one round by hand


def test_clients_join_the_nearest_centre_and_centres_move_to_the_mean() -> None:
    method, models = FeSEM(k=2), numbers(0, 1, 9, 11)
    server = merge(method, server_with(method, 4, 0, 10), models, [0, 1, 2, 3], [1] * 4)
    assert server["assignment"].tolist() == [0, 0, 1, 1]
    assert centres_of(server) == [0.5, 10.0]
    moved = {WEIGHT: server[f"centre/{WEIGHT}"]}
    assert squared_distances(models, moved, [WEIGHT]).amin(1).mean().item() == 0.625
    for client, centre in enumerate((0.5, 0.5, 10, 10)):
        assert parameters(method.send(server, client))[WEIGHT].item() == centre


def test_members_can_count_by_size() -> None:
    sizes = [30.0, 10.0, 5.0, 5.0]
    for weights, wanted in (("size", [0.25, 10.0]), ("uniform", [0.5, 10.0])):
        method = FeSEM(k=2, weights=weights)  # type: ignore[arg-type]
        server = merge(method, server_with(method, 4, 0, 10), numbers(0, 1, 9, 11), [0, 1, 2, 3], sizes)
        assert centres_of(server) == wanted


def test_ties_go_to_the_lowest_centre_and_an_empty_one_stays() -> None:
    method = FeSEM(k=3)
    server = merge(method, server_with(method, 3, 4, 6, -100), numbers(5, 5, 5), [0, 1, 2], [1] * 3)
    assert server["assignment"].tolist() == [0, 0, 0]
    assert centres_of(server) == [5.0, 6.0, -100.0]


def test_equal_centres_leave_everybody_in_the_first_for_ever() -> None:
    # The pitfall of starting all centres from one model, which the method avoids by choosing them after round 1.
    method = FeSEM(k=2)
    server = server_with(method, 4, 3, 3)
    server = merge(method, server, numbers(0, 1, 9, 11), [0, 1, 2, 3], [1] * 4)
    assert server["assignment"].tolist() == [0] * 4
    assert centres_of(server) == [5.25, 3.0]


def test_those_who_took_no_part_keep_their_centre() -> None:
    method = FeSEM(k=2)
    server = server_with(method, 4, 0, 10)
    server["assignment"] = torch.tensor([1, 0, 1, 0])
    after = merge(method, server, numbers(1, 8), [1, 3], [1, 1])
    assert after["assignment"].tolist() == [1, 0, 1, 1]
    assert centres_of(after) == [1.0, 8.0]


def test_permuting_the_centres_only_relabels() -> None:
    method, models = FeSEM(k=3), numbers(0, 1, 9, 11, 30)
    a, b = (
        merge(method, server_with(method, 5, *start), models, list(range(5)), [1] * 5)
        for start in ((0, 10, 25), (10, 25, 0))
    )
    relabel = torch.tensor([2, 0, 1])
    assert relabel[a["assignment"]].tolist() == b["assignment"].tolist()
    assert [centres_of(b)[i] for i in relabel] == centres_of(a)


@pytest.mark.parametrize("seed", range(5))
def test_neither_step_raises_the_objective(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    models = numbers(*torch.randn(12, generator=draw).tolist())
    start = torch.randn(3, generator=draw).tolist()
    method = FeSEM(k=3)
    server = server_with(method, 12, *start)
    server["assignment"] = torch.randint(0, 3, (12,), generator=draw)

    def objective(centres: list[float], assignment: Tensor) -> float:
        return squared_distances(models, numbers(*centres), [WEIGHT]).gather(1, assignment[:, None]).mean().item()

    for _ in range(4):
        after = merge(method, server, models, list(range(12)), [1] * 12)
        before_all = objective(centres_of(server), server["assignment"])
        after_e = objective(centres_of(server), after["assignment"])
        after_m = objective(centres_of(after), after["assignment"])
        assert after_m <= after_e + 1e-12 <= before_all + 2e-12
        server = after


def test_distances_are_squared_and_over_the_whole_model() -> None:
    models = {"a": torch.tensor([[1.0, 2.0], [0.0, 0.0]]), "b": torch.tensor([[[3.0]], [[0.0]]])}
    centres = {"a": torch.zeros(2, 2), "b": torch.tensor([[[0.0]], [[1.0]]])}
    assert squared_distances(models, centres, ["a", "b"]).tolist() == [[14.0, 9.0], [0.0, 1.0]]
    assert squared_distances(models, centres, ["b"]).tolist() == [[9.0, 4.0], [0.0, 1.0]]


def stacked(net: Net, count: int) -> Params:
    made = [net.init(seed) for seed in range(count)]
    return {name: torch.stack([params[name] for params in made]) for name in made[0]}


@pytest.mark.parametrize("layers", ["all", "head"])
def test_shifting_buffers_leaves_the_assignment_unchanged(layers: Any) -> None:
    net = Net(small_cnn, (1, 5, 5), 4)
    models = stacked(net, 6)
    shifted = copied(models)
    for place in range(6):
        shifted["body.1.running_mean"][place] += 1e6 * place
        shifted["body.1.num_batches_tracked"][place] += 10**6 * place
    method = FeSEM(k=2, layers=layers)
    server = method.init_server(net, net.init(0), 6, 3)
    who, sizes = torch.arange(6), torch.ones(6)
    a, b = (parameters(method.merge(net, server, given, who, sizes)) for given in (models, shifted))
    assert a["assignment"].tolist() == b["assignment"].tolist()
    assert sorted(set(a["assignment"].tolist())) == [0, 1]
    for name in net.parameters:
        assert torch.equal(a[f"centre/{name}"], b[f"centre/{name}"])


def test_buffers_are_averaged_inside_the_cluster() -> None:
    net = Net(small_cnn, (1, 5, 5), 4)
    models = stacked(net, 4)
    models["body.1.running_mean"] += torch.arange(4.0)[:, None]
    models["body.1.num_batches_tracked"] += torch.tensor([5, 6, 7, 8])
    method = FeSEM(k=2)
    after = parameters(
        method.merge(net, method.init_server(net, net.init(0), 4, 0), models, torch.arange(4), torch.ones(4))
    )
    for centre in (0, 1):
        members = after["assignment"] == centre
        assert members.any()
        mean = models["body.1.running_mean"][members].mean(0)
        torch.testing.assert_close(after["centre/body.1.running_mean"][centre], mean)
        count = after["centre/body.1.num_batches_tracked"]
        assert count.dtype == torch.int64
        assert int(count[centre]) == int(models["body.1.num_batches_tracked"][members].max())


def test_the_distance_can_look_at_the_head_only() -> None:
    net = Net(plain_mlp, (6,), 4)
    base = net.init(0)
    models = {name: torch.stack([tensor] * 4) for name, tensor in base.items()}
    models["body.1.weight"][:2] += 100  # two groups by their bodies
    models["head.fc.weight"][::2] += 1  # and two others by their heads
    for layers, groups in (("all", [0, 0, 1, 1]), ("head", [0, 1, 0, 1])):
        method = FeSEM(k=2, layers=layers)  # type: ignore[arg-type]
        server = method.init_server(net, base, 4, 1)
        found = parameters(method.merge(net, server, models, torch.arange(4), torch.ones(4)))["assignment"]
        assert found.tolist() in (groups, [1 - g for g in groups])


# --- the first centres


def first_centres(method: FeSEM, models: Params, seed: int) -> list[float]:
    """Return the centres after the first merge, of which every client is nearest to one that is a client's model."""
    count = len(models[WEIGHT])
    net = number_net()
    server = parameters(method.init_server(net, net.init(0), count, seed))
    return sorted(centres_of(merge(method, server, models, list(range(count)), [1] * count)))


def test_k_means_plus_plus_finds_far_groups_whatever_the_seed() -> None:
    models = numbers(0, 0.001, 0.002, 1000, 1000.001, -5000)
    for seed in range(20):
        assert first_centres(FeSEM(k=3), models, seed) == pytest.approx([-5000, 0.001, 1000.0005])


def test_random_centres_are_clients_that_differ() -> None:
    models = numbers(0, 0.001, 0.002, 1000, 1000.001, -5000)
    found = {tuple(np.round(first_centres(FeSEM(k=3, init="random"), models, seed), 6)) for seed in range(20)}
    assert len(found) > 3, "evenly drawn clients do not always fall into the three groups"
    twins = numbers(4, 4, 4, 7)
    assert all(first_centres(FeSEM(k=2, init="random"), twins, seed) == [4.0, 7.0] for seed in range(10))


def test_the_choice_depends_on_the_seed_alone() -> None:
    models = numbers(*range(10))
    chosen = [first_centres(FeSEM(k=2), models, seed) for seed in (0, 0, 1, 2, 3, 4)]
    assert chosen[0] == chosen[1]
    assert len({tuple(c) for c in chosen}) > 1


def test_k_means_plus_plus_prefers_far_clients_in_proportion_to_the_squared_distance() -> None:
    # From 0, the point 3 is nine times as likely as the point 1; from the others the odds are their own.
    models = numbers(0, 1, 3)
    net, method = number_net(), FeSEM(k=2)
    picked = [method._choose(net, models, [WEIGHT], seed)[WEIGHT] for seed in range(1500)]
    pairs = [tuple(centres.flatten().tolist()) for centres in picked]
    wanted = {(0, 1): 1 / 10, (0, 3): 9 / 10, (1, 0): 1 / 5, (1, 3): 4 / 5, (3, 0): 9 / 13, (3, 1): 4 / 13}
    for pair, odds in wanted.items():
        assert pairs.count(pair) / 1500 == pytest.approx(odds / 3, abs=0.04)


def test_identical_models_are_no_trouble() -> None:
    for init in ("kmeans++", "random"):
        assert first_centres(FeSEM(k=3, init=init), numbers(2, 2, 2, 2), 0) == [2.0] * 3


def test_fewer_participants_than_centres_are_no_trouble() -> None:
    outcome = simulate(FeSEM(k=4), plain_mlp, blobs(), rounds=4, participation=0.25)
    assert outcome.status == "completed"
    assert np.isfinite(outcome.metrics["test/loss"]).all()


# --- given centres


def test_centres_can_be_given_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "centres.npz"
    np.savez(file, allow_pickle=False, **{WEIGHT: np.array([0.0, 10.0]).reshape(2, 1, 1)})
    method = FeSEM(k=2, init="given", centres=str(file))
    net = number_net()
    method.check(net)
    server = parameters(method.init_server(net, net.init(0), 4, 0))
    assert parameters(method.send(server, 2))[WEIGHT].item() == net.init(0)[WEIGHT].item(), "round 1 has one model"
    after = merge(method, server, numbers(0, 1, 9, 11), [0, 1, 2, 3], [1] * 4)
    assert after["assignment"].tolist() == [0, 0, 1, 1]
    assert centres_of(after) == [0.5, 10.0]


def test_bad_centres_are_refused(tmp_path: Path) -> None:
    net, file = number_net(), tmp_path / "centres.npz"
    for method in (FeSEM(init="given"), FeSEM(centres="somewhere.npz")):
        with pytest.raises(InputError, match="centres"):
            method.check(net)
    method = FeSEM(k=2, init="given", centres=str(file))
    with pytest.raises(InputError, match="cannot read"):
        method.check(net)
    file.write_bytes(b"not an archive")
    with pytest.raises(InputError, match="cannot read"):
        method.check(net)
    np.savez(file, allow_pickle=False, **{WEIGHT: np.zeros((3, 1, 1))})
    with pytest.raises(InputError, match=r"\(3, 1, 1\), wanted \(2, 1, 1\)"):
        method.check(net)
    np.savez(file, allow_pickle=False, other=np.zeros((2, 1, 1)))
    with pytest.raises(InputError, match=r"'head\.weight' .* is missing"):
        method.check(net)


def test_more_centres_than_clients_are_refused() -> None:
    with pytest.raises(InputError, match="k is 5, more centres than the 4 clients"):
        simulate(FeSEM(k=5), plain_mlp, blobs(), rounds=1)
    many = blobs([2] * 70, test=1)
    assert simulate(FeSEM(k=65), plain_mlp, many, rounds=1, batch_size=2).status == "completed"


# --- whole runs


def planted(shift: float = 0.0) -> list[ClientArrays]:
    """Return six clients whose labels follow one rule, or in the second half the opposite one."""
    rng = np.random.default_rng(0)
    clients = []
    for number in range(6):
        x = rng.normal(size=(40, 6)).astype(np.float32) + np.float32(shift)
        y = (x[:, 0] > shift).astype(np.int64) ^ (number >= 3)
        clients.append(ClientArrays(x[:30], y[:30], x[30:], y[30:]))
    return clients


FAST: dict[str, Any] = {"batch_size": 10, "optimizer": Optimizer(lr=0.3, momentum=0.5)}


@pytest.mark.parametrize("init", ["kmeans++", "random"])
def test_two_planted_groups_are_found(init: Any) -> None:
    one = simulate(FeSEM(k=1), plain_mlp, planted(), rounds=8, epochs=3, **FAST)
    seen = watch(FeSEM(k=2, init=init), plain_mlp, planted(), rounds=8, epochs=3, **FAST)
    assignment = parameters(seen.servers[-1])["assignment"].tolist()
    assert assignment in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert seen.outcome.metrics["test/accuracy"][-1].mean() > 0.85
    assert one.metrics["test/accuracy"][-1].mean() < 0.7


def test_round_one_starts_from_one_model_and_does_not_end_in_one_centre() -> None:
    seen = watch(FeSEM(k=2), plain_mlp, planted(), rounds=1, init="per_client", **FAST)
    assert len(set(parameters(seen.servers[0])["assignment"].tolist())) == 2
    still = watch(FeSEM(k=2), plain_mlp, planted(), rounds=1, participants=[[]], init="per_client")
    first = still.stage("evaluated")
    assert all(same(params, first[0, 0]) for params in first.values())


def test_a_client_is_measured_with_the_centre_it_joined() -> None:
    seen = watch(FeSEM(k=2), plain_mlp, planted(), rounds=3, **FAST)
    for number, raw in enumerate(seen.servers, 1):
        server = parameters(raw)
        for client in range(6):
            mine = int(server["assignment"][client])
            model = seen.models[number, "evaluated", client]
            assert all(torch.equal(model[name], server[f"centre/{name}"][mine]) for name in model)


def test_as_many_centres_as_clients_is_local() -> None:
    clients = blobs((12, 12, 12), held=[(0, 1), (2, 3), (1, 2)])
    run: dict[str, Any] = {"rounds": 4, "init": "common", "batch_size": 4, "optimizer": Optimizer(lr=0.1)}
    seen, alone = (watch(method, plain_mlp, clients, **run) for method in (FeSEM(k=3), Local()))
    for server in seen.servers:
        assert sorted(parameters(server)["assignment"].tolist()) == [0, 1, 2]
    for key, params in alone.stage("evaluated").items():
        assert same(params, seen.stage("evaluated")[key])
    for name in ("test/accuracy", "test/loss", "train/loss"):
        np.testing.assert_array_equal(seen.outcome.metrics[name], alone.outcome.metrics[name])


def test_an_empty_cluster_gives_no_nan() -> None:
    seen = watch(FeSEM(k=4), plain_mlp, [*planted()[:1]] * 5, rounds=4, shuffle=False, init="common", **FAST)
    assert seen.outcome.status == "completed"
    for server in seen.servers:
        assert parameters(server)["assignment"].tolist() == [0] * 5
        assert all(bool(t.isfinite().all()) for t in parameters(server).values())
    assert bool(torch.isfinite(flat(seen.models[4, "evaluated", 0])).all())


def test_one_centre_is_downloaded_however_many_there_are() -> None:
    outcomes = [simulate(FeSEM(k=k), plain_mlp, blobs(), rounds=2) for k in (1, 4)]
    for way in ("up", "down"):
        counts = [outcome.traffic[f"{way}/scalars"].tolist() for outcome in outcomes]
        assert counts[0] == counts[1] == [[6 * 6 + 6 + 6 * 4 + 4] * 4] * 2
