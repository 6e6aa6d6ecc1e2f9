"""A cell as a real federation: the server and each client are processes, and each client has its own samples only.

A party is a folder that can be taken to another machine: a cell, samples, the suite's own files.  `fedbench.apart` has
what parties do; here they are written, started as processes of this machine, and held against the simulation.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from fedbench import cells, samples
from fedbench.apart import Failed, Played, Round, own
from fedbench.cells import Cell
from fedbench.data import read_npz
from fedbench.errors import InputError
from fedbench.federation import Outcome
from fedbench.setups import Setup
from fedbench.threads import thread_limit
from fedbench.wire import DIRECTIONS

if TYPE_CHECKING:
    from fedbench.data import Arrays
    from fedbench.partition import Partition

THREADS = 1
"""Threads of torch in each party, and in the simulation that is held against them: sums depend on it by rounding."""

_FAREWELL = 60  # seconds for the server to send its clients home


# --- parties as folders


class Party(NamedTuple):
    """One side of a federation: its part of the samples, and which client it is (None: the server)."""

    setup: Setup
    client: int | None


def write_parties(cell: Cell, arrays: "Arrays", partition: "Partition", base: Path, folder: Path) -> list[Path]:
    """Write a folder for each party, the server's first; no client's has anything of another client's samples."""
    import torch

    dtype = getattr(torch, cell.recipe["training"]["dtype"])
    data = samples.from_arrays(arrays, partition, dtype, torch.device("cpu"))
    written = []
    for client in (None, *range(data.clients)):
        party = folder / ("server" if client is None else f"client-{client}")
        party.mkdir(parents=True)
        samples.save(samples.part(data, client), party / "samples.npz")
        about = {"cell": asdict(cell), "base": str(cells.copy_files([cell], base, party)), "client": client}
        (party / "party.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        written.append(party)
    return written


def read_party(folder: Path) -> Party:
    """Read what `write_parties` wrote."""
    about = json.loads((folder / "party.json").read_text(encoding="utf-8"))
    cell = Cell(**about["cell"])
    return Party(cells.setup(cell, samples.load(folder / "samples.npz"), folder / about["base"]), about["client"])


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """Give a name for `folder` until it is complete; what fails leaves nothing there; `Failed`, the logs.

    InputError if the folder is there already, or another process is at work on it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(folder.with_name(f"{folder.name}.lock")).acquire(blocking=False)
    except Timeout:
        raise InputError(f"{folder}: another deploy is at work on it; wait for it, or name another with --to") from None
    with held:
        if folder.exists():
            raise InputError(f"{folder}: is there already; remove it, or name another with --to")
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            yield part
            part.rename(folder)
        except Failed:
            raise
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


# --- rounds as a file


def write_rounds(played: Played, party: Path) -> None:
    """Write what was played into the server's folder, all at once."""
    flat: dict[str, NDArray[Any]] = {"status": np.array(played.status), "message": np.array(played.message)}
    for one in played.rounds:
        for kind in _KINDS:
            flat |= {f"{one.number}/{kind}/{name}": values for name, values in getattr(one, kind).items()}
    part = party / "rounds.npz.part"
    with part.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **flat)
    os.replace(part, party / _ROUNDS)


def read_rounds(party: Path) -> Played:
    """Read what `write_rounds` wrote."""
    flat = read_npz(party / _ROUNDS)
    status, message = (str(flat.pop(name)) for name in ("status", "message"))
    found: dict[int, dict[str, Any]] = {}
    for path, values in flat.items():
        number, kind, name = path.split("/", 2)
        found.setdefault(int(number), {one: {} for one in _KINDS})[kind][name] = values
    rounds = [Round(number, **tables) for number, tables in sorted(found.items())]
    return Played(rounds, "diverged" if status == "diverged" else "completed", message)


_KINDS = ("metrics", "traffic", "serialised", "headers")
_ROUNDS = "rounds.npz"


# --- the federation on this machine


def run(parties: Sequence[Path]) -> Played:
    """Run every party as a process of this machine, the server's first; return what was played.

    Raises `Failed` with the last line of a party that died before the last round was over.
    """
    (parties[0] / _ROUNDS).unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running: list[subprocess.Popen[bytes]] = []
    try:
        for party in parties:
            with (party / "log.txt").open("wb") as log:
                out = None if party == parties[0] else log
                running.append(subprocess.Popen(_command(party, address), stdout=out, stderr=log))
        _await(parties[0] / _ROUNDS, running)
        if not (parties[0] / _ROUNDS).exists():
            raise _failed(parties, running)
        with suppress(subprocess.TimeoutExpired):  # all is played; how they part is of no account
            running[0].wait(_FAREWELL)
        return read_rounds(parties[0])
    finally:
        for process in running:
            process.kill()
            process.wait()


def _command(party: Path, address: str) -> list[str]:
    return [sys.executable, "-P", "-m", "fedbench.flower", str(party), address]


def _await(rounds: Path, running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until there is the file of the rounds, or never will be."""
    server, *clients = running
    while server.poll() is None and not rounds.exists() and not any(client.poll() for client in clients):
        with suppress(subprocess.TimeoutExpired):
            server.wait(0.2)


def _failed(parties: Sequence[Path], running: Sequence[subprocess.Popen[bytes]]) -> Failed:
    """Return what became of the party that died first, as far as one can tell: a client's death ends the server too."""
    for process in running[1:]:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    dead = [party for party, process in zip(parties, running, strict=True) if process.poll()]
    log = (dead or parties[:1])[-1] / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Failed(f"{log.parent.name} died: {lines[-1] if lines else 'it said nothing'} (see {log})")


def simulate(cell: Cell, arrays: "Arrays", partition: "Partition", base: Path) -> Outcome:
    """Return what the simulation comes to, computed as the parties compute."""
    with thread_limit(THREADS):
        return cells.run_cell(cell, arrays, partition, engine="loop", threads=THREADS, base=base)


# --- what it came to


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


def contradiction(played: Played, simulated: Outcome) -> str:
    """Return in words what is not the simulation's and no matter of rounding, the first such thing; or nothing."""
    if played.status != simulated.status:
        return f"it {_ended(played)}, and the simulation {_ended(simulated)}"
    rounds = len(next(iter(simulated.traffic.values()), ()))
    if len(played.rounds) != rounds:
        return f"it ended after round {len(played.rounds)}, and the simulation after {rounds}"
    names = {name for one in played.rounds for name in one.metrics}
    for lone, where in (
        (names - set(simulated.metrics), "here"),
        (own(simulated.metrics) - names, "in the simulation"),
    ):
        if lone:
            return f"{min(lone)} was measured only {where}"
    for row, one in enumerate(played.rounds):
        for name, counts in simulated.traffic.items():
            if (one.traffic[name] != counts[row]).any():
                return f"round {one.number}: {name} is counted otherwise"
        for name in sorted(names):
            if (np.isnan(_metric(one, name)) != np.isnan(simulated.metrics[name][row])).any():
                return f"round {one.number}: {name} was measured of other clients"
    return ""


def difference(played: Played, simulated: Outcome) -> float:
    """Return the largest difference of a metric from the simulation's; between the two is no contradiction."""
    off = [
        np.abs(values - simulated.metrics[name][row])
        for row, one in enumerate(played.rounds)
        for name, values in one.metrics.items()
    ]
    return max((float(np.nan_to_num(values).max()) for values in off), default=0.0)


def _metric(one: Round, name: str) -> NDArray[np.float64]:
    nowhere = np.full(len(one.traffic["up/bytes"]), np.nan)
    return one.metrics.get(name, nowhere)


def _ended(end: Played | Outcome) -> str:
    return f"{end.status} ({end.message})" if end.message else end.status
