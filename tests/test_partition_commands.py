"""`fedbench partition`: tables and pictures of who holds what."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from fedbench import cli
from fedbench.data import Arrays
from fedbench.partition import Given, draw
from fedbench.partition_commands import mismatch

SUITE = """
dataset: {name: arrays, path: points.npz}
model: mlp
grid: {partition.alpha: [0.1, 100.0]}
partition: {name: dirichlet, clients: 45, noise: 0.5, min_samples: 12, test: iid}
methods: [local, fedavg]
"""


def fedbench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedbench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(900, 4)), np.arange(900) % 6
    np.savez(tmp_path / "points.npz", x_train=x[:600], y_train=y[:600], x_test=x[600:], y_test=y[600:])
    (tmp_path / "skewed.yaml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def test_every_partition_has_a_table_and_a_picture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbench(monkeypatch, "partition", "skewed.yaml", "--to", "pictures") == 0
    said = capsys.readouterr().out
    tables = re.split(r"^(dirichlet alpha=\S+ seed=1234)$", said, flags=re.MULTILINE)[1:]
    assert tables[::2] == ["dirichlet alpha=0.1 seed=1234", "dirichlet alpha=100.0 seed=1234"]
    means = []
    for text in tables[1::2]:
        lines = [line.split() for line in text.splitlines() if re.match(r"\d+ ", line) and "clients" not in line]
        assert [int(line[0]) for line in lines] == list(range(40))
        assert all(int(line[1]) >= 12 for line in lines)
        assert "and 5 more clients; 45 clients with 12 to" in text
        assert "600 of 600 training and 300 test samples dealt" in text
        assert "test samples: in equal parts" in text
        assert "noise" in text
        assert "rotation" not in text
        means.append([float(re.search(rf"mean {word} (\S+?)[ \n]", text)[1]) for word in ("entropy", "mismatch")])  # type: ignore[index]  # it is there
    assert means[0][0] < 1.5 < 2 < means[1][0]
    assert means[0][1] > 2 * means[1][1] > 0
    assert "samples moved to clients that lacked some, after 10 draws" in tables[1]
    pictures = sorted(path.name for path in (folder / "pictures").iterdir())
    assert pictures == ["partition-dirichlet-alpha-0.1-seed-1234.svg", "partition-dirichlet-alpha-100.0-seed-1234.svg"]
    for name in pictures:
        root = ElementTree.parse(folder / "pictures" / name).getroot()
        texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"client", "class", "training samples"} <= texts
    assert not (folder / "runs").exists()


def test_only_and_set_choose_partitions(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("--only", "alpha=0.1", "--set", "partition.clients=3", "--set", "partition.noise=0")
    assert fedbench(monkeypatch, "partition", "skewed.yaml", *chosen) == 0
    said = capsys.readouterr().out
    assert "dirichlet seed=1234" in said
    assert "3 clients with" in said
    assert "noise" not in said
    assert [path.name for path in (folder / "runs" / "skewed").iterdir()] == ["partition-dirichlet-seed-1234.svg"]


def test_what_is_not_feasible_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedbench(monkeypatch, "partition", "skewed.yaml", "--set", "partition.min_samples=14") == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "partition.min_samples: 14 for each of 45 clients is 630, more than the 600 training samples" in errors


def test_mismatch_is_the_distance_between_training_and_test_labels() -> None:
    clients = np.array([0, 0, 0, 0, 1, 1, 2, 2])
    y_train, y_test = np.array([0, 0, 0, 1, 1, 1, 2, 2]), np.array([0, 1, 0, 0])
    x = np.zeros((8, 1), np.uint8)
    arrays = Arrays(
        x, y_train, x[:4], y_test, 3, client_train=clients, client_test=np.array([0, 0, 1, 1])
    )  # client 2 has no test samples
    np.testing.assert_allclose(mismatch(draw(Given(), arrays, 0), arrays), [0.25, 1.0, np.nan])
