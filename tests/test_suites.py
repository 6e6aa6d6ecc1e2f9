"""The suites that come with fedbench: they load, and the four of the FedProto paper's tables are those tables."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedbench import config, reference
from fedbench.cells import Cell, expand, select

TABLES = ("table1", "table2", "table3", "table4")
LINES = list(csv.DictReader((config.SUITES / "fedproto_tables.csv").read_text().splitlines()))
"""The lines of the paper's tables, as they are printed."""


def content(dataset: Mapping[str, Any]) -> str:
    """Stand for a fingerprint, without any file."""
    return f"content of {dataset['name']}"


def cells(name: str) -> list[Cell]:
    return expand(config.load(name), content)


def place(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells the lines of the tables, and the rows of the suites, apart."""
    return line["dataset"], float(line["stdev"]), int(line["n"]), line["method"]


@pytest.mark.parametrize("name", list(config.shipped_suites()))
def test_every_suite_expands_and_says_what_it_is_for(name: str) -> None:
    suite = config.load(name)
    made = expand(suite, content)
    assert suite.description
    assert suite.name == name
    assert len({(cell.label, cell.key) for cell in made}) == len(made)
    reference.read(suite, made)


@pytest.mark.parametrize(("name", "rows"), [("table1", 72), ("table2", 24), ("table3", 24), ("table4", 24)])
def test_a_table_has_its_rows_times_seeds(name: str, rows: int) -> None:
    suite, made = config.load(name), cells(name)
    seeds = len(suite.seeds) * len(suite.partition_seeds)
    assert "seeds" in suite.model_fields_set
    assert len(made) == rows * seeds
    assert len({place(cell.facts()) for cell in made}) == rows
    assert {place(line) for line in LINES if line["table"] == name[-1]} == {place(cell.facts()) for cell in made}


def test_the_four_suites_are_the_whole_file() -> None:
    assert len(LINES) == 144
    assert {place(line) for line in LINES} == {place(cell.facts()) for name in TABLES for cell in cells(name)}


def test_every_row_has_the_rounds_of_table_1() -> None:
    printed = {(line["dataset"], line["method"]): line["rounds"] for line in LINES if line["table"] == "1"}
    for dataset in ("mnist", "femnist", "cifar10"):
        assert printed[dataset, "local"] == "0"  # the paper trains it for as long as FedProto, one supposes
        printed[dataset, "local"] = printed[dataset, "fedproto"]
    for name in TABLES:
        found = {(cell.facts()["dataset"], cell.label): str(cell.facts()["rounds"]) for cell in cells(name)}
        assert found.items() <= printed.items()


@pytest.mark.parametrize("name", ["table2", "table3", "table4"])
def test_the_further_tables_differ_from_the_first_in_stdev_alone(name: str) -> None:
    made = cells(name)
    like = select(cells("table1"), f"dataset={made[0].facts()['dataset']}")
    for one, other in zip(made, like, strict=True):
        apart = {fact for fact, value in one.facts().items() if other.facts()[fact] != value}
        assert apart == {"stdev"}


def test_mixed_models_are_those_of_the_paper() -> None:
    options = {
        cell.facts()["dataset"]: [model["options"] for model in cell.recipe["models"]]
        for cell in select(cells("table1"), "method=fedproto-mh")
    }
    for dataset in ("mnist", "femnist"):
        assert [model["channels"] for model in options[dataset]] == [18, 20, 22]
    assert [(model["stride1"], model["stride2"]) for model in options["cifar10"]] == [(1, 4), (2, 2)]


def test_imagenet_weights_are_one_setting_away() -> None:
    suite = config.override(config.load("table1"), ["model.weights=imagenet"])
    recipes = [cell.recipe for cell in expand(suite, content)]
    assert {model["options"]["weights"] for recipe in recipes for model in recipe["models"] if "content" in model} == {
        "imagenet"
    }
    residual = [model for recipe in recipes for model in recipe["models"] if model["name"] == "resnet18"]
    assert all(model["options"]["stem"] == "random" and model["content"] for model in residual)
    assert len(residual) == 3 * 3 * (7 + 2)


def test_the_small_table_has_the_same_rows() -> None:
    small, whole = ({place(cell.facts()) for cell in cells(name)} for name in ("table1-small", "table1"))
    assert small == whole


def test_the_ablation_changes_one_thing_at_a_time() -> None:
    rows: dict[str, set[str]] = {}
    made = cells("paper_vs_code")
    (plain,) = (cell.facts() for cell in select(made, "method=fedproto,seed=0,noise=uniform"))
    for cell in select(made, "algorithm=fedproto,seed=0"):
        facts = cell.facts()
        apart = {fact for fact in facts if fact != "method" and facts[fact] != plain[fact]}
        rows.setdefault(cell.label, set()).update(apart)
    every = rows.pop("preset paper")
    assert {frozenset(apart) for apart in rows.values()} == {
        frozenset({fact})
        for fact in (
            "noise",
            "batch_size",
            "init",
            "last_batch",
            "method.aggregation",
            "method.distance",
            "method.lam",
            "method.prototypes",
            "method.regulariser",
        )
    }
    assert {"method.aggregation", "method.distance", "method.prototypes", "method.regulariser"} < every
    assert {cell.facts()["seed"] for cell in made} == {0, 1, 2}


def test_the_sweeps_of_figures_vary_one_thing_as_the_figure_says() -> None:
    """Beside it there are rows without it, and each row's rounds."""
    for name, varied, count in (("fig3", "k", 6), ("fig4", "method.lam", 8), ("dirichlet", "alpha", 5)):
        suite = config.load(name)
        assert suite.figure
        assert varied.endswith(suite.figure.x)
        made = select(cells(name), "algorithm=fedproto,seed=0")
        facts = [cell.facts() for cell in made]
        assert {fact for one in facts for fact in one if one[fact] != facts[0][fact]} - {"method"} == {varied}
        assert len({one[varied] for one in facts}) == len(made) == count


def test_a_reference_has_a_number_for_every_row_of_the_tables() -> None:
    for name in TABLES:
        suite, made = config.load(name), cells(name)
        published = reference.read(suite, made)
        assert published
        for cell in made:
            found = published.find(cell.facts(), suite.metric)
            assert found
            assert 0.5 < found.mean < 1


def test_the_file_beside_the_suites_is_part_of_the_package() -> None:
    lines = Path(__file__).parent.parent.joinpath("pyproject.toml").read_text().splitlines()
    (data,) = (line for line in lines if line.startswith("fedbench = [") and "suites" in line)
    assert '"suites/*.csv"' in data


def test_the_tuned_table_is_the_table_with_values_to_choose() -> None:
    spaces: dict[str, set[str]] = {}
    for one, other in zip(cells("table1-tuned"), cells("table1"), strict=True):
        recipe = dict(one.recipe)
        tuning = recipe.pop("tuning")
        assert (one.label, recipe) == (other.label, other.recipe)
        assert tuning["trials"] == 20
        spaces.setdefault(one.label, set()).update(tuning["space"])
    rate = "training.optimizer.lr"
    own = {"fedproto": {"method.lam"}, "fedproto-mh": {"method.lam"}, "fedprox": {"method.mu"}}
    assert spaces == {label: {rate} | own.get(label, set()) for label in spaces}
