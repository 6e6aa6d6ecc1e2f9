"""What a suite has computed so far, as one folder; a name in it that does not end in `.part` is complete.

    <root>/version                the layout's version
           cells/<key>/           cell.json, outcome.json, metrics.npz and, once MLflow has the cell, tracked.json
           studies/<key>.json     the trials of a tuned cell's study, by its `study_key`; each trial is a cell too
           errors/<key>.json      the last attempt, where it ended in an exception; never counts as done
           partitions/<key>/      index arrays and card
           checkpoints/<key>.pt   the progress of a cell under way (see `fedbench.checkpoint`), until it is done

One process writes at a time (`Store.lock`), and its workers their checkpoints; anybody may read.
"""

import io
import json
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from fedbench import durable, interrupts, studies
from fedbench.cells import Cell
from fedbench.data import read_npz
from fedbench.errors import InputError
from fedbench.options import one_line
from fedbench.studies import Study

if TYPE_CHECKING:
    from fedbench.federation import Outcome
    from fedbench.partition import Partition

VERSION = 1
Status = Literal["completed", "diverged", "stopped", "error", "missing"]
TABLES = ("metrics", "traffic", "work", "sizes", "initial", "kept", "newcomers")
"""The fields of an outcome that hold arrays."""

_OLD = ".old.part"


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
        found = marker.read_text(errors="replace").strip() if marker.exists() else str(VERSION)
        if found != str(VERSION):
            raise InputError(
                f"{marker}: layout {found}, but this fedbench reads layout {VERSION}; use the fedbench that wrote it "
                "(its cells' outcome.json say which), or choose another --out"
            )

    def check_begun(self) -> None:
        """Raise InputError if nothing was ever run in the folder."""
        if not self.root.is_dir():
            raise InputError(f"{self.root}: no such folder; nothing of this suite has been run there")

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
            with self._writing():
                _write(self.root / "version", f"{VERSION}\n".encode())
                self._recover()
            yield

    def status(self, cell: Cell) -> Status:
        """Return how the cell stands; an outcome counts before a later attempt's error."""
        if self.has(cell):
            status: Status = self._about(cell.key)["status"]
            return status
        return "error" if self._error(cell.key).exists() else "missing"

    def has(self, cell: Cell) -> bool:
        """Return whether the cell has an outcome, completed or diverged."""
        return self._folder(cell.key).is_dir()

    def get(self, key: str) -> Record:
        """Return a finished cell; InputError names the file that is missing or damaged."""
        from fedbench.federation import Outcome

        folder = self._folder(key)
        about = self._about(key)
        with _intact(folder / "metrics.npz"):
            tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
            for name, array in read_npz(folder / "metrics.npz").items():
                table, column = name.split("/", 1)
                tables[table][column] = array
        with _intact(folder / "outcome.json"):
            outcome = Outcome(status=about["status"], message=about["message"], seconds=about["seconds"], **tables)
            made = about["provenance"]
        with _intact(folder / "cell.json"):
            cell = _cell(_read(folder / "cell.json"))
            if cell.key != key:
                raise ValueError(f"its recipe has the key {cell.key}")
        return Record(cell, outcome, made)

    def _about(self, key: str) -> dict[str, Any]:
        file = self._folder(key) / "outcome.json"
        with _intact(file):
            about = _read(file)
            if about["status"] not in ("completed", "diverged", "stopped"):
                raise ValueError(f"its status is {about['status']}")
            return about

    def put(self, record: Record) -> None:
        """Store a finished cell in the place of whatever its key held before; InputError if it cannot be written."""
        outcome = record.outcome
        target = self._folder(record.cell.key)
        part = target.with_name(f"{target.name}.part")
        about = {"status": outcome.status, "message": outcome.message, "seconds": outcome.seconds}
        arrays = {f"{table}/{name}": array for table in TABLES for name, array in getattr(outcome, table).items()}
        packed = io.BytesIO()
        np.savez_compressed(packed, allow_pickle=False, **arrays)
        with self._writing():
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _write(part / "cell.json", _json(_plain(record.cell)))
            _write(part / "outcome.json", _json({**about, "provenance": record.provenance}))
            _write(part / "metrics.npz", packed.getvalue())
            old = target.with_name(f"{target.name}{_OLD}")  # a folder half deleted must not look like a cell
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                target.rename(old)
            part.rename(target)
            shutil.rmtree(old, ignore_errors=True)
            self._error(record.cell.key).unlink(missing_ok=True)
            for checkpoint in self.checkpoints.glob(f"{record.cell.key}.*"):
                checkpoint.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Finish a write although a signal comes; InputError if the folder or the disk does not take it."""
        with interrupts.held():
            try:
                yield
            except OSError as error:
                raise InputError(
                    f"{error.filename or self.root}: cannot be written ({error.strerror or error}); what is finished "
                    "is kept, and the same command goes on from there"
                ) from error

    def _recover(self) -> None:
        """Put back outcomes that a killed process moved away and did not replace; drop half-written checkpoints."""
        for old in self.root.glob(f"cells/*{_OLD}"):
            target = old.with_name(old.name.removesuffix(_OLD))
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        for part in self.checkpoints.glob("*.part"):
            part.unlink(missing_ok=True)

    @property
    def checkpoints(self) -> Path:
        """The folder for the progress of cells under way."""
        return self.root / "checkpoints"

    def error(self, key: str) -> CellError | None:
        """Return how the last attempt at a cell failed, if it did."""
        path = self._error(key)
        if not path.exists():
            return None
        with _intact(path):
            found = _read(path)
            return CellError(_cell(found), found["line"], found["trace"], found["input"])

    def put_error(self, error: CellError) -> None:
        """Store how an attempt failed; an outcome from before stays."""
        path = self._error(error.cell.key)
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _json({**_plain(error.cell), "line": error.line, "trace": error.trace, "input": error.input}))

    def errors(self) -> list[CellError]:
        """Return every failed attempt that no later one made good."""
        found = (self.error(path.stem) for path in sorted((self.root / "errors").glob("*.json")))
        return [error for error in found if error is not None]

    def finished(self) -> list[str]:
        """Return the keys of all cells that have an outcome."""
        return sorted(path.name for path in (self.root / "cells").glob("*") if path.suffix != ".part")

    def others(self, keys: Collection[str]) -> int:
        """Return how many cells have an outcome, beside those with these keys and the trials of tuning."""
        rest = set(self.finished()).difference(keys)
        return sum("trial" not in _read(self._folder(key) / "cell.json").get("recipe", {}) for key in rest)

    def partition(self, cell: Cell, draw: Callable[[], "Partition"]) -> "Partition":
        """Return the cell's partition, drawn and stored the first time; InputError if the stored one is damaged."""
        folder = self._partition(cell)
        if folder.is_dir():
            return _read_partition(folder)
        partition = draw()
        with self._writing():
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
        return _read_study(path) if path.exists() else None

    def put_study(self, cell: Cell, study: Study) -> None:
        """Store all trials of a tuned cell in the place of those before."""
        path = self._study(cell)
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _json(studies.to_plain(study)))

    def tracked(self, cell: Cell, uri: str) -> bool:
        """Return whether the cell's present outcome is in the MLflow store at `uri`, as far as is known."""
        return uri in self._tracked(cell)

    def put_tracked(self, cell: Cell, uri: str, run_id: str) -> None:
        """Note that the cell's outcome is in the MLflow store at `uri`, as the run `run_id`."""
        with self._writing():
            _write(self._folder(cell.key) / "tracked.json", _json({**self._tracked(cell), uri: run_id}))

    def forget_tracked(self, uri: str) -> None:
        """Note of no outcome any more that it is in the MLflow store at `uri`, since that begins anew."""
        for path in self.root.glob("cells/*/tracked.json"):
            with suppress(InputError), self._writing():
                marks = _read(path)
                if marks.pop(uri, None):
                    _write(path, _json(marks))

    def _tracked(self, cell: Cell) -> dict[str, Any]:
        with suppress(InputError):  # not logged, or not known to be
            return _read(self._folder(cell.key) / "tracked.json")
        return {}

    # --- repair

    def damaged(self) -> Iterator[tuple[Path, str]]:
        """Yield everything that cannot be read, with the reason."""
        checks: list[Callable[[Path], object]] = [
            lambda path: self.get(path.name),
            lambda path: self.error(path.stem),
            _read_study,
            _read_partition,
        ]
        for kind, check in zip(_KINDS, checks, strict=True):
            for path in sorted((self.root / kind).glob("*")):
                if path.suffix != ".part":
                    try:
                        check(path)
                    except InputError as error:
                        yield path, str(error).partition(_REPAIR)[0]
        if reason := damage_of(self.root / "optuna.db"):
            yield self.root / "optuna.db", reason

    def set_aside(self, path: Path) -> Path:
        """Move a file or a folder to where nobody looks for it, and return its new place."""
        inside = path.relative_to(self.root) if path.is_relative_to(self.root) else Path(path.name)
        place = self.root / "broken" / inside
        number = 1
        while place.exists():
            number += 1
            place = (self.root / "broken" / inside).with_name(f"{path.name}.{number}")
        with self._writing():
            place.parent.mkdir(parents=True, exist_ok=True)
            for journal in path.parent.glob(f"{path.name}-*"):  # SQLite would replay it into the next database
                journal.rename(place.with_name(place.name + journal.name.removeprefix(path.name)))
            path.rename(place)
        return place

    def _folder(self, key: str) -> Path:
        return self.root / "cells" / key

    def _error(self, key: str) -> Path:
        return self.root / "errors" / f"{key}.json"

    def _study(self, cell: Cell) -> Path:
        return self.root / "studies" / f"{cell.study_key}.json"

    def _partition(self, cell: Cell) -> Path:
        return self.root / "partitions" / cell.partition_key


def _plain(cell: Cell) -> dict[str, Any]:
    return {"suite": cell.suite, "label": cell.label, "recipe": cell.recipe, "specs": cell.specs}


def _cell(plain: Mapping[str, Any]) -> Cell:
    return Cell(plain["suite"], plain["label"], plain["recipe"], plain["specs"])


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


_KINDS = ("cells", "errors", "studies", "partitions")
_REPAIR = "; `fedbench repair "


def _repair(path: Path) -> str:
    """Return what to do about a damaged file of a store."""
    root = next(above.parent for above in path.parents if above.name in _KINDS)
    return f"{_REPAIR}{shlex.quote(str(root))}` moves it aside, and the next run makes it anew"


@contextmanager
def _intact(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong with reading a file into an InputError that names it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{str(error).partition(_REPAIR)[0]}{_repair(path)}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: missing or damaged ({one_line(error)}){_repair(path)}") from error


def _read(path: Path) -> dict[str, Any]:
    with _intact(path):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError(f"a {type(value).__name__}")
        return value


def _read_study(path: Path) -> Study:
    with _intact(path):
        return studies.from_plain(_read(path))


def _read_partition(path: Path) -> "Partition":
    from fedbench.partition import Partition

    with _intact(path):
        return Partition.load(path)


def damage_of(database: Path) -> str:
    """Return what is wrong with an SQLite database; nothing if it is whole, in use or not there."""
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            (said,) = opened.execute("pragma quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return ""
    except sqlite3.DatabaseError as error:
        return f"{database}: {error}"
    return "" if said == "ok" else f"{database}: {one_line(ValueError(said))}"


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with durable.written(part) as file:
        file.write(content)
    part.replace(path)
