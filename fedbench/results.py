"""A suite's cells with what came out of each, as one value; and what the numbers of a cell come to.

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

from fedbench import stats
from fedbench.cells import Cell, chosen_facts, source
from fedbench.data import data_root
from fedbench.metrics import higher_is_better
from fedbench.store import Status, Store
from fedbench.studies import Study

if TYPE_CHECKING:
    import pandas as pd

    from fedbench.data import About
    from fedbench.federation import Outcome


@dataclass(frozen=True)
class Numbers:
    """What reports need of an outcome, and what a results file keeps of it (see `fedbench.results_csv`).

    - `rounds`: how many came to their end.
    - `last`: metric -> (clients,) float64 in the metric's last evaluated round, NaN for clients without a value; a
      metric that nobody has is not in it.  `at`: metric -> that round, from 1.
    - `curves`: metric -> (rounds,) float64, mean over the clients that have a value in each round, NaN if none has.
      `initial`: metric -> the same before round 1.
    - `totals`: traffic ("up/scalars", ...) and work ("work/steps", ...) -> (rounds,) float64, sum over clients.
    - `sizes`: split -> (clients,) int64, samples.
    - `seconds`: of the whole run: "total", "training", "evaluation".
    - `kept`: what was kept beside (see `fedbench.kept`), of which a results file has the confusion.
    - `newcomers`: see `fedbench.newcomers.joined`.
    """

    rounds: int
    last: Mapping[str, NDArray[np.float64]]
    at: Mapping[str, int]
    curves: Mapping[str, NDArray[np.float64]]
    initial: Mapping[str, float]
    totals: Mapping[str, NDArray[np.float64]]
    sizes: Mapping[str, NDArray[np.int64]]
    seconds: Mapping[str, float]
    kept: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    newcomers: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def numbers(outcome: "Outcome") -> Numbers:
    """Return what reports need of an outcome."""
    last = {name: found for name, table in outcome.metrics.items() if (found := _last(table))}
    work = {f"work/{name}": table for name, table in outcome.work.items() if name != "seconds"}
    return Numbers(
        rounds=max((len(table) for table in (outcome.traffic | outcome.metrics).values()), default=0),
        last={name: values for name, (values, _) in last.items()},
        at={name: number for name, (_, number) in last.items()},
        curves={name: _means(table) for name, table in outcome.metrics.items()},
        initial={name: float(_means(values)) for name, values in outcome.initial.items()},
        totals={name: table.sum(axis=1, dtype=np.float64) for name, table in (outcome.traffic | work).items()},
        sizes=outcome.sizes,
        seconds=outcome.seconds,
        kept=outcome.kept,
        newcomers=outcome.newcomers,
    )


@dataclass(frozen=True)
class Result:
    """One planned cell and how it stands.

    `message` is of the divergence or the error; `numbers` and `provenance` are there once the cell has been run to its
    end, be it by divergence.
    """

    cell: Cell
    status: Status
    message: str = ""
    numbers: Numbers | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def diverged_in(self) -> int | None:
        """The round that brought the divergence, from 1; the rounds before it are in the numbers."""
        return self.numbers.rounds + 1 if self.numbers and self.status == "diverged" else None


@dataclass(frozen=True)
class Results:
    """All planned cells in the suite's order.

    - `cards`: of the partitions drawn so far, by the cells' `partition_key` (see `fedbench.partition.draw`).
    - `sources`: where the data come from, by their content hash in the cells' recipes.
    - `studies`: the trials so far of the cells that are tuned, by their `study_key`.
    - `others`: how many finished cells lie in the same folder and are not among these.
    """

    cells: tuple[Result, ...]
    cards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sources: Mapping[str, "About"] = field(default_factory=dict)
    studies: Mapping[str, Study] = field(default_factory=dict)
    others: int = 0

    def metrics(self) -> list[str]:
        """Return the names of everything that was measured in any cell, sorted."""
        return sorted({name for one in self.cells if one.numbers for name in (*one.numbers.last, *one.numbers.curves)})

    def summary(self, metric: str = "test/accuracy") -> "pd.DataFrame":
        """Return one row per cell: key, label, status, facts, message, and the fields of `Summary` and `Costs`."""
        import pandas as pd

        rows = []
        for result in self.cells:
            facts = result.cell.facts() | chosen_facts(result.provenance)
            del facts["method"]  # the label again
            found = {}
            if result.numbers is not None:
                found = asdict(summarise(result.numbers, metric)) | asdict(costs(result.numbers))
                stages = arrivals(result.numbers, metric).stages
                found |= {f"newcomers_{epochs}": mean for epochs, (mean, _) in stages.items()}
            about = {"key": result.cell.key, "label": result.cell.label, "status": result.status}
            rows.append({**about, **facts, "message": result.message, **found})
        return pd.DataFrame(rows)


def collect(store: Store, cells: Iterable[Cell], base: Path | None = None, data: Path | None = None) -> Results:
    """Return the cells with what the store holds of them; the same cell under two labels is in it twice.

    `base` is the folder that paths of plugins start from, `data` that of the user's data (see `data_root`).  InputError
    if the store is damaged.
    """
    results, cards, sources, studies = [], {}, {}, {}
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
        if cell.tuned and cell.study_key not in studies and (study := store.study(cell)):
            studies[cell.study_key] = study
    return Results(tuple(results), cards, sources, studies, store.others(found))


def _look_up(store: Store, cell: Cell) -> Result:
    if store.has(cell):
        record = store.get(cell.key)
        outcome = record.outcome
        return Result(cell, outcome.status, outcome.message, numbers(outcome), record.provenance)
    error = store.error(cell.key)
    return Result(cell, "error", error.line) if error else Result(cell, "missing")


# --- numbers of one cell


@dataclass(frozen=True)
class Summary:
    """One metric of one outcome, in its last evaluated round; NaN if it was never measured.

    - `round`: that round, from 1; 0 if there is none.
    - `mean`, `std`: over clients, every client counting the same; the deviation is the population's (ddof 0).
    - `pooled`: mean over samples: clients weighted by their samples in the metric's split.
    - `worst`: of the client that is worst off; `worst_decile`: mean of the tenth of the clients that is.
    - `gini`, `jain`: how unequal and how equal the clients are (see `fedbench.stats`).
    - `left_out`: clients (of `clients`, newcomers apart) without a value, such as those without test samples; in none
      of the above.
    """

    round: int
    mean: float
    std: float
    pooled: float
    worst: float
    worst_decile: float
    gini: float
    jain: float
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


@dataclass(frozen=True)
class Arrivals:
    """What became of an outcome's newcomers; empty and NaN if it has none.

    - `stages`: epochs of fine-tuning, from 0 -> mean and deviation (ddof 0) of a metric over newcomers that have one.
    - `down_scalars`: what one downloads; `steps`: what one takes in the longest fine-tuning; means over newcomers.
    - `diverged`: newcomers whose fine-tuning did, for the first number of epochs or a later one.
    """

    stages: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    down_scalars: float = math.nan
    steps: float = math.nan
    diverged: int = 0


def newcomers_metric(metric: str) -> str:
    """Return what newcomers are measured by where rows are measured by a metric, which may be one of training."""
    return metric if metric.startswith(("test/", "validation/")) else "test/accuracy"


def arrivals(numbers: Numbers, metric: str) -> Arrivals:
    """Return what became of the newcomers where rows are measured by a metric."""
    found, metric = numbers.newcomers, newcomers_metric(metric)
    if not found:
        return Arrivals()
    epochs = found["epochs"].tolist()
    table = found.get(metric, np.full((len(epochs), len(found["clients"])), math.nan))
    return Arrivals(
        {count: _spread(row[~np.isnan(row)]) for count, row in zip(epochs, table, strict=True)},
        float(found["down/scalars"].mean()),
        float(found["work/steps"][-1].mean()),
        int((~np.isnan(table[0]) & np.isnan(table).any(axis=0)).sum()),
    )


def _spread(values: NDArray[np.float64]) -> tuple[float, float]:
    return (float(values.mean()), float(values.std())) if len(values) else (math.nan, math.nan)


def summarise(numbers: Numbers, metric: str) -> Summary:
    """Return a metric's numbers over clients; all NaN if the method does not have it."""
    clients = len(numbers.sizes["train"]) - len(numbers.newcomers.get("clients", ()))
    if metric not in numbers.last:
        nan = math.nan
        return Summary(0, nan, nan, nan, nan, nan, nan, nan, clients, clients)
    there = ~np.isnan(numbers.last[metric])
    values, weights = numbers.last[metric][there], _weights(numbers, metric)[there]
    with np.errstate(invalid="ignore", over="ignore"):  # a loss may be infinite, and then has no deviation
        std = float(values.std())
    return Summary(
        round=numbers.at[metric],
        mean=float(values.mean()),
        std=std,
        pooled=float(np.average(values, weights=weights)) if weights.sum() else math.nan,
        worst=float(values.min() if higher_is_better(metric) else values.max()),
        worst_decile=stats.worst_decile(values, higher_is_better(metric)),
        gini=stats.gini(values),
        jain=stats.jain(values),
        clients=clients,
        left_out=clients - len(values),
    )


def costs(numbers: Numbers) -> Costs:
    """Return what an outcome took; zero everywhere if it ended before its first round did."""
    total = {name: float(sums.sum()) for name, sums in numbers.totals.items()}
    return Costs(
        rounds=numbers.rounds,
        up_scalars=total.get("up/scalars", 0.0) / max(numbers.rounds, 1),
        down_scalars=total.get("down/scalars", 0.0) / max(numbers.rounds, 1),
        steps=total.get("work/steps", 0.0),
        samples=total.get("work/samples", 0.0),
        seconds=numbers.seconds["total"],
    )


def _last(table: NDArray[np.float64]) -> tuple[NDArray[np.float64], int] | None:
    """Return the last row in which anybody has a value, and its number from 1; None if nobody ever has.

    A copy, since of a suite's thousands of tables nobody else keeps the rest.
    """
    measured = np.flatnonzero(~np.isnan(table).all(axis=1))
    return (table[measured[-1]].copy(), int(measured[-1]) + 1) if len(measured) else None


def _means(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over clients, the last axis, of those that have a value; NaN where none has."""
    there = np.count_nonzero(~np.isnan(table), axis=-1)
    means = np.full(table.shape[:-1], math.nan)
    np.divide(np.nansum(table, axis=-1), there, out=means, where=there > 0)
    return means


def _weights(numbers: Numbers, metric: str) -> NDArray[np.int64]:
    split = metric.split("/")[0]
    return numbers.sizes.get(split, numbers.sizes["test"])  # "local/..." is measured on test samples
