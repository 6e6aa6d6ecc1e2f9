"""Where cells run: in this process or in worker processes, chosen by name, with the same numbers from each.

An executor takes jobs and yields a result for each as it finishes, in any order.  A worker only computes: it returns
what came out, and whoever drives the executor writes it down.
"""

import faulthandler
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import connection, get_context, resource_tracker
from pathlib import Path
from pkgutil import resolve_name
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from fedbench import __version__, cells, cuda, data, memory
from fedbench.cells import Cell
from fedbench.errors import InputError
from fedbench.options import one_line
from fedbench.store import CellError, Record
from fedbench.threads import thread_limit

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from fedbench.checkpoint import Checkpoint
    from fedbench.data import Arrays
    from fedbench.engines import Engine
    from fedbench.engines.choice import EngineName
    from fedbench.federation import Stop
    from fedbench.partition import Partition

_log = logging.getLogger("fedbench")


@dataclass(frozen=True)
class Job:
    """A cell to run, with its partition.

    - `chosen`: for a tuned cell, the "values" it runs with, and what else is to be recorded about them.
    - `objective`: for a trial, the metric that the judge is told in every round in which it is measured.
    """

    cell: Cell
    partition: "Partition"
    chosen: Mapping[str, Any] = field(default_factory=dict)
    objective: str = ""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster: its address, or "" for one that is started on this machine; and how much of a GPU a cell takes.

    `gpus` None stands for one where the device is a GPU.
    """

    address: str = ""
    gpus: float | None = None


@dataclass(frozen=True)
class Setting:
    """What all jobs share.

    - `data`: the data folder; `base`: the folder that plugin paths start from.
    - `threads`: per cell; `fast`: on CUDA, see `fedbench.cuda`.
    - `executor`: the name of the one that runs them, which it says itself.
    - `checkpoints`: the folder in which whoever computes a cell saves its progress, if anybody is to; `checkpoint`: how
      often, in seconds.
    - `cluster`: where cells run if not on this machine; with it, `workers` 0 stands for as many as it has room for.
    """

    data: Path
    base: Path
    device: str = "cpu"
    workers: int = 1
    threads: int = 1
    engine: "EngineName" = "auto"
    together: int = 1
    executor: str = "inline"
    checkpoints: Path | None = None
    checkpoint: float = 30.0
    cluster: Cluster | None = None
    fast: bool = False


OnRound = Callable[[Cell, int, int], None]
"""Called with a cell, the rounds it has done and the rounds it will do."""


Judge = Callable[[Cell, int, float], bool]
"""Told a trial, a round and the mean of its objective over clients, says whether the trial is to end there."""


def mild(cell: Cell, number: int, value: float) -> bool:
    """Let every trial go on."""
    return False


Results = Generator[Record | CellError, None, None]


class Executor(Protocol):
    """Runs jobs `setting.workers` at a time; closing the iterator gives up the cells under way.

    Jobs in a deque are taken out of it; more may be put in after any result, the last one too.
    """

    def __call__(self, jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Results:
        """Yield each job's result as it finishes; an exception inside a cell is that cell's result."""
        ...


def own_process(setting: Setting) -> None:
    """Make this process one that computes cells."""
    import torch

    memory.keep_freed()
    torch.set_num_threads(setting.threads)
    if torch.device(setting.device).type == "cuda":
        cuda.set_up(setting.fast)


def inline(jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Results:
    """Run the jobs one after the other in this process."""
    waiting = jobs if isinstance(jobs, deque) else deque(jobs)
    with thread_limit(setting.threads):
        own_process(setting)
        while waiting:
            yield attempt(waiting.popleft(), setting, on_round, judge)


def together(jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Results:
    """Run up to `setting.together` jobs of one kind at a time as one stacked program; those of a kind alone, alone.

    Nothing is saved of cells under way: what they come to would depend, by rounding, on how far each of them was.
    """
    import torch

    from fedbench.engines.choice import Chosen
    from fedbench.engines.together import play_together

    waiting = jobs if isinstance(jobs, deque) else deque(jobs)
    with thread_limit(setting.threads):
        own_process(setting)
        while waiting:
            first = waiting.popleft()
            kind = cells.kind(first.cell)
            alike = [job for job in waiting if kind is not None and cells.kind(job.cell) == kind]
            batch = [first, *alike[: setting.together - 1]]
            for job in batch[1:]:
                waiting.remove(job)
            load_arrays(first.cell, setting)  # before the threads, which share it
            chosen = Chosen(torch.device(setting.device), setting.threads, measured=setting.engine == "auto")

            def with_engine(engine: "Engine", job: Job) -> Record | CellError:
                alone = replace(setting, executor="together", checkpoints=None)
                return attempt(job, alone, on_round, judge, engine)

            yield from play_together([partial(with_engine, job=job) for job in batch], chosen)


ATTEMPTS = 2
"""How often a cell is started whose process, worker or node is lost."""


def processes(jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Results:
    """Run the jobs in spawned processes; a cell whose process dies `ATTEMPTS` times ends in an error."""
    setting = replace(setting, executor="processes")
    waiting = jobs if isinstance(jobs, deque) else deque(jobs)
    busy: dict[Connection[Any, Any], tuple[_Worker, Job]] = {}
    idle: list[_Worker] = []
    tried: Counter[str] = Counter()

    def assign(worker: _Worker) -> None:
        job = waiting.popleft()
        busy[worker.pipe] = (worker, job)
        with suppress(BrokenPipeError):  # a worker that is dead already shows as the end of its pipe, below
            worker.pipe.send(job)

    try:
        while waiting or busy:
            while waiting and idle:
                assign(idle.pop())
            while waiting and len(busy) < setting.workers:
                assign(_Worker(setting))
            ready = set(connection.wait(list(busy)))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                worker, job = busy[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    message = worker.died(job.cell)
                if isinstance(message, tuple):
                    on_round(job.cell, *message)
                    continue
                if isinstance(message, _Question):
                    with suppress(BrokenPipeError):
                        pipe.send(judge(job.cell, message.number, message.value))
                    continue
                del busy[pipe]
                tried[job.cell.key] += worker.is_dead
                if worker.is_dead and tried[job.cell.key] < ATTEMPTS:
                    waiting.appendleft(job)
                    _log.warning("%s: %s; it is tried once more", job.cell.label, message.line)
                    pipe.close()
                    continue
                if waiting and not worker.is_dead:  # before the yield: it computes on while the driver writes
                    assign(worker)
                elif waiting is jobs and not worker.is_dead:  # more may come
                    idle.append(worker)
                else:
                    pipe.close()
                yield message
    finally:
        for worker in idle:
            worker.pipe.close()
        for worker, _ in busy.values():
            worker.process.kill()
        for worker, _ in busy.values():
            worker.process.join()


def on_ray(jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Results:
    """Run the jobs on a Ray cluster, see `fedbench.cluster`."""
    found: Executor = resolve_name("fedbench.cluster:on_ray")  # which needs this module
    yield from found(jobs, setting, on_round, judge)


EXECUTORS: dict[str, Executor] = {"inline": inline, "processes": processes, "together": together, "ray": on_ray}


def usable_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_device(device: str) -> None:
    """Raise InputError if torch does not know the device or this machine does not have it."""
    if device == "cpu":  # without importing torch
        return
    from fedbench.arguments import checked_device

    checked_device(device, "--device")


_ARRAYS: "dict[str, Arrays]" = {}


def load_arrays(cell: Cell, setting: Setting) -> "Arrays":
    """Return the cell's data set, decoded once for the cells that share it and follow each other."""
    key = data_key(cell, setting)
    if key not in _ARRAYS:
        hold_arrays(cell, setting, data.load(cells.source(cell, setting.base), setting.data))
    return _ARRAYS[key]


def hold_arrays(cell: Cell, setting: Setting, arrays: "Arrays") -> None:
    """Let the cell's data set be the one that this process holds."""
    _ARRAYS.clear()
    _ARRAYS[data_key(cell, setting)] = arrays


def data_key(cell: Cell, setting: Setting) -> str:
    """Return what tells one data set from another."""
    return json.dumps([cell.recipe["dataset"], str(setting.data)])


@final
class _Worker:
    """A spawned process that takes jobs from `pipe` and answers there; what it writes to stderr is passed on."""

    def __init__(self, setting: Setting) -> None:
        # Workers are born with signals blocked that are the driver's, who ends them.  The tracker that multiprocessing
        # starts beside the first process would unblock them again, so it goes first.
        resource_tracker.ensure_running()
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        heard, said = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(theirs, said, setting), daemon=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # so that the worker's death closes the last one
        said.close()
        self.is_dead = False
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._listener = Thread(target=self._listen, args=(heard,), daemon=True)
        self._listener.start()

    def _listen(self, heard: "Connection[Any, Any]") -> None:
        with open(os.dup(heard.fileno()), errors="replace") as stream, heard:
            for line in stream:
                self._last.append(line)
                sys.stderr.write(line)

    def died(self, cell: Cell) -> CellError:
        """Note that the process has died, and return the error that this is for its cell."""
        self.is_dead = True
        self.process.join()
        self._listener.join(1.0)  # not longer: a process of its own may have the other end
        code = self.process.exitcode or 0
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code}: {signal.strsignal(-code)}"
            how += ", as when memory runs out" if -code == signal.SIGKILL else ""
        return CellError(cell, f"its process died ({how})", "".join(self._last), input=False)


_LAST_LINES = 40
"""Lines of a dead worker's stderr that are kept; the dump of a crash has some twenty."""


def _work(pipe: "Connection[Any, Any]", said: "Connection[Any, Any]", setting: Setting) -> None:
    os.dup2(said.fileno(), 2)
    said.close()
    faulthandler.enable()

    def ask(_: Cell, number: int, value: float) -> bool:
        pipe.send(_Question(number, value))
        return bool(pipe.recv())

    own_process(setting)
    with suppress(EOFError, BrokenPipeError):  # the driver is done with us, or dead
        while True:
            job = pipe.recv()
            pipe.send(attempt(job, setting, lambda _, done, total: pipe.send((done, total)), ask))


@dataclass(frozen=True)
class _Question:
    """What a worker asks the judge."""

    number: int
    value: float


def attempt(
    job: Job, setting: Setting, on_round: OnRound, judge: Judge, engine: "Engine | None" = None
) -> Record | CellError:
    """Run a job here and now, on an engine that others have too, or one of its own.

    An exception inside the cell is its result.
    """
    import torch

    from fedbench.engines import choice
    from fedbench.engines.together import Together

    cell = job.cell
    begin, clock = datetime.now(UTC), time.perf_counter()
    settled = cells.settle(cell, job.chosen["values"]) if cell.tuned else cell
    engine = engine or choice.engine(setting.engine, torch.device(setting.device), setting.threads)
    made = {
        **_machine(setting.device),
        "device": setting.device,
        "threads": setting.threads,
        **({"fast": True} if setting.fast else {}),
        "engine asked for": setting.engine,
        "partition": job.partition.hash,
    }
    checkpoint = _checkpoint(cell.key, {**made, "recipe": settled.key, "code": _code()}, setting)
    try:
        outcome = cells.run_cell(
            settled,
            load_arrays(cell, setting),
            job.partition,
            device=setting.device,
            engine=engine,
            threads=setting.threads,
            base=setting.base,
            on_round=lambda done, total: on_round(cell, done, total),
            stop=_stop(job, judge) if job.objective else None,
            checkpoint=checkpoint,
        )
    except Exception as error:
        bad = isinstance(error, InputError)
        return CellError(cell, str(error) if bad else one_line(error), traceback.format_exc(), bad)
    used = choice.used(engine.chosen if isinstance(engine, Together) else engine)
    made |= {"engine": used, "executor": setting.executor}
    made |= {"started": begin.isoformat(timespec="microseconds"), "seconds": time.perf_counter() - clock}
    if checkpoint and checkpoint.resumed:
        made["resumed"] = f"after round {checkpoint.resumed}"
    return Record(cell, outcome, {**made, **({"chosen": dict(job.chosen)} if cell.tuned else {})})


def _checkpoint(key: str, about: Mapping[str, Any], setting: Setting) -> "Checkpoint | None":
    """Return where a cell's progress is saved; `about` is all that its numbers depend on, the host and the commit."""
    from fedbench.checkpoint import Checkpoint

    if setting.checkpoints is None:
        return None
    relevant = {name: value for name, value in about.items() if name not in ("host", "commit")}
    return Checkpoint(setting.checkpoints / f"{key}.pt", relevant, setting.checkpoint)


def _stop(job: Job, judge: Judge) -> "Stop":
    def stop(number: int, metrics: Mapping[str, Any]) -> bool:
        values = metrics.get(job.objective, np.zeros(0))
        there = values[~np.isnan(values)]
        return len(there) > 0 and judge(job.cell, number, float(there.mean()))

    return stop


@cache
def _machine(device: str) -> dict[str, Any]:
    """Return what numbers and times may depend on besides the recipe."""
    import torch

    made = {
        "fedbench": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "system": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu(),
    }
    return {**made, "gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else made


@cache
def _code() -> str:
    """Return the hash of fedbench's own code, as it is on the disk."""
    package = Path(__file__).parent
    folders = sorted(os.walk(package, followlinks=True))
    files = [Path(folder, name) for folder, _, names in folders for name in sorted(names) if name.endswith(".py")]
    return data.hash_files(files)[:16]


def _commit() -> str | None:
    """Return the commit of the checkout that this code is in, with "-dirty" if it was changed; None outside of one."""
    here = Path(__file__)
    git = ["git", "--no-optional-locks", "-C", str(here.parent)]  # several workers ask at once, and so may the user
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
