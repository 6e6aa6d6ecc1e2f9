"""What a suite asks of its report, checked before anything runs: facts of its cells, and metrics that they measure."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

from fedbench.cells import Cell
from fedbench.config import Suite
from fedbench.errors import InputError, unknown


def figure_axis(axis: str, facts: Sequence[str]) -> str | None:
    """Return the full name of the fact that a figure has on its axis; None if there is none, or more than one."""
    meant = [name for name in facts if name == axis] or [name for name in facts if name.endswith(f".{axis}")]
    return meant[0] if len(meant) == 1 else None


def check_facts(suite: Suite, cells: Iterable[Cell]) -> None:
    """Raise InputError if the suite's figure stands on a fact that none of its cells has."""
    facts = list(dict.fromkeys(itertools.chain.from_iterable(cell.facts() for cell in cells)))
    if suite.figure and figure_axis(suite.figure.x, facts) is None:
        short = [name.removeprefix("method.") for name in facts]
        raise InputError(f"{suite.place}: figure.x: {unknown('fact', suite.figure.x, short)}")


def check_client(suite: Suite, tested: Sequence[int], newcomers: Collection[int]) -> None:
    """Raise InputError if the suite wants the confusion of a client that has none, or that no cell keeps.

    `tested` has the number of test samples of every client.
    """
    wanted = suite.confusion_of
    if "confusion_of" in suite.model_fields_set and "confusion" not in suite.keep:
        raise InputError(f"{suite.place}: confusion_of: {wanted} needs cells that keep it: keep: [confusion]")
    if wanted == "worst":
        return
    if wanted >= len(tested):
        raise InputError(f"{suite.place}: confusion_of: {wanted}; want a client from 0 to {len(tested) - 1}, or worst")
    why = "is a newcomer" if wanted in newcomers else "has no test samples" if not tested[wanted] else ""
    if why:
        raise InputError(f"{suite.place}: confusion_of: client {wanted} {why}; want another one, or worst")


def check_metrics(suite: Suite, measured: Iterable[Set[str]]) -> None:
    """Raise InputError if the suite's report wants a metric that none of its cells measures.

    `measured` gives what each cell does; it is asked for no more cells than it takes.
    """
    wanted = list(_metrics(suite))
    known: set[str] = set()
    for names in measured:
        known |= names
        if known.issuperset(metric for _, metric in wanted):
            return
    for key, metric in wanted:
        if known and metric not in known:
            raise refused(metric, known, f"{suite.place}: {key}")


def refused(metric: str, known: Set[str], where: str) -> InputError:
    """Return why there is no such metric."""
    split = metric.partition("/")[0]
    samples = "test" if split == "local" else split
    if samples in ("test", "validation") and not any(name.startswith(f"{split}/") for name in known):
        return InputError(f"{where}: no '{metric}', since no client of the partition has {samples} samples")
    return InputError(f"{where}: {unknown('metric', metric, known)}")


def _metrics(suite: Suite) -> Iterator[tuple[str, str]]:
    """Yield the keys of a suite that name metrics, and each metric."""
    yield "metric", suite.metric
    yield from (("further_metrics", metric) for metric in suite.further_metrics)
    yield from (("figure.y", metric) for metric in (suite.figure.y if suite.figure else ()))
