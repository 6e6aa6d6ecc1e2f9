"""Cells: one method × data set × partition × seed each, every setting resolved, known by the hash of its recipe."""

import copy
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from fedbench import options, plugins, space
from fedbench.config import Suite, read_value
from fedbench.errors import InputError, unknown
from fedbench.settings import LACKS, Training
from fedbench.space import Tune
from fedbench.words import text

if TYPE_CHECKING:
    from fedbench.checkpoint import Checkpoint
    from fedbench.data import Arrays, DataSource
    from fedbench.engines import Engine
    from fedbench.engines.choice import EngineName
    from fedbench.federation import Outcome, Stop
    from fedbench.method import Method
    from fedbench.net import ModelFactory, Net
    from fedbench.newcomers import Newcomers
    from fedbench.partition import Partition, Partitioner
    from fedbench.samples import Samples
    from fedbench.setups import Setup

PROTOCOL = 1
"""Raised when the same recipe gives other numbers than before, so that old results are not taken for new ones."""

Scalar = str | int | float | bool | None

_AXES = ("dataset", "model", "partition", "training")
_NO_ROW_AXES = tuple(key for key in plugins.ROW_KEYS if key != "preset")


@final
@dataclass(frozen=True)
class Cell:
    """One run of one method.

    - `label`: its row in tables; not hashed, so the same work under two labels has one key.
    - `recipe`: plain JSON values, all that the numbers depend on: protocol, dataset {name, options, content},
      partition {name, options, seed, and content if read from a file}, models [{name, options, and the same}] (several:
      contiguous blocks of clients), training, method {name, options, revision}, seed, and the suite's `keep` if it
      has one.  A plugin in a file is named Class@<sha256 of the file>.  Where hyperparameters are to be chosen first,
      also tuning: a suite's `tune`, with `params` resolved to the `space` (see `fedbench.space`).
    - `specs`: such a name -> how the suite wrote it; not hashed.
    - `control`: whether its method is one that others are held against; not hashed.
    """

    suite: str
    label: str
    recipe: Mapping[str, Any]
    specs: Mapping[str, str] = field(default_factory=dict)
    control: bool = False

    @cached_property
    def key(self) -> str:
        """The first 16 hexadecimal digits of the recipe's sha256."""
        return _hash(self.recipe)

    @property
    def tuned(self) -> bool:
        """Whether hyperparameters are chosen before it is run; its recipe holds how, and not what comes out."""
        return "tuning" in self.recipe

    @cached_property
    def study_key(self) -> str:
        """The same of what the choice depends on: not the seed of the run, nor how many trials are taken."""
        recipe = {name: value for name, value in self.recipe.items() if name not in ("seed", "keep")}
        if "newcomers" in recipe:
            recipe["newcomers"] = recipe["newcomers"]["clients"]
        return _hash({**recipe, "tuning": {name: v for name, v in recipe["tuning"].items() if name != "trials"}})

    @cached_property
    def partition_key(self) -> str:
        """The same of what the partition depends on."""
        return _hash({name: self.recipe[name] for name in ("protocol", "dataset", "partition")})

    def facts(self) -> dict[str, Scalar]:
        """Return the cell's settings under flat names: for `--only`, tables, and MLflow.

        `method` is the label and `algorithm` the plugin; partition options and training settings stand under their own
        names (`n`, `rounds`, `optimizer.lr`), other options behind what they belong to (`method.mu`, `model.channels`:
        where mixed models differ, their values joined by "/").
        """
        recipe = self.recipe
        models = recipe["models"]
        facts: dict[str, Scalar] = {
            "method": self.label,
            "algorithm": recipe["method"]["name"],
            "dataset": recipe["dataset"]["name"],
            "model": models[0]["name"] if len(models) == 1 else "mixed",
            "partition": recipe["partition"]["name"],
            "partition_seed": recipe["partition"]["seed"],
            "seed": recipe["seed"],
        }
        facts |= _flat(recipe["partition"]["options"])
        facts |= _flat(recipe["training"])
        facts |= _flat(recipe["method"]["options"], "method.")
        facts |= _flat(recipe["dataset"]["options"], "dataset.")
        columns = [_flat(model["options"], "model.") for model in models]
        for name in dict.fromkeys(itertools.chain(*columns)):
            values = [column.get(name) for column in columns]
            same = all(value == values[0] for value in values)
            facts[name] = values[0] if same else "/".join(map(text, values))
        if self.tuned:
            facts |= {fact_name(place): TUNED for place in recipe["tuning"]["space"]}
            facts |= _flat({name: v for name, v in recipe["tuning"].items() if name != "space"}, "tuning.")
        if "newcomers" in recipe:
            facts |= _flat(recipe["newcomers"], "newcomers.")
        if "trial" in recipe:
            facts |= _flat(recipe["trial"])
        return facts


TUNED = "tuned"
"""Stands among a cell's facts for a value that is chosen before it is run."""


def fact_name(place: str) -> str:
    """Return the name of the fact that is a setting's value, given its place in a recipe."""
    return place.removeprefix("training.")


def chosen_facts(provenance: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return what stands in the place of `TUNED` once a cell has been run, given how that was made."""
    values = provenance.get("chosen", {}).get("values", {})
    return {fact_name(place): value for place, value in values.items()}


def expand(suite: Suite, fingerprint: Callable[[Mapping[str, Any]], str]) -> list[Cell]:
    """Return all cells of a suite, the rows of one comparison next to each other.

    `fingerprint` gives the content hash of a data set {name, options}; see `fingerprints`.  InputError names the place
    in the suite for a plugin or an option that is wrong, and says so if there are no cells.
    """
    cells: dict[tuple[str, str], Cell] = {}
    maker = _Maker(suite, fingerprint)
    for where, part in suite.parts():
        if not part["methods"]:
            raise InputError(f"{where}: no cells, since `methods` names none")
        for path in part.get("grid", {}):
            if path.partition(".")[0] not in _AXES:
                raise InputError(
                    f"{where}: grid: cannot vary '{path}', only {', '.join(_AXES)} and their options (partition.n); "
                    "hyperparameters are varied in a row's own grid"
                )
        for point in _points(part):
            for cell in maker.cells(point, where, tuple(part.get("grid", {}))):
                # Two experiments may ask for the same cell: it is one.
                cells.setdefault((cell.label, cell.key), cell)
        maker.check_tuned(part, where)
    return list(cells.values())


NO_DATA = "no data"
"""Content of a data set whose files are not there, where that is no error; the keys of its cells mean nothing."""


def fingerprints(base: Path, root: Path, fetch: bool = True) -> Callable[[Mapping[str, Any]], str]:
    """Return the `fingerprint` that `expand` wants, for data under `root` and plugin paths from `base`.

    Files that are missing are fetched; or else, with `fetch` false, the content is `NO_DATA`.
    """

    def fingerprint(dataset: Mapping[str, Any]) -> str:
        from fedbench import data

        found: DataSource = plugins.build("datasets", dataset["name"], dataset["options"], base, "dataset")
        if not fetch and not all(file.is_file() for file in found.files(root)):
            return NO_DATA
        return data.fingerprint(found, root)

    return fingerprint


def select(cells: Sequence[Cell], only: str) -> list[Cell]:
    """Return the cells of which all the facts in "method=fedproto,n=3" are true.

    A fact that comes more than once may have any of its values; `lam` is short for `method.lam`, and a row's label
    also means what its grid makes of it.  InputError if there is no such fact, or no such cell.
    """
    facts = [cell.facts() for cell in cells]
    wanted: dict[str, list[str]] = {}
    for item in only.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise InputError(f"--only {only}: write fact=value, as in method=fedproto,n=3")
        wanted.setdefault(_fact_name(name, facts, only), []).append(value)
    for name, values in wanted.items():
        for value in values:
            if not any(_is(name, row, value) for row in facts):
                there = dict.fromkeys(text(row[name]) for row in facts if name in row)
                raise InputError(f"--only {only}: {unknown(name, value, there)}")
    chosen = [
        cell
        for cell, row in zip(cells, facts, strict=True)
        if all(any(_is(name, row, value) for value in values) for name, values in wanted.items())
    ]
    if not chosen:
        raise InputError(f"--only {only}: no cell has all of this at once")
    return chosen


def run_cell(
    cell: Cell,
    arrays: "Arrays",
    partition: "Partition",
    *,
    device: str = "cpu",
    engine: "EngineName | Engine" = "auto",
    threads: int = 1,
    base: Path | None = None,
    on_round: Callable[[int, int], None] | None = None,
    stop: "Stop | None" = None,
    checkpoint: "Checkpoint | None" = None,
) -> "Outcome":
    """Train and evaluate one cell; `on_round` is called with the rounds done and the rounds there are.

    A trial has no test samples, also not among its arrays; `stop` may end it early.  A `checkpoint` is what it goes on
    from, and where it saves its progress.  InputError if a plugin's file is no longer what the recipe says, or model,
    data and method do not fit.
    """
    from fedbench import federation

    if "trial" in cell.recipe:
        arrays = replace(arrays, x_test=arrays.x_test[:0], y_test=arrays.y_test[:0], client_test=None)
    method, models, training = parts(cell, base)
    return federation.run(
        method,
        models,
        arrays,
        partition,
        training,
        seed=cell.recipe["seed"],
        device=device,
        engine=engine,
        threads=threads,
        on_round=on_round,
        stop=stop,
        keep=cell.recipe.get("keep", ()),
        newcomers=newcomers_of(cell, partition),
        checkpoint=checkpoint,
    )


def newcomers_of(cell: Cell, partition: "Partition") -> "Newcomers":
    """Return a cell's newcomers; InputError if there are no such clients."""
    from fedbench import newcomers

    if "newcomers" not in cell.recipe:
        return newcomers.NOBODY
    return newcomers.choose(**cell.recipe["newcomers"], total=partition.clients, seed=partition.card["seed"])


def setup(cell: Cell, data: "Samples", base: Path | None = None) -> "Setup":
    """Return a cell's federation before its first round; `data` may be what one party has of the samples."""
    from fedbench import setups

    method, models, training = parts(cell, base)
    return setups.make_setup(method, models, data, training, cell.recipe["seed"])


def parts(cell: Cell, base: Path | None) -> "tuple[Method, list[ModelFactory], Training]":
    """Return a cell's method, models and training; InputError if a plugin's file is no longer what the recipe says."""
    method = _build("methods", cell, cell.recipe["method"], base)
    models = [_build("models", cell, model, base) for model in cell.recipe["models"]]
    return method, models, options.make(Training, cell.recipe["training"], "training")


def copy_files(cells: Iterable[Cell], base: Path, folder: Path) -> Path:
    """Copy the files that cells name relative to `base` into a folder; return what stands for `base` in it, relatively.

    That is what their methods and models are in, and what those read.  Other paths mean the same on every machine.
    """
    base = Path(os.path.abspath(base))
    files = {Path(os.path.normpath(base / file)) for cell in cells for file in _files(cell, base)}
    above = Path(os.path.commonpath([base, *(file.parent for file in files)]))
    place = Path("files") / base.relative_to(above)
    (folder / place).mkdir(parents=True)
    (folder / place / ".keep").touch()  # Ray leaves out empty folders
    for file in files:
        target = folder / "files" / file.relative_to(above)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return place


def _files(cell: Cell, base: Path) -> Iterator[Path]:
    used: list[tuple[plugins.Kind, Mapping[str, Any]]] = [("methods", cell.recipe["method"])]
    used += [("models", model) for model in cell.recipe["models"]]
    for kind, recipe in used:
        spec, given = cell.specs.get(recipe["name"], recipe["name"]), recipe["options"]
        found, _ = plugins.located(kind, spec, given, base)
        names = [given[name] for name, value in found.items() if value != given[name]]
        names += [spec.rpartition(":")[0]] if ".py:" in spec else []
        yield from (Path(name) for name in names if not Path(name).expanduser().is_absolute())


def settle(cell: Cell, values: space.Values) -> Cell:
    """Return the cell that a tuned one comes to, once its values are chosen."""
    recipe = {name: value for name, value in cell.recipe.items() if name != "tuning"}
    return replace(cell, recipe=space.put(recipe, values))


def trial(cell: Cell, number: int, values: space.Values) -> Cell:
    """Return a trial of a tuned cell's study: a cell on the same clients, without their test samples."""
    tuning = cell.recipe["tuning"]
    recipe = {
        **settle(cell, values).recipe,
        "partition": {**cell.recipe["partition"], "tuning": {"validation": tuning["validation"]}},
        "trial": {"study": cell.study_key, "trial": number, "objective": tuning["objective"]},
        "seed": tuning["seed"],
    }
    recipe.pop("keep", None)  # it is of test samples
    if "newcomers" in recipe:  # these take no part in choosing either
        recipe["newcomers"] = {**recipe["newcomers"], "epochs": []}
    return replace(cell, recipe=recipe)


def kind(cell: Cell) -> str | None:
    """Return what two cells must have in common to be computed together, or None for a cell that must be alone.

    That is all but seeds, the method's numbers with a fraction, and the learning rate where it only scales steps.
    """
    recipe = copy.deepcopy(dict(cell.recipe))
    if len(recipe["models"]) > 1 or cell.tuned or "newcomers" in recipe:
        return None
    recipe.pop("trial", None)  # the partition is that of a trial too
    del recipe["seed"], recipe["partition"]["seed"]
    given = recipe["method"]["options"]
    recipe["method"]["options"] = {name: value for name, value in given.items() if not isinstance(value, float)}
    optimizer = recipe["training"]["optimizer"]
    if optimizer["name"] == "sgd" and not optimizer["weight_decay"] and not optimizer["weight_decay_bias"]:
        del optimizer["lr"]
    return _canonical(recipe)


def _mixes(name: str) -> bool:
    """Return whether a registered method takes mixed architectures; one that does not even import takes none."""
    with suppress(InputError):
        return bool(plugins.load("methods", name).mixed_models)
    return False


class Checker:
    """Finds out before anything runs whether the methods, models and data of cells fit each other."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._nets: dict[str, Net] = {}

    def check(self, cell: Cell, arrays: "Arrays", partition: "Partition") -> None:
        """Raise InputError if a cell cannot be trained: a shape, an architecture mix, an option that does not fit."""
        from fedbench import setups

        method = _build("methods", cell, cell.recipe["method"], self._base)
        training = options.make(Training, cell.recipe["training"], "training")
        try:
            nets, data = self._nets_and_sample(cell, training, arrays)
            setups.check(method, nets, training, [len(rows) for rows in partition.train], data)
            newcomers_of(cell, partition)
        except InputError as error:
            hint = ""
            if len(cell.recipe["models"]) > 1 and not method.mixed_models:
                able = [name for name in plugins.names("methods") if _mixes(name)]
                hint = f"; methods that can: {', '.join(able)}"
            raise InputError(f"{cell.label} on {cell.recipe['dataset']['name']}: {error}{hint}") from error
        except Exception:  # a fault in somebody's plugin: its cells will fail, the others run
            return

    def metrics(self, cell: Cell, arrays: "Arrays", partition: "Partition") -> set[str]:
        """Return the names of what a cell measures; nothing if its method fails, as the cell then will."""
        from fedbench import setups

        splits = [split for split in ("test", "validation") if any(map(len, getattr(partition, split)))]
        try:
            method = _build("methods", cell, cell.recipe["method"], self._base)
            training = options.make(Training, cell.recipe["training"], "training")
            nets, data = self._nets_and_sample(cell, training, arrays)
            names = setups.measured(method, nets, training, data, partition.clients, splits)
        except Exception:
            return set()
        kept = (
            "embeddings" in cell.recipe.get("keep", ()) and "test" in splits and len({net.width for net in nets}) == 1
        )
        return names | {"test/silhouette/class", "test/silhouette/client"} if kept else names

    def _nets_and_sample(self, cell: Cell, training: Training, arrays: "Arrays") -> "tuple[list[Net], Samples]":
        """Return a cell's models, and the first sample of its data."""
        import torch

        from fedbench import samples

        nets = [self._net(cell, model, training, arrays) for model in cell.recipe["models"]]
        return nets, samples.first(arrays, getattr(torch, training.dtype), nets[0].device)

    def _net(self, cell: Cell, model: Mapping[str, Any], training: Training, arrays: "Arrays") -> "Net":
        from fedbench import setups

        key = _canonical([model, arrays.shape, arrays.classes, training.dtype, training.batch_norm])
        if key not in self._nets:
            factory = _build("models", cell, model, self._base)
            self._nets[key] = setups.make_net(factory, arrays.shape, arrays.classes, training)
        return self._nets[key]


def source(cell: Cell, base: Path | None = None) -> "DataSource":
    """Return a cell's data set, not yet loaded."""
    made: DataSource = _build("datasets", cell, cell.recipe["dataset"], base)
    return made


def draw_partition(cell: Cell, arrays: "Arrays", base: Path | None = None) -> "Partition":
    """Draw a cell's partition; InputError if the data do not suffice."""
    from fedbench import partition

    recipe = cell.recipe["partition"]
    partitioner: Partitioner = options.make(partition.PARTITIONERS[recipe["name"]], recipe["options"], "partition")
    if "tuning" in recipe:
        fraction = recipe["tuning"]["validation"]
        return partition.draw_for_tuning(partitioner, arrays, recipe["seed"], fraction, base or Path())
    return partition.draw(partitioner, arrays, recipe["seed"], base or Path())


@final
class _Maker:
    """Makes the cells of one point of a suite; what several points share is resolved once."""

    def __init__(self, suite: Suite, fingerprint: Callable[[Mapping[str, Any]], str]) -> None:
        self.suite = suite
        self.fingerprint = fingerprint
        self.specs: dict[str, str] = {}
        self.contents: dict[str, str] = {}
        self.tunable: set[str] = set()
        self.found: set[str] = set()
        self.controls: set[str] = set()

    def cells(self, part: Mapping[str, Any], where: str, grid: Sequence[str] = ()) -> Iterator[Cell]:
        """Yield the cells of one point of an experiment's grid, of which the names of the axes are given."""
        shared = {"protocol": PROTOCOL, "dataset": self._dataset(part, where)}
        partition = self._partition(part, where)
        rows = [made for label, row in part["methods"].items() for made in self._rows(label, row, part, where, grid)]
        partition_seeds = part.get("partition_seeds") or self.suite.partition_seeds
        for partition_seed, seed in itertools.product(partition_seeds, self.suite.seeds):
            for label, row in rows:
                recipe = {**shared, "partition": {**partition, "seed": partition_seed}, **row, "seed": seed}
                if self.suite.keep:
                    recipe["keep"] = self.suite.keep
                if self.suite.newcomers:
                    recipe["newcomers"] = self.suite.newcomers.model_dump()
                used = [recipe["dataset"], recipe["method"], *recipe["models"]]
                specs = {one["name"]: self.specs[one["name"]] for one in used if one["name"] in self.specs}
                control = recipe["method"]["name"] in self.controls
                yield Cell(self.suite.name, label, recipe, specs, control)

    def check_tuned(self, part: Mapping[str, Any], where: str) -> None:
        """Raise InputError if `tune.params` names something that no row of the experiment has."""
        for name in (part.get("tune") or {}).get("params", {}):
            if name in self.found:
                continue
            if name.removeprefix("training.").removeprefix("optimizer.") in itertools.chain(*LACKS.values()):
                raise InputError(f"{where}: tune.params.{name}: is a setting that no row's optimiser has; leave it out")
            raise InputError(f"{where}: tune.params: {unknown('setting', name, self.tunable)}")

    def _plugin(self, kind: plugins.Kind, spec: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        cls = plugins.load(kind, spec, self.suite.base, where)
        resolved = options.resolve(cls, given, where)
        name = plugins.identity(spec, self.suite.base)
        if name != spec:
            self.specs[name] = spec
        recipe = {"name": name, "options": resolved}
        content = plugins.located(kind, spec, resolved, self.suite.base, where)[1]
        return recipe if content is None else {**recipe, "content": content}

    def _dataset(self, part: Mapping[str, Any], where: str) -> dict[str, Any]:
        spec, given = _choice(part, "dataset", where)
        recipe = self._plugin("datasets", spec, given, f"{where}: dataset")
        asked = {"name": spec, "options": recipe["options"]}
        key = _canonical(asked)
        if key not in self.contents:
            self.contents[key] = self.fingerprint(asked)
        return {**recipe, "content": self.contents[key]}

    def _partition(self, part: Mapping[str, Any], where: str) -> dict[str, Any]:
        from fedbench.partition import PARTITIONERS, content

        name, given = _choice(part, "partition", where)
        if name not in PARTITIONERS:
            raise InputError(f"{where}: partition: {unknown('partition', name, PARTITIONERS)}")
        kind, place = PARTITIONERS[name], f"{where}: partition"
        recipe = {"name": name, "options": options.resolve(kind, given, place)}
        file = content(options.make(kind, given, place), self.suite.base)
        return recipe if file is None else {**recipe, "content": file}

    def _rows(
        self, label: str, row: Mapping[str, Any], part: Mapping[str, Any], where: str, grid: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        place = f"{where}: methods.{label}"
        for path in row.get("grid", {}):
            if path in _NO_ROW_AXES or ("." in path and not path.startswith("training.")):
                raise InputError(
                    f"{place}.grid: cannot vary '{path}', only hyperparameters, preset and training.<setting>"
                )
        for point in _points({"training": {}, **row}):
            varied = " ".join(f"{path.rpartition('.')[2]}={text(_at(point, path))}" for path in row.get("grid", {}))
            training = options.merge(part.get("training", {}), point["training"])
            recipe = {
                "models": self._models(point, part, where),
                "training": options.resolve(Training, training, f"{place}.training"),
                "method": self._method(label, point, place),
            }
            if part.get("tune") is not None:
                axes = [axis if axis.startswith("training.") else f"method.{axis}" for axis in row.get("grid", {})]
                recipe = self._tuned(Tune.model_validate(part["tune"]), recipe, [*grid, *axes], place)
            yield f"{label} ({varied})" if varied else label, recipe

    def _tuned(self, tune: Tune, row: Mapping[str, Any], varied: Sequence[str], place: str) -> dict[str, Any]:
        """Return a row's part of the recipe with how its values are chosen."""
        name = row["method"]["name"]
        method = plugins.load("methods", self.specs.get(name, name), self.suite.base, place)
        known = space.places(tune, row, varied)
        self.tunable.update(map(space.short, known), ["lr"])
        self.found.update(name for name in tune.params if space.find(name, known))
        fixed, searched = space.span(tune, method, row, varied, place)
        how = tune.model_dump(exclude={"params"})
        return {**fixed, "tuning": {**how, "trials": space.trials(tune, searched), "space": searched}}

    def _models(self, row: Mapping[str, Any], part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        if row.get("models", "single") == "single":
            return [self._plugin("models", *_choice(part, "model", where), f"{where}: model")]
        mixed = part.get("mixed", [])
        if not mixed:
            raise InputError(f"{where}: mixed: is missing, though a row says `models: mixed`")
        made = []
        for number, model in enumerate(mixed):
            place = f"{where}: mixed.{number}"
            name, options = _choice({"model": _over_model(model, part)}, "model", place)
            made.append(self._plugin("models", name, options, place))
        return made

    def _method(self, label: str, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        spec = row.get("method") or label
        cls = plugins.load("methods", spec, self.suite.base, place)
        given = {name: value for name, value in row.items() if name not in plugins.ROW_KEYS}
        preset = row.get("preset")
        if preset is not None:
            if preset not in cls.presets:
                raise InputError(f"{place}.preset: {unknown('preset', str(preset), cls.presets)}")
            given = {**cls.presets[preset], **given}
        recipe = self._plugin("methods", spec, given, place)
        if cls.control:
            self.controls.add(recipe["name"])
        return {**recipe, "revision": cls.revision}


def _points(part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a suite's part or row once for every combination of values in its grid, which is left out."""
    grid: Mapping[str, list[Any]] = part.get("grid", {})
    for values in itertools.product(*grid.values()):
        point = copy.deepcopy({name: value for name, value in part.items() if name != "grid"})
        for path, value in zip(grid, values, strict=True):
            _put(point, path, value)
        yield point


def _put(part: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        if isinstance(part.get(name), str):  # a choice by its name alone
            part[name] = {"name": part[name]}
        part = part.setdefault(name, {})
    part[last] = value


def _at(part: Any, path: str) -> Any:
    for name in path.split("."):
        part = part[name]
    return part


def _choice(part: Mapping[str, Any], key: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a data set, model or partition."""
    choice = part.get(key)
    if isinstance(choice, str):  # a grid's value
        return choice, {}
    if not choice or not isinstance(choice.get("name"), str):
        raise InputError(f"{where}: {key}: is missing" + (" its name" if choice else ""))
    return choice["name"], {name: value for name, value in choice.items() if name != "name"}


def _over_model(mixed: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of the mixed models with what it leaves out taken from `model`, unless that has another name."""
    model = part.get("model") or {}
    if isinstance(model, str):  # a grid's value
        model = {"name": model}
    return {**model, **mixed} if mixed.get("name", model.get("name")) == model.get("name") else dict(mixed)


def _build(kind: plugins.Kind, cell: Cell, recipe: Mapping[str, Any], base: Path | None) -> Any:
    name = recipe["name"]
    spec = cell.specs.get(name, name)
    if plugins.identity(spec, base) != name:
        raise InputError(f"{spec}: the file has changed since the cells were made; run the suite again")
    given = recipe["options"]
    if kind != "datasets":
        given, content = plugins.located(kind, spec, given, base, spec)
        if content != recipe.get("content"):
            raise InputError(f"{spec}: the file it reads has changed since the cells were made; run the suite again")
    return plugins.build(kind, spec, given, base, spec)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(value: Any) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _fact_name(name: str, facts: Sequence[Mapping[str, Scalar]], only: str) -> str:
    """Return the full name of a fact."""
    known = dict.fromkeys(itertools.chain(*facts))
    if name in known:
        return name
    meant = [full for full in known if full.endswith(f".{name}")]
    if len(meant) > 1:
        raise InputError(f"--only {only}: '{name}' may be {' or '.join(meant)}")
    if not meant:
        raise InputError(f"--only {only}: {unknown('fact', name, known)}")
    return meant[0]


def _is(name: str, facts: Mapping[str, Scalar], value: str) -> bool:
    """Return whether a fact has a value, written as in YAML."""
    if name not in facts:
        return False
    fact = facts[name]
    if value in (fact, text(fact)) or (name == "method" and str(fact).startswith(f"{value} (")):
        return True
    meant = read_value(value, "--only")
    return meant == fact and isinstance(meant, bool) == isinstance(fact, bool)
