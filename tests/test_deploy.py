"""Deployed cells: parties with their own samples only, the numbers of the simulation, the bytes that were counted."""

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

from fedbench import cells, samples
from fedbench.apart import ClientHalf
from fedbench.cells import Cell, draw_partition
from fedbench.deploy import (
    DIRECTIONS,
    Answer,
    Failed,
    Round,
    difference,
    play,
    read_party,
    read_rounds,
    rounds,
    write_parties,
    write_rounds,
)
from fedbench.executors import Setting, load_arrays
from fedbench.federation import Outcome

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
    return write_parties(cell, arrays, partition, base, folder), cells.run_cell(
        cell, arrays, partition, engine="loop", base=base
    )


def played(parties: list[Path]) -> list[Round]:
    return list(rounds(read_party(parties[0]).setup, Direct(parties)))


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
        assert difference(found, outcome) == 0
        assert [("test/accuracy" in one.metrics) for one in found] == [False, True, True]
        for one in found:
            for direction in DIRECTIONS:
                assert one.fits(direction)
                scalars = one.traffic[f"{direction}/scalars"]
                assert (scalars * 4 <= one.serialised[direction]).all()
        assert sum(int(one.traffic["up/scalars"].sum()) for one in found) == outcome.traffic["up/scalars"].sum() > 0
        write_rounds(found, parties[0])
        again = read_rounds(parties[0])
        assert difference(again, outcome) == 0
        assert all(one.fits(direction) for one in again for direction in DIRECTIONS)


def test_other_numbers_and_bytes_that_were_not_counted_are_noticed(tiny: Tiny) -> None:
    cell = tiny.cells()[1]
    parties, outcome = deployed(tiny, cell)
    one, *others = played(parties)
    off = {**one.metrics, "test/loss": one.metrics["test/loss"] + 0.25}
    assert difference([replace(one, metrics=off), *others], outcome) == pytest.approx(0.25)
    more = {**one.traffic, "up/scalars": one.traffic["up/scalars"] + 1}
    assert difference([replace(one, traffic=more), *others], outcome) == np.inf
    for beside in (-1000, 10_000):
        sent = {**one.serialised, "up": one.serialised["up"] + beside}
        assert not replace(one, serialised=sent).fits("up")


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
        play(parties)


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
