"""`fedbench deploy`: one cell as a real federation on this machine, held against the simulation."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedbench.errors import InputError
from fedbench.words import counted

if TYPE_CHECKING:
    from fedbench.cells import Cell

_TOLERANCE = 1e-5


def run(cells: "Sequence[Cell]", base: Path, root: Path, to: Path | None, store: Path) -> None:
    """Deploy the one cell that there is, and simulate it; exit code 1 if they differ in metrics, or bytes do not fit.

    The parties' folders are written into a new folder `to`, or one in `store`.  InputError for several cells, a tuned
    one, a folder that is there already, or without Flower.
    """
    from fedbench import cells as cell
    from fedbench import data, deploy

    if len({one.key for one in cells}) > 1:
        raise InputError(f"deploy: {counted(len(cells), 'cell')}; say which one with --only and --seeds")
    (one, *_) = cells
    if one.tuned:
        raise InputError(
            "deploy: the cell's values are yet to be tuned; take a suite that `fedbench tune --export` wrote"
        )
    if "newcomers" in one.recipe:
        raise InputError("deploy: newcomers are of a simulation; leave `newcomers` out")
    if find_spec("flwr") is None:
        raise InputError("deploy: Flower is not installed; pip install 'fedbench-suite[flower]'")
    folder = to or store / "deployed" / one.key
    if folder.exists():
        raise InputError(f"{folder}: is there already; remove it, or name another with --to")
    arrays = data.load(cell.source(one, base), root)
    partition = cell.draw_partition(one, arrays, base)
    cell.Checker(base).check(one, arrays, partition)
    parties = deploy.write_parties(one, arrays, partition, base, folder)
    print(f"{one.label}: a server and {len(parties) - 1} clients, from {folder}", flush=True)
    try:
        played = deploy.play(parties)
    except deploy.Failed as failed:
        print(failed)
        raise typer.Exit(1) from None
    simulated = cell.run_cell(one, arrays, partition, engine="loop", base=base)
    largest = deploy.difference(played, simulated)
    fits = all(played_round.fits(direction) for played_round in played for direction in deploy.DIRECTIONS)
    print(_compared(largest))
    print(f"bytes serialised are {'' if fits else 'NOT '}those counted and a header within its bounds")
    if largest > _TOLERANCE or not fits:
        raise typer.Exit(1)


def _compared(largest: float) -> str:
    if largest == 0:
        return "metrics and counted bytes are the simulation's, bit for bit"
    if largest <= _TOLERANCE:
        return f"metrics are the simulation's up to {largest:.1e}, and counted bytes exactly"
    if math.isfinite(largest):
        return f"metrics are NOT the simulation's: they differ by up to {largest:.1e}"
    return "counted bytes, or which clients were measured, are NOT the simulation's"
