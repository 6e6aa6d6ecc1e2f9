"""`fedbench partition`: the partitions of a suite as tables and pictures, before anything is trained."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.errors import within
from fedbench.plan import Plan
from fedbench.words import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedbench.cells import Cell
    from fedbench.data import Arrays
    from fedbench.partition import Partition
    from fedbench.report.table import Table

_MOST = 40  # clients that a table shows


def show(plan: Plan, to: Path | None) -> None:
    """Draw the partitions of a plan's cells, print a table of each, and save its picture as SVG.

    Pictures go into the folder `to`, else beside the cells.  InputError if the data do not suffice.
    """
    from rich.console import Console

    from fedbench import cells, data
    from fedbench.report import plots, terminal
    from fedbench.report.figures import partition_heat

    console = Console()
    folder = to or plan.store.root
    first = {cell.partition_key: cell for cell in reversed(plan.cells)}
    titles = _titles(list(first.values())[::-1])
    arrays: dict[str, Arrays] = {}
    for key, title in titles.items():
        content = first[key].recipe["dataset"]["content"]
        if content not in arrays:
            arrays = {content: data.load(cells.source(first[key], plan.suite.base), plan.data)}
        with within(plan.suite.place):
            partition = cells.draw_partition(first[key], arrays[content], plan.suite.base)
        heat, said = partition_heat(partition.card)
        lines = [_summary(partition, arrays[content]), *_notes(partition.card)]
        console.print(terminal.render_table(_table(title, partition, arrays[content])))
        print("\n".join(lines))
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"partition-{re.sub(r'[^a-z0-9.]+', '-', title.lower()).strip('-')}.svg"
        file.write_text(plots.svg(plots.Figure(file.stem, "", title, said, said, heat)), encoding="utf-8")
        print(f"written to {file}\n", flush=True)


def _titles(cells: "Sequence[Cell]") -> dict[str, str]:
    """Return what to call each partition: its rule, the facts in which the partitions differ, and the seed."""
    facts = {
        cell.partition_key: {
            "dataset": cell.recipe["dataset"]["name"],
            **{f"dataset.{name}": value for name, value in cell.recipe["dataset"]["options"].items()},
            **cell.recipe["partition"]["options"],
        }
        for cell in cells
    }
    varying = [
        name
        for name in dict.fromkeys(name for one in facts.values() for name in one)
        if len({str(one.get(name)) for one in facts.values()}) > 1
    ]
    return {
        cell.partition_key: " ".join(
            [
                cell.recipe["partition"]["name"],
                *(f"{name}={facts[cell.partition_key][name]}" for name in varying if name in facts[cell.partition_key]),
                f"seed={cell.recipe['partition']['seed']}",
            ]
        )
        for cell in cells
    }


def _table(title: str, partition: "Partition", arrays: "Arrays") -> "Table":
    """Return a line for each client, up to a number."""
    from fedbench.report.table import Table

    columns = partition.card["per_client"]
    apart = mismatch(partition, arrays)
    extra = [name for name in ("noise", "rotation") if name in partition.card and any(partition.card[name])]
    rows = [
        (
            str(client),
            *(f"{columns[part][client]:,}" for part in ("train", "validation", "test")),
            _ranges(columns["classes"][client]),
            f"{columns['entropy_bits'][client]:.2f}",
            "" if math.isnan(apart[client]) else f"{apart[client]:.2f}",
            *(f"{partition.card[name][client]:.3g}" for name in extra),
        )
        for client in range(min(partition.clients, _MOST))
    ]
    head = ("client", "train", "validation", "test", "classes", "entropy (bits)", "mismatch", *extra)
    return Table(title, head, tuple(rows))


def _ranges(classes: Sequence[int]) -> str:
    """Return numbers as text, neighbours joined: 0-3 7."""
    import numpy as np

    runs = np.split(np.asarray(classes), np.flatnonzero(np.diff(classes) > 1) + 1)
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def mismatch(partition: "Partition", arrays: "Arrays") -> "NDArray[np.float64]":
    """Return how far each client's test labels are from its training labels (clients,); NaN without test samples.

    That is the total variation distance: 0 if both have the same shares of classes, 1 if they have no class in common.
    """
    import numpy as np

    from fedbench.partitioners.dealing import label_counts

    y_test = arrays.y_test if partition.card["test_pool"] == "test" else arrays.y_train
    train = label_counts(partition.train, arrays.y_train, arrays.classes).astype(np.float64)
    test = label_counts(partition.test, y_test, arrays.classes).astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(train / train.sum(1, keepdims=True) - test / test.sum(1, keepdims=True))
    distances: NDArray[np.float64] = apart.sum(1) / 2
    return distances


def _summary(partition: "Partition", arrays: "Arrays") -> str:
    totals = partition.card["totals"]
    sizes = partition.card["per_client"]["train"]
    apart = mismatch(partition, arrays)
    there = [value for value in apart.tolist() if not math.isnan(value)]
    more = partition.clients - _MOST
    said = [
        *([f"and {counted(more, 'more client')}"] if more > 0 else []),
        f"{counted(partition.clients, 'client')} with {min(sizes):,} to {max(sizes):,} training samples",
        f"{totals['train']:,} of {len(arrays.y_train):,} training and {totals['test']:,} test samples dealt",
        f"mean entropy {totals['entropy_bits']:.2f} of {math.log2(arrays.classes):.2f} bits",
        *([f"mean mismatch {math.fsum(there) / len(there):.2f}"] if there else []),
    ]
    return "; ".join(said)


def _notes(card: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader should know besides."""
    totals, options = card["totals"], card["options"]
    if "test" in options:
        how = {"match": "in proportion to each client's training samples of a class", "iid": "in equal parts"}
        pool = "taken from each client's samples" if card["test_pool"] == "train" else how[options["test"]]
        yield f"test samples: {pool}"
    if totals["clients_without_test"]:
        yield f"{counted(totals['clients_without_test'], 'client')} without test samples"
    if totals["test_of_unseen_class"]:
        yield (
            f"{counted(totals['test_of_unseen_class'], 'test sample')} of classes that their clients do not train on "
            f"({counted(totals['clients_with_unseen_class'], 'client')})"
        )
    if card.get("moved"):
        yield f"{counted(card['moved'], 'sample')} moved to clients that lacked some, after {card['draws']} draws"
    if card.get("too_small"):
        yield f"{counted(card['too_small'], 'client')} left out, having fewer than {options['min_samples']} samples"
