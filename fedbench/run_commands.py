"""`fedbench run` and `fedbench tune`: cells and trials are run, stored and logged as they come."""

import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from fedbench import report_commands, show_commands
from fedbench.errors import InputError
from fedbench.interrupts import Interrupted
from fedbench.plan import Plan, Policy, check_files, has_data
from fedbench.words import counted

if TYPE_CHECKING:
    from fedbench.cells import Cell
    from fedbench.executors import Executor, Job, Setting
    from fedbench.progress import Progress
    from fedbench.store import CellError, Record, Store
    from fedbench.studies import Study
    from fedbench.tracking import Tracker

EngineName = Literal["auto", "loop", "vectorised"]  # as in fedbench.engines.choice, which imports torch


@dataclass(frozen=True)
class How:
    """How cells are to run, as the options of the same names say it; InputError where they do not fit each other."""

    device: str
    engine: EngineName
    workers: int
    threads: int
    fast: bool
    together: int
    checkpoint: float
    executor: Literal["auto", "ray"]
    ray_address: str
    ray_gpus: float | None

    def __post_init__(self) -> None:
        """Check the options."""
        from fedbench import executors

        if self.executor == "ray":
            self._check_ray()
        elif self.ray_address or self.ray_gpus is not None:
            raise InputError(f"{'--ray-address' if self.ray_address else '--ray-gpus'}: is of --executor ray")
        else:
            executors.check_device(self.device)
            if self.threads > (cores := executors.usable_cores()):
                raise InputError(f"--threads {self.threads}: this machine has {counted(cores, 'core')}")
        if self.together > 1 and self.workers > 1:
            raise InputError(f"--workers {self.workers}: cells that are computed together want --workers 1")
        if self.together > 1 and self.engine == "loop":
            raise InputError(
                f"--engine loop: takes clients one by one; want auto or vectorised with --together {self.together}"
            )
        if self.fast and not self.device.startswith("cuda"):
            raise InputError(f"--fast: is for --device cuda, not for {self.device}")

    def _check_ray(self) -> None:
        if find_spec("ray") is None:
            raise InputError("--executor ray: Ray is not installed; pip install 'fedbench-suite[ray]'")
        if self.together > 1:
            raise InputError(f"--together {self.together}: is of one machine, not of --executor ray")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"--device {self.device}: want cpu or cuda, since Ray chooses which GPU")
        if self.ray_gpus is not None and not (0 <= self.ray_gpus <= 1 or self.ray_gpus % 1 == 0):
            raise InputError(f"--ray-gpus {self.ray_gpus}: want a part of one GPU, or a whole number of them")

    def setting(self, plan: Plan, cells: "Sequence[Cell]") -> "Setting":
        """Return the setting for a plan's cells that are to run; by default as many at a time as cores allow."""
        from fedbench import executors, tune

        workers, cluster = self.workers, None
        if self.executor == "ray":
            cluster = executors.Cluster(self.ray_address, self.ray_gpus)  # knows by itself how many it has room for
        else:
            most = max(1, executors.usable_cores() // self.threads) if self.device == "cpu" else 1
            trials = sum(int(cell.recipe["tuning"]["batch"]) for cell in tune.unfinished(cells, plan.store))
            workers = min(workers or most, max(len(cells), trials, 1))
        return executors.Setting(
            data=plan.data,
            base=plan.suite.base,
            device=self.device,
            workers=workers,
            threads=self.threads,
            engine=self.engine,
            together=self.together,
            checkpoints=plan.store.checkpoints,
            checkpoint=self.checkpoint,
            cluster=cluster,
            fast=self.fast,
        )


def run(plan: Plan, policy: Policy, how: How, tracking_uri: str | None) -> None:
    """Run the cells that a policy chooses, and report; exit code 1 if some failed, 2 if by bad input.

    `tracking_uri` is that of an MLflow server, "none", or None for a database in the folder of all runs.
    """
    with locked(plan.store):
        todo = plan.chosen(policy)
        setting, tracker = how.setting(plan, todo), _tracker(plan, tracking_uri)
        errors = _run(plan, todo, setting, tracker)
    if any(plan.store.has(cell) for cell in plan.cells):
        report_commands.report_cells(plan)
    if errors:
        first = errors[0]
        print(
            f"fedbench: {len(errors)} of {counted(len(plan.titles), 'cell')} failed, "
            f"first {plan.titles[first.cell.key]}: {first.line}; `fedbench show {first.cell.key}` tells more",
            file=sys.stderr,
        )
        raise typer.Exit(2 if any(error.input for error in errors) else 1)


def dry_run(plan: Plan, policy: Policy) -> None:
    """Say what would run; InputError for whatever would be refused before anything is trained."""
    from fedbench import executors, tune

    check_files(plan)
    todo = plan.chosen(policy)
    ready = list(filter(has_data, todo))
    plan.jobs(ready, executors.Setting(plan.data, plan.suite.base), store=False)
    show_commands.show_cells(plan)
    lacking = f", {len(todo) - len(ready)} more once their data are there" if len(ready) < len(todo) else ""
    trials = sum(tune.wanting(cell, plan.store) for cell in tune.unfinished(plan.cells, plan.store))
    before = f", and {counted(trials, 'trial')} before that" if trials else ""
    print(f"{len(ready)} of {counted(len(plan.titles), 'cell')} would run{lacking}{before}")


def tune(plan: Plan, how: How, tracking_uri: str | None, storage: str | None, export: Path | None) -> None:
    """Run the trials that a plan's tuned cells lack, and report; exit code 1 if a choice has no completed trial.

    `storage` is the URL of an Optuna storage, or None for a database beside the cells; `export` a suite file to write.
    InputError if no cell is tuned.
    """
    cells = [cell for cell in plan.cells if cell.tuned]
    if not cells:
        raise InputError(f"{plan.suite.file}: none of these cells is tuned; `tune` stands in other experiments")
    with locked(plan.store):
        setting = how.setting(plan, cells)
        with _kept(plan):
            tracker = _tune(plan, cells, setting, _tracker(plan, tracking_uri), storage)
            _log(plan, _trials(plan), tracker, print)
    report_commands.report_tuning(plan)
    settled = _with_values(plan, cells)
    if export and settled:
        _export(plan, list(settled.values()), export)
    lacking = dict.fromkeys(plan.studies[cell.study_key] for cell in cells if cell.key not in settled)
    if lacking:
        print(f"fedbench: no trial of {', '.join(lacking)} was completed", file=sys.stderr)
        raise typer.Exit(1)


def locked(store: "Store") -> AbstractContextManager[None]:
    """Hold the right to write into a suite's folder, after whoever else does."""
    return store.lock(lambda: print(f"another run is at work in {store.root}; waiting for it", flush=True))


def _tracker(plan: Plan, uri: str | None) -> "Tracker | None":
    from fedbench.tracking import Tracker, check_uri, local_uri

    if uri is not None:
        check_uri(uri)
    return None if uri == "none" else Tracker(plan.store, plan.suite.name, local_uri(plan.out) if uri is None else uri)


def _run(plan: Plan, todo: "Sequence[Cell]", setting: "Setting", tracker: "Tracker | None") -> "list[CellError]":
    """Tune, run, store and log cells; return the failures."""
    print(f"{plan.suite.name}: {counted(len(plan.titles), 'cell')}, {len(todo)} to run", flush=True)
    with _kept(plan):
        jobs = plan.jobs(todo, setting)
        tracker = _tune(plan, todo, setting, tracker)
        ready, untuned = _settled(plan, jobs)
        with _progress(todo) as progress, closing(_execute(setting)(ready, setting, progress.on_round)) as results:
            errors, tracker = _drive(plan, itertools.chain(untuned, results), progress, tracker)
        _log(plan, [*plan.cells, *_trials(plan)], tracker, print)
    return errors


def _tune(
    plan: Plan, cells: "Sequence[Cell]", setting: "Setting", tracker: "Tracker | None", storage: str | None = None
) -> "Tracker | None":
    """Run, store and log the trials that the studies of some cells lack; return the tracker unless it failed."""
    from fedbench import tune

    todo = tune.unfinished(cells, plan.store)
    if not todo and storage is None:
        return tracker
    with tune.searches(todo, plan.store, tune.default_storage(plan.store) if storage is None else storage) as found:
        if not found:  # an address that cannot be used is said all the same
            return tracker
        jobs = plan.jobs([tune.probe(cell) for cell in todo], setting)
        partitions = {job.cell.partition_key: job.partition for job in jobs}
        print(
            f"tuning: {counted(sum(one.to_run for one in found), 'trial')} to run for {counted(len(found), 'choice')}",
            flush=True,
        )
        with _progress([]) as progress:
            for search in found:
                progress.expect(search.to_run, search.cell.recipe["training"]["rounds"])
            with closing(tune.run(found, partitions, _execute(setting), setting, progress.on_round)) as results:
                return _drive(plan, results, progress, tracker)[1]


def _settled(plan: Plan, jobs: "Sequence[Job]") -> "tuple[list[Job], list[CellError]]":
    """Return the jobs with the values that tuning chose, and an error for each cell for which it could choose none."""
    from fedbench import tune
    from fedbench.store import CellError

    ready, errors = [], []
    for job in jobs:
        study = plan.store.study(job.cell) if job.cell.tuned else None
        chosen = tune.chosen(job.cell, study)
        if job.cell.tuned and not chosen:
            errors.append(CellError(job.cell, tune.why_not(job.cell, study), "", input=False))
        else:
            ready.append(replace(job, chosen=chosen))
    return ready, errors


def _execute(setting: "Setting") -> "Executor":
    from fedbench import executors

    if setting.cluster:
        return executors.EXECUTORS["ray"]
    if setting.together > 1:
        return executors.EXECUTORS["together"]
    return executors.EXECUTORS["inline" if setting.workers == 1 else "processes"]


def _drive(
    plan: Plan, results: "Iterable[Record | CellError]", progress: "Progress", tracker: "Tracker | None"
) -> "tuple[list[CellError], Tracker | None]":
    """Store and log results as they come; return the failures, and the tracker unless it failed."""
    from fedbench.store import CellError

    errors = []
    for result in results:
        if isinstance(result, CellError):
            plan.store.put_error(result)
            errors.append(result)
        else:
            plan.store.put(result)
        metric = result.cell.recipe.get("trial", {}).get("objective", plan.suite.metric)
        progress.finish(result.cell, f"{plan.title(result.cell)}: {_said(result, metric)}")
        tracker = _log(plan, [result.cell], tracker, progress.say)
    return errors, tracker


def _log(
    plan: Plan, cells: "Sequence[Cell]", tracker: "Tracker | None", say: Callable[[str], None]
) -> "Tracker | None":
    """Log those of the cells that are done and not logged; after a failure there is no tracker any more."""
    from fedbench.store import damage_of
    from fedbench.tracking import TrackingError

    for cell in cells:
        try:
            if tracker and plan.store.has(cell) and tracker.lacks(cell):
                tracker.log(cell, plan.title(cell))
        except TrackingError as error:
            damaged = damage_of(plan.out / "mlflow.db")
            first = f" after `fedbench repair {shlex.quote(str(plan.store.root))}`" if damaged else ""
            say(f"{error}; the results are kept, and the next run logs them{first}")
            return None
    return tracker


@contextmanager
def _kept(plan: Plan) -> Iterator[None]:
    """Say after Ctrl-C, or when terminated, how things stand."""
    try:
        yield
    except Interrupted as ended:
        done = len({cell.key for cell in plan.cells if plan.store.has(cell)})
        trials = " and every trial that ended" if plan.studies else ""
        print(
            f"{ended}; {done} of {len(plan.titles)} cells are done and kept{trials}, the same command goes on from here"
        )
        raise typer.Exit(ended.exit_code) from None


def _progress(cells: "Sequence[Cell]") -> "Progress":
    from rich.console import Console

    from fedbench.progress import Bar, Lines

    console = Console()
    return Bar(cells, console) if console.is_terminal else Lines(cells)


def _said(result: "Record | CellError", metric: str) -> str:
    """Return what came out of a cell, in a few words."""
    from fedbench.results import numbers, summarise
    from fedbench.store import CellError

    if isinstance(result, CellError):
        return f"error: {result.line}"
    took = f"{result.provenance['seconds']:.1f} s"
    if "resumed" in result.provenance:
        took += f", resumed {result.provenance['resumed']}"
    if result.outcome.status == "diverged":
        return f"diverged in {result.outcome.message} ({took})"
    if result.outcome.status == "stopped":
        return f"pruned after {result.outcome.message} ({took})"
    found = summarise(numbers(result.outcome), metric)
    if not found.round:
        return f"{metric} was not measured ({took})"
    clients = f"{found.clients - found.left_out} of {found.clients} clients" if found.left_out else "clients"
    return f"{metric} {found.mean:.4f}, std {found.std:.4f} over {clients} ({took})"


def _trials(plan: Plan) -> "list[Cell]":
    """Return the trials in the store that belong to the plan's cells."""
    there = set(plan.store.finished())
    keys = dict.fromkeys(trial.cell for study in _studies(plan) for trial in study.trials)
    return [plan.store.get(key).cell for key in keys if key in there]


def _studies(plan: Plan) -> "list[Study]":
    first = {cell.study_key: cell for cell in plan.cells if cell.tuned}
    return [study for cell in first.values() if (study := plan.store.study(cell))]


def _with_values(plan: Plan, cells: "Sequence[Cell]") -> "dict[str, Cell]":
    """Return tuned cells with the values chosen for them, by their keys; without those that have none."""
    from fedbench import tune
    from fedbench.cells import settle

    chosen = {cell.key: (cell, tune.chosen(cell, plan.store.study(cell))) for cell in cells}
    return {key: settle(cell, found["values"]) for key, (cell, found) in chosen.items() if found}


def _export(plan: Plan, settled: "Sequence[Cell]", file: Path) -> None:
    """Write a suite with values in the place of tuning."""
    from fedbench import export

    note = f"Values that `fedbench tune` chose for {plan.suite.name}."
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(export.dumps(plan.suite, settled, file.parent, note), encoding="utf-8")
    print(f"written to {file}")
