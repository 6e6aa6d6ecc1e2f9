"""A cell as a real federation: the server and each client are processes, and each client has its own samples only.

A party is a folder that can be taken to another machine: a cell, samples, the suite's own files.  The way of messages
between the parties is a `Link`; `fedbench.flower` is the one by Flower.
"""

import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbench import cells
from fedbench.cells import Cell
from fedbench.data import read_npz

if TYPE_CHECKING:
    from fedbench.data import Arrays
    from fedbench.federation import Outcome, Setup
    from fedbench.partition import Partition

Direction = Literal["up", "down", "evaluation"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down", "evaluation")


# --- parties as folders


class Party(NamedTuple):
    """One side of a federation: its part of the samples, and which client it is (None: the server)."""

    setup: "Setup"
    client: int | None


def write_parties(cell: Cell, arrays: "Arrays", partition: "Partition", base: Path, folder: Path) -> list[Path]:
    """Write a folder for each party, the server's first; no client's has anything of another client's samples."""
    import torch

    from fedbench import samples

    dtype = getattr(torch, cell.recipe["training"]["dtype"])
    data = samples.from_arrays(arrays, partition, dtype, torch.device("cpu"))
    base = base.absolute()
    written = []
    for client in (None, *range(data.clients)):
        party = folder / ("server" if client is None else f"client-{client}")
        party.mkdir(parents=True)
        samples.save(samples.part(data, client), party / "samples.npz")
        cells.copy_files([cell], base, party)
        about = {"cell": asdict(cell), "base": str(base), "client": client}
        (party / "party.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        written.append(party)
    return written


def read_party(folder: Path) -> Party:
    """Read what `write_parties` wrote."""
    from fedbench import samples

    about = json.loads((folder / "party.json").read_text(encoding="utf-8"))
    cell = Cell(**about["cell"])
    base = cells.moved(Path(about["base"]), folder)
    return Party(cells.setup(cell, samples.load(folder / "samples.npz"), base), about["client"])


# --- rounds, whichever way messages go


class Answer(NamedTuple):
    """What a client sent back: a packed message, if any, metrics, and how many bytes each way took on the wire."""

    packed: bytes
    metrics: Mapping[str, float]
    sent: int
    received: int


class Link(Protocol):
    """The way from the server to the clients and back."""

    def train(self, number: int, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        """Let clients train on what is sent to each, in a round; return their uploads."""
        ...

    def evaluate(self, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        """Let clients evaluate, given what is sent to each; return their metrics."""
        ...


@dataclass(frozen=True)
class Round:
    """What a round came to: arrays (clients,) by name.

    - `metrics`: "test/..." after the merge, in rounds that are evaluated, and "train/...".
    - `traffic`: what the wire counted, see `Wire`.
    - `serialised`: bytes of whole messages, by direction; `headers`: how many of them may be no counted bytes.
    """

    number: int
    metrics: Mapping[str, NDArray[np.float64]]
    traffic: Mapping[str, NDArray[np.int64]]
    serialised: Mapping[str, NDArray[np.int64]]
    headers: Mapping[str, NDArray[np.int64]]

    def counted(self, direction: str) -> NDArray[np.int64]:
        """Return the bytes that the wire counted, labels and buffers too."""
        return sum(
            (self.traffic[f"{direction}/{kind}"] for kind in ("bytes", "index_bytes", "buffer_bytes")),
            np.zeros(len(self.serialised[direction]), np.int64),
        )

    def fits(self, direction: str) -> bool:
        """Return whether what was sent is what was counted, and a header within its bounds."""
        counted, sent = self.counted(direction), self.serialised[direction]
        return bool(((counted <= sent) & (sent <= counted + self.headers[direction])).all())


def rounds(setup: "Setup", link: Link) -> Iterator[Round]:
    """Play the server's side of all rounds.  Raises `Diverged` for an upload that is not finite."""
    from fedbench.apart import ServerHalf
    from fedbench.federation import participants
    from fedbench.method import stack
    from fedbench.wire import Wire, unpack

    clients, every = setup.data.clients, setup.training.evaluate_every
    half, wire = ServerHalf(setup), Wire(clients, setup.buffers)

    def count(direction: Direction, client: int, packed: bytes) -> int:
        """Let a message pass the wire; return what its header may take."""
        message = wire.carry(direction, [client], stack([unpack(packed)]))
        return 512 + sum(64 + len(name) for name in message)

    for number in range(1, setup.training.rounds + 1):
        serialised: dict[str, NDArray[np.int64]] = {name: np.zeros(clients, np.int64) for name in DIRECTIONS}
        headers: dict[str, NDArray[np.int64]] = {name: np.zeros(clients, np.int64) for name in DIRECTIONS}
        metrics: dict[str, NDArray[np.float64]] = {}

        def note(found: Mapping[str, float], client: int, into: dict[str, NDArray[np.float64]] = metrics) -> None:
            for name, value in found.items():
                into.setdefault(name, np.full(clients, np.nan))[client] = value

        down = {client: half.send(client) for client in participants(setup, number)}
        answers = link.train(number, down)
        for client, packed in down.items():
            answer = answers[client]
            headers["down"][client] = count("down", client, packed)
            headers["up"][client] = count("up", client, answer.packed)
            serialised["down"][client], serialised["up"][client] = answer.sent, answer.received
            note(answer.metrics, client)
        if down:
            half.merge({client: answers[client].packed for client in down})
        if number % every == 0 or number == setup.training.rounds:
            down = {client: half.send(client) for client in range(clients)}
            for client, answer in link.evaluate(down).items():
                headers["evaluation"][client] = count("evaluation", client, down[client])
                serialised["evaluation"][client] = answer.sent
                note(answer.metrics, client)
        yield Round(number, metrics, wire.take(), serialised, headers)


def write_rounds(played: Sequence[Round], party: Path) -> None:
    """Write rounds into the server's folder."""
    flat = {
        f"{one.number}/{kind}/{name}": v for one in played for kind in _KINDS for name, v in getattr(one, kind).items()
    }
    np.savez(party / "rounds.npz", allow_pickle=False, **flat)


def read_rounds(party: Path) -> list[Round]:
    """Read what `write_rounds` wrote."""
    found: dict[int, dict[str, Any]] = {}
    for path, values in read_npz(party / "rounds.npz").items():
        number, kind, name = path.split("/", 2)
        found.setdefault(int(number), {one: {} for one in _KINDS})[kind][name] = values
    return [Round(number, **tables) for number, tables in sorted(found.items())]


_KINDS = ("metrics", "traffic", "serialised", "headers")


# --- the federation on this machine


class Failed(Exception):
    """What became of a process that died, in a line."""


def play(parties: Sequence[Path]) -> list[Round]:
    """Run every party as a process of this machine, the server's first; return the rounds.

    Raises `Failed` with the last line of a party that died.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running: list[subprocess.Popen[bytes]] = []
    try:
        for party in parties:
            with (party / "log.txt").open("wb") as log:
                command = [sys.executable, "-P", "-m", "fedbench.flower", str(party), address]
                out = None if party == parties[0] else log
                running.append(subprocess.Popen(command, stdout=out, stderr=log))
        server, *clients = running
        while server.poll() is None and not any(client.poll() for client in clients):
            with suppress(subprocess.TimeoutExpired):
                server.wait(0.2)
        for process in clients if server.returncode else ():  # a client's death may be why the server died
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        dead = [party for party, process in zip(parties, running, strict=True) if process.poll()]
        if dead:
            raise _failed(dead[-1])
        return read_rounds(parties[0])
    finally:
        for process in running:
            process.kill()
            process.wait()


def _failed(party: Path) -> Failed:
    lines = (party / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Failed(f"{party.name} died: {lines[-1] if lines else 'it said nothing'}")


def in_words(played: Round) -> Iterator[str]:
    """Yield a round as lines: what was measured, and what was counted and sent each way."""
    accuracy = played.metrics.get("test/accuracy")
    said = "not evaluated" if accuracy is None else f"test/accuracy {np.nanmean(accuracy):.4f}"
    yield f"round {played.number}: {said}"
    for direction in DIRECTIONS:
        sent, counted = int(played.serialised[direction].sum()), int(played.counted(direction).sum())
        if sent:
            scalars = int(played.traffic[f"{direction}/scalars"].sum() + played.traffic[f"{direction}/buffers"].sum())
            yield (
                f"  {direction}: {scalars} scalars, {counted} bytes counted, {sent} serialised: {sent - counted} more, "
                f"of at most {int(played.headers[direction].sum())}"
            )


def difference(played: Sequence[Round], simulated: "Outcome") -> float:
    """Return the largest difference of a metric from the simulation's; infinity if other bytes were counted."""
    largest = 0.0
    for one in played:
        row = one.number - 1
        if any((values != simulated.traffic[name][row]).any() for name, values in one.traffic.items()):
            return math.inf
        for name, values in one.metrics.items():
            known = simulated.metrics[name][row]
            if (np.isnan(values) != np.isnan(known)).any():
                return math.inf
            largest = max(largest, float(np.nan_to_num(np.abs(values - known)).max()))
    return largest
