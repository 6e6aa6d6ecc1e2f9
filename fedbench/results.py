"""A suite's cells with what came out of each, as one value; and their numbers, per cell and as one long table.

Means are over clients, and the spread over clients is the population's (ddof 0), as in the FedProto paper's tables.
Numbers are of the last evaluated round: the best one on test data is chosen nowhere.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbench.cells import Cell, source
from fedbench.data import data_root
from fedbench.store import Status, Store

if TYPE_CHECKING:
    import pandas as pd

    from fedbench.data import About
    from fedbench.federation import Outcome


@dataclass(frozen=True)
class Result:
    """One planned cell and how it stands.

    `message` is of the divergence or the error; `outcome` and `provenance` are there once the cell has been run to its
    end, be it by divergence.
    """

    cell: Cell
    status: Status
    message: str = ""
    outcome: "Outcome | None" = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def diverged_in(self) -> int | None:
        """The round that brought the divergence, from 1; the rounds before it are in the outcome."""
        return _rounds(self.outcome) + 1 if self.outcome is not None and self.status == "diverged" else None


@dataclass(frozen=True)
class Results:
    """All planned cells in the suite's order.

    - `cards`: of the partitions drawn so far, by the cells' `partition_key` (see `fedbench.partition.draw`).
    - `sources`: where the data come from, by their content hash in the cells' recipes.
    """

    cells: tuple[Result, ...]
    cards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sources: Mapping[str, "About"] = field(default_factory=dict)

    def metrics(self) -> list[str]:
        """Return the names of everything that was measured in any cell, sorted."""
        return sorted({name for result in self.cells if result.outcome for name in result.outcome.metrics})

    def table(self) -> "pd.DataFrame":
        """Return every measured number: key, label, status, the cell's facts, metric, round, client, value.

        Beside the metrics (by round and client) there are traffic ("up/scalars", ...), "work/<name>", "size/<split>"
        (no round) and "time/<name>" (neither round nor client).  A cell without any number is a row without a metric.
        """
        import pandas as pd

        facts = pd.DataFrame([_identity(result) for result in self.cells])
        parts = [_numbers(result.outcome) for result in self.cells]
        lengths = [len(part) for part in parts]
        numbers = pd.concat(parts, ignore_index=True)
        # Categories: the facts are repeated for every number, and there may be millions.
        repeated = facts.astype("category").iloc[np.repeat(np.arange(len(facts)), lengths)].reset_index(drop=True)
        return pd.concat([repeated, numbers.astype({"metric": "category"})], axis=1)

    def summary(self, metric: str = "test/accuracy") -> "pd.DataFrame":
        """Return one row per cell: key, label, status, facts, message, and the fields of `Summary` and `Costs`."""
        import pandas as pd

        rows = []
        for result in self.cells:
            numbers = {}
            if result.outcome is not None:
                numbers = asdict(summarise(result.outcome, metric)) | asdict(costs(result.outcome))
            rows.append({**_identity(result), "message": result.message, **numbers})
        return pd.DataFrame(rows)


def collect(store: Store, cells: Iterable[Cell], base: Path | None = None, data: Path | None = None) -> Results:
    """Return the cells with what the store holds of them; the same cell under two labels is in it twice.

    `base` is the folder that paths of plugins start from, `data` that of the user's data (see `data_root`).  InputError
    if the store is damaged.
    """
    results, cards, sources = [], {}, {}
    found: dict[str, Result] = {}
    for cell in cells:
        if cell.key not in found:
            found[cell.key] = _look_up(store, cell)
        results.append(replace(found[cell.key], cell=cell))
        if cell.partition_key not in cards and (card := store.card(cell)):
            cards[cell.partition_key] = card
        content = cell.recipe["dataset"]["content"]
        if content not in sources:
            sources[content] = source(cell, base).describe(data_root(data))
    return Results(tuple(results), cards, sources)


def _look_up(store: Store, cell: Cell) -> Result:
    if store.has(cell):
        record = store.get(cell.key)
        return Result(cell, record.outcome.status, record.outcome.message, record.outcome, record.provenance)
    error = store.error(cell.key)
    return Result(cell, "error", error.line) if error else Result(cell, "missing")


def write_csv(results: Results, path: Path) -> None:
    """Write the long table as CSV, compressed if the path ends in .gz; floats come back exactly as they were."""
    results.table().to_csv(path, index=False, lineterminator="\n")


# --- numbers of one cell


@dataclass(frozen=True)
class Summary:
    """One metric of one outcome, in its last evaluated round; NaN if it was never measured.

    - `round`: that round, from 1; 0 if there is none.
    - `mean`, `std`: over clients, every client counting the same; the deviation is the population's (ddof 0).
    - `pooled`: mean over samples: clients weighted by their samples in the metric's split.
    - `worst`: of the client that is worst off.
    - `left_out`: clients (of `clients`) without a value, such as those without test samples; in none of the above.
    """

    round: int
    mean: float
    std: float
    pooled: float
    worst: float
    clients: int
    left_out: int


@dataclass(frozen=True)
class Costs:
    """What an outcome took.

    - `up_scalars`, `down_scalars`: per round, summed over the clients (mean over rounds).
    - `steps`, `samples`: of all clients in all rounds.
    - `seconds`: of the whole run.
    """

    rounds: int
    up_scalars: float
    down_scalars: float
    steps: float
    samples: float
    seconds: float


def higher_is_better(metric: str) -> bool:
    """Return whether more of a metric is better, which holds for all but losses."""
    return "loss" not in metric.split("/")


def summarise(outcome: "Outcome", metric: str) -> Summary:
    """Return a metric's numbers over clients; all NaN if the method does not have it."""
    clients = len(outcome.sizes["train"])
    values, last = _last(outcome.metrics.get(metric, np.empty((0, clients))))
    there = ~np.isnan(values)
    if not there.any():
        return Summary(0, math.nan, math.nan, math.nan, math.nan, clients, clients)
    values, weights = values[there], _weights(outcome, metric)[there]
    return Summary(
        round=last,
        mean=float(values.mean()),
        std=float(values.std()),
        pooled=float(np.average(values, weights=weights)) if weights.sum() else math.nan,
        worst=float(values.min() if higher_is_better(metric) else values.max()),
        clients=clients,
        left_out=clients - len(values),
    )


def costs(outcome: "Outcome") -> Costs:
    """Return what an outcome took; zero everywhere if it ended before its first round did."""
    rounds = _rounds(outcome)
    total = {name: float(table.sum()) for name, table in (outcome.traffic | outcome.work).items()}
    return Costs(
        rounds=rounds,
        up_scalars=total.get("up/scalars", 0.0) / max(rounds, 1),
        down_scalars=total.get("down/scalars", 0.0) / max(rounds, 1),
        steps=total.get("steps", 0.0),
        samples=total.get("samples", 0.0),
        seconds=outcome.seconds["total"],
    )


def _rounds(outcome: "Outcome") -> int:
    return max((len(table) for table in (outcome.traffic | outcome.metrics).values()), default=0)


def _last(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """Return the last row in which anybody has a value, and its number from 1; an empty one and 0 if none has."""
    measured = np.flatnonzero(~np.isnan(table).all(axis=1))
    return (table[measured[-1]], int(measured[-1]) + 1) if len(measured) else (np.empty(0), 0)


def _weights(outcome: "Outcome", metric: str) -> NDArray[np.int64]:
    split = metric.split("/")[0]
    return outcome.sizes.get(split, outcome.sizes["test"])  # "local/..." is measured on test samples


# --- the long table


def _identity(result: Result) -> dict[str, Any]:
    cell, facts = result.cell, result.cell.facts()
    del facts["method"]  # the label again
    return {"key": cell.key, "label": cell.label, "status": result.status, **facts}


def _numbers(outcome: "Outcome | None") -> "pd.DataFrame":
    """Return metric, round, client and value of every number of an outcome; what was not measured is not in it."""
    import pandas as pd

    columns: list[tuple[str, NDArray[Any], NDArray[Any], NDArray[Any]]] = []
    none = np.full(1, math.nan)
    if outcome is None:
        columns.append(("", none, none, none))
    else:
        work = {f"work/{name}": table for name, table in outcome.work.items()}
        for name, table in (outcome.metrics | outcome.traffic | work).items():
            rounds, clients = np.nonzero(~np.isnan(table))
            columns.append((name, rounds + 1, clients, table[rounds, clients]))
        for name, sizes in outcome.sizes.items():
            columns.append((f"size/{name}", none.repeat(len(sizes)), np.arange(len(sizes)), sizes))
        columns += [(f"time/{name}", none, none, np.array([seconds])) for name, seconds in outcome.seconds.items()]
    names, rounds, clients, values = zip(*columns, strict=True)
    return pd.DataFrame(
        {
            "metric": np.repeat(np.array(names, dtype=object), [len(part) for part in values]),
            "round": pd.array(np.concatenate(rounds), dtype="Int64"),
            "client": pd.array(np.concatenate(clients), dtype="Int64"),
            "value": np.concatenate(values).astype(np.float64),
        }
    )
