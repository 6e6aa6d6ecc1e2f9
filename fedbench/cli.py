"""The command line; it knows every part, and no part knows it."""

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedbench import (
    data_commands,
    deploy_commands,
    interrupts,
    partition_commands,
    plugin_commands,
    repair_commands,
    report_commands,
    run_commands,
    show_commands,
)
from fedbench.errors import InputError
from fedbench.interrupts import Interrupted
from fedbench.plan import Policy, check_asked, make_plan

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
    run_commands.EngineName,
    typer.Option(help="How clients are computed: one by one, or all at once; the numbers are the same."),
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
    # Newer versions of typer let pydantic say what is wrong, which has the value apart, unless it is no allowed word.
    for found in getattr(error.__cause__, "errors", list)()[:1]:
        if found["type"] != "value_error":
            said = f"{said.partition(', unable to')[0]}, not {found['input']}"
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
    how = run_commands.How(
        device, engine, workers, threads, fast, together, checkpoint, executor, ray_address, ray_gpus
    )
    plan = make_plan(suite, only, sets, seeds, out, data, fetch=not dry_run)
    check_asked(plan)
    if dry_run:
        run_commands.dry_run(plan, policy)
    else:
        run_commands.run(plan, policy, how, tracking_uri)


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

    how = run_commands.How(
        device, engine, workers, threads, fast, together, checkpoint, executor, ray_address, ray_gpus
    )
    plan = make_plan(suite, only, sets, seeds, out, data, adapt=partial(config.tuned, trials=trials))
    run_commands.tune(plan, how, tracking_uri, storage, export)


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
        report_commands.write_report(*results_csv.load(file), to or file.parent, wanted, figures)
    else:
        plan = make_plan(suite, only, sets, seeds, out, data)
        plan.store.check_begun()
        check_asked(plan)
        report_commands.report_cells(plan, to, wanted, figures)


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

    (one, asked), (other, also) = (report_commands.side(name, out, data) for name in (a, b))
    made = compare(one, other, (a, b), metric if metric is not None else asked or also)
    print(made.csv() if form == "csv" else made.markdown(), end="")


@app.command("list")
def list_(kind: Annotated[Literal["methods", "datasets", "models", "suites"], typer.Argument()]) -> None:
    """List what suites can name; a plugin that cannot be imported says why."""
    from fedbench import config, plugins

    if kind == "suites":
        rows = {name: config.load(path).description for name, path in config.shipped_suites().items()}
    else:
        rows = {name: show_commands.summary(kind, name) for name in plugins.names(kind)}
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
    if re.fullmatch("[0-9a-f]{4,16}", what) and show_commands.show_cell(out, what):
        return
    plan = make_plan(what, only, sets, seeds, out, data, fetch=False)
    show_commands.show_cells(plan)
    show_commands.show_estimate(plan, device, calibrate)


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
    plan = make_plan(suite, only, sets, None, out, data)
    partition_commands.show(plan, to)


@app.command()
def repair(
    suite: Annotated[str, typer.Argument(metavar="SUITE|FOLDER", help="A suite, or the folder of its runs.")],
    out: _Out = _RUNS,
) -> None:
    """Move what cannot be read in a suite's folder aside, and MLflow's database; the next run makes it anew."""
    repair_commands.run(suite, out)


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
    plan = make_plan(suite, only, sets, seeds, out, data)
    deploy_commands.run(plan, to)


@app.command()
def schema() -> None:
    """Print the JSON Schema of suite files, for editors."""
    from fedbench import config

    print(json.dumps(config.schema(), indent=2))


@app.command()
def ui(
    out: _Out = _RUNS, port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000
) -> None:
    """Open MLflow's page on the runs, until Ctrl-C."""
    from fedbench.tracking import local_uri

    if not (out / "mlflow.db").exists():
        raise InputError(f"--out {out}: no mlflow.db in it; run a suite first")
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"}
    print(f"MLflow on {out} at http://127.0.0.1:{port} in a few seconds; Ctrl-C ends it", flush=True)
    server = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", local_uri(out), "--port", str(port)]
    os.execv(sys.executable, [*server, "--workers", "1", "--uvicorn-opts", "--log-level=warning"])
