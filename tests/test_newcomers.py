"""Clients that come after the last round: who they are, what they get, and what becomes of them."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Tiny
from helpers import blobs, plain_mlp, small_cnn, small_mlp
from numpy.typing import NDArray

from fedbench import cells, cli, results_csv
from fedbench.checkpoint import Checkpoint
from fedbench.config import load
from fedbench.engines import Engine
from fedbench.engines.loop import Loop
from fedbench.engines.vectorised import Vectorised
from fedbench.errors import InputError
from fedbench.federation import Outcome, play
from fedbench.method import Method
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedprox import FedProx
from fedbench.methods.fedrep import FedRep
from fedbench.methods.fesem import FeSEM
from fedbench.methods.local import Local
from fedbench.models.mlp import Mlp
from fedbench.newcomers import Newcomers, choose
from fedbench.report import compare
from fedbench.results import Result, Results, arrivals, numbers
from fedbench.samples import ClientArrays, Samples, from_clients
from fedbench.settings import Optimizer, Training
from fedbench.setups import Setup, make_setup
from fedbench.store import Store
from fedbench.tracking import series

METHODS = [Local(), FedAvg(), FedProx(), FedPer(), FedRep(), FeSEM(), FedProto()]
SIZES = (7, 12, 5, 9, 6, 11)
GROWING = Optimizer(lr=100.0, weight_decay=1.0)  # weights a hundred times as large after every step
LATE = Newcomers((4, 5), (1, 3))


def pooled(clients: list[ClientArrays], dtype: torch.dtype = torch.float64) -> Samples:
    return from_clients(clients, 4, dtype, torch.device("cpu"))


def federation(method: Method, clients: list[ClientArrays], newcomers: Newcomers = LATE, **settings: Any) -> Setup:
    training = Training(**{"rounds": 3, "batch_size": 4, "dtype": "float64", **settings})
    made = make_setup(method, [plain_mlp], pooled(clients), training, 0)
    return replace(made, newcomers=newcomers, engine=Loop())


def named(method: Method) -> str:
    return type(method).__name__


def seen(outcome: Outcome) -> dict[str, NDArray[Any]]:
    work = {name: table for name, table in outcome.work.items() if name != "seconds"}
    return {**outcome.metrics, **outcome.traffic, **work}


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_training_is_as_if_newcomers_did_not_exist(method: Method) -> None:
    clients = blobs(SIZES)
    alone = seen(play(federation(method, clients[:4], Newcomers())))
    outcome = play(federation(method, clients))
    together = seen(outcome)
    assert alone.keys() == together.keys()
    for name, table in together.items():
        np.testing.assert_array_equal(table[:, :4], alone[name], err_msg=name)
        nothing = np.nan if name in outcome.metrics else 0
        np.testing.assert_array_equal(table[:, 4:], np.full((3, 2), nothing), err_msg=name)


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_both_engines_agree(method: Method) -> None:
    setup = federation(method, blobs(SIZES))
    engines: list[Engine] = [Loop(), Vectorised()]
    loop, stacked = (play(replace(setup, engine=engine)).newcomers for engine in engines)
    assert loop.keys() == stacked.keys()
    for name, table in loop.items():
        np.testing.assert_allclose(stacked[name], table, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("method", "repeats", "down"),
    [
        (Local(), 1, 0),
        (FedAvg(), 1, 42 + 28),
        (FedPer(), 1, 42),
        (FedRep(), 2, 42),
        (FeSEM(k=3), 1, 3 * (42 + 28)),
        (FedProto(), 1, 4 * 6),
    ],
    ids=lambda value: named(value) if isinstance(value, Method) else None,
)
def test_each_is_sent_what_the_method_offers_and_trained_as_long_as_said(
    method: Method, repeats: int, down: int
) -> None:
    """A model of 6 inputs, 6 hidden and 4 classes: body 42, head 28."""
    outcome = play(federation(method, blobs(SIZES)))
    found = outcome.newcomers
    assert found["clients"].tolist() == [4, 5]
    assert found["epochs"].tolist() == [0, 1, 3]
    batches = np.array([2, 3])  # of 6 and 11 samples
    assert found["work/steps"].tolist() == [(repeats * count * batches).tolist() for count in (0, 1, 3)]
    assert found["work/samples"][2].tolist() == [repeats * 3 * 6, repeats * 3 * 11]
    assert found["down/scalars"].tolist() == [down, down]
    assert found["down/bytes"].tolist() == [8 * down, 8 * down]
    assert found["test/accuracy"].shape == (3, 2)
    assert not np.isnan(found["test/loss"]).any()
    assert (found["test/loss"][2] != found["test/loss"][0]).all()


def test_fedavgs_newcomers_begin_with_the_global_model() -> None:
    """With the same test samples, a newcomer sees before fine-tuning what every client sees after the last round."""
    clients = blobs(SIZES)
    same = [one._replace(x_test=clients[0].x_test, y_test=clients[0].y_test) for one in clients]
    outcome = play(federation(FedAvg(), same))
    for name in ("test/loss", "test/accuracy"):
        assert outcome.newcomers[name][0].tolist() == [outcome.metrics[name][-1, 0]] * 2


@pytest.mark.parametrize("init", ["common", "per_client"])
def test_local_newcomers_begin_from_scratch(init: Any) -> None:
    clients = blobs(SIZES)
    outcome = play(federation(Local(), clients, init=init))
    everybody = play(federation(Local(), clients, Newcomers(), init=init))
    for name in ("test/loss", "test/accuracy"):
        assert outcome.newcomers[name][0].tolist() == everybody.initial[name][4:].tolist()


def test_each_number_of_epochs_is_a_fine_tuning_from_the_same_start() -> None:
    setup = federation(FedPer(), blobs(SIZES))
    both, short, long = (
        play(replace(setup, newcomers=Newcomers((4, 5), epochs))).newcomers for epochs in ((1, 3), (1,), (3,))
    )
    for name in ("test/loss", "test/accuracy", "work/steps"):
        np.testing.assert_array_equal(both[name], [short[name][0], short[name][1], long[name][1]])


def test_fesems_newcomers_take_the_centre_that_fits_them() -> None:
    """Two planted groups, which name the same two blobs the other way round, and a newcomer of each."""
    rng = np.random.default_rng(0)

    def client(swapped: bool) -> ClientArrays:
        y = np.arange(40) % 2
        x = (rng.normal(size=(40, 6)) * 0.3 + 3 * y[:, None]).astype(np.float32)
        y = 1 - y if swapped else y
        return ClientArrays(x[:20], y[:20], x[20:], y[20:])

    clients = [client(swapped) for swapped in (False, True) * 4]
    settings: dict[str, Any] = {"rounds": 6, "epochs": 3, "optimizer": Optimizer(lr=0.1)}
    outcome = play(federation(FeSEM(k=2), clients, Newcomers((6, 7), (1,)), **settings))
    assert outcome.metrics["test/accuracy"][-1, :6].min() > 0.9  # the groups were found
    assert outcome.newcomers["test/accuracy"][0].min() > 0.9


def test_newcomers_of_mixed_architectures() -> None:
    clients = blobs(SIZES)
    models = [partial(Mlp, hidden=(size, 6)) for size in (5, 7)]
    setup = make_setup(FedProto(), models, pooled(clients), Training(rounds=2, batch_size=4, dtype="float64"), 0)
    found = play(replace(setup, newcomers=Newcomers((1, 5), (2,)), engine=Loop())).newcomers
    assert found["clients"].tolist() == [1, 5]
    assert not np.isnan(found["test/loss"]).any()
    assert found["work/steps"][1].tolist() == [2 * 3, 2 * 3]
    only = play(replace(setup, newcomers=Newcomers((5,), (2,)), engine=Loop())).newcomers
    assert only["test/loss"].shape == (2, 1)


def test_batch_norm_and_dropout_are_no_obstacle() -> None:
    clients = blobs((8, 8, 8, 8), shape=(1, 6, 6))
    setup = make_setup(FedAvg(), [small_cnn], pooled(clients, torch.float32), Training(rounds=1, batch_size=4), 0)
    found = play(replace(setup, newcomers=Newcomers((3,), (2,)))).newcomers
    assert found["down/buffers"].tolist() == [7]
    dropping = make_setup(FedRep(), [small_mlp], pooled(blobs(SIZES), torch.float32), Training(rounds=1), 0)
    assert not np.isnan(play(replace(dropping, newcomers=LATE)).newcomers["test/loss"]).any()


def test_a_newcomer_without_test_samples_is_left_out_of_means() -> None:
    clients = blobs(SIZES)
    clients[5] = clients[5]._replace(x_test=clients[5].x_test[:0], y_test=clients[5].y_test[:0])
    outcome = play(federation(FedAvg(), clients))
    table = outcome.newcomers["test/accuracy"]
    assert np.isnan(table).tolist() == [[False, True]] * 3
    stages = arrivals(numbers(outcome), "test/accuracy").stages
    assert [stages[count][0] for count in (0, 1, 3)] == table[:, 0].tolist()


def test_a_newcomer_whose_fine_tuning_diverges_has_no_value_and_a_note(tiny: Tiny) -> None:
    clients = blobs(SIZES)
    setup = federation(FedAvg(), clients, Newcomers((4, 5), (1, 100)), rounds=1, optimizer=GROWING)
    outcome = play(setup)
    assert outcome.status == "completed"
    table = outcome.newcomers["test/accuracy"]
    assert np.isnan(table).any()
    assert not np.isnan(table[0]).any()
    np.testing.assert_array_equal(np.isnan(table), np.isnan(outcome.newcomers["test/loss"]))
    found = arrivals(numbers(outcome), "test/accuracy")
    assert found.diverged == np.isnan(table).any(axis=0).sum()
    tiny.change(newcomers={"clients": [4, 5], "epochs": [1, 100]}, methods={"fedavg": {}})
    made = {"device": "cpu", "seconds": 1.0, "started": "2026-01-01T00:00:00.000000+00:00"}
    result = Result(tiny.cells()[0], "completed", numbers=numbers(outcome), provenance=made)
    notes = " ".join(compare(Results((result,)), load(tiny.file)).notes)
    assert f"the fine-tuning of {found.diverged} newcomer" in notes


def test_participation_is_a_share_of_those_who_take_part() -> None:
    setup = federation(FedAvg(), blobs(SIZES), participation=0.5, rounds=8)
    steps = play(setup).work["steps"]
    assert (np.count_nonzero(steps, axis=1) == 2).all()
    assert not steps[:, 4:].any()


def test_a_federation_that_goes_on_from_a_checkpoint_has_the_same_newcomers(tmp_path: Path) -> None:
    setup = federation(FedPer(), blobs(SIZES))
    whole = play(setup, checkpoint=Checkpoint(tmp_path / "one.pt", {}, 0)).newcomers
    again = Checkpoint(tmp_path / "one.pt", {}, 0)
    resumed = play(setup, checkpoint=again).newcomers
    assert again.resumed == 2
    assert whole.keys() == resumed.keys()
    for name, table in whole.items():
        np.testing.assert_array_equal(resumed[name], table)


def test_divergence_leaves_nobody_to_join() -> None:
    outcome = play(federation(FedAvg(), blobs(SIZES), optimizer=Optimizer(lr=1e200)))
    assert outcome.status == "diverged"
    assert outcome.newcomers == {}
    assert arrivals(numbers(outcome), "test/accuracy").stages == {}


# --- who they are


def test_newcomers_are_drawn_under_the_partition_seed() -> None:
    drawn = {choose(4, [5], 20, seed).clients for seed in range(30)}
    assert len(drawn) > 20
    assert all(len(set(clients)) == 4 and list(clients) == sorted(clients) for clients in drawn)
    assert choose(4, [5], 20, 7) == choose(4, [5], 20, 7)
    assert set(choose(2, [5], 20, 7).clients) < set(choose(4, [5], 20, 7).clients)
    assert choose([3, 1], [1, 2], 4, 0) == Newcomers((1, 3), (1, 2))


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (4, r"newcomers\.clients: 4, and 4 clients in all; one at least has to train"),
        (9, r"newcomers\.clients: 9, and 4 clients"),
        ([0, 1, 2, 3], "one at least has to train"),
        ([1, 4], r"newcomers\.clients: \[1, 4\]; the partition has the clients 0 to 3"),
    ],
)
def test_newcomers_that_cannot_be(clients: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose(clients, [5], 4, 0)


# --- in suites


def fedbench(monkeypatch: pytest.MonkeyPatch, tiny: Tiny, *arguments: str) -> int:
    monkeypatch.chdir(tiny.file.parent)
    monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_newcomers_are_part_of_the_recipe_only_where_there_are_some(tiny: Tiny) -> None:
    without = tiny.cells()
    assert all("newcomers" not in cell.recipe for cell in without)
    tiny.change(newcomers={"clients": 1, "epochs": 2})
    assert [cell.recipe["newcomers"] for cell in tiny.cells()] == [{"clients": 1, "epochs": [2]}] * 3
    assert {cell.key for cell in without}.isdisjoint(cell.key for cell in tiny.cells())
    assert [cell.partition_key for cell in without] == [cell.partition_key for cell in tiny.cells()]
    assert all(cells.kind(cell) is None for cell in tiny.cells())
    tiny.change(newcomers={"clients": [2, 0], "epochs": [3, 1]})
    assert tiny.cells()[0].recipe["newcomers"] == {"clients": [0, 2], "epochs": [1, 3]}


def test_hyperparameters_are_chosen_without_newcomers(tiny: Tiny) -> None:
    tiny.change(tune={"trials": 2, "params": {"training.optimizer.lr": [0.01, 0.1]}})
    plain = tiny.cells()[1]
    tiny.change(newcomers={"clients": 1, "epochs": 2})
    one = tiny.cells()[1]
    tiny.change(newcomers={"clients": 1, "epochs": 5})
    other = tiny.cells()[1]
    assert one.study_key == other.study_key != plain.study_key
    trial = cells.trial(one, 0, {"training.optimizer.lr": 0.1})
    assert trial.recipe["newcomers"] == {"clients": 1, "epochs": []}
    assert "newcomers" not in cells.trial(plain, 0, {"training.optimizer.lr": 0.1}).recipe


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"clients": 4}, "tiny.yaml: newcomers.clients: 4, and 4 clients in all"),
        ({"clients": [0, 9]}, "tiny.yaml: newcomers.clients: [0, 9]; the partition has the clients 0 to 3"),
        ({"clients": 0}, "newcomers.clients: 0 should be 1 or more"),
        ({"clients": [1, 1]}, "newcomers.clients: has 1 more than once"),
        ({"clients": 1, "epoch": 3}, "newcomers: unknown key 'epoch'; did you mean 'epochs'"),
        ({"clients": []}, "newcomers.clients: [] should be how many, or numbers of clients from 0 on"),
        (
            {"clients": 1, "epochs": []},
            "newcomers.epochs: [] should be a whole number from 1 to 2147483647, or several",
        ),
        ({"clients": 1, "epochs": "2"}, "newcomers.epochs"),
        ({"epochs": 1}, "newcomers.clients: is missing"),
        (3, "newcomers: should be a mapping"),
    ],
)
def test_wrong_newcomers_are_one_line(
    said: Any, message: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.change(newcomers=said)
    run = ["run", str(tiny.file), "--data", str(tiny.data), "--workers", "1", "--tracking-uri", "none"]
    assert fedbench(monkeypatch, tiny, *run) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors


def test_a_suite_with_newcomers_reports_them(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.change(newcomers={"clients": 1, "epochs": [1, 4]})
    common = ["--data", str(tiny.data), "--out", str(tiny.out)]
    run = ["run", str(tiny.file), "--workers", "1", "--tracking-uri", "none", *common]
    assert fedbench(monkeypatch, tiny, *run) == 0
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "150")
    assert fedbench(monkeypatch, tiny, "report", str(tiny.file), "--format", "md,csv", *common) == 0
    said = capsys.readouterr().out
    assert "no samples to measure on" not in said
    folder = tiny.out / "tiny"
    store = Store(folder)
    page = (folder / "report.md").read_text(encoding="utf-8")
    table = page.partition("## newcomers\n")[2].partition("\n##")[0]
    head, rows = table.splitlines()[1], {line.split()[1]: line.split(" | ") for line in table.splitlines()[3:] if line}
    for word in ("test/accuracy (%) before", "after 1 epoch", "after 4 epochs", "steps", "down ×10³"):
        assert word in head
    assert set(rows) == {"local", "fedavg", "fedproto"}
    for cell in tiny.cells():
        outcome = store.get(cell.key).outcome
        found: Mapping[str, NDArray[Any]] = outcome.newcomers
        (late,) = found["clients"].tolist()
        assert np.isnan(outcome.metrics["test/accuracy"][:, late]).all()
        want = [f"{100 * value:.2f} ± 0.00" for value in found["test/accuracy"][:, 0]]
        assert [text.strip(" |") for text in rows[cell.label][1:4]] == want
        logged = {(name, step): value for name, step, value in series(outcome)}
        assert logged["newcomers/test/accuracy/mean", 4] == found["test/accuracy"][2, 0]
    again = tiny.file.parent / "again"
    csv = str(folder / "results.csv")
    assert fedbench(monkeypatch, tiny, "report", csv, "--format", "md,csv", "--to", str(again)) == 0
    for name in ("report.md", "results.csv", "summary.csv"):
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    read, _, _ = results_csv.load(folder / "results.csv")
    kept = read.cells[1].numbers
    assert kept is not None
    first = store.get(tiny.cells()[1].key).outcome.newcomers
    for name in ("clients", "epochs", "test/loss", "work/steps", "down/scalars", "down/index_bytes"):
        np.testing.assert_array_equal(kept.newcomers[name], first[name])
