"""What stands behind the numbers: settings of rows, partitions, data, versions, machines and cell keys."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedbench.config import Suite
from fedbench.report.layout import SEEDS, Layout, Member, fact, grouped, names, values
from fedbench.results import Result, Results
from fedbench.words import counted, text

OF_ONE_CELL = ("started", "seconds", "partition", "host", "chosen")
"""Words of a cell's provenance that are not listed, since each cell has its own, or nobody else needs to know."""


def row_settings(members: Sequence[Member], layout: Layout) -> list[tuple[str, str, str]]:
    """Return for each row its label, its algorithm, and its settings.

    These are all hyperparameters, since a number such as FedProto's lambda means nothing without the distance beside
    it, and what else is not the same for all rows.
    """
    axes = {*layout.implied, *(name for more in layout.implied.values() for name in more)}
    own = [name for name in _own(members) if name not in axes]
    rows = []
    for label, row in grouped(members, lambda member: member.label).items():
        mine = [name for name in own if any(name in member.facts for member in row)]
        settings = (f"{name.removeprefix('method.')}={' / '.join(values(name, row))}" for name in mine)
        rows.append((label, " / ".join(values("algorithm", row)), ", ".join(settings)))
    return rows


def _own(members: Sequence[Member]) -> list[str]:
    """Return the names of all hyperparameters, and of the other facts that vary, seeds apart."""
    known = [name for name in names(members) if name not in ("method", "algorithm", *SEEDS)]
    own = [name for name in known if name.startswith("method.")]
    return own + [name for name in known if name not in own and len(values(name, members)) > 1]


PARTITION_HEAD = ("partition", "clients", "train", "validation", "test", "classes", "entropy (bits)", "hash")
"""Sizes and numbers of classes are per client; the entropy is that of the training labels, mean over clients."""


def partition_rows(members: Sequence[Member], layout: Layout, cards: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return for each partition the texts under `PARTITION_HEAD`, from its card."""
    axes = [name for axis, more in layout.implied.items() for name in (axis, *more)]
    rows = []
    for key, sharing in grouped(members, lambda member: member.result.cell.partition_key).items():
        first = sharing[0]
        recipe = first.result.cell.recipe["partition"]
        telling = [name for name in axes if name in ("dataset", *recipe["options"]) or name.startswith("dataset.")]
        name = ", ".join([recipe["name"], *(fact(name, first.facts) for name in telling), f"seed={recipe['seed']}"])
        rows.append((name, *(_card(cards[key]) if key in cards else ("not drawn", *[""] * 6))))
    return rows


def _card(card: Mapping[str, Any]) -> tuple[str, ...]:
    columns, totals = card["per_client"], card["totals"]
    sizes = (_span(columns[split]) for split in ("train", "validation", "test"))
    classes = _span([len(held) for held in columns["classes"]])
    return (str(totals["clients"]), *sizes, classes, f"{totals['entropy_bits']:.2f}", card["hash"][:16])


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def provenance(results: Results, suite: Suite, members: Sequence[Member]) -> list[tuple[str, str]]:
    """Return pairs of a word and a text: all that one needs to know to get the same numbers again."""
    own = {"method", "algorithm", *SEEDS, *_own(members)}
    same = members[0].facts
    return [
        ("suite", f"{suite.name}, sha256 of its content {_digest(suite)}"),
        ("protocol", _listed(result.cell.recipe["protocol"] for result in results.cells)),
        ("seeds", _listed(f"partition {member.seeds[0]} with run {member.seeds[1]}" for member in members)),
        ("in all rows", ", ".join(fact(name, same) for name in same if name not in own)),
        *_data(results),
        *_plugins(results),
        *_made([result.provenance for result in results.cells if result.provenance]),
        *_keys(results.cells),
    ]


def _digest(suite: Suite) -> str:
    """Return the hash of what the suite says, `--set` included, however the file is laid out."""
    content = json.dumps(suite.model_dump(mode="json", exclude_unset=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _data(results: Results) -> list[tuple[str, str]]:
    pairs = []
    for content, about in results.sources.items():
        cells = [result.cell for result in results.cells if result.cell.recipe["dataset"]["content"] == content]
        name = cells[0].recipe["dataset"]["name"]
        said = [about.title, about.source, about.licence, *([about.citation] if about.citation else [])]
        pairs.append((f"data {cells[0].specs.get(name, name)}", "; ".join([*said, f"sha256 {content[:16]}"])))
    return pairs


def _plugins(results: Results) -> list[tuple[str, str]]:
    specs = {spec: name for result in results.cells for name, spec in result.cell.specs.items()}
    return [(f"plugin {spec}", f"sha256 {name.rpartition('@')[2][:16]}") for spec, name in specs.items()]


def _made(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return how the finished cells were made: versions and machines, and the time it took."""
    words = dict.fromkeys(word for record in records for word in record if word not in OF_ONE_CELL)
    found = {word: [record[word] for record in records if record.get(word) is not None] for word in words}
    pairs = [(word, _listed(known)) for word, known in found.items() if known]
    if records:
        seconds = [record["seconds"] for record in records]
        pairs.append(
            (
                "wall time",
                f"{sum(seconds):,.1f} s for {counted(len(seconds), 'cell')}, at most {max(seconds):,.1f} s for one",
            )
        )
        begun = [record["started"][:19] for record in records]
        pairs.append(("started", " to ".join(dict.fromkeys([min(begun), max(begun)]))))
    return pairs


def _keys(cells: Iterable[Result]) -> list[tuple[str, str]]:
    rows = grouped(cells, lambda result: result.cell.label)
    return [(f"cells of {label}", _listed(result.cell.key for result in row)) for label, row in rows.items()]


def _listed(items: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(text(item) for item in items))
