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
        self._rounds: dict[str, int] = {}
        self._finished = self._cells = self._wanted = 0
        for cell in cells:
            self.expect(1, _rounds(cell))

    @final
    def expect(self, cells: int, rounds: int) -> None:
        """Note that so many more cells will run, of which one has so many rounds."""
        self._cells += cells
        self._wanted += cells * rounds

    @final
    def on_round(self, cell: "Cell", done: int, total: int) -> None:
        """Note that a cell has done so many rounds."""
        self._rounds[cell.key] = done
        self._show()

    @final
    def finish(self, cell: "Cell", text: str) -> None:
        """Note that a cell has ended, one way or the other, and say how."""
        self._finished += 1
        self._rounds[cell.key] = _rounds(cell)
        self.say(f"[{self._finished}/{self._cells}] {text}")
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


def _rounds(cell: "Cell") -> int:
    return int(cell.recipe["training"]["rounds"])


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
            self.say(f"... {sum(self._rounds.values())} of {self._wanted} rounds")


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
        self._task = self._bar.add_task("", total=self._wanted)
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
        cells = f"{self._finished}/{self._cells} cells"
        self._bar.update(self._task, description=cells, completed=sum(self._rounds.values()), total=self._wanted)
