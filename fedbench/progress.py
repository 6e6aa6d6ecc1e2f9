"""How far a run is: a bar on a terminal, plain lines elsewhere."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, final

if TYPE_CHECKING:
    from rich.console import Console

    from fedbench.cells import Cell

_PATIENCE = 30.0  # seconds between two plain lines about cells that have not finished


class Progress(ABC):
    """Counts the rounds and the cells of one run, and tells."""

    def __init__(self, cells: "Sequence[Cell]") -> None:
        """Take the cells that will run."""
        self._wanted = {cell.key: int(cell.recipe["training"]["rounds"]) for cell in cells}
        self._rounds = dict.fromkeys(self._wanted, 0)
        self._finished = 0

    @final
    def on_round(self, cell: "Cell", done: int, total: int) -> None:
        """Note that a cell has done so many rounds."""
        self._rounds[cell.key] = done
        self._show()

    @final
    def finish(self, cell: "Cell", text: str) -> None:
        """Note that a cell has ended, one way or the other, and say how."""
        self._finished += 1
        self._rounds[cell.key] = self._wanted[cell.key]
        self.say(f"[{self._finished}/{len(self._wanted)}] {text}")
        self._show()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, whatever happened."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Print a line."""

    @abstractmethod
    def _show(self) -> None:
        """Show the counts."""


@final
class Lines(Progress):
    """A line for every cell, and one now and then while cells take long."""

    def __init__(self, cells: "Sequence[Cell]") -> None:
        """Take the cells that will run."""
        super().__init__(cells)
        self._told = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)
        self._told = time.monotonic()

    def _show(self) -> None:
        if time.monotonic() - self._told > _PATIENCE:
            self.say(f"... {sum(self._rounds.values())} of {sum(self._wanted.values())} rounds")


@final
class Bar(Progress):
    """A bar over the rounds of all cells, with the time left, beneath the lines of finished cells."""

    def __init__(self, cells: "Sequence[Cell]", console: "Console") -> None:
        """Take the cells that will run, and a console on a terminal."""
        from rich import progress

        super().__init__(cells)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("rounds, left:"),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=sum(self._wanted.values()))
        self._show()
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def _show(self) -> None:
        cells = f"{self._finished}/{len(self._wanted)} cells"
        self._bar.update(self._task, description=cells, completed=sum(self._rounds.values()))
