"""Deployed cells: parties with their own samples only, the numbers of the simulation, the bytes that were counted."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import Run, Tiny

from fedbench import cells, deploy, samples
from fedbench.apart import Answer, ClientHalf, Failed, Played, play
from fedbench.cells import Cell, draw_partition
from fedbench.deploy import aside, contradiction, difference, read_party, read_rounds, write_parties, write_rounds
from fedbench.deploy_commands import _compared
from fedbench.errors import InputError
from fedbench.executors import Setting, load_arrays
from fedbench.federation import Outcome
from fedbench.wire import DIRECTIONS

ENVELOPE = 20  # bytes that a link adds to a message

needs_flower = pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")


class Direct:
    """A link by calls: each client is what was read from its folder."""

    def __init__(self, parties: list[Path]) -> None:
        found = [read_party(party) for party in parties]
        self.clients = {
            party.client: ClientHalf(party.setup, party.client) for party in found if party.client is not None
        }

    def train(self, number: int, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        answers = {}
        for client, down in packed.items():
            up, metrics = self.clients[client].train(number, down)
            answers[client] = Answer(up, metrics, len(down) + ENVELOPE, len(up) + ENVELOPE)
        return answers

    def evaluate(self, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        return {
            client: Answer(b"", self.clients[client].evaluate(down)[1], len(down) + ENVELOPE, 0)
            for client, down in packed.items()
        }


def deployed(tiny: Tiny, cell: Cell) -> tuple[list[Path], Outcome]:
    """Write a cell's parties, and simulate it."""
    base, arrays = tiny.file.parent, load_arrays(cell, Setting(tiny.data, tiny.file.parent))
    partition = draw_partition(cell, arrays)
    folder = tiny.out / cell.label
    parties = write_parties(cell, arrays, partition, base, folder)
    return parties, deploy.simulate(cell, arrays, partition, base)


def played(parties: list[Path]) -> Played:
    return play(read_party(parties[0]).setup, Direct(parties), lambda one: None)


def test_a_party_has_its_own_samples_and_no_others(tiny: Tiny) -> None:
    tiny.change(partition={"name": "iid", "clients": 4, "validation": 0.2})
    cell = tiny.cells()[1]
    parties, outcome = deployed(tiny, cell)
    arrays = load_arrays(cell, Setting(tiny.data, tiny.file.parent))
    whole = samples.from_arrays(arrays, draw_partition(cell, arrays), torch.float32, torch.device("cpu"))
    server, *clients = (samples.load(party / "samples.npz") for party in parties)
    assert len(server.x) == len(server.y) == 0
    assert not server.own.any()
    assert [len(index) for index in server.train] == outcome.sizes["train"].tolist()
    for number, held in enumerate(clients):
        assert len(held.x) == sum(int(outcome.sizes[name][number]) for name in ("train", "validation", "test"))
        for name in ("train", "validation", "test"):
            mine, all_of_them = getattr(held, name), getattr(whole, name)
            assert torch.equal(held.x[mine[number]], whole.x[all_of_them[number]])
            assert torch.equal(held.y[mine[number]], whole.y[all_of_them[number]])
            assert not any(len(index) for other, index in enumerate(mine) if other != number)
        assert torch.equal(held.own[number], whole.own[number])
        assert held.own.sum() == whole.own[number].sum()
    assert not [file for party in parties for file in party.rglob("*.pkl")]


def test_parties_come_to_the_numbers_of_the_simulation_and_send_what_was_counted(tiny: Tiny) -> None:
    (tiny.file.parent / "folder").mkdir()
    (tiny.file.parent / "trouble.py").rename(tiny.file.parent / "folder" / "mine.py")
    rows = {"fedavg": {}, "fedper": {}, "fedproto": {}, "mine": {"method": "./folder/mine.py:Trouble"}}
    tiny.change(methods=rows, training={"rounds": 3, "batch_size": 4, "participation": 0.5, "evaluate_every": 2})
    for cell in tiny.cells():
        parties, outcome = deployed(tiny, cell)
        (tiny.file.parent / "folder" / "mine.py").rename(tiny.file.parent / "away.py")  # a party has all that it needs
        found = played(parties)
        (tiny.file.parent / "away.py").rename(tiny.file.parent / "folder" / "mine.py")
        assert (contradiction(found, outcome), difference(found, outcome)) == ("", 0)
        assert [("test/accuracy" in one.metrics) for one in found.rounds] == [False, True, True]
        for one in found.rounds:
            for direction in DIRECTIONS:
                assert one.fits(direction)
                scalars = one.traffic[f"{direction}/scalars"]
                assert (scalars * 4 <= one.serialised[direction]).all()
        sent = sum(int(one.traffic["up/scalars"].sum()) for one in found.rounds)
        assert sent == outcome.traffic["up/scalars"].sum() > 0
        write_rounds(found, parties[0])
        again = read_rounds(parties[0])
        assert (contradiction(again, outcome), difference(again, outcome)) == ("", 0)
        assert all(one.fits(direction) for one in again.rounds for direction in DIRECTIONS)


def test_a_party_holds_no_path_of_its_author(tiny: Tiny) -> None:
    (tiny.file.parent / "folder").mkdir()
    (tiny.file.parent / "trouble.py").rename(tiny.file.parent / "mine.py")
    tiny.change(methods={"mine": {"method": "../mine.py:Trouble"}})
    tiny.file.rename(tiny.file.parent / "folder" / "tiny.yaml")
    tiny = replace(tiny, file=tiny.file.parent / "folder" / "tiny.yaml")
    parties, _ = deployed(tiny, tiny.cells()[0])
    assert json.loads((parties[0] / "party.json").read_text())["base"] == "files/folder"
    assert (parties[0] / "files" / "mine.py").exists()
    assert str(tiny.out) not in (parties[0] / "party.json").read_text()
    assert read_party(parties[0]).client is None


def test_metrics_and_bytes_that_are_not_the_simulations_are_noticed(tiny: Tiny) -> None:
    tiny.change(partition={"name": "iid", "clients": 4, "validation": 0.2})
    parties, outcome = deployed(tiny, tiny.cells()[1])
    whole = played(parties)
    one, *others = whole.rounds
    assert {name.split("/")[0] for name in one.metrics} == {"train", "local", "test", "validation"}

    def said(**changes: object) -> str:
        return contradiction(Played([replace(one, **changes), *others]), outcome)  # type: ignore[arg-type]  # any field

    loss = one.metrics["test/loss"]
    off = Played([replace(one, metrics={**one.metrics, "test/loss": loss + 0.25}), *others])
    assert contradiction(off, outcome) == ""
    assert difference(off, outcome) == pytest.approx(0.25)
    assert not _compared(off, outcome, 1e-5)[0]
    more = {**one.traffic, "up/scalars": one.traffic["up/scalars"] + 1}
    assert said(traffic=more) == "round 1: up/scalars is counted otherwise"
    fewer = np.where(np.arange(4) == 2, np.nan, loss)
    assert said(metrics={**one.metrics, "test/loss": fewer}) == "round 1: test/loss was measured of other clients"
    assert said(metrics={**one.metrics, "test/loss/new": loss}) == "test/loss/new was measured only here"
    without = [replace(r, metrics={n: v for n, v in r.metrics.items() if n != "test/loss"}) for r in whole.rounds]
    assert contradiction(Played(without), outcome) == "test/loss was measured only in the simulation"
    for beside in (-1000, 10_000):
        sent = {**one.serialised, "up": one.serialised["up"] + beside}
        assert not replace(one, serialised=sent).fits("up")


def test_rounds_that_were_not_played_are_noticed(tiny: Tiny) -> None:
    parties, outcome = deployed(tiny, tiny.cells()[1])
    whole = played(parties)
    assert _compared(whole, outcome, 0)[0]
    for number in (0, 2):
        prefix = Played(whole.rounds[:number])
        assert contradiction(prefix, outcome) == f"it ended after round {number}, and the simulation after 3"
        assert not _compared(prefix, outcome, 1)[0]
        said = contradiction(Played(prefix.rounds, "diverged", "round 1: no"), outcome)
        assert said == "it diverged (round 1: no), and the simulation completed"


def test_a_cell_that_diverges_does_so_in_both(tiny: Tiny) -> None:
    ends: list[int] = []
    for lr, method in ((1e30, "fedavg"), (1e30, "local"), (1e4, "local")):
        tiny.change(training={"rounds": 3, "batch_size": 4, "optimizer": {"name": "sgd", "lr": lr}})
        (cell,) = (cell for cell in tiny.cells() if cell.label == method)
        parties, outcome = deployed(replace(tiny, out=tiny.out / f"{method}{lr}"), cell)
        found = played(parties)
        assert outcome.status == "diverged"
        assert (found.status, found.message) == (outcome.status, outcome.message)
        write_rounds(found, parties[0])
        again = read_rounds(parties[0])
        assert again.message == outcome.message
        equal, said = _compared(again, outcome, 0)
        assert equal
        assert said.endswith(f"; both diverged in {outcome.message}")
        assert said.startswith("metrics and" if again.rounds else "no round was finished")
        ends.append(len(again.rounds))
    assert 0 in ends
    assert max(ends) > 0


def test_the_simulation_has_as_many_threads_as_a_party(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(
        cells, "run_cell", lambda *_, **more: threads.append((torch.get_num_threads(), more["threads"]))
    )
    cell, before = tiny.cells()[0], torch.get_num_threads()
    arrays = load_arrays(cell, Setting(tiny.data, tiny.file.parent))
    torch.set_num_threads(3)
    try:
        deploy.simulate(cell, arrays, draw_partition(cell, arrays), tiny.file.parent)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert threads == [(1, 1)]


PARTY = """
import os, sys, time
from pathlib import Path
party, what = Path(sys.argv[1]), sys.argv[2]
rounds = party.parent / "server" / "rounds.npz"
if party.name == "server" and what == "dies early":
    sys.exit("no port")
if party.name == "server":
    (party / "given.npz").rename(rounds)
    while not (party.parent / "client-0" / "gone").exists():
        time.sleep(0.01)
else:
    while what == "dies late" and not rounds.exists():
        time.sleep(0.01)
    (party / "gone").touch()
    sys.exit("hung up on")
"""


def test_clients_that_are_hung_up_on_after_the_last_round_have_not_died(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties, outcome = deployed(tiny, tiny.cells()[1])
    write_rounds(played(parties), parties[0])
    given, what = (parties[0] / "rounds.npz").read_bytes(), "dies late"
    (parties[0] / "given.npz").write_bytes(given)
    monkeypatch.setattr(deploy, "_command", lambda party, _: [sys.executable, "-c", PARTY, str(party), what])
    assert contradiction(deploy.run(parties[:2]), outcome) == ""
    what = "dies early"
    with pytest.raises(Failed, match=r"(server died: no port|client-0 died: hung up on) \(see .*log.txt\)"):
        deploy.run(parties[:2])


def test_what_fails_leaves_no_folder_that_looks_complete(tmp_path: Path) -> None:
    folder, part = tmp_path / "parties", tmp_path / "parties.part"

    def attempt(error: BaseException) -> None:
        with aside(folder) as given:
            given.mkdir()
            raise error

    for error, left in ((KeyboardInterrupt(), False), (Failed("client-0 died"), True)):
        part.mkdir()
        (part / "of an attempt before").touch()
        with pytest.raises(type(error)):
            attempt(error)
        assert (folder.exists(), part.exists()) == (False, left)
    with aside(folder) as given:
        given.mkdir()
    assert (folder.exists(), part.exists()) == (True, False)
    with pytest.raises(InputError, match="parties: is there already; remove it"), aside(folder):
        pytest.fail("it is there")
    assert folder.exists()


def test_two_do_not_deploy_into_one_folder_at_the_same_time(tmp_path: Path) -> None:
    folder, file = tmp_path / "parties", tmp_path / "parties.part" / "of the other"
    file.parent.mkdir()
    file.touch()
    holder = (
        "import sys, filelock\n"
        "with filelock.FileLock(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holder, f"{folder}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="parties: another deploy is at work on it; wait for it, or"), aside(folder):
        pytest.fail("it is held")
    assert file.exists()
    other.communicate(timeout=30)
    with aside(folder) as given:  # free again
        given.mkdir()
    assert folder.exists()


@needs_flower
def test_a_client_that_is_none_or_there_twice_is_refused() -> None:
    from flwr.common import Code, GetPropertiesRes, Status

    from fedbench.flower import _by_number

    class Proxy:
        def __init__(self, number: object) -> None:
            self.number = number

        def get_properties(self, *_: object) -> GetPropertiesRes:
            return GetPropertiesRes(Status(Code.OK, ""), {} if self.number is None else {"client": self.number})

    last, first = Proxy(1), Proxy(0)
    assert _by_number([last, first], 2) == {0: first, 1: last}
    for number, line in ((1, "two have connected as client 1"), (2, "as client 2; want 0 to 1"), (None, "client None")):
        with pytest.raises(ValueError, match=line):
            _by_number([Proxy(0), Proxy(1), Proxy(number)], 2)


@needs_flower
def test_clients_are_not_waited_for_without_end(tiny: Tiny) -> None:
    from flwr.common import Code, EvaluateRes, FitRes, Parameters, Status

    from fedbench.flower import _Server

    class Proxy:
        def fit(self, ins: object, timeout: float | None, group: int) -> FitRes:
            assert timeout
            return FitRes(Status(Code.OK, ""), Parameters([b"up"], ""), 0, {"train/loss": 0.5})

        def evaluate(self, ins: object, timeout: float | None, group: None) -> EvaluateRes:
            assert timeout
            return EvaluateRes(Status(Code.OK, ""), 0.0, 0, {"test/loss": 1.5})

    parties, _ = deployed(tiny, tiny.cells()[1])
    server = _Server(read_party(parties[0]).setup, parties[0])
    server._proxies = {0: Proxy(), 1: Proxy()}
    trained, evaluated = server.train(1, {0: b"down", 1: b"down"}), server.evaluate({1: b"down"})
    assert [(answer.packed, answer.metrics) for answer in trained.values()] == [(b"up", {"train/loss": 0.5})] * 2
    assert evaluated[1].metrics == {"test/loss": 1.5}


@needs_flower
def test_four_processes_and_a_server_on_flower(tiny: Tiny) -> None:
    suite = {
        "dataset": "mnist_mini",
        "model": "cnn_mnist",
        "partition": {"name": "nway_kshot", "n": 3, "k": 10, "clients": 4},
        "training": {"rounds": 2},
        "methods": {"fedavg": {}, "fedper": {}, "fedproto": {}},
    }
    tiny.file.write_text(yaml.safe_dump(suite))
    for method in ("fedavg", "fedper", "fedproto"):
        command = [sys.executable, "-P", "-m", "fedbench", "deploy", str(tiny.file), "--only", f"method={method}"]
        done = subprocess.run([*command, "--out", str(tiny.out)], capture_output=True, text=True)
        assert done.returncode == 0, done
        assert done.stdout.count("\nround ") == 2
        assert done.stdout.count("  up: ") == 2
        assert " the simulation's" in done.stdout
        assert "NOT" not in done.stdout
        end = "bytes serialised are those counted and a header within its bounds\n"
        assert done.stdout.endswith(end)


@needs_flower
def test_a_party_that_dies_is_named(tiny: Tiny) -> None:
    tiny.change(methods={"bad": {"method": "./trouble.py:Trouble"}})
    (cell,) = tiny.cells()
    parties, _ = deployed(tiny, cell)
    (parties[2] / "samples.npz").write_bytes(b"nothing")
    with pytest.raises(Failed, match=r"client-1 died: .*samples.npz: not a readable"):
        deploy.run(parties)


def test_what_cannot_be_deployed_is_said_at_once(tiny: Tiny, fedbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(*more: str) -> str:
        code, out, err = fedbench("deploy", str(tiny.file), "--data", str(tiny.data), "--out", str(tiny.out), *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    assert "deploy: 3 cells; say which one" in refusal()
    one = ["--only", "method=local"]
    tiny.change(tune={"trials": 2, "params": {"optimizer.lr": [0.1, 0.2]}})
    assert "yet to be tuned" in refusal(*one)
    tiny.change(tune=None, newcomers={"clients": 1, "epochs": 1})
    assert "leave `newcomers` out" in refusal(*one)
    tiny.change(newcomers=None)
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert "Flower is not installed; pip install 'fedbench-suite[flower]'" in refusal(*one)
    assert not tiny.out.exists()
