"""Two sets of results side by side: which cells belong together, what differs, and whether it is more than noise."""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny
from markdown_it import MarkdownIt
from test_report import AWKWARD, cell, diverged, done

from fedbench.compare import Group, SideBySide, compare, stored
from fedbench.errors import InputError
from fedbench.results import Result, Results


def beside(a: Sequence[Result], b: Sequence[Result], metric: str = "") -> SideBySide:
    return compare(Results(tuple(a)), Results(tuple(b)), ("one", "two"), metric)


def study(
    label: str = "fedavg", means: Sequence[float] = (0.5, 0.6, 0.7, 0.55, 0.66, 0.61), **changes: Any
) -> list[Result]:
    """Return cells with these means over clients, one for each run seed."""
    return [done(cell(label, seed=seed, **changes), m - 0.05, m + 0.05) for seed, m in enumerate(means)]


def group(found: SideBySide, label: str = "fedavg", setting: str = "") -> Group:
    (one,) = (one for one in found.groups if (one.label, one.setting) == (label, setting))
    return one


def text(found: SideBySide, title: str) -> Sequence[tuple[str, ...]]:
    (table,) = (table for table in found.tables if table.title == title)
    return table.rows


def lines(found: SideBySide) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(found.csv())))


# --- which cells belong together


def test_the_same_cells_have_no_difference() -> None:
    found = beside(study(), study())
    against = group(found).against
    assert against
    assert (against.pairs, against.difference, against.p, against.verdict) == (6, 0, 1, "not distinguishable")
    assert group(found).differs == {}
    assert found.notes[:2] == (
        "6 cells in both, 0 only in A, 0 only in B.",
        "6 of them have the same key, so the same numbers are expected: 6 have them.",
    )
    assert "What differs" not in {table.title for table in found.tables}


def test_cells_with_the_same_key_and_other_numbers_are_counted() -> None:
    other = study()
    other[2] = done(other[2].cell, 0.1, 0.1)
    assert "expected: 5 have them" in beside(study(), other).notes[1]


def test_cells_are_matched_by_what_tells_them_apart_and_differ_in_the_rest() -> None:
    a = [*study(n=3), *study(n=4), *study("local", n=3)]
    b = [*study(n=4, rounds=5, k=50), *study(n=5, rounds=5, k=50), *study("fedrep", n=4)]
    found = beside(a, b)
    counts = {
        (one.label, one.setting): [(m.a is not None, m.b is not None) for m in one.matches] for one in found.groups
    }
    assert counts == {
        ("fedavg", "n=3"): 6 * [(True, False)],
        ("fedavg", "n=4"): 6 * [(True, True)],
        ("fedavg", "n=5"): 6 * [(False, True)],
        ("local", ""): 6 * [(True, False)],
        ("fedrep", ""): 6 * [(False, True)],
    }
    assert group(found, "fedavg", "n=4").differs == {"k": ("100", "50"), "rounds": ("2", "5")}
    assert text(found, "What differs") == (("k", "100", "50", "fedavg"), ("rounds", "2", "5", "fedavg"))
    assert {line["differs"] for line in lines(found) if line["key_a"] and line["key_b"]} == {"k=100 / 50, rounds=2 / 5"}


def test_what_follows_from_something_else_does_not_keep_cells_apart() -> None:
    a = [*study(n=3, rounds=10), *study(n=4, rounds=20)]
    b = [*study(n=3, rounds=2), *study(n=4, rounds=2)]
    found = beside(a, b)
    assert [one.setting for one in found.groups] == ["n=3", "n=4"]
    assert group(found, setting="n=4").differs == {"rounds": ("20", "2")}


def test_other_data_and_revisions_are_told() -> None:
    b = study()
    for result in b:
        result.cell.recipe["dataset"]["content"] = "e" * 64
        result.cell.recipe["method"]["revision"] = 2
    assert group(beside(study(), b)).differs == {"content of the data": ("d" * 16, "e" * 16), "revision": ("1", "2")}


def test_cells_with_other_seeds_do_not_belong_together() -> None:
    found = beside(
        study(means=(0.5, 0.6)), [done(cell("fedavg", seed=1), 0.9, 0.9), done(cell("fedavg", seed=7), 0.9, 0.9)]
    )
    seeds = [[side.seeds if side else None for side in (m.a, m.b)] for m in group(found).matches]
    assert seeds == [[(7, 0), None], [(7, 1), (7, 1)], [None, (7, 7)]]
    assert group(found).against is None


def test_nothing_in_common_is_bad_input() -> None:
    with pytest.raises(
        InputError, match="one and two have no cell in common; rows of the first: fedavg; of the second: local"
    ):
        beside(study(), study("local"))
    with pytest.raises(InputError, match="unknown metric 'test/accurac'; did you mean 'test/accuracy'"):
        beside(study(), study(), "test/accurac")


# --- numbers


def test_a_planted_difference_is_found_and_the_lines_are_one_family() -> None:
    base = [0.5, 0.6, 0.7, 0.55, 0.66, 0.61]
    noise = [0.002, -0.002, 0.001, -0.001, 0.002, -0.002]
    a = [*study(means=base), *study("local", base), *study("fedrep", base)]
    effects = {"fedavg": 0.1, "local": 0.0, "fedrep": -0.1}
    b = [
        result
        for label, effect in effects.items()
        for result in study(label, [mean + effect + more for mean, more in zip(base, noise, strict=True)])
    ]
    found = beside(a, b)
    assert {one.label: one.against.verdict for one in found.groups if one.against} == {
        "fedavg": "better",
        "local": "not distinguishable",
        "fedrep": "worse",
    }
    assert {one.against.family for one in found.groups if one.against} == {3}
    assert [row[0] for row in text(found, "Over pairs of seeds")] == ["fedavg", "local", "fedrep"]
    assert "6 pairs of seeds: the Wilcoxon test cannot go below p = 0.0312, 0.0938 corrected for 3" in found.notes[2]
    losses = beside(a, b, "test/loss")
    assert [one.against.verdict for one in losses.groups if one.against] == ["better", "not distinguishable", "worse"]


def test_single_pairs_are_shown_and_not_tested() -> None:
    found = beside(study(means=(0.5,)), study(means=(0.9,)))
    assert text(found, "Cell by cell") == (("fedavg", "7 / 0", "50.00 ± 5.00", "90.00 ± 5.00", "+40.00"),)
    assert {table.title for table in found.tables} == {"Cell by cell"}
    assert "1 pair of seeds can show nothing" in found.notes[2]
    (line,) = lines(found)
    assert float(line["difference"]) == pytest.approx(0.4)
    assert (line["pairs"], line["p"], line["verdict"]) == ("", "", "")


def test_cells_without_a_number_say_why() -> None:
    failed, missing = Result(cell("local"), "error", "RuntimeError"), Result(cell("fedrep"), "missing")
    a = [*study(means=(0.5,)), *study("local", (0.5,)), *study("fedrep", (0.5,))]
    found = beside(a, [diverged(cell("fedavg"), 1), failed, missing])
    assert [row[3:] for row in text(found, "Cell by cell")] == [("diverged", ""), ("failed", ""), ("missing", "")]
    assert [line["status_b"] for line in lines(found)] == ["diverged", "error", "missing"]
    assert [line["b"] for line in lines(found)] == ["", "", ""]


def test_the_csv_has_the_numbers_as_they_are() -> None:
    found = beside(study(), study(means=(0.6, 0.7, 0.8, 0.6, 0.75, 0.7)))
    rows = lines(found)
    assert len(rows) == 6
    assert [float(row["b"]) for row in rows] == pytest.approx([0.6, 0.7, 0.8, 0.6, 0.75, 0.7])
    against = group(found).against
    assert against
    assert float(rows[0]["p"]) == against.p
    assert (float(rows[0]["low"]), float(rows[0]["high"])) == against.interval
    assert {row["verdict"] for row in rows} == {"better"}


def test_versions_and_machines_that_differ_are_told() -> None:
    b = [Result(r.cell, r.status, "", r.numbers, {**r.provenance, "torch": "3.0", "host": "x"}) for r in study()]
    assert text(beside(study(), b), "What differs") == (("torch", "2.14.1", "3.0", "made with"),)


def test_labels_stay_text() -> None:
    found = beside(study(AWKWARD, algorithm="local"), study(AWKWARD, algorithm="local", means=(0.9,)))
    tokens = MarkdownIt().enable("table").parse(found.markdown())
    shown = {"".join(part.content for part in token.children or ()) for token in tokens if token.type == "inline"}
    assert AWKWARD in shown
    kinds = {token.type for token in tokens} | {part.type for token in tokens for part in token.children or ()}
    assert not kinds & {"code_inline", "em_open", "strong_open", "link_open", "html_inline"}
    assert lines(found)[0]["row"] == AWKWARD


# --- the command


def test_suites_folders_and_results_files_can_be_compared(fedbench: Callable[..., Any], tiny: Tiny) -> None:
    run = ["run", str(tiny.file), "--workers", "1", "--tracking-uri", "none", "--seeds", "0,1"]
    assert fedbench(*run)[0] == 0
    assert fedbench(*run, "--out", "other", "--set", "rounds=1")[0] == 0
    assert fedbench("report", str(tiny.file), "--seeds", "0,1", "--format", "csv")[0] == 0
    tiny.change(seeds=[0, 1])
    said = [fedbench("compare", a, "other/tiny") for a in (str(tiny.file), "runs/tiny", "runs/tiny/results.csv")]
    for code, out, err in said:
        assert (code, err) == (0, "")
        assert "| rounds | 3 | 1 | local, fedavg, fedproto |" in " ".join(out.split())
        assert "6 cells in both, 0 only in A, 0 only in B." in out
    tables = [sorted(line for line in out.splitlines() if line.startswith("|")) for _, out, _ in said]
    assert tables[0] == tables[1] == tables[2]
    code, out, _ = fedbench("compare", "runs/tiny", "other/tiny", "--format", "csv", "--metric", "test/loss")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 6
    assert all(row["verdict"] in ("better", "worse", "not distinguishable") for row in rows)


def test_what_cannot_be_compared_is_one_line(fedbench: Callable[..., Any], tiny: Tiny) -> None:
    Path("empty").mkdir()
    Path("old").mkdir()
    Path("old/version").write_text("99\n")
    for other, message in (
        ("empty", "empty: not the folder of a suite's runs"),
        ("old", "old/version: layout 99, but this fedbench reads layout 1; use the fedbench that wrote it"),
        ("nothing", "unknown suite 'nothing'"),
        ("nothing.csv", "nothing.csv: "),
    ):
        code, _, err = fedbench("compare", str(tiny.file), other)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_a_folder_with_failed_cells_is_read(tiny: Tiny) -> None:
    from fedbench.store import CellError, Store

    store = Store(tiny.out)
    with store.lock(lambda: None):
        store.put_error(CellError(tiny.cells()[0], "RuntimeError: out of luck", "", input=False))
    (result,) = stored(tiny.out).cells
    assert (result.status, result.message) == ("error", "RuntimeError: out of luck")
