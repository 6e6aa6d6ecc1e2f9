"""Where cells run, on a Ray cluster: each cell a task, on whatever node has room; lost ones are run again.

The driver puts data sets and partitions into the cluster's object store once, hands out cells, and alone writes what
comes back.  Ray is imported when cells run on it.
"""

import asyncio
import itertools
import os
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbench import __version__, cells, executors
from fedbench.cells import Cell
from fedbench.errors import InputError
from fedbench.executors import ATTEMPTS, Cluster, Job, Judge, OnRound, Results, Setting, mild
from fedbench.options import one_line
from fedbench.store import CellError, Record

if TYPE_CHECKING:
    from fedbench.data import Arrays
    from fedbench.partition import Partition

_PATIENCE = 10.0  # seconds without news, after which the driver looks whether any node is left


def on_ray(jobs: Sequence[Job], setting: Setting, on_round: OnRound, judge: Judge = mild) -> Results:
    """Run the jobs as tasks on a Ray cluster, with no more in flight than it has room for.

    A cell whose worker or node is lost is run again, `ATTEMPTS` times in all.  InputError if there is no
    cluster at the address, or no node in it on which a cell could ever run.
    """
    waiting = jobs if isinstance(jobs, deque) else deque(jobs)
    checkpoints = setting.checkpoints.absolute() if setting.checkpoints else None
    setting = replace(setting, base=setting.base.absolute(), checkpoints=checkpoints, executor="ray")
    with _connected(setting, list(waiting)) as (ray, base):
        driver = _Driver(ray, setting, base, on_round, judge)
        try:
            yield from driver.run(waiting)
        finally:
            driver.give_up()


class _Task(NamedTuple):
    """One attempt at a job."""

    number: int
    job: Job
    attempt: int


class _Driver:
    """Hands jobs to the cluster and listens to what their tasks say."""

    def __init__(self, ray: Any, setting: Setting, base: Path, on_round: OnRound, judge: Judge) -> None:
        self._ray, self._setting, self._on_round, self._judge = ray, setting, on_round, judge
        self._there = replace(setting, base=base)
        self._cluster = setting.cluster or Cluster()
        self._gpus = _gpus(setting)
        self._running: dict[Any, _Task] = {}
        self._shared: dict[str, Any] = {}
        self._numbers = itertools.count()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        forever = {"max_restarts": -1, "max_task_retries": -1}
        self._desk = ray.remote(num_cpus=0, scheduling_strategy=here, **forever)(_Desk).remote()
        self._work = ray.remote(num_cpus=setting.threads, num_gpus=self._gpus, max_retries=0)(_work)

    def run(self, waiting: deque[Job]) -> Results:
        """Yield each job's result as it finishes; more jobs may be added after any of them."""
        lost: deque[_Task] = deque()
        news = self._desk.wait.remote()
        ready: list[Any] = []
        while waiting or lost or self._running:
            if waiting or lost:
                self._fill(waiting, lost)
            elif not ready:  # no news for a while: is there any node left?
                self._room()
            ready, _ = self._ray.wait([news, *self._running], timeout=_PATIENCE)
            self._listen()
            if news in ready:
                news = self._desk.wait.remote()
            for reference in [one for one in ready if one in self._running]:
                task = self._running.pop(reference)
                result = self._result(reference, task)
                if result is None:
                    lost.append(task)
                else:
                    yield result

    def _fill(self, waiting: deque[Job], lost: deque[_Task]) -> None:
        """Start as many jobs as there is room for, those that were lost first."""
        room = self._room() - len(self._running)
        while (waiting or lost) and room > 0:
            self._start(lost.popleft() if lost else _Task(0, waiting.popleft(), 0))
            room -= 1

    def give_up(self) -> None:
        """End the tasks under way, and the driver's wait for news: Ray logs an error about calls that never return."""
        with suppress(self._ray.exceptions.RayError):  # of a cluster that is gone already
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            self._ray.get(self._desk.close.remote(), timeout=_PATIENCE)

    def _room(self) -> int:
        """Return how many tasks may be in flight; InputError if no node could ever take one."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return _room(nodes, self._setting, self._gpus)

    def _start(self, before: _Task) -> None:
        job = before.job
        arrays = self._put("data", executors.data_key(job.cell, self._setting), self._arrays, job)
        partition = self._put("partition", job.cell.partition_key, lambda job: job.partition, job)
        task = _Task(next(self._numbers), job, before.attempt + 1)
        bare = partial(Job, job.cell, chosen=job.chosen, objective=job.objective)
        reference = self._work.remote(__version__, task.number, bare, partition, arrays, self._there, self._desk)
        self._running[reference] = task

    def _arrays(self, job: Job) -> "Arrays":
        return executors.load_arrays(job.cell, self._setting)

    def _put(self, what: str, key: str, value: Any, job: Job) -> Any:
        """Return the reference to what all tasks with that key share."""
        name = f"{what} {key}"
        if name not in self._shared:
            self._shared[name] = self._ray.put(value(job))
        return self._shared[name]

    def _listen(self) -> None:
        """Pass on what tasks have said; those that were given up are not listened to."""
        tasks = {task.number: task for task in self._running.values()}
        for message in self._ray.get(self._desk.take.remote()):
            task = tasks.get(message.task)
            if task and message.value is None:
                self._on_round(task.job.cell, message.number, message.total)
            elif task:
                self._desk.answer.remote(message.task, self._judge(task.job.cell, message.number, message.value))

    def _result(self, reference: Any, task: _Task) -> Record | CellError | None:
        """Return what became of a task, or None if it is to be run again."""
        errors = self._ray.exceptions
        try:
            result: Record | CellError = replace(self._ray.get(reference), cell=task.job.cell)
            return result
        except errors.RayTaskError as error:  # nothing that the cell did: that is in its result
            line = f"a Ray worker could not run it: {one_line(error.cause or error)}"
            return CellError(task.job.cell, line, str(error), input=False)
        except errors.RayError as error:
            if task.attempt < ATTEMPTS:
                return None
            line = f"its worker was lost {ATTEMPTS} times, last: {one_line(error)}"
            return CellError(task.job.cell, line, str(error), input=False)


def _room(nodes: Sequence[Mapping[str, float]], setting: Setting, gpus: float) -> int:
    """Return how many tasks nodes with these resources may have in flight; InputError if none could ever take one."""
    slots = sum(_slots(node, setting.threads, gpus) for node in nodes)
    if not slots:
        have = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise InputError(
            f"--executor ray: no node could run a cell, which takes {setting.threads} CPUs and {gpus:g} GPUs; "
            f"the nodes have: {have or 'none is left'}"
        )
    return min(slots, setting.workers or slots)


def _slots(resources: Mapping[str, float], cpus: int, gpus: float) -> int:
    """Return how many tasks a node can run at the same time."""
    slots = int(resources.get("CPU", 0.0) / cpus)
    return min(slots, int(resources.get("GPU", 0.0) / gpus + 1e-9)) if gpus else slots


def _gpus(setting: Setting) -> float:
    """Return how much of a GPU a cell takes."""
    asked = setting.cluster.gpus if setting.cluster else None
    return float(setting.device.startswith("cuda")) if asked is None else asked


# --- what the tasks do


@dataclass(frozen=True)
class _Message:
    """A task has done a round of so many; or wants to know what the judge says to a value."""

    task: int
    number: int
    total: int = 0
    value: float | None = None


@dataclass
class _Desk:
    """An actor at the driver's node, at which tasks leave messages and wait for answers."""

    messages: list[_Message] = field(default_factory=list)
    some: asyncio.Event = field(default_factory=asyncio.Event)
    answers: "dict[int, asyncio.Future[bool]]" = field(default_factory=dict)

    async def tell(self, message: _Message) -> None:
        """Take a message."""
        self.messages.append(message)
        self.some.set()

    async def ask(self, message: _Message) -> bool:
        """Take a question, and return its answer."""
        self.answers[message.task] = asyncio.get_running_loop().create_future()
        await self.tell(message)
        return await self.answers[message.task]

    async def answer(self, task: int, answer: bool) -> None:
        """Answer a task's last question; a desk that was lost since then will be asked again."""
        if task in self.answers:
            self.answers.pop(task).set_result(answer)

    async def wait(self) -> None:
        """Return when there are messages."""
        await self.some.wait()

    async def close(self) -> None:
        """Let nobody wait any longer."""
        self.some.set()

    async def take(self) -> list[_Message]:
        """Return the messages since the last time."""
        taken, self.messages = self.messages, []
        self.some.clear()
        return taken


def _work(
    version: str,
    number: int,
    bare: "Callable[[Partition], Job]",
    partition: "Partition",
    arrays: "Arrays",
    setting: Setting,
    desk: Any,
) -> Record | CellError:
    """Run a job in a worker of the cluster; Ray has put partition and arrays in the place of references to them."""
    import ray

    job = bare(partition)
    if version != __version__:
        line = f"--executor ray: the driver has fedbench {version}, but a node {__version__}; want the same on all"
        return CellError(job.cell, line, "", input=True)
    executors.own_process(setting)
    executors.hold_arrays(job.cell, setting, arrays)
    seen = setting.checkpoints and setting.checkpoints.parent.is_dir()  # the driver's folder, if nodes share files
    setting = replace(setting, base=setting.base.absolute(), checkpoints=setting.checkpoints if seen else None)

    def tell(_: Cell, done: int, total: int) -> None:
        ray.get(desk.tell.remote(_Message(number, done, total)))  # so that it comes before the result

    def ask(_: Cell, done: int, value: float) -> bool:
        return bool(ray.get(desk.ask.remote(_Message(number, done, value=value))))

    return executors.attempt(job, setting, tell, ask)


# --- the cluster


@contextmanager
def _connected(setting: Setting, jobs: Sequence[Job]) -> Iterator[tuple[Any, Path]]:
    """Connect to a cluster, or start one on this machine; give Ray, and what stands for `base` in a worker's folder."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as Ray will do by default
    try:
        import ray
    except ImportError as error:
        raise InputError(f"--executor ray: {error}; pip install 'fedbench-suite[ray]'") from None
    cluster = setting.cluster or Cluster()
    own: dict[str, Any] = {"num_cpus": _own_cpus(setting), "include_dashboard": False}
    terminate = signal.getsignal(signal.SIGTERM)
    _check_address(cluster.address)
    with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
        base = cells.copy_files((job.cell for job in jobs), setting.base, Path(folder))
        try:
            ray.init(
                cluster.address or "local",
                runtime_env={"working_dir": folder},  # and not where the driver is, whose folders would be importable
                logging_level="ERROR",
                log_to_driver=False,
                **({} if cluster.address else own),
            )
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
            where = f"--ray-address {cluster.address}" if cluster.address else "--executor ray"
            raise InputError(f"{where}: {one_line(error)}") from error
        finally:
            with suppress(ValueError):  # not the main thread: Ray has taken nothing
                signal.signal(signal.SIGTERM, terminate)
        try:
            yield ray, base
        finally:
            ray.shutdown()


def _own_cpus(setting: Setting) -> int:
    """Return how many processors a cluster on this machine is to have: those there are, or what the workers take."""
    return setting.workers * setting.threads if setting.workers else max(executors.usable_cores(), setting.threads)


def _check_address(address: str) -> None:
    """Raise InputError unless something answers at HOST:PORT; Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if address and not (colon and port.isdecimal()):
        raise InputError(f"--ray-address {address}: want HOST:PORT, as `ray start --head` says")
    try:
        if address:
            socket.create_connection((host, int(port)), _PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--ray-address {address}: nothing answers there ({error})") from error
