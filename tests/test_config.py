import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedbench import config
from fedbench.errors import InputError

SUITE = """
seeds: [0, 1]
dataset: mnist_mini
model: {name: cnn_mnist, dropout: 0.25}
partition: {name: nway_kshot, n: 3, k: 20}
training: {rounds: 10, optimizer: {lr: 1e-2, momentum: 0.9}}
grid: {partition.n: [3, 4], training.optimizer.lr: [0.01, 0.1]}
methods:
  local:
  fedprox: {training: {rounds: 20}, grid: {mu: [0.1, 1], training.epochs: [1, 2]}}
  fedproto-0.1: {method: fedproto, lam: 0.1}
experiments:
  - {partition: {k: 50}, training: {rounds: 12}, methods: {fedprox: {weights: size}}}
  - {partition: {name: iid}, methods: [local, fedavg]}
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], config.Suite]:
    def write_and_load(text: str) -> config.Suite:
        (tmp_path / "s.yaml").write_text(text, encoding="utf-8")
        return config.load(tmp_path / "s.yaml")

    return write_and_load


def parts(suite: config.Suite) -> list[dict[str, Any]]:
    return [part for _, part in suite.parts()]


def test_a_suite_is_read(load: Callable[[str], config.Suite], tmp_path: Path) -> None:
    suite = load(SUITE)
    assert (suite.name, suite.seeds, suite.partition_seeds, suite.metric) == ("s", [0, 1], [1234], "test/accuracy")
    assert suite.base == tmp_path
    assert suite.file == str(tmp_path / "s.yaml")
    assert suite.dataset == {"name": "mnist_mini"}
    assert suite.training == {"rounds": 10, "optimizer": {"lr": 0.01, "momentum": 0.9}}


def test_a_list_of_methods_is_rows_with_nothing_to_say(load: Callable[[str], config.Suite]) -> None:
    (part,) = parts(load("methods: [local, fedavg, './mine.py:Mine']"))
    assert part["methods"] == {
        "local": {"method": "local"},
        "fedavg": {"method": "fedavg"},
        "Mine": {"method": "./mine.py:Mine"},
    }


def test_experiments_are_laid_over_the_suite(load: Callable[[str], config.Suite]) -> None:
    first, second = parts(load(SUITE))
    assert first["partition"] == {"name": "nway_kshot", "n": 3, "k": 50}
    assert first["training"] == {"rounds": 12, "optimizer": {"lr": 0.01, "momentum": 0.9}}
    assert list(first["methods"]) == ["local", "fedprox", "fedproto-0.1"]
    assert first["methods"]["fedprox"]["weights"] == "size"
    assert first["methods"]["fedprox"]["training"] == {"rounds": 20}
    # another name starts afresh, a list of methods chooses rows
    assert second["partition"] == {"name": "iid"}
    assert second["training"] == {"rounds": 10, "optimizer": {"lr": 0.01, "momentum": 0.9}}
    assert second["methods"] == {"local": {}, "fedavg": {"method": "fedavg"}}
    assert second["grid"] == first["grid"] == {"partition.n": [3, 4], "training.optimizer.lr": [0.01, 0.1]}


def test_a_row_that_changes_its_method_starts_afresh(load: Callable[[str], config.Suite]) -> None:
    text = "methods: {a: {method: fedprox, mu: 1}}\nexperiments: [{methods: {a: {method: fedproto, lam: 2}}}, {}]"
    first, second = parts(load(text))
    assert first["methods"] == {"a": {"method": "fedproto", "lam": 2}}
    assert second["methods"] == {"a": {"method": "fedprox", "mu": 1}}


def test_yaml_means_what_it_says() -> None:
    text = """
    small: 1e-3
    more: [+1.5E3, .5, 5., 1_000, -7]
    ten: 010
    time: 12:30
    day: 2024-01-01
    text: ['1e3', 1.2.3, 0x10, "False"]
    flags: [true, False, on, OFF, yes, no]
    nothing: [~, null, ]
    empty:
    base: &base {a: 1, b: 2}
    merged: {<<: *base, b: 3}
    alias: *base
    """
    assert config.read_value(text, "f") == {
        "small": 0.001,
        "more": [1500.0, 0.5, 5.0, 1000, -7],
        "ten": 10,
        "time": "12:30",
        "day": "2024-01-01",
        "text": ["1e3", "1.2.3", "0x10", "False"],
        "flags": [True, False, True, False, True, False],
        "nothing": [None, None],
        "empty": None,
        "base": {"a": 1, "b": 2},
        "merged": {"a": 1, "b": 3},
        "alias": {"a": 1, "b": 2},
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("methods: [local\n", "s.yaml, line 2, column 1: while parsing a flow sequence expected ',' or ']'"),
        ("seeds: [0]\nname: a: b", "s.yaml, line 2, column 8: mapping values are not allowed here"),
        ("\tname: a", "s.yaml, line 1, column 1: while scanning"),
        ("name: a\nseeds: [0]\nname: b", "s.yaml, line 3, column 1: key 'name' comes twice"),
        ("methods: {fedavg: {}, fedavg: {}}", "s.yaml, line 1, column 23: key 'fedavg' comes twice"),
        ("methods: {on: {}}", "s.yaml, line 1, column 11: a key must be text, so put on in quotes"),
        ("a: &a [*a]", "s.yaml, line 1, column 4: refers to itself"),
        ("a: *b", "s.yaml, line 1, column 4: found undefined alias 'b'"),
        ("a: !!python/name:os.system", "s.yaml, line 1, column 4: could not determine a constructor"),
        ("a: 1\n---\nb: 1", "s.yaml, line 2, column 1: expected a single document"),
        ("name: \x07", "s.yaml: ReaderError: unacceptable character"),
        ("", "s.yaml: a suite is a mapping"),
        ("[local]", "s.yaml: a suite is a mapping"),
        ("method: [local]", "s.yaml: unknown key 'method'; did you mean 'methods'?"),
        (
            "experiments: [{}, {seeds: [1]}]",
            "s.yaml: experiments.1: unknown key 'seeds'; it stands at the top of the suite",
        ),
        ("name: ../up", "s.yaml: name: '../up' should be letters, digits"),
        ("dataset: 3", "s.yaml: dataset: 3 should be a name, or a mapping with a name and options"),
        (
            "training: {optimizer: {name: adam, momentum: 0.5}}\nmethods: [local]",
            "s.yaml: training.optimizer.momentum: 0.5 is for sgd, adam has none; leave it out, or take name: sgd",
        ),
        (
            "training: {optimizer: {name: adam}}\nmethods: {local: {training: {optimizer: {nesterov: false}}}}",
            "s.yaml: methods.local.training.optimizer.nesterov: false is for sgd, adam has none; leave it out, or",
        ),
        (
            "training: {optimizer: {name: adam}}\nexperiments: [{training: {optimizer: {momentum: 0}}}]",
            "s.yaml: experiments.0.training.optimizer.momentum: 0 is for sgd, adam has none; leave it out, or",
        ),
        (
            "grid: {training.optimizer: [{name: sgd}, {name: adam, momentum: 0}]}\nmethods: [local]",
            "s.yaml: grid.training.optimizer.momentum: 0 is for sgd, adam has none; leave it out, or take name: sgd",
        ),
        ("dataset: {name: 3}", "s.yaml: dataset: the name should be text"),
        ("seeds: 3", "s.yaml: seeds: should be a list, not 3"),
        ("seeds: []", "s.yaml: seeds: is empty, so there is nothing to run"),
        ("seeds: [0, 1, 0]", "s.yaml: seeds: has 0 more than once"),
        ("seeds: [-1]", "s.yaml: seeds.0: should be greater than or equal to 0, not -1"),
        ("seeds: [1.5]", "s.yaml: seeds.0: should be a whole number, not 1.5"),
        ("seeds: [true]", "s.yaml: seeds.0: should be a whole number, not true"),
        ("partition_seeds: [4294967296]", "s.yaml: partition_seeds.0: should be less than 4294967296, not 4294967296"),
        ("metric: [a]", 's.yaml: metric: should be text, not ["a"]'),
        ("training: {round: 3}", "s.yaml: training: unknown key 'round'; did you mean 'rounds'?"),
        ("lr: 0.1", "s.yaml: unknown key 'lr'; it stands in training.optimizer"),
        ("mu: 0.1", "s.yaml: unknown key 'mu'; it stands in the row of a method, such as fedprox"),
        ("training: {optimizer: {rounds: 1}}", "s.yaml: training.optimizer: unknown key 'rounds'; it stands in train"),
        (
            "training: {participation: 5.0}",
            "s.yaml: training.participation: should be less than or equal to 1, not 5.0",
        ),
        ("training: {shuffle: 'False'}", 's.yaml: training.shuffle: should be true or false, not "False"'),
        ("training: {optimizer: {lr: fast}}", 's.yaml: training.optimizer.lr: should be a number, not "fast"'),
        ("training: {optimizer: {lr: .nan}}", "s.yaml: training: every number must be finite"),
        ("training: 3", "s.yaml: training: should be a mapping, not 3"),
        ("methods: {a: {training: {rounds: 0}}}", "s.yaml: methods.a.training.rounds: should be greater than or equal"),
        ("methods: {a: {models: mix}}", "s.yaml: methods.a.models: should be 'single' or 'mixed', not \"mix\""),
        ("methods: {a: 3}", "s.yaml: methods.a: should be a mapping"),
        ("methods: [a, {b: 1}]", 's.yaml: methods.1: should be text, not {"b": 1}'),
        ("methods: [a, a]", "s.yaml: methods: has 'a' more than once"),
        ("methods: {'a,b': {}}", "s.yaml: methods: label 'a,b' is empty, or has a comma"),
        ("methods: fedavg", "s.yaml: methods: 'fedavg' should be a list of names, or a mapping of labels to rows"),
        ("grid: {partition.n: 3}", "s.yaml: grid.partition.n: should be a list, not 3"),
        ("grid: {partition.n: []}", "s.yaml: grid: partition.n has no values"),
        ("grid: {partition.n: [1, 2, 1.0]}", "s.yaml: grid: partition.n has 1.0 more than once"),
        ("methods: {a: {mu: 1, grid: {mu: [.1]}}}", "s.yaml: methods.a: mu stands in the row and in its grid; leave"),
        (
            "experiments: [{methods: {a: {training: {optimizer: {lr: 1}}, grid: {training.optimizer.lr: [2]}}}}]",
            "s.yaml: experiments.0.methods.a: training.optimizer.lr stands in the row and in its grid; leave out one",
        ),
        (
            "training: {rounds: 1000000000000000000000000}",
            "s.yaml: training.rounds: should be less than or equal to 2147483647, not 1000000000000000000000000",
        ),
        (
            "tune: {trials: 2147483648}",
            "s.yaml: tune.trials: should be less than or equal to 2147483647, not 2147483648",
        ),
        (
            "newcomers: {clients: 1, epochs: 2147483648}",
            "s.yaml: newcomers.epochs: [2147483648] should be a whole number from 1 to 2147483647, or several",
        ),
        ("methods: {a: {grid: {mu: [.1, 1e-1]}}}", "s.yaml: methods.a.grid: mu has 0.1 more than once"),
        (
            "experiments: [{}, {methods: {a: {training: {epochs: x}}}}]",
            's.yaml: experiments.1.methods.a.training.epochs: should be a whole number, not "x"',
        ),
    ],
)
def test_a_wrong_suite_is_one_line(text: str, line: str, load: Callable[[str], config.Suite], tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load(text)
    assert str(caught.value).startswith(f"{tmp_path}/{line}")
    assert "\n" not in str(caught.value)


def test_a_value_may_be_true_beside_1(load: Callable[[str], config.Suite]) -> None:
    assert load("grid: {training.shuffle: [true, false], dataset.x: [1, true]}").grid["dataset.x"] == [1, True]


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, line in {
        "quickstrt": "unknown suite 'quickstrt'; did you mean 'quickstart'?",
        "quickstrt.yaml": "quickstrt.yaml: no such file",
        "suites/a": "suites/a: no such file",
        "s/quickstart.yaml": "s/quickstart.yaml: no such file; the suite that comes with fedbench is called quickstart",
        "": "unknown suite ''; known: " + ", ".join(sorted(config.shipped_suites())),
        ".": ".: is a folder; want a suite's file or name (or, to report, a results.csv)",
    }.items():
        with pytest.raises(InputError) as caught:
            config.load(name)
        assert str(caught.value) == line
    (tmp_path / "a:b.yaml").write_text("seeds: [1]")
    with pytest.raises(
        InputError, match=r"^a:b\.yaml: the suite is called as the file unless it has a `name`, but 'a:b' "
    ):
        config.load("a:b.yaml")
    (tmp_path / "a:b.yaml").write_text("name: ab")
    assert config.load("a:b.yaml").name == "ab"
    (tmp_path / "latin.yaml").write_bytes("name: café".encode("latin-1"))
    with pytest.raises(InputError, match=r"^latin.yaml: is not text"):
        config.load("latin.yaml")


def test_a_suite_that_comes_with_fedbench_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quickstart" in config.shipped_suites()
    for name, path in config.shipped_suites().items():
        assert config.load(name).file == str(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("name: mine")
    assert config.load("quickstart").name == "mine"


def test_rounds_are_set_everywhere(load: Callable[[str], config.Suite]) -> None:
    suite = config.override(load(SUITE), ["rounds=5", "training.optimizer.lr=1e-3", "epochs=3"])
    for part in parts(suite):
        assert part["training"] == {"rounds": 5, "optimizer": {"lr": 0.001, "momentum": 0.9}, "epochs": 3}
        assert part["grid"] == {"partition.n": [3, 4]}
        for row in part["methods"].values():
            assert row.get("training", {}) in ({}, {"rounds": 5})
            assert row.get("grid", {}) in ({}, {"mu": [0.1, 1]})


def test_a_row_may_have_an_optimizer_without_the_settings_of_the_suites(load: Callable[[str], config.Suite]) -> None:
    optimizers = "training: {optimizer: {momentum: 0.9}}\nmethods: {local: {training: {optimizer: {name: adam}}}}"
    (only,) = parts(load(f"{optimizers}\ndataset: mnist_mini\nmodel: mlp\npartition: iid"))
    assert only["methods"]["local"]["training"]["optimizer"] == {"name": "adam"}


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("training: {epochs: 5}", "experiments.0.training.epochs"),
        ("partition: {n: 3}", "experiments.0.partition.n"),
        ("methods: {fedprox: {mu: 3}}", "experiments.0.methods.fedprox.mu"),
    ],
)
def test_an_experiment_cannot_say_what_the_suites_grid_varies(
    said: str, place: str, load: Callable[[str], config.Suite]
) -> None:
    suite = (
        "partition: nway_kshot\ngrid: {training.epochs: [1, 2], partition.n: [2]}\n"
        "methods: {fedprox: {grid: {mu: [0.1, 1]}}}\nexperiments: "
    )
    with pytest.raises(InputError) as caught:
        parts(load(f"{suite}[{{{said}}}]"))
    path = place.removeprefix("experiments.0.").removeprefix("methods.fedprox.")
    assert str(caught.value).endswith(
        f"s.yaml: {place}: is varied by the suite's grid; want grid: {{{path}: [...]}} here"
    )
    here = "grid: {training.epochs: [5], partition.n: [3]}, methods: {fedprox: {grid: {mu: [3]}}}"
    (only,) = parts(load(f"{suite}[{{{here}}}]"))
    assert only["grid"] == {"training.epochs": [5], "partition.n": [3]}
    assert only["methods"]["fedprox"]["grid"] == {"mu": [3]}


def test_an_experiment_varies_what_the_suite_fixes(load: Callable[[str], config.Suite]) -> None:
    suite = "training: {epochs: 5}\nmethods: {fedprox: {mu: 1}}\nexperiments: "
    (only,) = parts(
        load(f"{suite}[{{grid: {{training.epochs: [1, 2]}}, methods: {{fedprox: {{grid: {{mu: [3]}}}}}}}}]")
    )
    assert only["grid"] == {"training.epochs": [1, 2]}
    assert only["methods"]["fedprox"] == {"mu": 1, "grid": {"mu": [3]}}


def test_options_and_whole_choices_are_set_everywhere(load: Callable[[str], config.Suite]) -> None:
    first, second = parts(config.override(load(SUITE), ["partition.n=7", "dataset={name: arrays, path: a.npz}"]))
    assert first["partition"]["n"] == 7
    assert second["partition"] == {"name": "iid"}
    assert first["dataset"] == second["dataset"] == {"name": "arrays", "path": "a.npz"}
    assert list(first["grid"]) == ["training.optimizer.lr"]
    first, second = parts(config.override(load(SUITE), ["partition=iid", "training.optimizer={name: adam}"]))
    assert first["partition"] == {"name": "iid"}
    assert first["training"]["optimizer"] == {"name": "adam"}
    assert "grid" not in first or first["grid"] == {}


def test_hyperparameters_and_grids_are_set(load: Callable[[str], config.Suite]) -> None:
    sets = ["methods.fedprox.mu=3", "methods.fedproto-0.1.lam=4", "grid.partition.n=[2]", "name=other", "metric=test/x"]
    suite = config.override(load(SUITE), sets, seeds="7,8, 9")
    assert (suite.name, suite.metric, suite.seeds) == ("other", "test/x", [7, 8, 9])
    first, second = parts(suite)
    assert first["methods"]["fedprox"] == {
        "mu": 3,
        "weights": "size",
        "training": {"rounds": 20},
        "grid": {"training.epochs": [1, 2]},
    }
    assert first["methods"]["fedproto-0.1"]["lam"] == 4
    assert first["grid"]["partition.n"] == second["grid"]["partition.n"] == [2]
    assert set(second["methods"]) == {"local", "fedavg"}


@pytest.mark.parametrize("asked", ["grid.training.epochs=[1, 2]", "grid={training.epochs: [1, 2]}"])
def test_a_grid_that_is_set_holds_where_an_experiment_said_something_else(
    asked: str, load: Callable[[str], config.Suite]
) -> None:
    suite = load("experiments: [{training: {epochs: 3, rounds: 4}}, {partition: iid}, {grid: {training.epochs: [7]}}]")
    found = parts(config.override(suite, [asked]))
    assert [part["grid"] for part in found] == [{"training.epochs": [1, 2]}] * 3
    assert found[0]["training"] == {"rounds": 4}


def test_rows_of_a_list_are_set(load: Callable[[str], config.Suite]) -> None:
    ((_, part),) = config.override(load("methods: [local, './mine.py:Mine']"), ["methods.Mine.mu=3"]).parts()
    assert part["methods"] == {"local": {"method": "local"}, "Mine": {"method": "./mine.py:Mine", "mu": 3}}
    suite = load("methods: {fedprox: }\nexperiments: [{methods: [fedprox, local]}, {methods: [local]}]")
    first, second = parts(config.override(suite, ["methods.fedprox.mu=3"]))
    assert first["methods"] == {"fedprox": {"mu": 3}, "local": {"method": "local"}}
    assert second["methods"] == {"local": {"method": "local"}}
    first, second = parts(config.override(load("experiments: [{methods: [b]}, {methods: [a]}]"), ["methods.a.k=3"]))
    assert (first["methods"], second["methods"]) == ({"b": {"method": "b"}}, {"a": {"method": "a", "k": 3}})


def test_override_leaves_the_suite_alone(load: Callable[[str], config.Suite]) -> None:
    suite = load(SUITE)
    before = suite.model_dump()
    other = config.override(suite, ["rounds=1"], "5")
    assert suite.model_dump() == before
    assert config.override(suite) == suite
    assert (other.file, other.base) == (suite.file, suite.base)


@pytest.mark.parametrize(
    ("sets", "seeds", "line"),
    [
        (["rounds"], None, "--set rounds: write key=value, as in rounds=5"),
        (["roundz=5"], None, "--set roundz=5: unknown key 'roundz'; did you mean 'rounds'?"),
        (
            ["training.roundz=5"],
            None,
            "--set training.roundz=5: training: unknown key 'roundz'; did you mean 'rounds'?",
        ),
        (["rounds=0"], None, "--set rounds=0: training.rounds: should be greater than or equal to 1, not 0"),
        (["rounds="], None, "--set rounds=: training.rounds: should be a whole number, not null"),
        (["shuffle=yep"], None, '--set shuffle=yep: training.shuffle: should be true or false, not "yep"'),
        (
            ["optimizer.name=adam"],
            None,
            "--set optimizer.name=adam: training.optimizer.momentum: 0.9 is for sgd, adam has none; leave it out, or",
        ),
        (["shuffle=1"], None, "--set shuffle=1: training.shuffle: should be true or false, not 1"),
        (["rounds=[1"], None, "--set rounds=[1, line 1, column 3: while parsing a flow sequence"),
        (["methods.fedprx.mu=1"], None, "--set methods.fedprx.mu=1: unknown row 'fedprx'; did you mean 'fedprox'?"),
        (["experiments=[]"], None, "--set experiments=[]: unknown key 'experiments'; it stands in the file"),
        (["momentun=0"], None, "--set momentun=0: unknown key 'momentun'; did you mean 'momentum' in training.optim"),
        (["training.lr=1"], None, "--set training.lr=1: training: unknown key 'lr'; it stands in training.optimizer"),
        (["clients=3"], None, "--set clients=3: unknown key 'clients'; it stands in partition"),
        (["trials=3"], None, "--set trials=3: unknown key 'trials'; it stands in tune"),
        (["lam=3"], None, "--set lam=3: unknown key 'lam'; it stands in methods.fedproto"),
        (["rounds=5", "seeds=1"], None, "--set seeds=1: seeds: should be a list, not 1"),
        ([], "1,x", '--seeds 1,x: seeds.1: should be a whole number, not "x"'),
        ([], "", "--seeds : seeds: is empty, so there is nothing to run"),
        ([], "1,1", "--seeds 1,1: seeds: has 1 more than once"),
    ],
)
def test_a_wrong_override_is_one_line(
    sets: list[str], seeds: str | None, line: str, load: Callable[[str], config.Suite]
) -> None:
    with pytest.raises(InputError) as caught:
        config.override(load(SUITE), sets, seeds)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_what_the_grid_varies_as_a_whole_is_not_set_in_part(load: Callable[[str], config.Suite]) -> None:
    suite = load("grid: {dataset: [mnist_mini, {name: arrays, path: a}]}")
    with pytest.raises(InputError, match="the suite's grid varies 'dataset' as a whole"):
        config.override(suite, ["dataset.path=b"])


@pytest.mark.parametrize("flag", ["shuffle=False", "shuffle=false", "shuffle=off"])
def test_false_on_the_command_line_is_not_true(flag: str, load: Callable[[str], config.Suite]) -> None:
    assert config.override(load(SUITE), [flag]).training["shuffle"] is False


def test_the_schema_knows_every_key() -> None:
    schema = json.loads(json.dumps(config.schema()))
    assert set(schema["properties"]) == set(config.Suite.model_fields)
    assert schema["additionalProperties"] is False
    assert "name" not in schema["required"]
    definitions = schema["$defs"]
    assert definitions["Training"]["properties"]["participation"] == {
        "default": 1.0,
        "exclusiveMinimum": 0,
        "maximum": 1,
        "title": "Participation",
        "type": "number",
    }
    assert definitions["Optimizer"]["additionalProperties"] is False
    assert definitions["Row"]["additionalProperties"] is True
    assert "mnist_mini" in schema["properties"]["dataset"]["anyOf"][0]["examples"]
    for name in _references(schema):
        assert name in definitions


def _references(schema: Any) -> list[str]:
    """Return the names of all definitions that a JSON Schema refers to."""
    if isinstance(schema, list):
        return [name for item in schema for name in _references(item)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"].removeprefix("#/$defs/")] if isinstance(schema.get("$ref"), str) else []
    return own + [name for value in schema.values() for name in _references(value)]
