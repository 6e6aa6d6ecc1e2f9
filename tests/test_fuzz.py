"""Broken suites of every kind: `fedbench run --dry-run` says in one line what is wrong, or takes them."""

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench import cli

SUITE: dict[str, Any] = {
    "description": "two experiments",
    "dataset": {"name": "arrays", "path": "blobs.npz"},
    "model": {"name": "mlp", "hidden": [8]},
    "mixed": [{"name": "mlp", "hidden": [8, 4]}, {"name": "mlp", "hidden": [6, 4]}],
    "partition": {"name": "nway_kshot", "n": 2, "k": 3, "clients": 4, "test_shots": 1},
    "training": {"rounds": 3, "batch_size": 4, "optimizer": {"name": "sgd", "lr": 0.1}, "participation": 0.5},
    "seeds": [0, 1],
    "partition_seeds": [0],
    "metric": "test/accuracy",
    "grid": {"partition.n": [2, 3], "training.epochs": [1, 2]},
    "methods": {
        "local": None,
        "fedprox": {"grid": {"mu": [0.1, 1.0]}, "training": {"shuffle": False}},
        "fedper": {"preset": "table1"},
        "proto-mh": {"method": "fedproto", "models": "mixed", "lam": 1.0},
    },
}
TUNED: dict[str, Any] = {
    **{name: SUITE[name] for name in ("dataset", "model", "partition", "training", "seeds")},
    "methods": ["fedavg", "fedprox"],
    "tune": {
        "trials": 3,
        "sampler": "random",
        "params": {"mu": [0.1, 1.0], "lr": {"low": 0.01, "high": 1.0, "log": True}},
    },
}
EXPERIMENTS: dict[str, Any] = {
    **{name: SUITE[name] for name in ("dataset", "model", "training")},
    "methods": ["local", "fedavg"],
    "experiments": [
        {"partition": {"name": "iid", "clients": 3}},
        {"partition": SUITE["partition"], "methods": {"fesem": {"k": 2}}, "grid": {"partition.k": [2, 3]}},
    ],
}


def _hashable(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 2**63, 10**30, -(10**400), 1e308, float("nan"), float("inf"), 1e-320]),
    st.integers(-3, 5),
    st.floats(allow_nan=True),
    st.sampled_from(
        ["", " ", "1", "False", "null", "sgd", "loss", "./nowhere.py:Mine", "no.where:Mine", "../..", ":", "a.b.c"]
    ),
    st.text(max_size=8),
    st.dates(),
    st.binary(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS.filter(_hashable), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a tree."""
    yield path
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield from _places(inner, (*path, name))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a tree with another value at one place; `GONE` takes the place away."""
    if not path:
        return value
    if isinstance(tree, dict):
        inside = {name: _put(v, path[1:], value) if name == path[0] else v for name, v in tree.items()}
        return {name: inner for name, inner in inside.items() if inner is not GONE}
    entries = [_put(v, path[1:], value) if number == path[0] else v for number, v in enumerate(tree)]
    return [inner for inner in entries if inner is not GONE]


GONE = object()


@st.composite
def broken(draw: st.DrawFn) -> str:
    """Draw a suite in which one thing or two are not what they should be."""
    suite = draw(st.sampled_from([SUITE, TUNED, EXPERIMENTS]))
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        path = draw(st.sampled_from(list(_places(suite))[1:]))
        before, value = _at(suite, path), draw(VALUES)
        kind = draw(st.sampled_from(["other", "other", "gone", "more", "deeper"]))
        if kind == "gone":
            value = GONE
        elif kind == "more":
            name = draw(st.sampled_from(["lr", "grid", "modle", "", "é", "rounds.x", 7, None]))
            value = {**before, name: value} if isinstance(before, dict) else [before, value]
        elif kind == "deeper":
            value = _nested(before, draw(st.sampled_from([1, 2, 60])))
        suite = _put(suite, path, value)
        if not suite:
            break
    return yaml.safe_dump(suite, sort_keys=False, allow_unicode=draw(st.booleans()))


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


TEXTS = [
    "",
    "\x00",
    "\ufeff",
    "- a\n- b\n",
    "just text",
    "a: &a [*a]\n",
    "dataset: &d {name: mnist_mini}\nmodel: *d\nmethods: [local]\n",
    "dataset: !!python/object/apply:os.system ['touch touched']\n",
    "methods: !!set {local, fedavg}\n",
    "methods: !mine {local}\n",
    "<<: *nobody\n",
    "<<: 3\n",
    "methods: {local: {}, local: {}}\n",
    "? [a, b]\n: c\n",
    "seeds: 2026-99-99\n",
    "seeds: 1_0:61\nmethods: [local]\n",
    "--- {}\n--- {}\n",
    "methods: [local\n",
    "\tmethods: [local]\n",
    "%YAML 9.9\n---\nmethods: [local]\n",
    "a: " + "[" * 1200,
    "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
]


def _said(file: Path, text: bytes, data: Path) -> tuple[Any, str]:
    """Return the exit code and stderr of a dry run of a suite with a text."""
    file.write_bytes(text)
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = (
        sys.argv,
        ["fedbench", "run", str(file), "--dry-run", "--data", str(data), "--out", str(file.parent)],
    )
    try:
        with redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        return ended.code, err.getvalue()
    finally:
        sys.argv = before
    return 0, err.getvalue()


def _check(file: Path, text: bytes, data: Path) -> None:
    code, err = _said(file, text, data)
    if code in (0, None):
        assert err == ""
    else:
        assert code == 2
        assert err.startswith("fedbench: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")


@settings(
    derandomize=True, max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=broken())
def test_a_suite_with_something_wrong(text: str, tiny: Tiny) -> None:
    _check(tiny.file, text.encode("utf-8", "surrogatepass"), tiny.data)


@settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_bytes_changed(data: st.DataObject, tiny: Tiny) -> None:
    text = bytearray(yaml.safe_dump(data.draw(st.sampled_from([SUITE, TUNED, EXPERIMENTS])), sort_keys=False).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3)
            | st.sampled_from([b"&a ", b"*a", b"!!int ", b"!", b": ", b"- ", b"{", b"\t", b"#", b"'"])
        )
    _check(tiny.file, bytes(text), tiny.data)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_file_that_is_no_suite(text: str, tiny: Tiny) -> None:
    code, err = _said(tiny.file, text.encode(), tiny.data)
    assert (code, err.count("\n")) == (2, 1), err[:500]
    assert err.startswith("fedbench: ")
    assert not (tiny.file.parent / "touched").exists()


def test_what_is_broken_here_is_whole(tiny: Tiny) -> None:
    for suite in (SUITE, TUNED, EXPERIMENTS):
        assert _said(tiny.file, yaml.safe_dump(suite, sort_keys=False).encode(), tiny.data) == (0, "")
