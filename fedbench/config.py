"""The suite file: what is compared with what, in YAML, checked as it is read.

    name: quickstart                       # default: the file's name
    seeds: [0]                             # of runs (initial weights, batches); each with every partition seed
    partition_seeds: [1234]
    dataset: mnist_mini                    # or {name: mnist_mini, option: value}
    model: cnn_mnist
    mixed: [{channels: 18}, {channels: 22}]     # of the rows that say `models: mixed`; what they leave out is `model`'s
    partition: {name: nway_kshot, n: 3, k: 100, stdev: 2}
    training: {rounds: 10, optimizer: {lr: 0.01}}
    grid: {partition.n: [3, 4, 5]}         # every combination of values
    methods:                               # label -> row, or a list of names
      fedprox: {mu: 0.1}                   # hyperparameters stand beside the keys of `Row`
    metric: test/accuracy                  # of the report's table
    further_metrics: [test/accuracy/head]  # in a table beside it
    reference: published.csv               # published numbers to show beside them, see `fedbench.reference`
    newcomers: {clients: 4, epochs: 5}     # take no part, and are fine-tuned when training is over
    keep: [embeddings, confusion]          # at the end: embeddings of test samples; what they are taken for
    confusion_of: worst                    # the client whose confusion the report shows, or its number
    figure: {x: k, y: test/accuracy}       # of the report: metrics (or a list of them) against a fact that varies
    tune: {trials: 20, params: {lam: [0.1, 1]}}   # hyperparameters are chosen first, see `fedbench.space.Tune`
    experiments: [{dataset: mnist}]        # each is laid over what stands above

Here only what needs no plugin is checked; names and options are when the cells are made (`fedbench.cells.expand`).
"""

import copy
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from fedbench import options, plugins
from fedbench.errors import InputError, unknown
from fedbench.settings import MOST, Optimizer, Training, check_optimizer
from fedbench.space import Tune

SUITES = Path(__file__).with_name("suites")
"""The folder of the suites that come with fedbench."""

_TRAINING = tuple(field.name for field in fields(Training))


def _named(value: Any) -> Any:
    if not isinstance(value, (str, dict)):
        raise ValueError(f"{value!r} should be a name, or a mapping with a name and options")
    return {"name": value} if isinstance(value, str) else value


def _check_name(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("name", ""), str):
        raise ValueError("the name should be text")
    return value


def _check_folder(value: str) -> str:
    if not re.fullmatch(r"\w[\w .+-]*", value):
        raise ValueError(f"{value!r} should be letters, digits, spaces and any of . + - _, since it names a folder")
    return value


def _check_labels(value: dict[str, Any]) -> dict[str, Any]:
    for label in value:
        if not label.strip() or re.search(r"[,\n]", label):
            raise ValueError(f"label {label!r} is empty, or has a comma or a line break in it")
    return value


def _check_grid(value: dict[str, list[Any]]) -> dict[str, list[Any]]:
    for path, values in value.items():
        if not values:
            raise ValueError(f"{path} has no values")
        _refuse_twins(values, f"{path} has")
    return value


def _check_seeds(value: list[int]) -> list[int]:
    if not value:
        raise ValueError("is empty, so there is nothing to run")
    _refuse_twins(value, "has")
    return value


def _check_names(value: list[str]) -> list[str]:
    _refuse_twins([_label(name) for name in value], "has")
    return value


def _refuse_twins(values: Sequence[Any], what: str) -> None:
    for index, value in enumerate(values):
        # 1 and 1.0 are twins, 1 and true are not
        if any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values[:index]):
            raise ValueError(f"{what} {value!r} more than once")


def _full_rows(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} should be a list of names, or a mapping of labels to rows")
    return {label: {} if row is None else row for label, row in value.items()}


def _names_or_rows(value: Any) -> str:
    return "names" if isinstance(value, list) else "rows"


Choice = Annotated[dict[str, Any], BeforeValidator(_named), AfterValidator(_check_name)]
"""A name with options; in an experiment the name may be left to what stands above."""

Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], AfterValidator(_check_seeds)]
Grid = Annotated[dict[str, list[Any]], AfterValidator(_check_grid)]
Settings = dict[str, Any]
"""Some of the fields of `fedbench.settings.Training`."""


@final
class Row(BaseModel):
    """One row of the comparison: a method, its hyperparameters (beside these keys), and what is its own in training.

    - `method`: registered name, `./file.py:Class` or `package.module:Class`; by default the row's label.
    - `preset`: one of the method's published settings; hyperparameters in the row come on top.
    - `models`: the same model for every client, or the suite's `mixed` ones.
    - `training`: on top of the suite's.
    - `grid`: hyperparameter, `preset` or `training.<setting>` -> values; one row for every combination.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    method: str | None = None
    preset: str | None = None
    models: Literal["single", "mixed"] = "single"
    training: Settings = {}
    grid: Grid = {}

    @model_validator(mode="after")
    def _check_said_once(self) -> Self:
        said = self.model_dump(exclude_unset=True)
        for path in self.grid:
            if _has(said, path.split(".")):
                raise ValueError(f"{path} stands in the row and in its grid; leave out one of them")
        return self


Rows = Annotated[dict[str, Row], BeforeValidator(_full_rows), AfterValidator(_check_labels)]
Names = Annotated[list[str], AfterValidator(_check_names)]
Methods = Annotated[Annotated[Rows, Tag("rows")] | Annotated[Names, Tag("names")], Discriminator(_names_or_rows)]


class _Part(BaseModel):
    """What the whole suite and one of its experiments may say; abstract."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    dataset: Choice | None = None
    model: Choice | None = None
    mixed: list[Choice] = []
    partition: Choice | None = None
    training: Settings = {}
    grid: Grid = {}
    methods: Methods = {}
    tune: Tune | None = None


@final
class Experiment(_Part):
    """What one experiment says differently.

    Mappings are laid over the suite's; a data set, model, partition or method of another name starts from its own
    defaults, and `methods` as a list keeps only the rows of these labels.
    """

    partition_seeds: Seeds | None = None


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _several(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


def _check_counts(value: list[int]) -> list[int]:
    if not value or min(value) < 1 or max(value) > MOST:
        raise ValueError(f"{value} should be a whole number from 1 to {MOST}, or several")
    _refuse_twins(value, "has")
    return sorted(value)


def _check_newcomers(value: int | list[int]) -> int | list[int]:
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{value} should be 1 or more")
        return value
    if not value or min(value) < 0:
        raise ValueError(f"{value} should be how many, or numbers of clients from 0 on")
    _refuse_twins(value, "has")
    return sorted(value)


Counts = Annotated[
    list[int], BeforeValidator(_several, json_schema_input_type=int | list[int]), AfterValidator(_check_counts)
]


@final
class Newcomers(BaseModel):
    """Clients that take no part in training, and come when it is over.

    - `clients`: how many, drawn under the partition's seed; or their numbers.
    - `epochs`: after how many epochs of fine-tuning they are evaluated; several numbers are several fine-tunings.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    clients: Annotated[int | list[int], AfterValidator(_check_newcomers)]
    epochs: Counts = [5]


@final
class Axes(BaseModel):
    """What a figure of the report shows: metrics `y`, a figure each, against `x`, a fact of the cells."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    x: str
    y: Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str]), Field(min_length=1)]


@final
class Suite(_Part):
    """A whole suite file, valid as far as it can be without its plugins."""

    name: Annotated[str, AfterValidator(_check_folder)]
    description: str = ""
    seeds: Seeds = [0]
    partition_seeds: Seeds = [1234]
    metric: str = "test/accuracy"
    further_metrics: Annotated[list[str], AfterValidator(_check_names)] = []
    reference: str = ""
    figure: Axes | None = None
    keep: list[Literal["embeddings", "confusion"]] = []
    newcomers: Newcomers | None = None
    confusion_of: Literal["worst"] | Annotated[int, Field(ge=0)] = "worst"
    experiments: list[Experiment] = []

    _file: str = PrivateAttr("suite")
    _sets: tuple[str, ...] = PrivateAttr(())

    @property
    def file(self) -> str:
        """The file's path as the user wrote it, for messages."""
        return self._file

    @property
    def place(self) -> str:
        """The file and what the command line set on top of it, for messages."""
        return " ".join([self._file, *(["with"] if self._sets else []), *(f"--set {text}" for text in self._sets)])

    @property
    def base(self) -> Path:
        """The folder that paths of plugins in the suite start from."""
        return Path(self._file).parent

    def parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield for each experiment its place, for messages, and its keys laid over the suite's, as plain values."""
        top = self.model_dump(exclude_unset=True)
        experiments = top.pop("experiments", None)
        if not experiments:
            yield self.place, _lay({}, top)
        for number, over in enumerate(experiments or []):
            where = f"{self.place}: experiments.{number}"
            laid = _lay(_lay({}, top), over)
            _refuse_hidden(over, laid, where)
            rows = over.get("methods", {})
            for label, row in rows.items() if isinstance(rows, dict) else ():
                _refuse_hidden(row, laid["methods"][label], f"{where}.methods.{label}")
            yield where, laid


def load(suite: str | Path) -> Suite:
    """Return the suite in a file, or one that comes with fedbench, by its name.

    InputError names the file and the place in it: line and column, or the dotted key.
    """
    path = Path(suite)
    if not path.is_file():
        shipped = shipped_suites()
        if str(suite) not in shipped:
            if path.is_dir() and str(suite):
                raise InputError(f"{path}: is a folder; want a suite's file or name (or, to report, a results.csv)")
            if path.suffix in (".yaml", ".yml") or path.name != str(suite):
                hint = f"; the suite that comes with fedbench is called {path.stem}" if path.stem in shipped else ""
                raise InputError(f"{path}: no such file{hint}")
            raise unknown("suite", str(suite), shipped)
        path = shipped[str(suite)]
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not text (UTF-8); want a suite in YAML") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    raw = read_value(text, str(path))
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a suite is a mapping of keys to values, such as `methods: [local, fedavg]`")
    if "name" not in raw:
        try:
            _check_folder(path.stem)
        except ValueError as error:
            raise InputError(f"{path}: the suite is called as the file unless it has a `name`, but {error}") from None
    return _suite({"name": path.stem, **raw}, str(path), str(path))


def restore(plain: Mapping[str, Any], file: str) -> Suite:
    """Return the suite of which these are the values that it sets; `file` is where they come from, for messages."""
    return _suite(plain, file, file)


def shipped_suites() -> dict[str, Path]:
    """Return the suites that come with fedbench: name -> file."""
    return {path.stem: path for path in sorted(SUITES.glob("*.yaml"))}


def override(suite: Suite, sets: Sequence[str] = (), seeds: str | None = None) -> Suite:
    """Return the suite with other values: `sets` are "dotted.key=value" (value as YAML), `seeds` is "1,2,3".

    A setting of the training needs no `training.` in front.  The value holds everywhere: also where an experiment or a
    row said something else, and in place of the key's axis in a grid.  InputError names what was asked for.
    """
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text}: write key=value, as in rounds=5")
        where = f"--set {text}"
        data = suite.model_dump(exclude_unset=True)
        _set(data, key.strip(), read_value(value, where), where)
        suite = _suite(data, suite.file, where)
    if seeds is not None:
        where = f"--seeds {seeds}"
        data = suite.model_dump(exclude_unset=True) | {"seeds": read_value(f"[{seeds}]", where)}
        suite = _suite(data, suite.file, where)
    suite._sets = tuple(sets)
    return suite


def tuned(suite: Suite, trials: int | None = None) -> Suite:
    """Return the suite with tuning, all of it if no part says `tune`, and with another number of trials."""
    data = suite.model_dump(exclude_unset=True)
    parts = [part for part in [data, *data.get("experiments", [])] if part.get("tune") is not None]
    if not parts:
        data["tune"] = {}
        parts = [data]
    for part in parts if trials is not None else ():
        part["tune"]["trials"] = trials
    made = _suite(data, suite.file, suite.place if trials is None else f"--trials {trials}")
    made._sets = suite._sets
    return made


def schema() -> dict[str, Any]:
    """Return the JSON Schema of suite files, for editors."""
    from fedbench.partition import PARTITIONERS

    made = Suite.model_json_schema()
    made["required"].remove("name")  # its default is the file's
    training = copy.deepcopy(options.schema(Training))
    made["$defs"] |= {**training.pop("$defs"), "Training": training}
    for name in ("Training", "Optimizer"):
        made["$defs"][name]["additionalProperties"] = False
    for part in (made, made["$defs"]["Experiment"], made["$defs"]["Row"]):
        part["properties"]["training"] = {"$ref": "#/$defs/Training"}
    for part in (made, made["$defs"]["Experiment"]):
        part["properties"] |= {
            "dataset": _choice_schema(plugins.names("datasets")),
            "model": _choice_schema(plugins.names("models")),
            "mixed": {"type": "array", "items": _choice_schema(plugins.names("models"))},
            "partition": _choice_schema([*PARTITIONERS]),
        }
    return made


def _choice_schema(names: Sequence[str]) -> dict[str, Any]:
    name = {"type": "string", "examples": list(names)}
    return {"anyOf": [name, {"type": "object", "properties": {"name": name}}]}


def _suite(data: Mapping[str, Any], file: str, where: str) -> Suite:
    """Return the checked suite; messages begin with `where`."""
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        raise options.explain(error, data, f"{where}: ", _keys_at, _elsewhere) from None
    for place, settings in _trainings(suite, f"{where}: "):
        options.resolve(Training, settings, place)
    for place, settings, name in _optimizers(suite, f"{where}: "):
        check_optimizer(name, settings, place)
    suite._file = file
    return suite


def _keys_at(path: tuple[str, ...]) -> Sequence[str]:
    """Return the keys that a suite may have at a place where unknown ones are refused."""
    if path[-1:] == ("tune",):
        return tuple(Tune.model_fields)
    if path[-1:] == ("newcomers",):
        return tuple(Newcomers.model_fields)
    return tuple(Experiment.model_fields if path else Suite.model_fields)


def _elsewhere(path: tuple[str, ...]) -> dict[str, str]:
    """Return the keys that a suite has at other places, in words where."""
    from fedbench.partition import PARTITIONERS

    found: dict[str, str] = {}
    for method in reversed(plugins.names("methods")):
        with suppress(InputError):  # one that cannot be imported
            kind: type = plugins.load("methods", method)
            found |= dict.fromkeys(options.option_names(kind), f"in the row of a method, such as {method}")
    found |= dict.fromkeys(Row.model_fields, "in the row of a method")
    for partitioner in PARTITIONERS.values():
        found |= options.places(partitioner, "partition")
    found |= dict.fromkeys(Tune.model_fields, "in tune")
    return found | options.places(Training, "training") | dict.fromkeys(Suite.model_fields, "at the top of the suite")


def _trainings(part: _Part, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield f"{place}training", part.training
    for label, row in part.methods.items() if isinstance(part.methods, dict) else ():
        yield f"{place}methods.{label}.training", row.training
    for number, experiment in enumerate(part.experiments if isinstance(part, Suite) else ()):
        yield from _trainings(experiment, f"{place}experiments.{number}.")


def _optimizers(part: _Part | Row, place: str, above: str = Optimizer.name) -> Iterator[tuple[str, Settings, str]]:
    """Yield what stands about the optimiser in a part and in its rows, with the place and the name that holds there."""
    given: Settings = part.training.get("optimizer", {})
    name = str(given.get("name", above))
    yield f"{place}training.optimizer", given, name
    for value in part.grid.get("training.optimizer", []):
        if isinstance(value, dict):
            yield f"{place}grid.training.optimizer", value, str(value.get("name", Optimizer.name))
    if isinstance(part, Row):
        return
    for label, row in part.methods.items() if isinstance(part.methods, dict) else ():
        yield from _optimizers(row, f"{place}methods.{label}.", name)
    for number, experiment in enumerate(part.experiments if isinstance(part, Suite) else ()):
        yield from _optimizers(experiment, f"{place}experiments.{number}.", name)


# --- experiments over suites


def _lay(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return one part of a suite laid over another; `methods` comes out as rows."""
    merged = options.merge(under, {key: value for key, value in over.items() if key != "methods"})
    for key in ("dataset", "model", "partition"):
        before, after = under.get(key), over.get(key)
        if before and after and after.get("name", before.get("name")) != before.get("name"):
            merged[key] = after
    rows = under.get("methods", {})
    said = over.get("methods", {})
    if isinstance(said, list):
        merged["methods"] = {label: rows.get(label, {"method": name}) for name in said for label in [_label(name)]}
    else:
        merged["methods"] = rows | {label: _lay_row(label, rows.get(label, {}), row) for label, row in said.items()}
    return merged


def _refuse_hidden(said: Mapping[str, Any], laid: Mapping[str, Any], where: str) -> None:
    """Raise InputError for a value that an experiment says and that, laid over the suite, is varied by its grid."""
    for path in laid.get("grid", {}):
        if path not in said.get("grid", {}) and _has(said, path.split(".")):
            raise InputError(f"{where}.{path}: is varied by the suite's grid; want grid: {{{path}: [...]}} here")


def _lay_row(label: str, under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    other = over.get("method") not in (None, under.get("method", label))
    return over if other else options.merge(under, over)


def _label(name: str) -> str:
    """Return the label of a method in a list: of one in a file, its class."""
    return name.rpartition(":")[2]


# --- other values


def _set(data: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Put a value into a suite's plain data and wherever else they say something about the same key."""
    place = _place(data, key, where)
    if place[0] == "methods" and len(place) > 1:
        _write_out(data)
    for part in [data, *data.get("experiments", [])]:
        rows: Any = part.get("methods", {})
        said = [(part, place)]
        if place[0] == "training" and isinstance(rows, dict):
            said += [(row, place) for row in rows.values()]
        elif place[0] == "methods" and len(place) > 2 and isinstance(rows, dict) and place[1] in rows:
            said += [(rows[place[1]], place[2:])]
        if _has(part, place[:2]) if place[0] == "methods" else part is data:
            _put(part, place, value)
        for holder, path in said:
            if _has(holder, path):
                _put(holder, path, value)
            _drop_axes(holder, path, where)
        if place[0] == "grid" and part is not data:
            for axis in place[1:] or (value if isinstance(value, dict) else ()):
                _drop(part, axis.split("."))


def _write_out(data: dict[str, Any]) -> None:
    """Make rows of names in a list, unless they stand for rows of the suite above them."""
    parts = [data, *(() if data.get("methods") else data.get("experiments", []))]
    for part in parts:
        if isinstance(part.get("methods"), list):
            part["methods"] = {_label(name): {"method": name} for name in part["methods"]}


def _place(data: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return the path that a dotted key means."""
    head, _, rest = key.partition(".")
    if head in _TRAINING:
        return ("training", *key.split("."))
    known = [name for name in Suite.model_fields if name != "experiments"]
    if head not in known:
        rows = {name: f"in methods.{label}" for label, row in _rows(data) for name in row}
        elsewhere = {**_elsewhere(()), **rows, "experiments": "in the file alone"}
        raise InputError(f"{where}: {unknown('key', head, [*known, *_TRAINING], elsewhere)}")
    if head != "methods" or not rest:
        return _split(key)
    labels = [label for label, _ in _rows(data)]
    # labels may have dots in them
    label = next((label for label in labels if f"{rest}.".startswith(f"{label}.")), None)
    if label is None:
        raise InputError(f"{where}: {unknown('row', rest.partition('.')[0], labels)}")
    return (head, label, *_split(rest[len(label) + 1 :]))


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label and the content of each row in a suite's plain data, however they are written."""
    for part in [data, *data.get("experiments", [])]:
        rows: Any = part.get("methods", {})
        yield from rows.items() if isinstance(rows, dict) else ((_label(name), {}) for name in rows)


def _split(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key; the keys of a grid have dots in them."""
    head, _, rest = key.partition(".")
    if not rest:
        return (head,) if head else ()
    return (head, rest) if head == "grid" else (head, *_split(rest))


def _has(data: Any, place: Sequence[str]) -> bool:
    for part in place:
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def _put(data: dict[str, Any], place: Sequence[str], value: Any) -> None:
    for part in place[:-1]:
        inner = data.get(part)
        data[part] = data = {} if not isinstance(inner, dict) else inner
    data[place[-1]] = value


def _drop(data: dict[str, Any], place: Sequence[str]) -> None:
    if _has(data, place):
        for part in place[:-1]:
            data = data[part]
        del data[place[-1]]


def _drop_axes(part: dict[str, Any], place: Sequence[str], where: str) -> None:
    """Take the axes that vary what was set out of a part's grid."""
    key = ".".join(place)
    for axis in list(part.get("grid", {})):
        if f"{axis}.".startswith(f"{key}."):
            del part["grid"][axis]
        elif key.startswith(f"{axis}."):
            raise InputError(f"{where}: the suite's grid varies '{axis}' as a whole; set that")


# --- YAML


@final
class _Loader(yaml.SafeLoader):
    """Safe YAML with the plain values of JSON and no surprises.

    Unlike YAML 1.1, 1e-3 is a number, 010 is ten, 12:30 and 2024-01-01 are text; a key may not come twice.
    """


def _number(kind: type[int] | type[float]) -> Any:
    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
        text = str(loader.construct_scalar(node))
        try:
            return kind(re.sub(r"\.(inf|nan)$", r"\1", text, flags=re.IGNORECASE))
        except ValueError:
            raise yaml.constructor.ConstructorError(None, None, f"'{text}' is not a number", node.start_mark) from None

    return construct


_Loader.yaml_implicit_resolvers = {}
_Loader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "str", "seq", "map")
}
_DIGITS = r"[0-9](?:_?[0-9])*"
_Loader.add_constructor("tag:yaml.org,2002:int", _number(int))
_Loader.add_constructor("tag:yaml.org,2002:float", _number(float))
for _tag, _pattern, _first in (
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"(?:yes|no|true|false|on|off)", "yYnNtTfFoO"),
    ("int", rf"[-+]?{_DIGITS}", "-+0123456789"),
    (
        "float",
        rf"[-+]?(?:(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?|\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
        "-+.0123456789",
    ),
):
    _flags = re.IGNORECASE if _tag == "bool" else 0
    _starts = [first.replace("\0", "") for first in _first]
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$", _flags), _starts)


def read_value(text: str, where: str) -> Any:
    """Return the plain values in a YAML text; InputError behind `where`, with line and column."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, (), {})
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = " ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{where}{place}: {said}") from None
    except yaml.YAMLError as error:  # characters that no YAML may have
        raise InputError(f"{where}: {options.one_line(error)}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None


def read_options(items: Sequence[str], example: str) -> dict[str, Any]:
    """Return options written as `key=value` on the command line, the value as in YAML; InputError shows the example."""
    options = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"--set {item}: write key=value, as in {example}")
        options[key] = read_value(value, f"--set {key}")
    return options


_MOST_VALUES = 100_000
"""That a suite may have, aliases counted as what they stand for: a few lines of them can make billions."""


def _check_node(node: yaml.Node, above: tuple[yaml.Node, ...], known: dict[yaml.Node, int]) -> int:
    """Return how many values a node stands for; `known` has those looked at before.

    Raises for too many, for a key that comes twice in a mapping or is no text, and for an alias to something around it.
    """
    if node in above:
        raise yaml.constructor.ConstructorError(None, None, "refers to itself", node.start_mark)
    if node in known:
        return known[node]
    above = (*above, node)
    count = 1
    if isinstance(node, yaml.SequenceNode):
        count += sum(_check_node(child, above, known) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, child in node.value:
            text = key.value if isinstance(key, yaml.ScalarNode) else None
            if text is None or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key must be text, so put {text or 'it'} in quotes", key.start_mark
                )
            if text in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{text}' comes twice", key.start_mark)
            seen.add(text)
            count += _check_node(child, above, known)
    if count > _MOST_VALUES:
        raise yaml.constructor.ConstructorError(
            None, None, f"more than {_MOST_VALUES:,} values, aliases counted", node.start_mark
        )
    known[node] = count
    return count
