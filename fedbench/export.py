"""A suite in which tuned values stand as if somebody had written them: the same cells, and nothing left to choose."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedbench import plugins
from fedbench.cells import Cell
from fedbench.config import Suite
from fedbench.settings import LACKS

_SHARED = ("dataset", "model", "mixed", "partition", "partition_seeds", "training")


def dumps(suite: Suite, cells: Sequence[Cell], folder: Path, note: str) -> str:
    """Return the YAML text of a suite with the cells of another one, every setting written out.

    `cells` have their values (see `fedbench.cells.settle`), and each run seed of the suite.  `folder` is where the file
    will be: paths in it are relative to that.  `note` becomes its first line.
    """
    data = suite.model_dump(mode="json", exclude_unset=True)
    kept = ("description", "seeds", "metric", "further_metrics", "figure", "keep")
    top: dict[str, Any] = {name: data[name] for name in kept if name in data}
    if suite.reference:
        top["reference"] = _moved(suite.reference, suite.base, folder)
    experiments = [_experiment(group, suite.base, folder) for group in _groups(cells)]
    for name in _SHARED:
        if all(one.get(name) == experiments[0].get(name) for one in experiments) and name in experiments[0]:
            top[name] = experiments[0][name]
            for one in experiments:
                del one[name]
    if len(experiments) == 1:
        top |= experiments[0]
    else:
        top["experiments"] = experiments
    return f"# {note}\n" + yaml.safe_dump(top, sort_keys=False, allow_unicode=True, width=120)


def _groups(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells that differ in their rows only, one for each row."""
    groups: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        shared = json.dumps([cell.recipe[name] for name in ("dataset", "partition", "models")])
        groups.setdefault(shared, {}).setdefault(cell.label, cell)
    for group in groups.values():
        yield list(group.values())


def _experiment(group: Sequence[Cell], base: Path, folder: Path) -> dict[str, Any]:
    recipe = group[0].recipe
    models = [_named("models", group[0], model, base, folder) for model in recipe["models"]]
    partition = {"name": recipe["partition"]["name"], **recipe["partition"]["options"]}
    if partition.get("path") is not None:
        partition["path"] = _moved(partition["path"], base, folder)
    training = _training(group[0])
    return {
        "dataset": _named("datasets", group[0], recipe["dataset"], base, folder),
        **({"model": models[0]} if len(models) == 1 else {"mixed": models}),
        "partition": partition,
        "partition_seeds": [recipe["partition"]["seed"]],
        "training": training,
        "methods": {cell.label.replace(",", ";"): _row(cell, training, base, folder) for cell in group},
    }


def _row(cell: Cell, training: Mapping[str, Any], base: Path, folder: Path) -> dict[str, Any]:
    named = _named("methods", cell, cell.recipe["method"], base, folder)
    own = _difference(_training(cell), training)
    return {
        "method": named.pop("name"),
        **({"models": "mixed"} if len(cell.recipe["models"]) > 1 else {}),
        **({"training": own} if own else {}),
        **named,
    }


def _training(cell: Cell) -> dict[str, Any]:
    """Return a cell's settings without those that its optimiser does not have, which a suite may not say."""
    training = cell.recipe["training"]
    optimizer: Mapping[str, Any] = training["optimizer"]
    said = {name: value for name, value in optimizer.items() if name not in LACKS[optimizer["name"]]}
    return {**training, "optimizer": said}


def _named(kind: plugins.Kind, cell: Cell, recipe: Mapping[str, Any], base: Path, folder: Path) -> dict[str, Any]:
    """Return a plugin's name and options as a suite has them."""
    spec = cell.specs.get(recipe["name"], recipe["name"])
    options = dict(recipe["options"])
    if kind != "datasets":  # whose files are in the folder of the data
        located, _ = plugins.located(kind, spec, options, base)
        options |= {n: _moved(options[n], base, folder) for n, value in located.items() if value != options[n]}
    place, _, name = spec.rpartition(":")
    return {"name": f"{_moved(place, base, folder)}:{name}" if place.endswith(".py") else spec, **options}


def _moved(path: str, base: Path, folder: Path) -> str:
    """Return a path relative to one folder as one relative to another."""
    given = Path(path).expanduser()
    if given.is_absolute() or base.resolve() == folder.resolve():
        return path
    return os.path.relpath((base / given).resolve(), folder.resolve())


def _difference(values: Mapping[str, Any], under: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to be laid over some plain values to get others."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            if inner := _difference(value, under[name]):
                found[name] = inner
        elif name not in under or value != under[name]:
            found[name] = value
    return found
