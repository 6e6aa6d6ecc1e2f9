"""Numbers of cells, checked by hand, and that what is not there is no number."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fedbench.cells import Cell, draw_partition, run_cell, source
from fedbench.data import load
from fedbench.errors import InputError
from fedbench.federation import Outcome
from fedbench.metrics import higher_is_better
from fedbench.results import Costs, Result, Results, Summary, collect, costs, numbers, summarise
from fedbench.store import CellError, Record, Store

if TYPE_CHECKING:
    from conftest import Tiny

nan = math.nan


def outcome(
    *accuracy: list[float], test: list[int], status: Any = "completed", **metrics: list[list[float]]
) -> Outcome:
    """Return an outcome with these rounds of test accuracies; every client sends 10 scalars and makes 2 steps."""
    measured = {"test/accuracy": accuracy, **{name.replace("_", "/"): table for name, table in metrics.items()}}
    shape = len(accuracy), len(test)
    return Outcome(
        status=status,
        message="" if status == "completed" else f"round {len(accuracy) + 1}: client 0 sent 'w'",
        metrics={name: np.array(table, float).reshape(shape) for name, table in measured.items()},
        traffic={"up/scalars": np.full(shape, 10), "down/scalars": np.full(shape, 30)},
        work={"steps": np.full(shape, 2.0), "samples": np.full(shape, 5.0), "seconds": np.full(shape, 0.5)},
        sizes={"train": np.array(test) * 3, "validation": np.array(test) + 1, "test": np.array(test)},
        seconds={"total": 7.5, "training": 5.0, "evaluation": 2.0},
    )


def summary(one: Outcome, metric: str = "test/accuracy") -> Summary:
    return summarise(numbers(one), metric)


def spent(one: Outcome) -> Costs:
    return costs(numbers(one))


def test_mean_over_clients_and_pooled_accuracy_are_two_numbers() -> None:
    found = summary(outcome([1.0, 0.0], test=[90, 10]))
    assert (found.mean, found.pooled, found.std, found.worst) == (0.5, 0.9, 0.5, 0.0)
    assert (found.round, found.clients, found.left_out) == (1, 2, 0)


def test_the_spread_over_clients_is_the_populations() -> None:
    found = summary(outcome([0.8, 0.6, 0.7], test=[1, 1, 1]))
    assert found.std == pytest.approx(math.sqrt(0.02 / 3))


def test_clients_without_test_samples_are_left_out_and_counted() -> None:
    found = summary(outcome([0.25, nan, 0.75], test=[10, 0, 30]))
    assert (found.mean, found.std, found.worst, found.pooled) == (0.5, 0.25, 0.25, 0.625)
    assert (found.clients, found.left_out) == (3, 1)


def test_the_last_evaluated_round_counts_and_never_the_best() -> None:
    found = summary(outcome([0.9, 0.9], [nan, nan], [0.4, 0.6], [nan, nan], test=[1, 1]))
    assert (found.round, found.mean) == (3, 0.5)


def test_a_metric_is_pooled_over_its_own_split() -> None:
    two = outcome([0.0, 0.0], test=[9, 0], validation_accuracy=[[1.0, 0.0]], local_accuracy=[[1.0, 0.0]])
    assert summary(two, "validation/accuracy").pooled == pytest.approx(10 / 11)
    assert summary(two, "local/accuracy").pooled == 1.0


def test_the_worst_client_of_a_loss_has_the_highest() -> None:
    assert summary(outcome([0, 0], test=[1, 1], test_loss=[[0.5, 2.0]]), "test/loss").worst == 2.0
    assert not higher_is_better("train/loss/ce")
    assert higher_is_better("test/accuracy/prototype_own")


def test_what_was_never_measured_is_no_number() -> None:
    for one, metric in ((outcome([1.0], test=[1]), "test/other"), (outcome([nan], test=[0]), "test/accuracy")):
        found = summary(one, metric)
        assert (found.round, found.left_out) == (0, 1)
        assert math.isnan(found.mean)
        assert math.isnan(found.worst)


def test_numbers_keep_no_table_alive() -> None:
    """A report on thousands of cells holds their numbers, and not all that was measured in every round."""
    found = numbers(outcome([0.5, 0.7], [0.6, 0.8], test=[1, 2]))
    arrays = [*found.last.values(), *found.curves.values(), *found.totals.values()]
    assert all(array.base is None and array.ndim == 1 for array in arrays)


def test_costs_are_summed_over_clients() -> None:
    took = spent(outcome([0, 0, 0], [0, 0, 0], test=[1, 1, 1]))
    assert (took.rounds, took.up_scalars, took.down_scalars) == (2, 30.0, 90.0)
    assert (took.steps, took.samples, took.seconds) == (12.0, 30.0, 7.5)


def test_uploads_are_averaged_over_rounds() -> None:
    one = outcome([0, 0], [0, 0], test=[1, 1])
    one.traffic["up/scalars"][:] = [[0, 0], [100, 50]]
    assert spent(one).up_scalars == 75.0


def test_a_cell_that_diverged_says_in_which_round() -> None:
    cell = Cell("s", "row", {})
    assert Result(cell, "diverged", "", numbers(outcome([1.0], [1.0], test=[1], status="diverged"))).diverged_in == 3
    assert Result(cell, "completed", "", numbers(outcome([1.0], [1.0], test=[1]))).diverged_in is None
    at_once = Outcome("diverged", "round 1: loss", {}, {}, {}, {"train": np.array([3])}, {"total": 0.1})
    assert Result(cell, "diverged", "", numbers(at_once)).diverged_in == 1
    assert spent(at_once).rounds == 0
    assert math.isnan(summary(at_once).mean)


def collected(tiny: "Tiny") -> Results:
    """Return results with every status: fedavg was never run, fedproto failed, and local is there under two labels."""
    tiny.change(methods={"local": {}, "fedavg": {}, "fedproto": {}, "fesem": {}, "again": {"method": "local"}})
    store = Store(tiny.out)
    cells = {cell.label: cell for cell in tiny.cells()}
    made = {"started": "2026-01-01T00:00:00+00:00", "seconds": 1.0}
    store.put(Record(cells["local"], outcome([0.5, nan], [1.0, nan], test=[3, 0]), made))
    store.put(Record(cells["fesem"], outcome([0.5, nan], test=[3, 0], status="diverged"), made))
    store.put_error(CellError(cells["fedproto"], "RuntimeError: out of luck", "Traceback", input=False))
    return collect(store, cells.values(), tiny.file.parent)


def test_every_planned_cell_is_collected(tiny: "Tiny") -> None:
    results = collected(tiny)
    stands = {result.cell.label: (result.status, result.message) for result in results.cells}
    assert stands == {
        "local": ("completed", ""),
        "fedavg": ("missing", ""),
        "fedproto": ("error", "RuntimeError: out of luck"),
        "fesem": ("diverged", "round 2: client 0 sent 'w'"),
        "again": ("completed", ""),
    }
    assert [about.title for about in results.sources.values()] == ["your own arrays"]
    assert results.metrics() == ["test/accuracy"]


def test_curves_are_means_over_the_clients_that_have_a_value() -> None:
    one = outcome([0.5, nan], [nan, nan], [0.5, 1.0], test=[3, 1])
    one.initial["test/accuracy"] = np.array([0.25, nan])
    found = numbers(one)
    np.testing.assert_array_equal(found.curves["test/accuracy"], [0.5, nan, 0.75])
    np.testing.assert_array_equal(found.last["test/accuracy"], [0.5, 1.0])
    assert (found.at["test/accuracy"], found.rounds, found.initial) == (3, 3, {"test/accuracy": 0.25})
    np.testing.assert_array_equal(found.totals["up/scalars"], [20.0] * 3)
    np.testing.assert_array_equal(found.totals["work/steps"], [4.0] * 3)


def test_the_summary_has_a_row_per_cell(tiny: "Tiny") -> None:
    summary = collected(tiny).summary()
    rows = {row["label"]: row for row in summary.to_dict("records")}
    assert [rows["local"][name] for name in ("mean", "left_out", "rounds", "up_scalars")] == [1.0, 1, 2, 20.0]
    assert rows["fedproto"]["message"] == "RuntimeError: out of luck"
    assert summary["mean"].isna().tolist() == [False, True, True, False, False]


def test_a_real_run_comes_out_as_it_was_measured(tiny: "Tiny") -> None:
    cell = tiny.cells()[1]
    data = load(source(cell, tiny.file.parent), tiny.data)
    store = Store(tiny.out)
    partition = store.partition(cell, lambda: draw_partition(cell, data))
    done = run_cell(cell, data, partition, base=tiny.file.parent)
    store.put(Record(cell, done, {}))
    (result,) = collect(store, [cell], tiny.file.parent).cells
    found = summary(done)
    last = done.metrics["test/accuracy"][-1]
    assert found.mean == pytest.approx(last.mean())
    assert found.pooled == pytest.approx((last * done.sizes["test"]).sum() / done.sizes["test"].sum())
    parameters = 6 * 8 + 8 + 8 * 3 + 3
    assert result.numbers is not None
    assert costs(result.numbers).up_scalars == 4 * parameters


def test_a_damaged_store_is_bad_input(tiny: "Tiny") -> None:
    collected(tiny)
    for path in tiny.out.glob("cells/*/metrics.npz"):
        path.write_bytes(b"PK")
    with pytest.raises(InputError, match=r"cells/\w+/metrics\.npz: "):
        collect(Store(tiny.out), tiny.cells(), tiny.file.parent)
