"""The command line; it knows every part, and no part knows it."""

import itertools
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedbench import data_commands, deploy_commands, interrupts, partition_commands, plugin_commands
from fedbench.errors import InputError, within
from fedbench.interrupts import Interrupted
from fedbench.words import counted

if TYPE_CHECKING:
    from fedbench import plugins
    from fedbench.cells import Cell
    from fedbench.config import Suite
    from fedbench.executors import Cluster, Executor, Job, Setting
    from fedbench.partition import Partition
    from fedbench.progress import Progress
    from fedbench.reference import Reference
    from fedbench.results import Results
    from fedbench.store import CellError, Record, Store
    from fedbench.studies import Study
    from fedbench.tracking import Tracker

app = typer.Typer(
    help="Compare federated-learning methods fairly.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_commands.app, name="data")
app.add_typer(plugin_commands.app, name="new")
app.command()(plugin_commands.check)


EngineName = Literal["auto", "loop", "vectorised"]  # as in fedbench.engines.choice, which imports torch
Policy = Literal["missing", "failed", "all"]
_POLICIES = (
    "missing: cells without an outcome (an error is none). failed: cells that ended in an error or diverged. "
    "all: every cell, its new outcome taking the place of the old one."
)
_SuiteName = Annotated[str, typer.Argument(metavar="SUITE", help="A suite file, or the name of one that is shipped.")]
_Only = Annotated[
    list[str],
    typer.Option(
        metavar="FACT=VALUE,...",
        help="Only cells of which all these facts are true, such as method=fedproto,n=3; a fact that comes twice may "
        "have either value. Facts are a cell's settings, which a dry run lists. Repeatable.",
    ),
]
_Sets = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Another value, such as rounds=5; repeatable.")
]
_Seeds = Annotated[str | None, typer.Option(metavar="SEED,...", help="Other run seeds, such as 0,1,2.")]
_Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")]
_Workers = Annotated[int, typer.Option(min=0, help="Cells at a time; 0: one for each usable core, or one on a GPU.")]
_Engine = Annotated[
    EngineName, typer.Option(help="How clients are computed: one by one, or all at once; the numbers are the same.")
]
_Threads = Annotated[int, typer.Option(min=1, help="Threads of each cell.")]
_Fast = Annotated[
    bool, typer.Option("--fast", help="On CUDA: TensorFloat-32, and algorithms whose numbers differ from run to run.")
]
_Executor = Annotated[
    Literal["auto", "ray"], typer.Option(help="Where cells run: on this machine, or as tasks on a Ray cluster.")
]
_RayAddress = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Of a Ray cluster; else one is started on this machine.")
]
_RayGpus = Annotated[
    float | None, typer.Option(min=0, help="GPUs of each cell on Ray, such as 0.25; else one with --device cuda.")
]
_Together = Annotated[
    int,
    typer.Option(
        min=1,
        help="Cells trained at once, stacked as one program, which fills a GPU: of those that differ in nothing but "
        "seeds and the method's numbers.",
    ),
]
_Checkpoint = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How often cells under way are saved; 0: after every round.")
]
_TrackingUri = Annotated[
    str | None,
    typer.Option(metavar="URI", help="An MLflow server, or 'none'; else a database in the folder of all runs."),
]
_Out = Annotated[Path, typer.Option(help="Folder of all runs.")]
_Data = Annotated[Path | None, typer.Option(help="Folder of your data; else $FEDBENCH_DATA, else ./data.")]
_SIDE = "A suite, the folder of one's runs, or a results.csv."
_RUNS = Path("runs")
_UsageError: Any = typer.BadParameter.__mro__[1]  # of click, or of the copy of it that newer versions of typer have


def main() -> None:
    """Run the command line; exits with 2 and one line for bad input, 1 for failed cells, 130 or 143 after a signal."""
    try:
        with interrupts.raised():
            sys.exit(app(standalone_mode=False) or 0)
    except Interrupted as ended:
        print(f"fedbench: {ended}; what is finished is kept", file=sys.stderr)
        sys.exit(ended.exit_code)
    except _UsageError as error:
        _print_usage(error)
        sys.exit(2)
    except InputError as error:
        print(f"fedbench: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a folder that cannot be made or written, a full disk
        print(f"fedbench: {error.filename or 'files'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def _print_usage(error: Any) -> None:
    """Print what is wrong with the arguments on one line, or the help if there are none."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "fedbench"
    said = " ".join(
        error.format_message().replace("Value error, ", "").replace("Input should be", "should be").rstrip(".").split()
    )
    print(f"fedbench: {said}; see `{command} --help`", file=sys.stderr)


@app.command()
def run(
    suite: _SuiteName,
    only: _Only = [],  # noqa: B006 (typer reads it)
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    seeds: _Seeds = None,
    workers: _Workers = 0,
    device: _Device = "cpu",
    engine: _Engine = "auto",
    threads: _Threads = 1,
    fast: _Fast = False,
    together: _Together = 1,
    checkpoint: _Checkpoint = 30.0,
    executor: _Executor = "auto",
    ray_address: _RayAddress = "",
    ray_gpus: _RayGpus = None,
    out: _Out = _RUNS,
    data: _Data = None,
    tracking_uri: _TrackingUri = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    policy: Annotated[Policy, typer.Option(help=_POLICIES)] = "missing",
) -> None:
    """Run a suite's cells, as far as they are not done, and report."""
    from fedbench import executors

    cluster = _cluster(executor, ray_address, ray_gpus, device, together)
    _check_together(together, workers, engine)
    _check_fast(fast, device)
    plan = _plan(suite, only, sets, seeds, out, data, fetch=not dry_run)
    _check_asked(plan)
    if dry_run:
        _check_files(plan)
        todo = _chosen(plan, policy)
        _jobs(plan, list(filter(_has_data, todo)), executors.Setting(plan.data, plan.suite.base), store=False)
        _describe(plan)
        ready = list(filter(_has_data, todo))
        lacking = f", {len(todo) - len(ready)} more once their data are there" if len(ready) < len(todo) else ""
        print(f"{len(ready)} of {counted(len(plan.titles), 'cell')} would run{lacking}{_and_trials(plan)}")
        return
    with _locked(plan.store):
        setting = _setting(plan, _at_once(plan, _chosen(plan, policy)), device, engine, workers, threads, cluster)
        setting = replace(setting, together=together, fast=fast, checkpoint=checkpoint)
        errors = _run(plan, policy, setting, _tracker(plan, tracking_uri, out))
    if any(plan.store.has(cell) for cell in plan.cells):
        _report(plan)
    if errors:
        first = errors[0]
        print(
            f"fedbench: {len(errors)} of {counted(len(plan.titles), 'cell')} failed, "
            f"first {plan.titles[first.cell.key]}: {first.line}; `fedbench show {first.cell.key}` tells more",
            file=sys.stderr,
        )
        raise typer.Exit(2 if any(error.input for error in errors) else 1)


@app.command()
def tune(
    suite: _SuiteName,
    only: _Only = [],  # noqa: B006 (typer reads it)
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    seeds: _Seeds = None,
    trials: Annotated[int | None, typer.Option(help="Trials of every row, in place of the suite's.")] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="URL", help="An Optuna storage; else a database beside the suite's cells.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a suite with the chosen values in it.")
    ] = None,
    workers: _Workers = 0,
    device: _Device = "cpu",
    engine: _Engine = "auto",
    threads: _Threads = 1,
    fast: _Fast = False,
    together: _Together = 1,
    checkpoint: _Checkpoint = 30.0,
    executor: _Executor = "auto",
    ray_address: _RayAddress = "",
    ray_gpus: _RayGpus = None,
    out: _Out = _RUNS,
    data: _Data = None,
    tracking_uri: _TrackingUri = None,
) -> None:
    """Choose the hyperparameters of a suite's rows on validation samples, as far as that is not done."""
    from fedbench import config

    plan = _plan(suite, only, sets, seeds, out, data, adapt=partial(config.tuned, trials=trials))
    cells = [cell for cell in plan.cells if cell.tuned]
    if not cells:
        raise InputError(f"{plan.suite.file}: none of these cells is tuned; `tune` stands in other experiments")
    cluster = _cluster(executor, ray_address, ray_gpus, device, together)
    _check_together(together, workers, engine)
    _check_fast(fast, device)
    with _locked(plan.store):
        setting = _setting(plan, _at_once(plan, cells), device, engine, workers, threads, cluster)
        setting = replace(setting, together=together, fast=fast, checkpoint=checkpoint)
        with _kept(plan):
            tracker = _tune(plan, cells, setting, _tracker(plan, tracking_uri, out), storage)
            _log(plan, _trials(plan), tracker, print)
    _report_tuning(plan)
    settled = _with_values(plan, cells)
    if export:
        _export(plan, settled, export)
    lacking = dict.fromkeys(plan.studies[cell.study_key] for cell in cells if cell.key not in settled)
    if lacking:
        print(f"fedbench: no trial of {', '.join(lacking)} was completed", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def report(
    suite: Annotated[
        str, typer.Argument(metavar="SUITE|results.csv", help="A suite, or what --format csv wrote of one.")
    ],
    only: _Only = [],  # noqa: B006 (typer reads it)
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    seeds: _Seeds = None,
    formats: Annotated[
        str, typer.Option("--format", metavar="FORMAT,...", help="Of html, md, latex and csv.")
    ] = "html,md",
    figures: Annotated[bool, typer.Option("--figures", help="Save the figures too, as SVG and PDF.")] = False,
    to: Annotated[
        Path | None, typer.Option(help="Folder to write to; else that of the suite's runs, or of results.csv.")
    ] = None,
    out: _Out = _RUNS,
    data: _Data = None,
) -> None:
    """Report what a suite's cells have come to so far."""
    from fedbench import results_csv
    from fedbench.report import read_formats

    wanted = read_formats(formats, "--format")
    if suite.endswith(".csv"):
        if sets or only or seeds is not None:
            raise InputError(f"{suite}: --only, --set and --seeds are of suites; a results.csv is reported whole")
        file = Path(suite)
        _write_report(*results_csv.load(file), to or file.parent, wanted, figures)
    else:
        plan = _plan(suite, only, sets, seeds, out, data)
        _check_asked(plan)
        _report(plan, to, wanted, figures)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    metric: Annotated[str | None, typer.Option(help="What to compare; else what the suite of A or B reports.")] = None,
    form: Annotated[Literal["md", "csv"], typer.Option("--format", help="A page, or a line for each cell.")] = "md",
    out: _Out = _RUNS,
    data: _Data = None,
) -> None:
    """Print two sets of results side by side, cell by cell: B minus A, and whether that is more than noise."""
    from fedbench.compare import compare

    (one, asked), (other, also) = (_side(name, out, data) for name in (a, b))
    made = compare(one, other, (a, b), metric if metric is not None else asked or also)
    print(made.csv() if form == "csv" else made.markdown(), end="")


def _side(name: str, out: Path, data: Path | None) -> "tuple[Results, str]":
    """Return what `compare` is to compare, and the metric that its suite reports, if there is one."""
    from fedbench import results, results_csv
    from fedbench.compare import stored

    if name.endswith(".csv"):
        found, suite, _ = results_csv.load(Path(name))
        return found, suite.metric
    if Path(name).is_dir():
        return stored(Path(name)), ""
    plan = _plan(name, (), (), None, out, data)
    return results.collect(plan.store, plan.cells, plan.suite.base, plan.data), plan.suite.metric


@app.command("list")
def list_(kind: Annotated[Literal["methods", "datasets", "models", "suites"], typer.Argument()]) -> None:
    """List what suites can name; a plugin that cannot be imported says why."""
    from fedbench import config, plugins

    if kind == "suites":
        rows = {name: config.load(path).description for name, path in config.shipped_suites().items()}
    else:
        rows = {name: _summary(kind, name) for name in plugins.names(kind)}
    width = max(map(len, rows), default=0)
    for name, text in rows.items():
        print(f"{name:{width}}  {text}".rstrip())


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="CELL|SUITE", help="The beginning of a cell's key, or a suite.")],
    only: _Only = [],  # noqa: B006 (typer reads it)
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    seeds: _Seeds = None,
    device: _Device = "cpu",
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Estimate times, from a few steps of each model.")
    ] = True,
    out: _Out = _RUNS,
    data: _Data = None,
) -> None:
    """Show everything about one cell, or a suite's cells, how they stand, and what they take."""
    if re.fullmatch("[0-9a-f]{4,16}", what) and _show_cell(out, what):
        return
    plan = _plan(what, only, sets, seeds, out, data, fetch=False)
    _describe(plan)
    _estimate(plan, device, calibrate)


@app.command()
def partition(
    suite: _SuiteName,
    only: _Only = [],  # noqa: B006 (typer reads it)
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    to: Annotated[Path | None, typer.Option(help="Folder of the pictures; else that of the suite's runs.")] = None,
    out: _Out = _RUNS,
    data: _Data = None,
) -> None:
    """Show who holds what under a suite's partitions: a table and a picture of each; nothing is trained."""
    plan = _plan(suite, only, sets, None, out, data)
    partition_commands.show(plan.cells, plan.suite.base, plan.data, to or plan.store.root, plan.suite.place)


@app.command()
def repair(suite: _SuiteName, out: _Out = _RUNS) -> None:
    """Move what cannot be read in a suite's folder aside, and MLflow's database; the next run makes it anew."""
    from fedbench import config
    from fedbench.store import Store, damage_of
    from fedbench.tracking import local_uri

    store = Store(out / config.load(suite).name)
    if not store.root.is_dir():
        raise InputError(f"{store.root}: no such folder; nothing of this suite has been run there")
    database = out / "mlflow.db"
    with _locked(store):
        found = list(store.damaged())
        if reason := damage_of(database):
            found.append((database, reason))
        for path, reason in found:
            print(f"{reason}; moved to {store.set_aside(path)}")
        if under_way := len(list(store.checkpoints.glob("*.pt"))):  # of this suite as it is, or as it was before
            print(
                f"{store.checkpoints}: {counted(under_way, 'checkpoint')} of cells that have not ended; can be deleted"
            )
    if database in dict(found):  # after its own lock, so that two repairs never wait for each other
        for other in (Store(marker.parent) for marker in sorted(out.glob("*/version"))):
            with _locked(other):
                other.forget_tracked(local_uri(out))
    print(f"{len(found)} moved aside" + (", the next run makes them anew" if found else ": everything can be read"))


@app.command()
def deploy(
    suite: _SuiteName,
    only: _Only = [],  # noqa: B006 (typer reads it)
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    seeds: _Seeds = None,
    to: Annotated[Path | None, typer.Option(help="Folder of the parties; else one beside the suite's cells.")] = None,
    out: _Out = _RUNS,
    data: _Data = None,
) -> None:
    """Run one cell with its server and each client as a process (Flower), and hold it against the simulation."""
    plan = _plan(suite, only, sets, seeds, out, data)
    deploy_commands.run(plan.cells, plan.suite.base, plan.data, to, plan.store.root, plan.suite.place)


@app.command()
def schema() -> None:
    """Print the JSON Schema of suite files, for editors."""
    from fedbench import config

    print(json.dumps(config.schema(), indent=2))


@app.command()
def ui(out: _Out = _RUNS, port: Annotated[int, typer.Option(help="Port on this machine.")] = 5000) -> None:
    """Open MLflow's page on the runs, until Ctrl-C."""
    from fedbench.tracking import local_uri

    if not (out / "mlflow.db").exists():
        raise InputError(f"--out {out}: no mlflow.db in it; run a suite first")
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
    print(f"MLflow on {out} at http://127.0.0.1:{port} in a few seconds; Ctrl-C ends it", flush=True)
    server = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", local_uri(out), "--port", str(port)]
    os.execv(sys.executable, [*server, "--workers", "1", "--uvicorn-opts", "--log-level=warning"])


@dataclass(frozen=True)
class _Plan:
    """What a command is about: `cells`, of `every` one of the suite's.

    `titles` names each different one, by its key, and `studies` what is tuned; `drawn` has partitions that were drawn,
    by their `partition_key`.
    """

    suite: "Suite"
    every: "list[Cell]"
    cells: "list[Cell]"
    titles: Mapping[str, str]
    studies: Mapping[str, str]
    data: Path
    store: "Store"
    reference: "Reference | None"
    drawn: "dict[str, Partition]" = field(default_factory=dict)


def _plan(
    name: str,
    only: Sequence[str],
    sets: Sequence[str],
    seeds: str | None,
    out: Path,
    data: Path | None,
    fetch: bool = True,
    adapt: "Callable[[Suite], Suite]" = lambda suite: suite,
) -> _Plan:
    """Return what a command is about; with `fetch` false the data may be missing (see `cells.fingerprints`).

    `adapt` makes another suite of the one that was asked for.
    """
    from fedbench import asked, config, reference
    from fedbench.cells import NO_DATA, expand, fingerprints, select
    from fedbench.data import data_root
    from fedbench.store import Store

    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; want the folder of all runs")
    suite = adapt(config.override(config.load(name), sets, seeds))
    root = data_root(data)

    def known(fetched: bool) -> "tuple[list[Cell], list[Cell]]":
        every = expand(suite, fingerprints(suite.base, root, fetch=False))
        chosen = select(every, ",".join(only)) if only else every
        absent = {}
        for cell in chosen:
            dataset = cell.recipe["dataset"]
            if dataset["content"] == NO_DATA:
                absent[str(dataset)] = {**dataset, "name": cell.specs.get(dataset["name"], dataset["name"])}
        if fetched or not absent:
            return every, chosen
        for dataset in absent.values():  # only what was selected; says what is missing if it cannot be fetched
            fingerprints(suite.base, root)(dataset)
        return known(fetched=True)

    try:
        every, cells = known(fetched=not fetch)
    except InputError as error:
        renamed = next(
            filter(None, (re.fullmatch(r"(dataset|model|partition)\.name=(.*)", text) for text in sets)), None
        )
        if not renamed:
            raise
        raise InputError(f"{error}; --set {renamed[1]}={renamed[2]} drops the options of the one before") from error
    published = reference.read(suite, every)
    asked.check_facts(suite, every)
    tuned = {cell.study_key: cell for cell in reversed(cells) if cell.tuned}
    names = _titles(list(tuned.values())[::-1])
    studies = {key: names[cell.key] for key, cell in tuned.items()}
    return _Plan(suite, every, cells, _titles(cells), studies, root, Store(out / suite.name), published)


def _locked(store: "Store") -> AbstractContextManager[None]:
    return store.lock(lambda: print(f"another run is at work in {store.root}; waiting for it", flush=True))


def _tracker(plan: _Plan, uri: str | None, out: Path) -> "Tracker | None":
    from fedbench.tracking import Tracker, check_uri, local_uri

    if uri is not None:
        check_uri(uri)
    return None if uri == "none" else Tracker(plan.store, plan.suite.name, local_uri(out) if uri is None else uri)


def _titles(cells: "Sequence[Cell]") -> dict[str, str]:
    """Return what to call each cell: its label, and as many facts as tell the cells of that label apart."""
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for cell in _unique(cells):
        rows.setdefault(cell.label, []).append((cell.key, cell.facts()))
    titles = {}
    for label, found in rows.items():
        apart: list[str] = []
        groups = 1
        for name in dict.fromkeys(name for _, facts in found for name in facts):
            more = len({tuple(facts.get(one) for one in [*apart, name]) for _, facts in found})
            if more > groups:  # what follows from the facts before it tells nothing
                apart, groups = [*apart, name], more
        for key, facts in found:
            titles[key] = " ".join([label, *(f"{name}={facts[name]}" for name in apart if name in facts)])
    return titles


def _unique(cells: "Sequence[Cell]") -> "list[Cell]":
    """Return each different cell once: the same work may stand under two labels."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.key, cell)
    return list(first.values())


def _chosen(plan: _Plan, policy: Policy) -> "list[Cell]":
    """Return the cells to run."""
    wanted = {"missing": ("missing", "error"), "failed": ("error", "diverged")}.get(policy)
    return [cell for cell in _unique(plan.cells) if wanted is None or plan.store.status(cell) in wanted]


def _setting(
    plan: _Plan,
    many: int,
    device: str,
    engine: "EngineName",
    workers: int,
    threads: int,
    cluster: "Cluster | None",
) -> "Setting":
    """Return how cells will run, of which there are so many; by default as many at a time as cores allow."""
    from fedbench import executors

    most = max(1, executors.usable_cores() // threads) if device == "cpu" else 1
    if not cluster:  # which knows by itself how many cells it has room for
        workers = min(workers or most, max(many, 1))
    setting = executors.Setting(plan.data, plan.suite.base, device, workers, threads, engine)
    return replace(setting, checkpoints=plan.store.checkpoints, cluster=cluster)


def _check_fast(fast: bool, device: str) -> None:
    if fast and not device.startswith("cuda"):
        raise InputError(f"--fast: is for --device cuda, not for {device}")


def _cluster(executor: str, address: str, gpus: float | None, device: str, together: int) -> "Cluster | None":
    """Return the Ray cluster to run on, if any; InputError if options or device do not fit."""
    from fedbench import executors

    if executor != "ray":
        if address or gpus is not None:
            raise InputError(f"{'--ray-address' if address else '--ray-gpus'}: is of --executor ray")
        executors.check_device(device)
        return None
    if find_spec("ray") is None:
        raise InputError("--executor ray: Ray is not installed; pip install 'fedbench-suite[ray]'")
    if together > 1:
        raise InputError(f"--together {together}: is of one machine, not of --executor ray")
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device {device}: want cpu or cuda, since Ray chooses which GPU")
    if gpus is not None and not (0 <= gpus <= 1 or gpus % 1 == 0):
        raise InputError(f"--ray-gpus {gpus}: want a part of one GPU, or a whole number of them")
    return executors.Cluster(address, gpus)


def _check_together(together: int, workers: int, engine: "EngineName") -> None:
    if together > 1 and workers > 1:
        raise InputError(f"--workers {workers}: cells that are computed together want --workers 1")
    if together > 1 and engine == "loop":
        raise InputError(f"--engine loop: takes clients one by one; want auto or vectorised with --together {together}")


def _at_once(plan: _Plan, cells: "Sequence[Cell]") -> int:
    """Return how many cells, or trials that come before them, could run at the same time."""
    from fedbench import tune

    studies = tune.unfinished(cells, plan.store)
    return max(len(cells), sum(int(cell.recipe["tuning"]["batch"]) for cell in studies))


def _run(plan: _Plan, policy: Policy, setting: "Setting", tracker: "Tracker | None") -> "list[CellError]":
    """Tune, run, store and log the chosen cells; return the failures."""
    todo = _chosen(plan, policy)
    print(f"{plan.suite.name}: {counted(len(plan.titles), 'cell')}, {len(todo)} to run", flush=True)
    with _kept(plan):
        jobs = _jobs(plan, todo, setting)
        tracker = _tune(plan, todo, setting, tracker)
        ready, untuned = _settled(plan, jobs)
        with _progress(todo) as progress, closing(_execute(setting)(ready, setting, progress.on_round)) as results:
            errors, tracker = _drive(plan, itertools.chain(untuned, results), progress, tracker)
        _log(plan, [*plan.cells, *_trials(plan)], tracker, print)
    return errors


def _execute(setting: "Setting") -> "Executor":
    from fedbench import executors

    if setting.cluster:
        return executors.EXECUTORS["ray"]
    if setting.together > 1:
        return executors.EXECUTORS["together"]
    return executors.EXECUTORS["inline" if setting.workers == 1 else "processes"]


@contextmanager
def _kept(plan: _Plan) -> Iterator[None]:
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


def _drive(
    plan: _Plan, results: "Iterable[Record | CellError]", progress: "Progress", tracker: "Tracker | None"
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
        progress.finish(result.cell, f"{_title(plan, result.cell)}: {_said(result, metric)}")
        tracker = _log(plan, [result.cell], tracker, progress.say)
    return errors, tracker


def _title(plan: _Plan, cell: "Cell") -> str:
    """Return what to call a cell, or a trial."""
    from fedbench import space

    if "trial" not in cell.recipe:
        return plan.titles[cell.key]
    study, number = cell.recipe["trial"]["study"], cell.recipe["trial"]["trial"]
    searched = next(one for one in plan.cells if one.tuned and one.study_key == study).recipe["tuning"]["space"]
    values = ", ".join(f"{space.short(place)}={_brief(space.at(cell.recipe, place))}" for place in searched)
    return f"{plan.studies[study]} trial {number} ({values})"


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- tuning


def _tune(
    plan: _Plan, cells: "Sequence[Cell]", setting: "Setting", tracker: "Tracker | None", storage: str | None = None
) -> "Tracker | None":
    """Run, store and log the trials that the studies of some cells lack; return the tracker unless it failed."""
    from fedbench import tune

    todo = tune.unfinished(cells, plan.store)
    if not todo and storage is None:
        return tracker
    with tune.searches(todo, plan.store, tune.default_storage(plan.store) if storage is None else storage) as found:
        if not found:  # an address that cannot be used is said all the same
            return tracker
        jobs = _jobs(plan, [tune.probe(cell) for cell in todo], setting)
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


def _settled(plan: _Plan, jobs: "Sequence[Job]") -> "tuple[list[Job], list[CellError]]":
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


def _with_values(plan: _Plan, cells: "Sequence[Cell]") -> "dict[str, Cell]":
    """Return tuned cells with the values chosen for them, by their keys; without those that have none."""
    from fedbench import tune
    from fedbench.cells import settle

    chosen = {cell.key: (cell, tune.chosen(cell, plan.store.study(cell))) for cell in cells}
    return {key: settle(cell, found["values"]) for key, (cell, found) in chosen.items() if found}


def _export(plan: _Plan, settled: "Mapping[str, Cell]", file: Path) -> None:
    """Write a suite with values in the place of tuning."""
    from fedbench import export

    if not settled:
        return
    note = f"Values that `fedbench tune` chose for {plan.suite.name}."
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(export.dumps(plan.suite, list(settled.values()), file.parent, note), encoding="utf-8")
    print(f"written to {file}")


def _report_tuning(plan: _Plan) -> None:
    """Print what tuning came to, and write it beside the cells."""
    from rich.console import Console

    from fedbench import report, results

    found = results.collect(plan.store, plan.cells, plan.suite.base, plan.data)
    comparison = report.compare(found, plan.suite)
    Console().print(report.terminal.render_tuning(comparison))
    file = plan.store.root / "tuning.md"
    file.write_text(report.markdown.render_tuning(comparison), encoding="utf-8")
    print(f"written to {file}")


def _and_trials(plan: _Plan) -> str:
    from fedbench import tune

    trials = sum(tune.wanting(cell, plan.store) for cell in tune.unfinished(plan.cells, plan.store))
    return f", and {counted(trials, 'trial')} before that" if trials else ""


def _trials(plan: _Plan) -> "list[Cell]":
    """Return the trials in the store that belong to the plan's cells."""
    there = set(plan.store.finished())
    keys = dict.fromkeys(trial.cell for study in _studies(plan) for trial in study.trials)
    return [plan.store.get(key).cell for key in keys if key in there]


def _studies(plan: _Plan) -> "list[Study]":
    first = {cell.study_key: cell for cell in plan.cells if cell.tuned}
    return [study for cell in first.values() if (study := plan.store.study(cell))]


def _check_asked(plan: _Plan) -> None:
    """Raise InputError if the suite asks for a metric or a client that its cells do not have, chosen or not."""
    from fedbench import asked, tune
    from fedbench.cells import Checker, newcomers_of
    from fedbench.executors import Setting, load_arrays

    setting = Setting(plan.data, plan.suite.base)
    checker = Checker(plan.suite.base)

    def measured(cell: "Cell") -> set[str]:
        partition = _partition(plan, cell, setting, store=False)
        if "trial" not in cell.recipe:  # which has no test samples at all
            asked.check_client(plan.suite, list(map(len, partition.test)), newcomers_of(cell, partition).clients)
        return checker.metrics(cell, load_arrays(cell, setting), partition)

    def perhaps_measured(cell: "Cell") -> set[str]:
        with suppress(InputError):  # of a cell that is not asked for
            return measured(cell)
        return set()

    others = map(perhaps_measured, _different(plan.every))
    asked.check_metrics(plan.suite, itertools.chain(map(measured, _different(plan.cells)), others))
    for cell in _different([cell for cell in plan.cells if cell.tuned]):
        known, objective = measured(tune.probe(cell)), cell.recipe["tuning"]["objective"]
        if known and objective not in known:
            raise asked.refused(objective, known, f"{plan.suite.place}: tune.objective: {cell.label}")


def _different(cells: "Sequence[Cell]") -> "list[Cell]":
    """Return the first of the cells that differ in nothing but seeds and training, as far as their data are there."""
    first: dict[str, Cell] = {}
    for cell in filter(_has_data, cells):
        partition = {**cell.recipe["partition"], "seed": None}
        first.setdefault(
            json.dumps([partition, *(cell.recipe[part] for part in ("dataset", "models", "method"))]), cell
        )
    return list(first.values())


def _partition(plan: _Plan, cell: "Cell", setting: "Setting", store: bool) -> "Partition":
    """Return a cell's partition, drawn if it is new; with `store` false it is not stored."""
    from fedbench.cells import draw_partition
    from fedbench.executors import load_arrays

    def draw() -> "Partition":
        if cell.partition_key not in plan.drawn:
            arrays = load_arrays(cell, setting)
            with within(plan.suite.place):
                plan.drawn[cell.partition_key] = draw_partition(cell, arrays, setting.base)
        return plan.drawn[cell.partition_key]

    return plan.store.partition(cell, draw) if store or plan.store.card(cell) else draw()


def _jobs(plan: _Plan, cells: "Sequence[Cell]", setting: "Setting", store: bool = True) -> "list[Job]":
    """Return the cells with their partitions, drawn where they are new; InputError if anything cannot be trained."""
    from fedbench.cells import Checker
    from fedbench.executors import Job, load_arrays

    first = {cell.partition_key: cell for cell in reversed(cells)}
    partitions = {key: _partition(plan, cell, setting, store) for key, cell in first.items()}
    checker = Checker(plan.suite.base)
    for cell in cells:
        arrays = load_arrays(cell, setting)
        with within(plan.suite.place):
            checker.check(cell, arrays, partitions[cell.partition_key])
    return [Job(cell, partitions[cell.partition_key]) for cell in cells]


def _log(
    plan: _Plan, cells: "Sequence[Cell]", tracker: "Tracker | None", say: Callable[[str], None]
) -> "Tracker | None":
    """Log those of the cells that are done and not logged; after a failure there is no tracker any more."""
    from fedbench.tracking import TrackingError

    for cell in cells:
        try:
            if tracker and plan.store.has(cell) and tracker.lacks(cell):
                tracker.log(cell, _title(plan, cell))
        except TrackingError as error:
            say(f"{error}; the results are kept, and the next run logs them")
            return None
    return tracker


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


def _report(
    plan: _Plan, to: Path | None = None, formats: Sequence[str] = ("html", "md"), figures: bool = False
) -> None:
    """Print the report on the plan's cells, and write it, by default beside them."""
    from fedbench import results

    found = results.collect(plan.store, plan.cells, plan.suite.base, plan.data)
    _write_report(found, plan.suite, plan.reference, to or plan.store.root, formats, figures)


def _write_report(
    found: "Results",
    suite: "Suite",
    reference: "Reference | None",
    folder: Path,
    formats: Sequence[str],
    figures: bool,
) -> None:
    from rich.console import Console

    from fedbench import report

    comparison = report.compare(found, suite, reference)
    Console().print(report.terminal.render(comparison))
    for path in report.write(found, suite, comparison, folder, formats, figures, reference):
        print(f"written to {path}")


def _describe(plan: _Plan) -> None:
    """Print the cells, what they have in common, and how they stand."""
    facts = [cell.facts() for cell in plan.cells]
    common = {name: value for name, value in facts[0].items() if all(row.get(name) == value for row in facts)}
    print(f"{plan.suite.name} ({plan.suite.file}) {plan.suite.description}".rstrip())
    said = ", ".join(f"{name}={value}" for name, value in common.items() if name != "algorithm")
    print(textwrap.fill(f"all cells: {said}", 100, subsequent_indent="  ", break_long_words=False))
    for cell in _unique(plan.cells):
        key, status = (cell.key, plan.store.status(cell)) if _has_data(cell) else ("-" * len(cell.key), "no data")
        print(f"{key}  {status:9}  {plan.titles[cell.key]}")


def _check_files(plan: _Plan) -> None:
    """Raise InputError if a file of the cells' data is missing, and none that a run would fetch."""
    from fedbench import data
    from fedbench.cells import source

    for cell in plan.cells:
        if not _has_data(cell):
            found = source(cell, plan.suite.base)
            if type(found).fetch is data.DataSource.fetch:
                data.present(found, plan.data)


def _has_data(cell: "Cell") -> bool:
    from fedbench.cells import NO_DATA

    return bool(cell.recipe["dataset"]["content"] != NO_DATA)


def _estimate(plan: _Plan, device: str, calibrate: bool) -> None:
    """Print the parameters of the models, and what the cells take in steps and in time."""
    from fedbench import executors, tune
    from fedbench.estimate import Estimate, estimate, in_words

    executors.check_device(device)
    cells = _unique(plan.cells)
    for name in dict.fromkeys(cell.recipe["dataset"]["name"] for cell in cells if not _has_data(cell)):
        print(f"{name}: no files here, so there is no estimate; `fedbench data where {name}` says what is missing")
    setting = executors.Setting(plan.data, plan.suite.base, device)
    groups: dict[str, list[Estimate]] = {}
    for found in estimate(filter(_has_data, cells), setting, calibrate):
        groups.setdefault(found.model, []).append(found)
    for model, group in groups.items():
        print(f"{model}: {in_words(group)}")
    todo = {cell.key for cell in _chosen(plan, "missing")}
    if not groups:
        return
    at_once = executors.usable_cores() if device == "cpu" else 1
    left = [found for group in groups.values() for found in group if found.cell.key in todo]
    print(f"to run: {in_words(left, at_once)}")
    tuned = [cell for cell in tune.unfinished(cells, plan.store) if _has_data(cell)]
    probes = estimate(map(tune.probe, tuned), setting, calibrate)
    trials = [found for cell, found in zip(tuned, probes, strict=True) for _ in range(tune.wanting(cell, plan.store))]
    if trials:
        print(f"before that, trials of tuning: {in_words(trials, at_once)}")


def _show_cell(out: Path, beginning: str) -> bool:
    """Print everything that is known about a cell, if there is one; InputError if there are several."""
    from fedbench.store import Store

    found: dict[str, Store] = {}
    for store in (Store(path.parent) for path in out.glob("*/version")):
        keys = {*store.finished(), *(error.cell.key for error in store.errors())}
        found |= {key: store for key in keys if key.startswith(beginning)}
    if len(found) > 1:
        raise InputError(f"several cells begin with {beginning}: {', '.join(sorted(found))}")
    for key, store in found.items():
        error = store.error(key)
        if key in store.finished():
            _print_record(store, key)
        if error:
            print(f"{key} ({error.cell.label}), last attempt: {error.line}\n{error.trace}", end="")
    return bool(found)


def _print_record(store: "Store", key: str) -> None:
    import yaml

    from fedbench.results import numbers, summarise

    record = store.get(key)
    found = numbers(record.outcome)
    about = {
        "cell": key,
        "suite": record.cell.suite,
        "label": record.cell.label,
        "status": record.outcome.status,
        "message": record.outcome.message,
        "recipe": dict(record.cell.recipe),
        "metrics": {name: asdict(summarise(found, name)) for name in found.curves},
        "provenance": dict(record.provenance),
        "partition": store.card(record.cell),
    }
    print(yaml.safe_dump(about, sort_keys=False, allow_unicode=True), end="")


def _summary(kind: "plugins.Kind", name: str) -> str:
    """Return the first line of a plugin's documentation, or why there is no plugin."""
    from fedbench import plugins

    try:
        return (plugins.load(kind, name).__doc__ or "").strip().partition("\n")[0]
    except InputError as error:
        return str(error)
