"""Finished cells in MLflow: one run each, beneath one run of the suite; MLflow watches and is never read back.

Whatever cannot be logged stays in the store, and the suite's next run logs it.
"""

import csv
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from filelock import FileLock

from fedbench.cells import Cell, chosen_facts
from fedbench.errors import InputError
from fedbench.options import one_line
from fedbench.store import Record, Store

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from fedbench.federation import Outcome

# Limits of MLflow: https://mlflow.org/docs/latest/api_reference/rest-api.html#request-limits
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_LONGEST_PARAM = 500  # MLflow takes 6000, but nobody reads that in a column; recipe.json has everything

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # it would tell of every table it makes, and print tracebacks beside our line
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its seven take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


class TrackingError(Exception):
    """MLflow could not take a cell; one line."""


def local_uri(out: Path) -> str:
    """Return the address of the MLflow store beside the runs."""
    return f"sqlite:///{(out / 'mlflow.db').resolve()}"


def check_uri(uri: str) -> None:
    """Raise InputError for what is neither the address of an MLflow store nor "none"."""
    if uri != "none" and not re.match(r"(https?|sqlite|postgresql|mysql|mssql)(\+\w+)?://.|databricks\b", uri):
        raise InputError(
            f"--tracking-uri {uri}: want none, the address of an MLflow server (http://127.0.0.1:5000), or that of its "
            "database (sqlite:///mlflow.db)"
        )


def _without_password(uri: str) -> str:
    """Return an address without the user and password in it, which are no part of where the store is."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() if "@" in parts.netloc else uri


class Tracker:
    """Logs the finished cells of one store to MLflow at `uri`; imports MLflow when there is something to log."""

    def __init__(self, store: Store, suite: str, uri: str) -> None:
        """Take the suite's name for the experiment and for the run above the cells'."""
        self._store = store
        self._suite = suite
        self._uri = uri
        self._name = _without_password(uri)
        self._database = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
        if self._database is not None and not self._database.exists():
            store.forget_tracked(self._name)

    def lacks(self, cell: Cell) -> bool:
        """Return whether a finished cell's outcome is not there yet."""
        return not self._store.tracked(cell, self._name)

    def log(self, cell: Cell, title: str) -> None:
        """Log a finished cell unless its outcome is there already; TrackingError if MLflow cannot take it."""
        record = self._store.get(cell.key)
        try:
            with self._quiet() as client:
                run_id = self._run(client, cell, record, title)
        except Exception as error:
            said = one_line(error).replace(self._uri, self._name)[:300]
            raise TrackingError(f"MLflow at {self._name} could not take a cell: {said}") from error
        self._store.put_tracked(cell, self._name, run_id)

    @contextmanager
    def _quiet(self) -> Iterator["MlflowClient"]:
        """Give a client of the tracking store; of a local one, to one process at a time, as SQLite wants it."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        with ExitStack() as stack:
            if self._database is not None:
                self._database.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(f"{self._database}.lock"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # MLflow's own, about its own use of its libraries
            from mlflow import MlflowClient

            yield MlflowClient(self._uri)

    def _run(self, client: "MlflowClient", cell: Cell, record: Record, title: str) -> str:
        """Return the id of the run that holds the record, made now or before."""
        experiment = self._experiment(client)
        tags = {"fedbench.cell": cell.key, "fedbench.outcome": record.provenance["started"]}
        for run in client.search_runs([experiment], _equal(tags)):
            if run.info.status != "RUNNING":
                return str(run.info.run_id)
            client.delete_run(run.info.run_id)  # whoever logged it was killed half-way
        tags |= {"mlflow.parentRunId": self._parent(client, experiment), "fedbench.status": record.outcome.status}
        started = round(datetime.fromisoformat(record.provenance["started"]).timestamp() * 1000)
        ended = started + round(record.provenance["seconds"] * 1000)
        run = client.create_run(experiment, start_time=started, tags=tags, run_name=title)
        self._fill(client, run.info.run_id, cell, record, ended)
        client.set_terminated(run.info.run_id, "FAILED" if record.outcome.status == "diverged" else "FINISHED", ended)
        return str(run.info.run_id)

    def _experiment(self, client: "MlflowClient") -> str:
        found = client.get_experiment_by_name(self._suite)
        if found:
            return str(found.experiment_id)
        # A client on a database would put artifacts into the current folder; a server knows its own place.
        place = (self._database.parent / "mlartifacts").resolve().as_uri() if self._database else None
        return str(client.create_experiment(self._suite, place))

    def _parent(self, client: "MlflowClient", experiment: str) -> str:
        tags = {"fedbench.suite": self._suite}
        found = client.search_runs([experiment], _equal(tags), max_results=1)
        if found:
            return str(found[0].info.run_id)
        run = client.create_run(experiment, tags=tags, run_name=self._suite)
        client.set_terminated(run.info.run_id)
        return str(run.info.run_id)

    def _fill(self, client: "MlflowClient", run_id: str, cell: Cell, record: Record, time: int) -> None:
        from mlflow.entities import Metric, Param

        facts = cell.facts() | chosen_facts(record.provenance)
        params = [Param(k, str(v)) for k, v in facts.items() if len(str(v)) <= _LONGEST_PARAM]
        for begin in range(0, len(params), _PARAMS_PER_BATCH):
            client.log_batch(run_id, params=params[begin : begin + _PARAMS_PER_BATCH])
        metrics = [Metric(name, value, time, number) for name, number, value in series(record.outcome)]
        for begin in range(0, len(metrics), _METRICS_PER_BATCH):
            client.log_batch(run_id, metrics=metrics[begin : begin + _METRICS_PER_BATCH])
        client.log_dict(run_id, dict(cell.recipe), "recipe.json")
        client.log_dict(run_id, dict(record.provenance), "provenance.json")
        client.log_dict(run_id, self._store.card(cell) or {}, "partition.json")
        client.log_text(run_id, client_table(record.outcome), "clients.csv")


def _equal(tags: Mapping[str, str]) -> str:
    """Return MLflow's filter for runs that have these tags."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def series(outcome: "Outcome") -> Iterator[tuple[str, int, float]]:
    """Yield (name, round, value) of everything that is logged round by round; round 0 is before training.

    Per metric, over the clients measured: its mean, and for accuracies the standard deviation, the worst client and
    every client; of traffic and work the sum over clients, and the sum over the rounds so far ("/total").  Of newcomers
    the mean, by epochs of fine-tuning.
    """
    for name, table in outcome.metrics.items():
        accuracy = "accuracy" in name
        first = outcome.initial.get(name, np.full(table.shape[1], np.nan))
        for number, row in enumerate([first, *table]):
            seen = row[~np.isnan(row)]
            if not len(seen):
                continue
            yield f"{name}/mean", number, float(seen.mean())
            if accuracy:
                yield f"{name}/std", number, float(seen.std())
                yield f"{name}/worst", number, float(seen.min())
                for client in np.flatnonzero(~np.isnan(row)):
                    yield f"{name}/client {client:03d}", number, float(row[client])
    for kind in (outcome.traffic, outcome.work):
        for name, counts in kind.items():
            sums = counts.sum(axis=1)
            for number, (value, total) in enumerate(zip(sums, np.cumsum(sums), strict=True), 1):
                yield name, number, float(value)
                yield f"{name}/total", number, float(total)
    for name, table in outcome.newcomers.items():
        for epochs, row in zip(outcome.newcomers["epochs"].tolist(), table if table.ndim == 2 else (), strict=False):
            seen = row[~np.isnan(row)]
            if len(seen):
                yield f"newcomers/{name}/mean", epochs, float(seen.mean())


def client_table(outcome: "Outcome") -> str:
    """Return one CSV line per client: its sizes, the last round's metrics, and all its traffic and work."""
    columns = {f"{name} samples": sizes for name, sizes in outcome.sizes.items()}
    columns |= {name: table[-1] for name, table in outcome.metrics.items() if len(table)}
    columns |= {f"{name}/total": table.sum(axis=0) for name, table in {**outcome.traffic, **outcome.work}.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["client", *columns])
    writer.writerows([client, *row] for client, row in enumerate(zip(*columns.values(), strict=True)))
    return text.getvalue()
