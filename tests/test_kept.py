"""What cells keep of test samples: embeddings, their silhouettes, confusion, and the figures in the report."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import Run, Tiny

from fedbench import asked, config, results, results_csv
from fedbench.cells import draw_partition, expand, fingerprints, run_cell, source
from fedbench.data import load
from fedbench.errors import InputError
from fedbench.federation import Outcome
from fedbench.kept import silhouette, silhouettes
from fedbench.partition import Partition
from fedbench.report import figures, plots
from fedbench.report.embeddings import scatter
from fedbench.report.plots import Heat, Scatter
from fedbench.store import Record, Store


def test_a_silhouette_by_hand() -> None:
    points = np.array([[0.0], [1.0], [4.0], [6.0]])
    values = silhouette(points, np.array([7, 7, 9, 9]))
    assert values == pytest.approx([(5 - 1) / 5, (4 - 1) / 4, (3.5 - 2) / 3.5, (5.5 - 2) / 5.5])


def test_who_is_alone_or_all_of_one_kind_has_none() -> None:
    points = np.array([[0.0], [1.0], [4.0]])
    assert silhouette(points, np.array([0, 0, 1]))[2] == 0
    assert silhouette(points, np.array([3, 3, 3])).tolist() == [0, 0, 0]
    assert silhouette(np.zeros((4, 2)), np.array([0, 0, 1, 1])).tolist() == [0, 0, 0, 0]


def test_silhouettes_are_those_of_scikit_learn() -> None:
    from sklearn import metrics

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 1500)  # more than a chunk
    points = rng.normal(size=(1500, 7)) + 100 + labels[:, None]
    assert silhouette(points, labels) == pytest.approx(metrics.silhouette_samples(points, labels), abs=1e-9)


def test_silhouettes_are_per_client_by_class_and_by_client() -> None:
    kept = {
        "embeddings": np.array([[0.0], [0.1], [5.0], [5.1]], np.float32),
        "labels": np.array([0, 1, 0, 1]),
        "clients": np.array([0, 0, 2, 2]),
    }
    found = silhouettes(kept, 3)
    assert np.isnan(found["test/silhouette/client"][1])
    assert found["test/silhouette/client"][[0, 2]].min() > 0.9
    assert found["test/silhouette/class"][[0, 2]].max() < 0


# --- kept by a cell


def outcome_of(tiny: Tiny, label: str, **keys: object) -> tuple[Record, Partition]:
    tiny.change(**keys)
    suite = config.load(tiny.file)
    cell = next(cell for cell in tiny.cells() if cell.label == label)
    arrays = load(source(cell, suite.base), tiny.data)
    partition = draw_partition(cell, arrays)
    return Record(cell, run_cell(cell, arrays, partition, base=suite.base), {}), partition


def test_a_cell_keeps_the_embeddings_of_its_own_test_samples(tiny: Tiny) -> None:
    record, partition = outcome_of(tiny, "fedproto", keep=["embeddings"])
    kept = record.outcome.kept
    sizes = [len(rows) for rows in partition.test]
    assert kept["clients"].tolist() == np.repeat(range(4), sizes).tolist()
    y = np.load(tiny.data / "blobs.npz")["y_test"]
    assert kept["labels"].tolist() == [int(y[row]) for rows in partition.test for row in rows]
    assert kept["embeddings"].shape == (sum(sizes), 8)
    assert kept["table/prototypes"].shape == (3, 8)
    assert kept["table/prototypes/labels"].tolist() == [0, 1, 2]
    for kind in ("class", "client"):
        table = record.outcome.metrics[f"test/silhouette/{kind}"]
        assert np.isnan(table[:-1]).all()
        assert (np.abs(table[-1]) <= 1).all()


def test_a_cell_without_the_key_is_the_same_but_for_what_is_kept(tiny: Tiny) -> None:
    plain, _ = outcome_of(tiny, "fedavg")
    keeping, _ = outcome_of(tiny, "fedavg", keep=["embeddings"])
    assert "keep" not in plain.cell.recipe
    assert plain.outcome.kept == {}
    assert plain.cell.key != keeping.cell.key
    for name, table in plain.outcome.metrics.items():
        np.testing.assert_array_equal(table, keeping.outcome.metrics[name])
    assert not any(name.startswith("table/") for name in keeping.outcome.kept)


def test_clients_with_models_of_different_widths_keep_nothing(tiny: Tiny) -> None:
    mixed = [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [6]}]
    methods = {"local": {"models": "mixed"}}
    record, _ = outcome_of(tiny, "local", keep=["embeddings"], mixed=mixed, methods=methods)
    assert record.outcome.status == "completed"
    assert record.outcome.kept == {}


def test_a_cell_keeps_what_its_test_samples_are_taken_for(tiny: Tiny) -> None:
    options = {"candidates": "own", "prediction": "prototype"}  # an answer that needs what the server sends
    record, partition = outcome_of(
        tiny, "fedproto", keep=["confusion"], mixed=[{"hidden": [4]}, {"hidden": [6]}], methods={"fedproto": options}
    )
    table = record.outcome.kept["confusion"]
    y = np.load(tiny.data / "blobs.npz")["y_test"]
    assert table.shape == (4, 3, 4)
    for client, rows in enumerate(partition.test):
        assert table[client].sum(axis=1).tolist() == np.bincount(y[rows], minlength=3).tolist()
        right = record.outcome.metrics["test/accuracy"][-1][client]
        assert table[client].trace() / len(rows) == pytest.approx(right)


# --- in the report


def stored(tiny: Tiny, **keys: object) -> tuple[results.Results, config.Suite, Outcome]:
    record, _ = outcome_of(tiny, "fedproto", methods={"fedproto": {}}, **(keys or {"keep": ["embeddings"]}))
    store = Store(tiny.out / "tiny")
    with store.lock(lambda: None):
        store.put(record)
    suite = config.load(tiny.file)
    cells = expand(suite, fingerprints(suite.base, tiny.data))
    return results.collect(store, cells, suite.base, tiny.data), suite, record.outcome


def test_the_report_has_them_in_the_plane(tiny: Tiny) -> None:
    found, suite, outcome = stored(tiny)
    figure = figures.figures(found, suite)[0]
    assert isinstance(figure.plot, Scatter)
    points = {group.label: len(group.points) for group in figure.plot.groups}
    assert points == {f"class {k}": int((outcome.kept["labels"] == k).sum()) for k in range(3)}
    assert [len(group.points) for group in figure.plot.large] == [1, 1, 1]
    mean = float(np.nanmean(outcome.metrics["test/silhouette/class"][-1]))
    assert f"Mean silhouette by class {mean:.2f}" in figure.caption
    assert plots.inline(figure) == plots.inline(figures.figures(found, suite)[0])


@pytest.mark.parametrize("shape", [(1, 5), (2, 5), (3, 1), (40, 1)])
def test_few_points_and_narrow_embeddings_have_a_place(shape: tuple[int, int]) -> None:
    points = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = scatter({"embeddings": points, "labels": np.zeros(len(points), np.int64)})
    assert np.isfinite([xy for group in found.groups for xy in group.points]).all()
    assert sum(len(group.points) for group in found.groups) == len(points)


@pytest.mark.parametrize("of", ["worst", 2])
def test_the_report_has_the_confusion_of_a_client(tiny: Tiny, of: str | int) -> None:
    found, suite, outcome = stored(tiny, keep=["confusion"], confusion_of=of)
    client = int(np.argmin(outcome.metrics["test/accuracy"][-1])) if of == "worst" else int(of)
    figure = next(figure for figure in figures.figures(found, suite) if figure.name == "confusion")
    assert figure.title == f"Confusion of client {client}"
    assert isinstance(figure.plot, Heat)
    counts = outcome.kept["confusion"][client]
    held, given = counts.sum(axis=1) > 0, counts.sum(axis=0) > 0
    assert figure.plot.rows == tuple(f"fedproto: {label}" for label in np.flatnonzero(held))
    shares = 100 * counts[held][:, given] / counts[held].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.nan_to_num(figure.plot.values), shares)  # blank where there is none
    file = tiny.out / "results.csv"
    file.write_text(results_csv.dumps(found, suite))
    again, restored, _ = results_csv.load(file)
    assert [plots.inline(f) for f in figures.figures(again, restored)] == [
        plots.inline(f) for f in figures.figures(found, suite)
    ]


def test_a_client_that_is_not_there_is_refused(tiny: Tiny) -> None:
    tiny.change(keep=["confusion"], confusion_of=4)
    with pytest.raises(InputError, match=r"tiny\.yaml: confusion_of: 4; want a client from 0 to 3, or worst"):
        asked.check_client(config.load(tiny.file), [5, 5, 5, 5], ())
    tiny.change(keep=[], confusion_of=3)
    with pytest.raises(InputError, match=r"confusion_of: 3 needs cells that keep it: keep: \[confusion\]"):
        asked.check_client(config.load(tiny.file), [5, 5, 5, 5], ())


def test_a_client_that_has_no_confusion_is_refused(tiny: Tiny, fedbench: Run) -> None:
    tiny.change(keep=["confusion"], confusion_of=2)
    with pytest.raises(InputError, match=r"confusion_of: client 2 has no test samples; want another one, or worst"):
        asked.check_client(config.load(tiny.file), [5, 5, 0, 5], ())
    tiny.change(newcomers={"clients": [2], "epochs": [1]})
    code, _, err = fedbench("run", "tiny.yaml", "--dry-run")
    assert (code, "confusion_of: client 2 is a newcomer; want another one, or worst\n" in err) == (2, True)


def test_a_client_without_test_samples_has_no_figure_of_confusion(tiny: Tiny) -> None:
    found, suite, outcome = stored(tiny, keep=["confusion"], confusion_of=2)
    assert "confusion" in [figure.name for figure in figures.figures(found, suite)]
    outcome.kept["confusion"][2] = 0
    empty = replace(found.cells[0], numbers=results.numbers(outcome))
    shown = figures.figures(replace(found, cells=(empty,)), suite)
    assert "confusion" not in [figure.name for figure in shown]


def test_a_sample_without_an_answer_counts_as_wrong(tiny: Tiny) -> None:
    found, suite, outcome = stored(tiny, keep=["confusion"], confusion_of=2)
    counts = outcome.kept["confusion"][2]
    counts[:] = 0
    counts[1, 1], counts[1, -1] = 3, 1
    measured = replace(found.cells[0], numbers=results.numbers(outcome))
    figure = next(f for f in figures.figures(replace(found, cells=(measured,)), suite) if f.name == "confusion")
    assert isinstance(figure.plot, Heat)
    assert figure.plot.columns == ("1", "none")
    assert figure.plot.values == ((75.0, 25.0),)
    assert "fedproto 75 %" in figure.alt


def test_a_name_of_something_else_cannot_be_kept(tiny: Tiny) -> None:
    tiny.change(keep=["weights"])
    with pytest.raises(InputError, match="keep"):
        config.load(tiny.file)
