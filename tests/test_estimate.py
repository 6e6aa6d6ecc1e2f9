"""What a suite is said to take, against what its cells take."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedbench import cells, config, data, estimate, plugins
from fedbench.cells import Cell
from fedbench.estimate import Estimate
from fedbench.executors import Setting

SUITE = """
dataset: mnist_mini
model: cnn_mnist
mixed: [{channels: 18}, {channels: 22}]
partition: {name: nway_kshot, n: 2, k: 9, stdev: 1, clients: 3, test_shots: 4, validation: 0.2}
training: {rounds: 2, batch_size: 4, last_batch: drop, evaluate_every: 2}
methods:
  local:
  fedrep: {head_epochs: 3, body_epochs: 2}
  fedavg: {training: {epochs: 4, last_batch: keep}}
  fedproto: {models: mixed, training: {batch_size: 5}}
"""
SETTING = Setting(Path(), Path())


def made(folder: Path, text: str = SUITE) -> list[Cell]:
    (folder / "s.yaml").write_text(text)
    return cells.expand(config.load(folder / "s.yaml"), lambda dataset: "content")


def test_steps_are_those_that_are_taken(tmp_path: Path) -> None:
    planned = made(tmp_path)
    arrays = data.load(plugins.build("datasets", "mnist_mini", {}), Path())
    taken = [
        float(cells.run_cell(cell, arrays, cells.draw_partition(cell, arrays)).work["steps"].sum()) for cell in planned
    ]
    assert [found.steps for found in estimate.estimate(planned, SETTING, calibrate=False)] == taken


def test_parameters_are_those_of_the_fedproto_code(tmp_path: Path) -> None:
    found = list(estimate.estimate(made(tmp_path), SETTING, calibrate=False))
    assert [one.parameters for one in found] == [(21_840,)] * 3 + [(19_738, 23_942)]
    assert all(math.isnan(one.seconds) for one in found)
    assert found[3].model == "mnist_mini, cnn_mnist with 19,738 / 23,942 parameters"


def test_twice_the_rounds_take_twice_the_time(tmp_path: Path) -> None:
    text = SUITE.replace("  fedavg:", "  more: {method: local, training: {rounds: 4}}\n  fedavg:")
    found = {one.cell.label: one.seconds for one in estimate.estimate(made(tmp_path, text), SETTING)}
    assert all(0 < seconds < 60 for seconds in found.values())
    assert found["more"] == pytest.approx(2 * found["local"])
    assert found["fedrep"] > 2 * found["local"]


def test_each_combination_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Mapping[str, Any]] = []
    run_cell = cells.run_cell

    def noted(cell: Cell, *arguments: Any, **keys: Any) -> Any:
        timed.append(cell.recipe)
        return run_cell(cell, *arguments, **keys)

    monkeypatch.setattr(estimate, "run_cell", noted)
    list(estimate.estimate(made(tmp_path), SETTING))
    assert [(recipe["method"]["name"], recipe["training"]["rounds"]) for recipe in timed] == [
        ("local", 3),
        ("fedproto", 3),
    ]


def test_a_model_that_diverges_has_no_time(tmp_path: Path) -> None:
    text = SUITE.replace("rounds: 2,", "rounds: 2, optimizer: {lr: 1e30},")
    found = list(estimate.estimate(made(tmp_path, text)[:1], SETTING))
    assert found[0].steps > 0
    assert estimate.in_words(found) == f"1 cell, {found[0].steps:.0f} client-steps"


@pytest.mark.parametrize(
    ("seconds", "workers", "said"),
    [
        (90.0, 1, "about 90 s one after the other"),
        (7199.0, 2, "about 60.0 minutes with 2 at a time"),
        (7200.0, 1, "about 2.0 hours one after the other"),
        (2e6, 1, "about 23.1 days one after the other"),
    ],
)
def test_times_in_words(seconds: float, workers: int, said: str, tmp_path: Path) -> None:
    cell = made(tmp_path)[0]
    halves = [Estimate(cell, (1,), 500.0, seconds / 2)] * 2
    assert estimate.in_words(halves, workers) == f"2 cells, 1,000 client-steps, {said}"


def test_nothing_to_run_in_words() -> None:
    assert re.fullmatch("0 cells, 0 client-steps", estimate.in_words([]))
