"""`fedbench show` and `fedbench list`: one cell, a suite's cells and what they take, what suites can name."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.errors import InputError, within
from fedbench.plan import Plan, has_data, unique

if TYPE_CHECKING:
    from fedbench import plugins
    from fedbench.store import Store


def show_cells(plan: Plan) -> None:
    """Print the cells, what they have in common, and how they stand."""
    facts = [cell.facts() for cell in plan.cells]
    common = {name: value for name, value in facts[0].items() if all(row.get(name) == value for row in facts)}
    print(f"{plan.suite.name} ({plan.suite.file}) {plan.suite.description}".rstrip())
    said = ", ".join(f"{name}={value}" for name, value in common.items() if name != "algorithm")
    print(textwrap.fill(f"all cells: {said}", 100, subsequent_indent="  ", break_long_words=False))
    for cell in unique(plan.cells):
        key, status = (cell.key, plan.store.status(cell)) if has_data(cell) else ("-" * len(cell.key), "no data")
        print(f"{key}  {status:9}  {plan.titles[cell.key]}")


def show_estimate(plan: Plan, device: str, calibrate: bool) -> None:
    """Print the parameters of the models, and what the cells take in steps and in time."""
    from fedbench import executors, tune
    from fedbench.estimate import Estimate, estimate, in_words

    executors.check_device(device)
    cells = unique(plan.cells)
    for name in dict.fromkeys(cell.recipe["dataset"]["name"] for cell in cells if not has_data(cell)):
        print(f"{name}: no files here, so there is no estimate; `fedbench data where {name}` says what is missing")
    setting = executors.Setting(plan.data, plan.suite.base, device)
    groups: dict[str, list[Estimate]] = {}
    with within(plan.suite.place):
        for found in estimate(filter(has_data, cells), setting, calibrate):
            groups.setdefault(found.model, []).append(found)
    for model, group in groups.items():
        print(f"{model}: {in_words(group)}")
    todo = {cell.key for cell in plan.chosen("missing")}
    if not groups:
        return
    at_once = executors.usable_cores() if device == "cpu" else 1
    left = [found for group in groups.values() for found in group if found.cell.key in todo]
    print(f"to run: {in_words(left, at_once)}")
    tuned = [cell for cell in tune.unfinished(cells, plan.store) if has_data(cell)]
    with within(plan.suite.place):
        probes = list(estimate(map(tune.probe, tuned), setting, calibrate))
    trials = [found for cell, found in zip(tuned, probes, strict=True) for _ in range(tune.wanting(cell, plan.store))]
    if trials:
        print(f"before that, trials of tuning: {in_words(trials, at_once)}")


def show_cell(out: Path, beginning: str) -> bool:
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


def summary(kind: "plugins.Kind", name: str) -> str:
    """Return the first line of a plugin's documentation, or why there is no plugin."""
    from fedbench import plugins

    try:
        return (plugins.load(kind, name).__doc__ or "").strip().partition("\n")[0]
    except InputError as error:
        return str(error)
