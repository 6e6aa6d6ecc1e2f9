"""Published numbers: which file is read, what is refused, and which line belongs to which cell."""

import math
from dataclasses import astuple
from pathlib import Path

import pytest

from fedbench import config, reference
from fedbench.cells import Cell, expand
from fedbench.errors import InputError
from fedbench.reference import Published, Reference

SUITE = """
dataset: mnist_mini
model: cnn_mnist
partition: {name: nway_kshot, n: 2, k: 6, clients: 3}
grid: {partition.n: [2, 3]}
methods: {local: , mine: {method: fedavg, training: {rounds: 7}}}
reference: numbers.csv
"""
HEAD = "table,dataset,n,method,accuracy_mean,accuracy_std,loss_mean,remark,rounds,params_thousands\n"
LINES = "1,mnist_mini,2.0,mine,97.5,0.25,1.5,good,100,4\nII,mnist_mini,3,mine,90,,,,,\n"


def read(folder: Path, text: str = HEAD + LINES, suite: str = SUITE) -> tuple[Reference, list[Cell]]:
    (folder / "s.yaml").write_text(suite)
    (folder / "numbers.csv").write_text(text)
    loaded = config.load(folder / "s.yaml")
    cells = expand(loaded, lambda dataset: "content")
    found = reference.read(loaded, cells)
    assert found
    return found, cells


def numbers(found: Published | None) -> tuple[float, ...]:
    assert found
    return astuple(found)


def test_a_line_belongs_to_the_cells_with_its_settings(tmp_path: Path) -> None:
    found, cells = read(tmp_path)
    assert found.settings == ("dataset", "n", "method")
    by_place = {(cell.label, cell.facts()["n"]): found.find(cell.facts(), "test/accuracy/head") for cell in cells}
    assert numbers(by_place[("mine", 2)]) == pytest.approx((0.975, 0.0025, 100, 4000))
    other = by_place[("mine", 3)]
    assert other
    assert other.mean == pytest.approx(0.9)
    assert all(math.isnan(value) for value in (other.std, other.rounds, other.up_scalars))
    assert by_place[("local", 2)] is by_place[("local", 3)] is None


def test_each_metric_has_its_own_column(tmp_path: Path) -> None:
    found, cells = read(tmp_path)
    loss = found.find(cells[1].facts(), "test/loss")
    assert loss
    assert loss.mean == 1.5
    assert math.isnan(loss.std)
    none = found.find(cells[1].facts(), "work/steps")
    assert none
    assert math.isnan(none.mean)


def test_a_suite_need_not_have_one(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE.replace("reference: numbers.csv", ""))
    assert reference.read(config.load(tmp_path / "s.yaml"), []) is None


def test_the_shipped_file_serves_suites_elsewhere(tmp_path: Path) -> None:
    text = SUITE.replace("reference: numbers", "reference: fedproto_tables").replace("k: 6,", "k: 6, stdev: 2,")
    (tmp_path / "s.yaml").write_text(text.replace("mine:", "fedproto-mh:"))
    loaded = config.load(tmp_path / "s.yaml")
    cells = expand(loaded, lambda dataset: "content")
    found = reference.read(loaded, cells)
    assert found
    facts = {**cells[3].facts(), "dataset": "mnist"}
    assert numbers(found.find(facts, "test/accuracy")) == pytest.approx((0.9707, 0.005, 100, 4000))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"numbers\.csv: no column ends in _mean"),
        ("dataset,accuracy\nmnist,1\n", r"numbers\.csv: no column ends in _mean"),
        ("datset,accuracy_mean\nmnist,1\n", r"numbers\.csv: unknown fact 'datset'; did you mean 'dataset'\?"),
        (HEAD + LINES + LINES, r"numbers\.csv: line 4: mnist_mini, 2\.0, mine comes twice"),
        (HEAD + LINES.replace("97.5", "97,5"), r"numbers\.csv: line 2: 11 fields under 10 headings"),
        (HEAD + LINES.replace("97.5", "many"), r"line 2: accuracy_mean: should be a number or empty, not 'many'"),
        (HEAD + '"', r"numbers\.csv: Error: unexpected end of data"),
    ],
)
def test_a_bad_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SUITE)
    with pytest.raises(InputError, match=r"s\.yaml: reference: no file .*numbers\.csv"):
        reference.read(config.load(tmp_path / "s.yaml"), [])
