import copy
import json
import pickle
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench import cells, config, data, plugins
from fedbench.cells import Cell
from fedbench.errors import InputError
from fedbench.federation import Outcome

GOLDEN = Path(__file__).parent / "golden" / "cell.json"
SMALL = """
seeds: [0]
dataset: mnist_mini
model: {name: mlp, hidden: [8]}
mixed: [{name: cnn_mnist, channels: 2}, {name: cnn_mnist, channels: 3}]
partition: {name: nway_kshot, n: 2, k: 6, stdev: 1, clients: 3, test_shots: 4}
training: {rounds: 2, optimizer: {lr: 0.1}, dtype: float64}
methods:
  local:
  fedavg: {weights: uniform}
  fedprox: {mu: 1, training: {epochs: 2}}
"""
METHOD = """
from dataclasses import dataclass
from fedbench.averaging import Averaging

@dataclass(frozen=True)
class Mine(Averaging):
    presets = {"paper": {"mu": 2.0, "nu": 3}}
    revision = 4
    mu: float = 0.5
    nu: int = 1

    def shares(self, net, name):
        return True
"""
Expand = Callable[..., list[Cell]]


def content(dataset: Mapping[str, Any]) -> str:
    """Stand for a fingerprint, without any file."""
    return f"content of {dataset['name']}"


@pytest.fixture
def expand(tmp_path: Path) -> Expand:
    (tmp_path / "mine.py").write_text(METHOD)

    def write_and_expand(text: str, *sets: str) -> list[Cell]:
        (tmp_path / "s.yaml").write_text(text)
        return cells.expand(config.override(config.load(tmp_path / "s.yaml"), sets), content)

    return write_and_expand


def mnist_mini() -> data.Arrays:
    return data.load(plugins.build("datasets", "mnist_mini", {}), Path())


@pytest.fixture(scope="module")
def arrays() -> data.Arrays:
    return mnist_mini()


def run(cell: Cell, arrays: data.Arrays, base: Path | None = None) -> Outcome:
    return cells.run_cell(cell, arrays, cells.draw_partition(cell, arrays, base), base=base)


def same(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes are equal to the last bit, times apart."""
    names = {"metrics", "traffic", "sizes"}
    first, second = ({n: getattr(o, n) for n in names} for o in (one, other))
    return all(
        first[n].keys() == second[n].keys()
        and all(np.array_equal(first[n][k], second[n][k], equal_nan=n == "metrics") for k in first[n])
        for n in names
    )


# --- recipes


def test_a_recipe_has_every_setting(expand: Expand) -> None:
    local, fedavg, fedprox = expand(SMALL)
    assert [cell.label for cell in (local, fedavg, fedprox)] == ["local", "fedavg", "fedprox"]
    recipe = fedprox.recipe
    assert list(recipe) == ["protocol", "dataset", "partition", "models", "training", "method", "seed"]
    assert recipe["dataset"] == {"name": "mnist_mini", "options": {}, "content": "content of mnist_mini"}
    assert recipe["partition"]["seed"] == 1234
    assert recipe["partition"]["options"]["noise"] == "gaussian"
    assert recipe["models"] == [{"name": "mlp", "options": {"hidden": [8], "dropout": 0.0}}]
    assert recipe["training"]["optimizer"]["momentum"] == 0.5
    assert (recipe["training"]["epochs"], fedavg.recipe["training"]["epochs"]) == (2, 1)
    assert recipe["method"]["options"] == {"weights": "size", "mu": 1.0}
    assert json.loads(json.dumps(recipe)) == recipe


def pinned(folder: Path, arrays: data.Arrays) -> dict[str, Any]:
    """Return what is pinned of one small cell: its recipe and keys, and numbers that come out."""
    (folder / "s.yaml").write_text(SMALL)
    suite = config.load(folder / "s.yaml")
    cell = cells.expand(suite, cells.fingerprints(suite.base, folder))[2]
    outcome = run(cell, arrays)
    numbers = {name: outcome.metrics[name].tolist() for name in ("train/loss", "test/loss")}
    return {"recipe": cell.recipe, "key": cell.key, "partition_key": cell.partition_key, "numbers": numbers}


def test_recipe_key_and_numbers_are_pinned(tmp_path: Path, arrays: data.Arrays) -> None:
    """If the numbers changed on purpose, raise PROTOCOL (or the method's revision), so that old results are not reused.

    If only the recipe did (a new setting, another default), that already gives new keys.  Then run this file as a
    script to pin what is now right.
    """
    golden, now = json.loads(GOLDEN.read_text()), pinned(tmp_path, arrays)
    assert now["recipe"] == golden["recipe"]
    assert (now["key"], now["partition_key"]) == (golden["key"], golden["partition_key"])
    for name, values in golden["numbers"].items():
        np.testing.assert_allclose(now["numbers"][name], values, rtol=1e-6)


def test_the_key_depends_on_the_recipe_alone(expand: Expand) -> None:
    cell = expand(SMALL)[2]
    shuffled = dict(reversed(list(copy.deepcopy(dict(cell.recipe)).items())))
    assert Cell("other", "label", shuffled, {"a": "b"}).key == cell.key
    (renamed,) = [c for c in expand(SMALL.replace("fedprox: {", "mine: {method: fedprox, ")) if c.label == "mine"]
    assert renamed.key == cell.key
    written = expand(SMALL.replace("mu: 1", "mu: 1.0").replace("lr: 0.1", "lr: 1e-1, nesterov: false"))[2]
    assert written.key == cell.key


@pytest.mark.parametrize(
    "change",
    ["rounds=3", "seeds=[1]", "partition_seeds=[0]", "partition.k=5", "model.hidden=[5]", "methods.fedprox.mu=2"],
)
def test_the_key_changes_with_the_work(change: str, expand: Expand) -> None:
    before, after = expand(SMALL)[2], expand(SMALL, change)[2]
    assert before.key != after.key
    assert (before.partition_key != after.partition_key) == change.startswith("partition")


def test_the_partition_does_not_depend_on_run_seed_method_or_model(expand: Expand, arrays: data.Arrays) -> None:
    made = expand(SMALL, "seeds=[0, 1]", "partition_seeds=[3, 4]", "methods.fedprox.models=mixed")
    by_seed: dict[Any, set[str]] = {}
    for cell in made:
        drawn = cells.draw_partition(cell, arrays).hash
        by_seed.setdefault(cell.recipe["partition"]["seed"], set()).add(f"{cell.partition_key} {drawn}")
    assert len(made) == 12
    assert [len(found) for found in by_seed.values()] == [1, 1]
    assert by_seed[3] != by_seed[4]


def test_presets_and_what_the_row_says_on_top(expand: Expand) -> None:
    text = SMALL + "  mine: {method: './mine.py:Mine', preset: paper, mu: 7}\n"
    (cell,) = [c for c in expand(text) if c.label == "mine"]
    assert cell.recipe["method"]["options"] == {"weights": "size", "mu": 7.0, "nu": 3}
    assert cell.recipe["method"]["revision"] == 4


def test_a_plugin_in_a_file_is_known_by_its_content(expand: Expand, tmp_path: Path) -> None:
    text = SMALL + "  mine: {method: './mine.py:Mine'}\n"
    before = expand(text)[-1]
    name = before.recipe["method"]["name"]
    assert name.startswith("Mine@")
    assert before.specs == {name: "./mine.py:Mine"}
    (tmp_path / "mine.py").write_text(METHOD + "\n")
    assert expand(text)[-1].key != before.key
    (tmp_path / "mine.py").write_text(METHOD)
    assert expand(text)[-1].key == before.key


def test_mixed_models_leave_to_the_model_what_is_the_same_for_all(expand: Expand) -> None:
    def models(line: str, *sets: str) -> list[dict[str, Any]]:
        text = re.sub("model: .*\nmixed: .*", line, SMALL).replace("local:", "local: {models: mixed}")
        recipes: list[dict[str, Any]] = expand(text, *sets)[0].recipe["models"]
        return recipes

    one = {"name": "cnn_mnist", "options": {"channels": 2, "dropout": 0.0, "width": 50}}
    two = {"name": "cnn_mnist", "options": {"channels": 9, "dropout": 0.0, "width": 50}}
    line = "model: {name: cnn_mnist, dropout: 0.0, channels: 9}\nmixed: [{channels: 2}, {name: cnn_mnist}]"
    assert models(line) == [one, two]
    assert [m["options"]["dropout"] for m in models(line, "model.dropout=0.25")] == [0.25, 0.25]
    other = models("model: {name: mlp, hidden: [3]}\nmixed: [{name: cnn_mnist, dropout: 0.0, channels: 2}, mlp]")
    assert other == [one, {"name": "mlp", "options": {"hidden": [3], "dropout": 0.0}}]


def test_mixed_models(expand: Expand) -> None:
    cell = expand(SMALL, "methods.local.models=mixed")[0]
    assert [model["options"]["channels"] for model in cell.recipe["models"]] == [2, 3]
    facts = cell.facts()
    assert (facts["model"], facts["model.channels"], facts["model.dropout"]) == ("mixed", "2/3", 0.5)


def test_grids_multiply(expand: Expand) -> None:
    text = SMALL + "  tuned: {method: fedprox, grid: {mu: [0, 1], training.epochs: [1, 3]}}\n"
    text += "grid: {partition.n: [2, 3], dataset: [mnist_mini], training.optimizer.lr: [0.1, 0.2]}\n"
    made = expand(text)
    assert len({cell.key for cell in made}) == len(made) == 4 * (3 + 4)
    tuned = [cell for cell in made if cell.label.startswith("tuned")][:4]
    assert [cell.label for cell in tuned] == [f"tuned (mu={mu} epochs={epochs})" for mu in (0, 1) for epochs in (1, 3)]
    assert [cell.facts()["method.mu"] for cell in tuned] == [0.0, 0.0, 1.0, 1.0]
    assert [cell.facts()["epochs"] for cell in tuned] == [1, 3, 1, 3]
    points = {(cell.facts()["n"], cell.facts()["optimizer.lr"]) for cell in made}
    assert points == {(2, 0.1), (2, 0.2), (3, 0.1), (3, 0.2)}


def test_a_grid_over_presets(expand: Expand) -> None:
    text = SMALL + "  fedper: {grid: {preset: [paper, table1]}}\n"
    assert [cell.label for cell in expand(text)[3:]] == ["fedper (preset=paper)", "fedper (preset=table1)"]


def test_the_same_cell_of_two_experiments_is_one(expand: Expand) -> None:
    made = expand(SMALL + "experiments: [{}, {partition: {n: 3}}, {partition: {n: 2}}]\n")
    assert len(made) == 6


def test_rows_of_one_comparison_stand_together(expand: Expand) -> None:
    made = expand(SMALL, "seeds=[0, 1]")
    assert [(cell.label, cell.recipe["seed"]) for cell in made[:3]] == [("local", 0), ("fedavg", 0), ("fedprox", 0)]


def test_a_partition_read_from_a_file_is_known_by_its_content(expand: Expand, tmp_path: Path) -> None:
    text = SMALL.replace("{name: nway_kshot, n: 2, k: 6, stdev: 1, clients: 3, test_shots: 4}", "PARTITION")
    text = text.replace("PARTITION", "{name: given, path: rows.json}")
    keys = []
    for rows in ("[[0], [1]]", "[[0], [2]]"):
        (tmp_path / "rows.json").write_text(f'{{"train": {rows}}}')
        keys.append(expand(text)[0].partition_key)
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("methods:\n", "methods: {}\nx:\n", ": unknown key 'x'"),
        (SMALL[SMALL.index("methods:") :], "", ": no cells, since `methods` names none"),
        ("fedavg: {", "fedavgg: {", ": methods.fedavgg: unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ("mnist_mini", "mnist_minni", ": dataset: unknown data set 'mnist_minni'; did you mean 'mnist_mini'?"),
        ("name: mlp", "name: mpl", ": model: unknown model 'mpl'; did you mean 'mlp'?"),
        ("nway_kshot", "nway_shot", ": partition: unknown partition 'nway_shot'; did you mean 'nway_kshot'?"),
        ("{mu: 1,", "{mu_: 1,", ": methods.fedprox: unknown key 'mu_'; did you mean 'mu'?"),
        ("{mu: 1,", "{mu: -1,", ": methods.fedprox.mu: should be greater than or equal to 0, not -1"),
        ("{mu: 1,", "{mu: 'x',", ': methods.fedprox.mu: should be a number, not "x"'),
        ("{mu: 1,", "{preset: papr,", ": methods.fedprox.preset: unknown preset 'papr'; did you mean 'paper'?"),
        ("{mu: 1,", "{method: 'none.py:A',", ": methods.fedprox: plugin file "),
        ("k: 6", "k: 0", ": partition.k: should be greater than or equal to 1, not 0"),
        ("k: 6, ", "", ": partition.k: is missing"),
        ("hidden: [8]", "hiden: [8]", ": model: unknown key 'hiden'; did you mean 'hidden'?"),
        ("model: {name: mlp,", "model: {", ": model: is missing its name"),
        ("dataset: mnist_mini", "", ": dataset: is missing"),
        ("mixed: [", "#", ": mixed: is missing, though a row says `models: mixed`"),
        ("channels: 3", "channels: 0", ": mixed.1.channels: should be greater than or equal to 1, not 0"),
        ("seeds: [0]", "grid: {methods.fedprox.mu: [1]}", ": grid: cannot vary 'methods.fedprox.mu', only dataset, "),
        ("seeds: [0]", "grid: {partition.m: [1]}", ": partition: unknown key 'm'; "),
        (
            "seeds: [0]",
            "grid: {training.optimizer: [{name: adm}]}",
            ": methods.local.training.optimizer.name: should be 'sgd' or 'adam', not \"adm\"",
        ),
        ("{mu: 1,", "{grid: {models: [mixed]},", ": methods.fedprox.grid: cannot vary 'models', only hyperparameters"),
        ("{mu: 1,", "{grid: {nu: [1]},", ": methods.fedprox: unknown key 'nu'; known: mu, weights"),
        (
            "{mu: 1, training: {",
            "{training: {optimizer: 1, ",
            ": methods.fedprox.training.optimizer: should be a mapping",
        ),
        ("seeds: [0]", "experiments: [{}, {partition: {k: 0}}]", ": experiments.1: partition.k: should be greater"),
    ],
)
def test_a_wrong_suite_is_one_line(old: str, new: str, line: str, expand: Expand, tmp_path: Path) -> None:
    text = SMALL if "mixed" not in line else SMALL.replace("local:", "local: {models: mixed}")
    assert old in text
    with pytest.raises(InputError) as caught:
        expand(text.replace(old, new, 1))
    assert str(caught.value).startswith(f"{tmp_path}/s.yaml{line}")
    assert "\n" not in str(caught.value)


def test_every_suite_that_comes_with_fedbench_expands() -> None:
    for name in config.shipped_suites():
        made = cells.expand(config.load(name), content)
        assert len({cell.key for cell in made}) == len(made)


def test_the_quickstart_compares_eight_methods_on_one_partition() -> None:
    made = cells.expand(config.load("quickstart"), content)
    labels = ["local", "fedavg", "fedprox", "fedper", "fedrep", "fesem", "fedproto", "fedproto-mh"]
    assert [cell.label for cell in made] == labels
    assert len({cell.partition_key for cell in made}) == 1
    assert {cell.facts()["clients"] for cell in made} == {20}


# --- choosing


def test_facts_are_flat_and_plain(expand: Expand) -> None:
    facts = expand(SMALL)[2].facts()
    expected = {"method": "fedprox", "algorithm": "fedprox", "dataset": "mnist_mini", "model": "mlp", "n": 2, "k": 6}
    expected |= {"partition": "nway_kshot", "partition_seed": 1234, "seed": 0, "rounds": 2, "optimizer.lr": 0.1}
    expected |= {"method.mu": 1.0, "model.dropout": 0.0, "model.hidden": "[8]", "shuffle": True}
    assert {name: facts[name] for name in expected} == expected
    assert all(value is None or isinstance(value, str | int | float) for value in facts.values())


@pytest.mark.parametrize(
    ("only", "labels"),
    [
        ("method=fedprox", ["fedprox"]),
        ("method=fedavg,method=local", ["local", "fedavg"]),
        ("method = fedavg , n = 2", ["fedavg"]),
        ("mu=1", ["fedprox", "tuned (mu=1)"]),
        ("method.mu=1.0,epochs=2", ["fedprox"]),
        ("method=tuned", ["tuned (mu=0)", "tuned (mu=1)"]),
        ("method=tuned (mu=1)", ["tuned (mu=1)"]),
        ("algorithm=fedprox,lr=1e-1", ["fedprox", "tuned (mu=0)", "tuned (mu=1)"]),
        ("shuffle=True,method=local", ["local"]),
        ("weight_decay_bias=null,method=local", ["local"]),
    ],
)
def test_only(only: str, labels: list[str], expand: Expand) -> None:
    made = expand(SMALL + "  tuned: {method: fedprox, grid: {mu: [0, 1]}}\n")
    assert [cell.label for cell in cells.select(made, only)] == labels


@pytest.mark.parametrize(
    ("only", "line"),
    [
        ("fedavg", "--only fedavg: write fact=value, as in method=fedproto,n=3"),
        ("", "--only : write fact=value, as in method=fedproto,n=3"),
        ("methd=fedavg", "--only methd=fedavg: unknown fact 'methd'; did you mean 'method'?"),
        ("method=fedavgg", "--only method=fedavgg: unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ("n=7", "--only n=7: unknown n '7'; known: 2"),
        ("shuffle=1", "--only shuffle=1: unknown shuffle '1'; known: true"),
        ("method=fedavg,mu=1", "--only method=fedavg,mu=1: no cell has all of this at once"),
        ("name=sgd", None),
    ],
)
def test_only_what_there_is(only: str, line: str | None, expand: Expand) -> None:
    made = expand(SMALL)
    if line is None:
        assert cells.select(made, only) == made
        return
    with pytest.raises(InputError) as caught:
        cells.select(made, only)
    assert str(caught.value) == line


# --- running


def test_results_do_not_depend_on_what_else_runs(expand: Expand, arrays: data.Arrays) -> None:
    order = expand(SMALL)[1:]
    together = {cell.key: run(cell, arrays) for cell in order}
    backwards = {cell.key: run(cell, arrays) for cell in reversed(order)}
    alone = run(expand(SMALL)[2], arrays)
    assert all(same(together[key], backwards[key]) for key in together)
    assert same(alone, together[order[1].key])
    assert not same(alone, together[order[0].key])


def test_a_cell_survives_its_way_to_a_worker(expand: Expand, arrays: data.Arrays) -> None:
    cell = expand(SMALL)[0]
    arrived = pickle.loads(pickle.dumps(cell))  # noqa: S301
    assert arrived == cell
    assert arrived.key == cell.key
    assert same(run(arrived, arrays), run(cell, arrays))


def test_a_method_in_a_file_runs_and_the_settings_arrive(expand: Expand, arrays: data.Arrays, tmp_path: Path) -> None:
    text = SMALL + "  mine: {method: './mine.py:Mine', training: {rounds: 3}}\n"
    seen: list[tuple[int, int]] = []
    cell = expand(text)[-1]
    partition = cells.draw_partition(cell, arrays)
    outcome = cells.run_cell(
        cell, arrays, partition, base=tmp_path, on_round=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert outcome.metrics["test/accuracy"].shape == (3, 3)
    # its shares() says yes to everything, so it is FedAvg
    assert same(outcome, run(expand(text, "methods.fedavg={training: {rounds: 3}}")[1], arrays))


def test_a_plugin_edited_since_is_not_run_under_the_old_key(
    expand: Expand, arrays: data.Arrays, tmp_path: Path
) -> None:
    cell = expand(SMALL + "  mine: {method: './mine.py:Mine'}\n")[-1]
    (tmp_path / "mine.py").write_text(METHOD.replace("0.5", "0.6"))
    with pytest.raises(InputError, match=r"^./mine.py:Mine: the file has changed since the cells were made"):
        run(cell, arrays, tmp_path)


def test_the_content_of_a_data_set_is_part_of_the_key(tmp_path: Path) -> None:
    text = SMALL.replace("dataset: mnist_mini", "dataset: {name: arrays, path: a.npz}")
    (tmp_path / "s.yaml").write_text(text)
    suite = config.load(tmp_path / "s.yaml")
    keys = []
    for value in (0, 1):
        np.savez(tmp_path / "a.npz", x=np.full((4, 3), value), y=np.arange(4))
        keys.append(cells.expand(suite, cells.fingerprints(suite.base, tmp_path))[0].key)
    assert keys[0] != keys[1]
    cell = cells.expand(suite, cells.fingerprints(suite.base, tmp_path))[0]
    assert data.load(cells.source(cell, suite.base), tmp_path).shape == (3,)
    (tmp_path / "a.npz").unlink()
    with pytest.raises(InputError, match=r"a.npz: no such file"):
        cells.expand(suite, cells.fingerprints(suite.base, tmp_path))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        GOLDEN.write_text(json.dumps(pinned(Path(temporary), mnist_mini()), indent=1) + "\n")


def test_a_methods_file_is_part_of_the_key_and_found_from_the_suites_folder(tmp_path: Path) -> None:
    text = "dataset: mnist_mini\nmodel: mlp\npartition: {name: iid, clients: 3}\n"
    text += "methods: {fesem: {k: 2, init: given, centres: centres.npz}}\n"
    (tmp_path / "s.yaml").write_text(text)
    (tmp_path / "centres.npz").write_bytes(b"one")
    first = cells.expand(config.load(tmp_path / "s.yaml"), lambda _: "0" * 64)[0]
    (tmp_path / "centres.npz").write_bytes(b"two")
    second = cells.expand(config.load(tmp_path / "s.yaml"), lambda _: "0" * 64)[0]
    assert first.key != second.key
    (tmp_path / "centres.npz").unlink()
    with pytest.raises(InputError, match=r"centres: cannot read .*centres\.npz"):
        cells.expand(config.load(tmp_path / "s.yaml"), lambda _: "0" * 64)
