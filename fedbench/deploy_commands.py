"""`fedbench deploy`: one cell as a real federation on this machine, held against the simulation."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedbench.errors import InputError, within
from fedbench.plan import Plan
from fedbench.words import counted

if TYPE_CHECKING:
    from fedbench.apart import Played
    from fedbench.federation import Outcome

_TOLERANCES = {"float32": 1e-5, "float64": 1e-9}
"""How far rounding may take a metric from the simulation's, by `training.dtype`."""


def run(plan: Plan, to: Path | None) -> None:
    """Deploy a plan's one cell, and simulate it; exit code 1 if they differ, or bytes do not fit.

    The parties' folders are written into a new `to`, else beside the cells, which is there once all is played.
    InputError for several cells, a tuned one, one with newcomers, a folder that is there already or that another
    process is at work on, or without Flower.
    """
    from fedbench import apart, cells, data, deploy, wire

    if len(plan.titles) > 1:
        raise InputError(f"deploy: {counted(len(plan.cells), 'cell')}; say which one with --only and --seeds")
    (one, *_), base = plan.cells, plan.suite.base
    if one.tuned:
        raise InputError(
            "deploy: the cell's values are yet to be tuned; take a suite that `fedbench tune --export` wrote"
        )
    if "newcomers" in one.recipe:
        raise InputError("deploy: newcomers are of a simulation; leave `newcomers` out")
    if find_spec("flwr") is None:
        raise InputError("deploy: Flower is not installed; pip install 'fedbench-suite[flower]'")
    folder = to or plan.store.root / "deployed" / one.key
    try:
        with deploy.aside(folder) as part:
            arrays = data.load(cells.source(one, base), plan.data)
            with within(plan.suite.place):
                partition = cells.draw_partition(one, arrays, base)
                cells.Checker(base).check(one, arrays, partition)
            parties = deploy.write_parties(one, arrays, partition, base, part)
            print(f"{one.label}: a server and {len(parties) - 1} clients, to {folder}", flush=True)
            played = deploy.run(parties)
            simulated = deploy.simulate(one, arrays, partition, base)
    except apart.Failed as failed:
        print(failed)
        raise typer.Exit(1) from None
    equal, said = _compared(played, simulated, _TOLERANCES[one.recipe["training"]["dtype"]])
    fits = all(played_round.fits(direction) for played_round in played.rounds for direction in wire.DIRECTIONS)
    print(said)
    if played.rounds:
        print(f"bytes serialised are {'' if fits else 'NOT '}those counted and a header within its bounds")
    if not (equal and fits):
        raise typer.Exit(1)


def _compared(played: "Played", simulated: "Outcome", tolerance: float) -> tuple[bool, str]:
    """Return whether the two are equal up to rounding, and that in words."""
    from fedbench import deploy

    if wrong := deploy.contradiction(played, simulated):
        return False, f"NOT the simulation: {wrong}"
    end = f"; both {played.status} in {played.message}" if played.message else ""
    if not played.rounds:
        return True, f"no round was finished that could be compared{end}"
    largest = deploy.difference(played, simulated)
    if largest == 0:
        return True, f"metrics and counted bytes are the simulation's, bit for bit{end}"
    if largest <= tolerance:
        return True, f"metrics are the simulation's up to {largest:.1e}, and counted bytes exactly{end}"
    return False, f"metrics are NOT the simulation's: they differ by up to {largest:.1e}{end}"
