"""What a command is about: those of a suite's cells that are asked for, their names, and where they are stored."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedbench.errors import InputError, within

if TYPE_CHECKING:
    from fedbench.cells import Cell
    from fedbench.config import Suite
    from fedbench.executors import Job, Setting
    from fedbench.partition import Partition
    from fedbench.reference import Reference
    from fedbench.store import Store

Policy = Literal["missing", "failed", "all"]
"""Which cells run: those without an outcome, those that failed or diverged, or every one."""


@dataclass(frozen=True)
class Plan:
    """What a command is about.

    - `cells`: those asked for, of `every` one of the suite's.
    - `titles`: names for the different ones, by their keys; `studies`: names for what is tuned, by its `study_key`.
    - `out`: the folder of all runs, and `store` the suite's in it; `data`: the folder of the user's data.
    - `drawn`: partitions that were drawn, by their `partition_key`.
    """

    suite: "Suite"
    every: "list[Cell]"
    cells: "list[Cell]"
    titles: Mapping[str, str]
    studies: Mapping[str, str]
    out: Path
    data: Path
    store: "Store"
    reference: "Reference | None"
    drawn: "dict[str, Partition]" = field(default_factory=dict)

    def title(self, cell: "Cell") -> str:
        """Return what to call a cell, or a trial."""
        from fedbench import space

        if "trial" not in cell.recipe:
            return self.titles[cell.key]
        study, number = cell.recipe["trial"]["study"], cell.recipe["trial"]["trial"]
        searched = next(one for one in self.cells if one.tuned and one.study_key == study).recipe["tuning"]["space"]
        values = ", ".join(f"{space.short(place)}={_brief(space.at(cell.recipe, place))}" for place in searched)
        return f"{self.studies[study]} trial {number} ({values})"

    def chosen(self, policy: Policy) -> "list[Cell]":
        """Return each cell that is to run once."""
        wanted = {"missing": ("missing", "error"), "failed": ("error", "diverged")}.get(policy)
        return [cell for cell in unique(self.cells) if wanted is None or self.store.status(cell) in wanted]

    def partition(self, cell: "Cell", setting: "Setting", store: bool) -> "Partition":
        """Return a cell's partition, drawn if it is new, and stored unless `store` is false; InputError as `draw`."""
        from fedbench.cells import draw_partition
        from fedbench.executors import load_arrays

        def draw() -> "Partition":
            if cell.partition_key not in self.drawn:
                arrays = load_arrays(cell, setting)
                with within(self.suite.place):
                    self.drawn[cell.partition_key] = draw_partition(cell, arrays, setting.base)
            return self.drawn[cell.partition_key]

        return self.store.partition(cell, draw) if store or self.store.card(cell) else draw()

    def jobs(self, cells: "Sequence[Cell]", setting: "Setting", store: bool = True) -> "list[Job]":
        """Return cells with their partitions, drawn where they are new; InputError if anything cannot be trained."""
        from fedbench.cells import Checker
        from fedbench.executors import Job, load_arrays

        first = {cell.partition_key: cell for cell in reversed(cells)}
        partitions = {key: self.partition(cell, setting, store) for key, cell in first.items()}
        checker = Checker(self.suite.base)
        for cell in cells:
            arrays = load_arrays(cell, setting)
            with within(self.suite.place):
                checker.check(cell, arrays, partitions[cell.partition_key])
        return [Job(cell, partitions[cell.partition_key]) for cell in cells]


def make_plan(
    name: str,
    only: Sequence[str],
    sets: Sequence[str],
    seeds: str | None,
    out: Path,
    data: Path | None,
    fetch: bool = True,
    adapt: "Callable[[Suite], Suite]" = lambda suite: suite,
) -> Plan:
    """Return what a command is about, from its arguments: `out` is the folder of all runs, `data` that of the data.

    With `fetch` false the data may be missing (see `cells.fingerprints`).  `adapt` makes another suite of the one that
    was named.  InputError for whatever the suite or an argument has wrong.
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
    names = titles(list(tuned.values())[::-1])
    studies = {key: names[cell.key] for key, cell in tuned.items()}
    return Plan(suite, every, cells, titles(cells), studies, out, root, Store(out / suite.name), published)


def titles(cells: "Sequence[Cell]") -> dict[str, str]:
    """Return what to call each cell: its labels, and as many facts as tell the cells of those labels apart."""
    labels: dict[str, dict[str, None]] = {}
    for cell in cells:
        labels.setdefault(cell.key, {})[cell.label] = None
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for cell in unique(cells):
        rows.setdefault(" = ".join(labels[cell.key]), []).append((cell.key, cell.facts()))
    named = {}
    for label, found in rows.items():
        apart: list[str] = []
        groups = 1
        for name in dict.fromkeys(name for _, facts in found for name in facts):
            more = len({tuple(facts.get(one) for one in [*apart, name]) for _, facts in found})
            if more > groups:  # what follows from the facts before it tells nothing
                apart, groups = [*apart, name], more
        for key, facts in found:
            named[key] = " ".join([label, *(f"{name}={facts[name]}" for name in apart if name in facts)])
    return named


def unique(cells: "Sequence[Cell]") -> "list[Cell]":
    """Return each different cell once: the same work may stand under two labels."""
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(cell.key, cell)
    return list(first.values())


def different(cells: "Sequence[Cell]") -> "list[Cell]":
    """Return the first of the cells that differ in nothing but seeds and training, as far as their data are there."""
    first: dict[str, Cell] = {}
    for cell in filter(has_data, cells):
        partition = {**cell.recipe["partition"], "seed": None}
        first.setdefault(
            json.dumps([partition, *(cell.recipe[part] for part in ("dataset", "models", "method"))]), cell
        )
    return list(first.values())


def has_data(cell: "Cell") -> bool:
    """Return whether the files of the cell's data were there when the plan was made."""
    from fedbench.cells import NO_DATA

    return bool(cell.recipe["dataset"]["content"] != NO_DATA)


def check_files(plan: Plan) -> None:
    """Raise InputError if a file of the cells' data is missing, and none that a run would fetch."""
    from fedbench import data
    from fedbench.cells import source

    for cell in plan.cells:
        if not has_data(cell):
            found = source(cell, plan.suite.base)
            if type(found).fetch is data.DataSource.fetch:
                data.present(found, plan.data)


def check_asked(plan: Plan) -> None:
    """Raise InputError if the suite asks for a metric or a client that its cells do not have, chosen or not."""
    from fedbench import asked, tune
    from fedbench.cells import Checker, newcomers_of
    from fedbench.executors import Setting, load_arrays

    setting = Setting(plan.data, plan.suite.base)
    checker = Checker(plan.suite.base)

    def measured(cell: "Cell") -> set[str]:
        partition = plan.partition(cell, setting, store=False)
        if "trial" not in cell.recipe:  # which has no test samples at all
            with within(plan.suite.place):
                newcomers = newcomers_of(cell, partition).clients
            asked.check_client(plan.suite, list(map(len, partition.test)), newcomers)
        return checker.metrics(cell, load_arrays(cell, setting), partition)

    def perhaps_measured(cell: "Cell") -> set[str]:
        with suppress(InputError):  # of a cell that is not asked for
            return measured(cell)
        return set()

    others = map(perhaps_measured, different(plan.every))
    asked.check_metrics(plan.suite, itertools.chain(map(measured, different(plan.cells)), others))
    for cell in different([cell for cell in plan.cells if cell.tuned]):
        known, objective = measured(tune.probe(cell)), cell.recipe["tuning"]["objective"]
        if known and objective not in known:
            raise asked.refused(objective, known, f"{plan.suite.place}: tune.objective: {cell.label}")


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
