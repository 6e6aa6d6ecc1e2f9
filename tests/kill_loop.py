"""Kill a run again and again, start it anew each time, and compare what it comes to with an undisturbed run.

python tests/kill_loop.py SUITE [--kills 20] [--seed 0] [ARGUMENT OF fedbench run ...]
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fedbench import config
from fedbench.store import TABLES, Store


def main() -> None:
    """Run the loop; exit with 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("suite")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given, more = parser.parse_known_args()
    name = config.load(given.suite).name
    with TemporaryDirectory() as folder:
        undisturbed, killed = Path(folder, "undisturbed"), Path(folder, "killed")
        run = _start(given.suite, undisturbed, more)
        _until_at_work(run)
        began = time.monotonic()
        _end(run)
        took = time.monotonic() - began
        print(f"undisturbed: {took:.0f} s", flush=True)
        resumed = kill(given.suite, killed, given.kills, took, random.Random(given.seed), more)
        wanted, found = numbers(undisturbed / name), numbers(killed / name)
    differ = [key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)]
    print(f"{len(wanted)} cells, {resumed} of them went on from a checkpoint; {len(differ)} differ {' '.join(differ)}")
    sys.exit(1 if differ or not wanted else 0)


def kill(
    suite: str, out: Path, kills: int, seconds: float, moments: random.Random, more: list[str], saved: bool = False
) -> int:
    """Kill so many runs of what takes `seconds`; return how many cells say that they went on from a checkpoint.

    With `saved`, each is killed after it has saved a checkpoint.
    """
    store = Store(out / config.load(suite).name)
    for number in range(kills):
        run = _start(suite, out, more)
        if saved:
            _until_saved(run, store.checkpoints)
        elif moments.random() < 0.8:  # the others are killed while they begin
            _until_at_work(run)
        moment = moments.uniform(0, 2 * seconds / kills)
        try:
            run.wait(moment)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        under_way = len(list(store.checkpoints.glob("*.pt")))
        print(f"{number + 1}: {moment:.1f} s, {len(store.finished())} cells done, {under_way} under way", flush=True)
    _end(_start(suite, out, more))
    return sum("resumed" in store.get(key).provenance for key in store.finished())


def numbers(root: Path) -> dict[str, dict[str, bytes]]:
    """Return everything that is stored in a folder but the clock's readings, by cell."""
    store = Store(root)
    found = {}
    for key in store.finished():
        outcome = store.get(key).outcome
        found[key] = {"status": f"{outcome.status} {outcome.message}".encode()} | {
            f"{table}/{name}": array.tobytes()
            for table in TABLES
            for name, array in getattr(outcome, table).items()
            if name != "seconds"
        }
    return found


def _start(suite: str, out: Path, more: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "fedbench", "run", suite, "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _until_at_work(run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    while (line := run.stdout.readline()) and " to run" not in line:
        pass


def _until_saved(run: subprocess.Popen[str], folder: Path) -> None:
    before = _times(folder)
    while run.poll() is None and not _times(folder) - before:
        time.sleep(0.001)


def _times(folder: Path) -> set[tuple[str, int]]:
    times = set()
    for path in folder.glob("*.pt"):
        with suppress(FileNotFoundError):  # its cell has ended
            times.add((path.name, path.stat().st_mtime_ns))
    return times


def _end(run: subprocess.Popen[str]) -> None:
    out, _ = run.communicate()
    if run.returncode:
        sys.exit(f"a run ended with {run.returncode}: {out}")


if __name__ == "__main__":
    main()
