"""What a suite has computed so far, as one folder; a name in it that does not end in `.part` is complete.

    <root>/version                the layout's version
           cells/<key>/           cell.json, outcome.json, metrics.npz and, once MLflow has the cell, tracked.json
           studies/<key>.json     the trials of a tuned cell's study, by its `study_key`; each trial is a cell too
           errors/<key>.json      the last attempt, where it ended in an exception; never counts as done
           partitions/<key>/      index arrays and card
           checkpoints/<key>.pt   the progress of a cell under way (see `fedbench.checkpoint`), until it is done

One process writes at a time (`Store.lock`), and its workers their checkpoints; anybody may read.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from fedbench import studies
from fedbench.cells import Cell
from fedbench.data import read_npz
from fedbench.errors import InputError
from fedbench.studies import Study

if TYPE_CHECKING:
    from fedbench.federation import Outcome
    from fedbench.partition import Partition

VERSION = 1
Status = Literal["completed", "diverged", "stopped", "error", "missing"]
_TABLES = ("metrics", "traffic", "work", "sizes", "initial", "kept")


@dataclass(frozen=True)
class Record:
    """A finished cell: what it was, what came out, and how that was made (versions, machine, times; plain values)."""

    cell: Cell
    outcome: "Outcome"
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class CellError:
    """A cell whose attempt ended in an exception: a line for the screen, and the traceback.

    `input` tells bad input (an `InputError`) from a fault of the code.
    """

    cell: Cell
    line: str
    trace: str
    input: bool


class Store:
    """One suite's cells, errors and partitions."""

    def __init__(self, root: Path) -> None:
        """Open the folder `root`, which need not exist; InputError if another layout is in it."""
        self.root = root
        marker = root / "version"
        found = marker.read_text().strip() if marker.exists() else str(VERSION)
        if found != str(VERSION):
            raise InputError(
                f"{marker}: layout {found}, but this fedbench reads layout {VERSION}; use the fedbench that wrote it "
                "(its cells' outcome.json say which), or choose another --out"
            )

    @contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the right to write; `waiting` is called when another process holds it."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.root / "lock")
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            waiting()
            held = lock.acquire()
        with held:
            _write(self.root / "version", f"{VERSION}\n".encode())
            yield

    def status(self, cell: Cell) -> Status:
        """Return how the cell stands; an outcome counts before a later attempt's error."""
        if self.has(cell):
            status: Status = _read(self._folder(cell.key) / "outcome.json")["status"]
            return status
        return "error" if self._error(cell.key).exists() else "missing"

    def has(self, cell: Cell) -> bool:
        """Return whether the cell has an outcome, completed or diverged."""
        return self._folder(cell.key).is_dir()

    def get(self, key: str) -> Record:
        """Return a finished cell; InputError names the file that is missing or damaged."""
        from fedbench.federation import Outcome

        folder = self._folder(key)
        about = _read(folder / "outcome.json")
        tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
        try:
            arrays = read_npz(folder / "metrics.npz")
        except InputError as error:
            raise InputError(f"{error}; delete {folder} and run the suite again") from error
        for name, array in arrays.items():
            table, column = name.split("/", 1)
            tables[table][column] = array
        outcome = Outcome(status=about["status"], message=about["message"], seconds=about["seconds"], **tables)
        return Record(_cell(_read(folder / "cell.json")), outcome, about["provenance"])

    def put(self, record: Record) -> None:
        """Store a finished cell in the place of whatever its key held before."""
        outcome = record.outcome
        target = self._folder(record.cell.key)
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        about = {"status": outcome.status, "message": outcome.message, "seconds": outcome.seconds}
        _write(part / "cell.json", _json(_plain(record.cell)))
        _write(part / "outcome.json", _json({**about, "provenance": record.provenance}))
        with (part / "metrics.npz").open("wb") as file:
            arrays = {f"{table}/{name}": array for table in _TABLES for name, array in getattr(outcome, table).items()}
            np.savez_compressed(file, allow_pickle=False, **arrays)
            os.fsync(file.fileno())
        old = target.with_name(f"{target.name}.old.part")  # a folder half deleted must not look like a cell
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        part.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        self._error(record.cell.key).unlink(missing_ok=True)
        for checkpoint in self.checkpoints.glob(f"{record.cell.key}.*"):
            checkpoint.unlink(missing_ok=True)

    @property
    def checkpoints(self) -> Path:
        """The folder for the progress of cells under way."""
        return self.root / "checkpoints"

    def error(self, key: str) -> CellError | None:
        """Return how the last attempt at a cell failed, if it did."""
        path = self._error(key)
        if not path.exists():
            return None
        found = _read(path)
        return CellError(_cell(found), found["line"], found["trace"], found["input"])

    def put_error(self, error: CellError) -> None:
        """Store how an attempt failed; an outcome from before stays."""
        path = self._error(error.cell.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _json({**_plain(error.cell), "line": error.line, "trace": error.trace, "input": error.input}))

    def errors(self) -> list[CellError]:
        """Return every failed attempt that no later one made good."""
        found = (self.error(path.stem) for path in sorted((self.root / "errors").glob("*.json")))
        return [error for error in found if error is not None]

    def finished(self) -> list[str]:
        """Return the keys of all cells that have an outcome."""
        return sorted(path.name for path in (self.root / "cells").glob("*") if path.suffix != ".part")

    def partition(self, cell: Cell, draw: Callable[[], "Partition"]) -> "Partition":
        """Return the cell's partition, drawn and stored the first time; InputError if the stored one is damaged."""
        from fedbench.partition import Partition

        folder = self._partition(cell)
        if folder.is_dir():
            return Partition.load(folder)
        partition = draw()
        folder.parent.mkdir(parents=True, exist_ok=True)
        partition.save(folder)
        return partition

    def card(self, cell: Cell) -> dict[str, Any] | None:
        """Return the card of the cell's partition, or None where none has been drawn."""
        path = self._partition(cell) / "card.json"
        return _read(path) if path.exists() else None

    def study(self, cell: Cell) -> Study | None:
        """Return the trials that a tuned cell has so far; None if there were none yet."""
        path = self._study(cell)
        return studies.from_plain(_read(path)) if path.exists() else None

    def put_study(self, cell: Cell, study: Study) -> None:
        """Store all trials of a tuned cell in the place of those before."""
        path = self._study(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _json(studies.to_plain(study)))

    def tracked(self, cell: Cell, uri: str) -> bool:
        """Return whether the cell's present outcome is in the MLflow store at `uri`."""
        path = self._folder(cell.key) / "tracked.json"
        return path.exists() and uri in _read(path)

    def put_tracked(self, cell: Cell, uri: str, run_id: str) -> None:
        """Note that the cell's outcome is in the MLflow store at `uri`, as the run `run_id`."""
        path = self._folder(cell.key) / "tracked.json"
        _write(path, _json({**(_read(path) if path.exists() else {}), uri: run_id}))

    def _folder(self, key: str) -> Path:
        return self.root / "cells" / key[:16]

    def _error(self, key: str) -> Path:
        return self.root / "errors" / f"{key[:16]}.json"

    def _study(self, cell: Cell) -> Path:
        return self.root / "studies" / f"{cell.study_key}.json"

    def _partition(self, cell: Cell) -> Path:
        return self.root / "partitions" / cell.partition_key[:16]


def _plain(cell: Cell) -> dict[str, Any]:
    return {"suite": cell.suite, "label": cell.label, "recipe": cell.recipe, "specs": cell.specs}


def _cell(plain: Mapping[str, Any]) -> Cell:
    return Cell(plain["suite"], plain["label"], plain["recipe"], plain["specs"])


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return value


def _damaged(path: Path, error: Exception) -> InputError:
    broken = path if path.parent.name in ("errors", "studies") else path.parent
    return InputError(f"{path}: missing or damaged ({' '.join(str(error).split())}); delete {broken} and run again")


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    part.replace(path)
