"""The same federation in fedbench and in other simulators, side by side in one run.

    python benchmarks/peers.py [--entrants loop fedbench fluke ...] [--passes 3] [--rounds 5] [--write]

Every entrant plays rounds of the workload (workload.py) in a process of its own, one after the other, and all of them
again in every pass, so that a busy machine slows all alike; what counts is the ratio within one run.  The others are
installed from PyPI, each into a virtual environment under --cache, with the torch of this one where the Python version
allows it, else with the same version of torch.  Prints Markdown tables; --write also puts them into README.md.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import readme
import torch
import workload

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer:
    """Where an entrant comes from: what pip installs, and the lowest version of Python that it runs on."""

    requirements: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)


PEERS = {
    "fedbench": Peer(),
    "loop": Peer(),
    "fluke": Peer(("fluke-fl==0.8.1",)),
    "pfl": Peer(("pfl==0.6.0",)),
    "blazefl": Peer(("blazefl==2.0.3", "numpy", "tqdm"), (3, 12)),
    "flower": Peer(("flwr[simulation]==1.42.0",)),
}


@dataclass(frozen=True)
class Run:
    """One row of a table: an entrant, what it does, and the arguments of its program after the number of rounds.

    - `threads`: of torch; `copies`: processes that each play a federation at the same time; `ranks`: under torchrun.
    """

    table: str
    peer: str
    mode: str
    method: str = "fedavg"
    arguments: tuple[str, ...] = ()
    threads: int = 1
    copies: int = 1
    ranks: int = 1


ONE, TWO, PROTO = "one thread", "two cores", "FedProto, one thread"
RUNS = [
    Run(ONE, "fedbench", "auto"),
    Run(ONE, "fedbench", "loop engine", arguments=("--engine", "loop")),
    Run(ONE, "loop", "clean PyTorch loop"),
    Run(ONE, "fluke", ""),
    Run(ONE, "pfl", ""),
    Run(ONE, "blazefl", "serial", arguments=("1",)),
    Run(ONE, "flower", "one Ray worker", arguments=("1",)),
    Run(PROTO, "fedbench", "auto", "fedproto"),
    Run(PROTO, "loop", "clean PyTorch loop", "fedproto"),
    Run(PROTO, "fluke", "", "fedproto"),
    Run(TWO, "fedbench", "one federation, two threads", arguments=("--threads", "2"), threads=2),
    Run(TWO, "fedbench", "two cells, `processes`", arguments=("--executor", "processes", "--cells", "2")),
    Run(TWO, "loop", "two processes", copies=2),
    Run(TWO, "fluke", "two threads of torch", threads=2),
    Run(TWO, "pfl", "torchrun, two processes", ranks=2),
    Run(TWO, "blazefl", "two threads", arguments=("2",)),
    Run(TWO, "flower", "two Ray workers", arguments=("2",)),
]


def environment(name: str, cache: Path, interpreters: Sequence[str]) -> Path:
    """Return the Python of an entrant's environment, made if it is not there; raises SystemExit if that fails."""
    peer = PEERS[name]
    if not peer.requirements:
        return Path(sys.executable)
    folder = cache / "-".join([*peer.requirements[:1], f"torch-{torch.__version__}"]).replace("[", "-").replace("]", "")
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    base = _interpreter(peer.python, interpreters)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder}", file=sys.stderr)
    subprocess.run([base, "-m", "venv", folder], check=True)
    version = _version(base)
    wanted = list(peer.requirements)
    if version == sys.version_info[:2]:
        packages = folder / "lib" / f"python{version[0]}.{version[1]}" / "site-packages"
        (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))
    else:
        wanted.append(f"torch=={torch.__version__.partition('+')[0]}")
    subprocess.run([python, "-m", "pip", "install", "-qq", *wanted], check=True)
    (folder / "complete").touch()
    return python


def _interpreter(lowest: tuple[int, int], given: Sequence[str]) -> str:
    candidates = [sys.executable, *given, *(f"python3.{minor}" for minor in range(lowest[1], lowest[1] + 3))]
    for candidate in candidates:
        if _version(candidate) >= lowest:
            return candidate
    raise SystemExit(
        f"needs Python {lowest[0]}.{lowest[1]} or later: give one with --python, or leave it out of --entrants"
    )


def _version(python: str) -> tuple[int, ...]:
    """Return the version of an interpreter, (0, 0) if it does not run."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    return tuple(map(int, found.split()))


def play(run: Run, python: Path, rounds: int) -> dict[str, Any]:
    """Return what an entrant reports; of several copies the time of all their client-steps together."""
    start = ["-m", "torch.distributed.run", f"--nproc_per_node={run.ranks}"] if run.ranks > 1 else []
    command = [str(python), *start, "-m", "entrants", run.peer, run.method, str(rounds), *run.arguments]
    paths = os.pathsep.join(map(str, (HERE.parent, HERE)))
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(run.threads), "RAY_DEDUP_LOGS": "0"}
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(command, cwd=HERE, env=settings, stdout=pipe, stderr=pipe, text=True)
        for _ in range(run.copies)
    ]
    found = []
    for process in started:
        output, errors = process.communicate()
        try:
            found.append(workload.read_report(output))
        except ValueError:
            raise SystemExit(f"{run.peer} {run.mode} failed:\n{output}\n{errors}") from None
    return {**found[0], "us_per_step": 1 / sum(1 / one["us_per_step"] for one in found)}


def peak(threads: int, size: int = 1024, turns: int = 50) -> float:
    """Return the median GFLOP/s of a float32 matrix product."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.rand(size, size), torch.rand(size, size)
    seconds = []
    for _ in range(turns):
        began = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(before)
    return 2 * size**3 / statistics.median(seconds) / 1e9


def tables(found: dict[Run, list[dict[str, Any]]], peaks: dict[int, list[float]]) -> str:
    """Return the tables as Markdown."""
    parts = []
    for name in dict.fromkeys(run.table for run in found):
        times = {
            run: statistics.median(f["us_per_step"] for f in all_) for run, all_ in found.items() if run.table == name
        }
        others = [time for run, time in times.items() if run.peer not in ("fedbench", "loop")]
        best = min(others, default=min(times.values()))
        rows = [
            [
                " ".join([run.peer, "" if run.peer == "loop" else found[run][0]["version"]]).strip(),
                run.mode,
                f"{times[run]:,.0f}",
                f"{min(f['us_per_step'] for f in found[run]):,.0f}",
                f"{best / times[run]:.2f}",
            ]
            for run in sorted(times, key=lambda run: times[run])
        ]
        head = [name, "mode", "µs per client-step", "best pass", "× the fastest simulator"]
        parts.append(readme.table(head, rows, words=2))
    speed = {threads: statistics.median(values) for threads, values in peaks.items()}
    said = ", ".join(f"{value:.0f} GFLOP/s with {n} thread{'s' * (n > 1)}" for n, value in speed.items())
    limit = workload.FLOP_PER_STEP / speed[1] / 1e3
    parts.append(
        f"float32 matrix product of 1024³: {said}, at which a client-step would take {limit:.0f} µs on one thread."
    )
    return "\n\n".join([f"{time.strftime('%Y-%m-%d')}, {readme.machine()}.", *parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entrants", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--tables", nargs="+", choices=[ONE, PROTO, TWO], default=[ONE, PROTO, TWO])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="of each run; the first only warms up")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fedbench" / "peers")
    parser.add_argument("--python", action="append", default=[], help="an interpreter for those that need a later one")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    pythons = {name: environment(name, given.cache, given.python) for name in given.entrants}
    runs = [run for run in RUNS if run.peer in pythons and run.table in given.tables]
    found: dict[Run, list[dict[str, Any]]] = defaultdict(list)
    peaks: dict[int, list[float]] = defaultdict(list)
    for number in range(given.passes):
        for threads in (1, 2):
            peaks[threads].append(peak(threads))
        for run in runs:
            found[run].append(play(run, pythons[run.peer], given.rounds))
            took = f"{found[run][-1]['us_per_step']:,.0f} µs"
            print(f"pass {number + 1}: {run.table}: {run.peer} {run.mode}: {took}", file=sys.stderr)
    text = tables(found, peaks)
    print(text)
    if given.write:
        readme.write("peers", text)


if __name__ == "__main__":
    main()
