"""The executors: the same numbers from each, and what happens to a cell that raises or whose process dies."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Tiny

from fedbench.cells import Cell, draw_partition
from fedbench.errors import InputError
from fedbench.executors import EXECUTORS, Job, Setting, check_device, inline, load_arrays, processes, usable_cores
from fedbench.federation import Outcome
from fedbench.store import CellError, Record


def setting(tiny: Tiny, workers: int = 2) -> Setting:
    return Setting(tiny.data, tiny.file.parent, workers=workers)


def jobs(tiny: Tiny, cells: Sequence[Cell] | None = None) -> list[Job]:
    cells = tiny.cells() if cells is None else cells
    return [Job(cell, draw_partition(cell, load_arrays(cell, setting(tiny)))) for cell in cells]


def ignore(cell: Cell, done: int, total: int) -> None:
    pass


def numbers(outcome: Outcome) -> dict[str, bytes]:
    """Return everything in an outcome but the clock's readings."""
    return {
        f"{table}/{name}": array.tobytes()
        for table in ("metrics", "traffic", "work", "sizes")
        for name, array in getattr(outcome, table).items()
        if name != "seconds"
    }


def run(tiny: Tiny, executor: str, workers: int, todo: list[Job]) -> dict[str, dict[str, bytes]]:
    found = {}
    for result in EXECUTORS[executor](todo, setting(tiny, workers), ignore):
        assert isinstance(result, Record), result
        found[result.cell.key] = numbers(result.outcome)
    return found


def test_order_company_and_executor_change_no_number(tiny: Tiny) -> None:
    todo = jobs(tiny)
    one = run(tiny, "inline", 1, todo)
    assert len(one) == 3
    assert len({tuple(sorted(found.items())) for found in one.values()}) == 3
    assert run(tiny, "inline", 1, todo[::-1]) == one
    assert run(tiny, "inline", 1, todo[1:2]).items() <= one.items()
    assert run(tiny, "processes", 1, todo) == one
    assert run(tiny, "processes", 2, todo[::-1]) == one


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_rounds_are_reported_and_provenance_is_made_where_the_cell_runs(tiny: Tiny, executor: str) -> None:
    (todo,) = jobs(tiny, tiny.cells()[1:2])
    seen: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (result,) = EXECUTORS[executor](
            [todo], setting(tiny), lambda cell, done, total: seen.append((cell.key, done, total))
        )
        assert torch.get_num_threads() == 2  # as it was
    finally:
        torch.set_num_threads(threads)
    assert seen == [(todo.cell.key, done, 3) for done in (1, 2, 3)]
    assert isinstance(result, Record)
    made = result.provenance
    assert made["partition"] == todo.partition.hash
    assert (made["device"], made["threads"], made["torch"]) == ("cpu", 1, torch.__version__)
    assert made["seconds"] > 0
    assert (made["engine asked for"], made["engine"], made["executor"]) == ("auto", "vectorised", executor)


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_jobs_may_be_added_after_any_result_and_a_judge_ends_trials(tiny: Tiny, executor: str) -> None:
    tiny.change(partition={"name": "iid", "clients": 4, "validation": 0.3})
    local, fedavg, _ = (replace(job, objective="validation/accuracy") for job in jobs(tiny))
    waiting, asked, rounds = deque([local]), [], []

    def judge(cell: Cell, number: int, value: float) -> bool:
        asked.append((cell.label, number, value))
        return cell.label == "fedavg" and number == 2

    found = {}
    results = EXECUTORS[executor](
        waiting, setting(tiny), lambda cell, done, _: rounds.append((cell.label, done)), judge
    )
    for result in results:
        assert isinstance(result, Record)
        found[result.cell.label] = result.outcome
        waiting.extend([fedavg] if len(found) == 1 else [])
    assert rounds == [("local", 1), ("local", 2), ("local", 3), ("fedavg", 1), ("fedavg", 2)]
    assert (found["local"].status, found["fedavg"].status) == ("completed", "stopped")
    means = {label: outcome.metrics["validation/accuracy"].mean(axis=1) for label, outcome in found.items()}
    assert asked == [(label, number, means[label][number - 1]) for label in found for number in (1, 2)]


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_an_exception_is_the_end_of_its_cell_only(tiny: Tiny, executor: str) -> None:
    rows: dict[str, dict[str, object]] = {
        "bad": {"method": "./trouble.py:Trouble", "what": "raise"},
        "wrong": {"method": "fedper", "personal": ["nowhere"]},
        "local": {},
    }
    tiny.change(methods=rows)
    results = list(EXECUTORS[executor](jobs(tiny), setting(tiny), ignore))
    bad, wrong, good = (next(r for r in results if r.cell.label == label) for label in rows)
    assert isinstance(good, Record)
    assert isinstance(bad, CellError)
    assert (bad.line, bad.input) == ("RuntimeError: two lines of trouble", False)
    assert "trouble.py" in bad.trace
    assert isinstance(wrong, CellError)
    assert wrong.input
    assert "nowhere" in wrong.line


def test_a_worker_that_dies_costs_its_cell_only(tiny: Tiny) -> None:
    rows: dict[str, object] = {
        f"die{number}": {"method": "./trouble.py:Trouble", "what": "die", "seconds": number / 100}
        for number in range(2)
    }
    tiny.change(methods={**rows, "local": {}, "fedavg": {}})
    results = {result.cell.label: result for result in processes(jobs(tiny), setting(tiny), ignore)}
    for label in rows:
        died = results[label]
        assert isinstance(died, CellError)
        assert died.line == "its process died (exit code 9)"
    assert isinstance(results["local"], Record)
    assert isinstance(results["fedavg"], Record)


MORTAL = '''
import ctypes, os, sys
from dataclasses import dataclass
from pathlib import Path
from fedbench.averaging import Averaging

MERGED = []


@dataclass(frozen=True)
class Mortal(Averaging):
    """FedAvg whose process dies in its third round: every time, or only where nothing says that it has before."""

    died: str = ""

    def shares(self, net, name):
        return True

    def merge(self, net, server, uploads, clients, sizes):
        MERGED.append(None)
        if len(MERGED) >= 3 and not (self.died and Path(self.died).exists()):
            print("the last words of", os.getpid(), file=sys.stderr, flush=True)
            if not self.died:
                ctypes.string_at(0)
            Path(self.died).touch()
            os.kill(os.getpid(), 9)
        return super().merge(net, server, uploads, clients, sizes)
'''


def test_a_worker_that_dies_costs_its_cell_one_retry_from_the_checkpoint(
    tiny: Tiny, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tiny.file.parent / "mortal.py").write_text(MORTAL)
    once = {"method": "./mortal.py:Mortal", "died": str(tiny.out / "died")}
    tiny.change(methods={"once": once, "always": {"method": "./mortal.py:Mortal"}, "local": {}})
    tiny.change(training={"rounds": 5, "batch_size": 4})
    tiny.out.mkdir()
    saving = replace(setting(tiny, 1), checkpoints=tiny.out, checkpoint=0)
    results = {result.cell.label: result for result in processes(jobs(tiny), saving, ignore)}
    once_, always, local = (results[label] for label in ("once", "always", "local"))
    assert isinstance(once_, Record)
    assert once_.provenance["resumed"] == "after round 2"
    (again,) = EXECUTORS["inline"](jobs(tiny, tiny.cells()[:1]), setting(tiny), ignore)
    assert isinstance(again, Record)  # now it does not die
    assert numbers(once_.outcome) == numbers(again.outcome)
    assert isinstance(local, Record)
    assert isinstance(always, CellError)
    assert always.line == "its process died (signal 11: Segmentation fault)"
    assert "the last words of" in always.trace
    assert "mortal.py" in always.trace  # where it was
    assert caplog.messages == [
        "once: its process died (signal 9: Killed, as when memory runs out); it is tried once more",
        "always: its process died (signal 11: Segmentation fault); it is tried once more",
    ]
    assert capfd.readouterr().err.count("the last words of") == 3


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _children(pid: int) -> list[int]:
    return [
        int(child) for child in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    ]


def _slow(tiny: Tiny) -> None:
    tiny.change(
        methods={f"slow{n}": {"method": "./trouble.py:Trouble", "seconds": 60.0 + n} for n in range(2)} | {"local": {}}
    )


def test_closing_ends_the_workers(tiny: Tiny) -> None:
    _slow(tiny)
    results = processes(jobs(tiny)[::-1], setting(tiny), ignore)
    assert next(results).cell.label == "local"
    before = _children(os.getpid())
    assert len(before) >= 2
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 10
    assert not _still_working(before)


def _still_working(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        with_arguments = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True
        ).stdout
        if "spawn_main" in with_arguments:
            found.append(with_arguments)
    return found


DRIVER = """
import sys
from pathlib import Path
from fedbench.cells import draw_partition, expand, fingerprints
from fedbench.config import load
from fedbench.executors import Job, Setting, load_arrays, processes

if __name__ == "__main__":
    suite, data = load(sys.argv[1]), Path(sys.argv[2])
    setting = Setting(data, suite.base, workers=2)
    cells = expand(suite, fingerprints(suite.base, data))
    jobs = [Job(cell, draw_partition(cell, load_arrays(cell, setting))) for cell in cells]
    for result in processes(jobs, setting, lambda cell, done, total: print(done, flush=True)):
        print(result, flush=True)
"""


def test_workers_follow_a_killed_driver_and_leave_ctrl_c_to_it(tiny: Tiny) -> None:
    tiny.change(training={"rounds": 100_000, "batch_size": 4, "evaluate_every": 1000})
    script = tiny.file.parent / "driver.py"
    script.write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, str(script), str(tiny.file), str(tiny.data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "1\n"
    while len(workers := [pid for pid in _children(driver.pid) if _still_working([pid])]) < 2:
        time.sleep(0.05)
    for pid in workers:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    assert len(_still_working(workers)) == 2
    driver.kill()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    _, stderr = driver.communicate(timeout=10)
    assert stderr == ""


def test_devices() -> None:
    check_device("cpu")
    absent = f"cuda:{torch.cuda.device_count()}"
    for device in (absent, "nonsense"):
        with pytest.raises(InputError, match=f"--device {device}: not on this machine, which has cpu"):
            check_device(device)


def test_usable_cores_follow_the_affinity() -> None:
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_arrays_are_decoded_once_for_cells_that_share_them(tiny: Tiny) -> None:
    first, second, _ = tiny.cells()
    assert load_arrays(first, setting(tiny)) is load_arrays(second, setting(tiny))
    np.testing.assert_equal(len(load_arrays(first, setting(tiny)).x_train), 90)


def test_inline_runs_lazily(tiny: Tiny) -> None:
    seen: list[int] = []
    results = inline(jobs(tiny), setting(tiny), lambda cell, done, total: seen.append(done))
    next(results)
    assert seen == [1, 2, 3]  # nothing of the second cell
