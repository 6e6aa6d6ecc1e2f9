"""What tuning came to: the trials of a study, and the values they lead to; plain values, without Optuna."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedbench.space import Values

State = Literal["completed", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    """One trial and what it took.

    - `values`: what it tried, by place (see `fedbench.space`).
    - `state`: failed is also one that diverged; `message` says why.
    - `value`: mean of the objective over clients in the last round, of a pruned one in the round that was its last;
      None if it failed.
    - `curve`: (round, that mean) for every round in which it was measured.
    - `steps`: optimiser steps of all clients; `seconds`: of the whole run; `up_scalars`: uploaded by all clients.
    - `cell`: its key in the store.
    """

    values: Values
    state: State
    value: float | None
    message: str
    curve: tuple[tuple[int, float], ...]
    steps: float
    seconds: float
    up_scalars: float
    cell: str


@dataclass(frozen=True)
class Study:
    """All trials so far, in the order in which they were chosen: the first has number 0.

    - `maximise`: whether more of the objective is better.
    - `own`: what the suite says for the settings that are searched.
    """

    objective: str
    maximise: bool
    space: Mapping[str, Mapping[str, Any]]
    own: Values
    trials: tuple[Trial, ...]

    def best(self, trials: int) -> int | None:
        """Return the number of the best of the first `trials`, of equals the first; None if none was completed."""
        found = [
            (trial.value if self.maximise else -trial.value, -number)
            for number, trial in enumerate(self.trials[:trials])
            if trial.state == "completed" and trial.value is not None
        ]
        return -max(found)[1] if found else None

    @property
    def own_value(self) -> float | None:
        """The objective with the suite's own values, if there was such a trial and it was completed."""
        first = self.trials[0] if self.trials else None
        return first.value if first and first.state == "completed" and first.values == self.own else None


def to_plain(study: Study) -> dict[str, Any]:
    """Return a study as plain JSON values."""
    return asdict(study)


def from_plain(plain: Mapping[str, Any]) -> Study:
    """Return the study that `to_plain` took apart."""
    trials = (Trial(**{**one, "curve": tuple((int(n), float(v)) for n, v in one["curve"])}) for one in plain["trials"])
    return Study(**{**plain, "trials": tuple(trials)})
