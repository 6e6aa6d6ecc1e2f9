"""Tuning: studies in Optuna, whose trials are cells that see validation samples only.

Trials are chosen in batches of a fixed size: each is a function of the study's seed, its number, and the trials of the
batches before it.  So the choice does not depend on how many run at the same time, and a study that was killed goes
on as if it had not been: trials that were running are chosen again with the same values, and those that had finished
are found in the store.  A trial enters Optuna's storage once its batch is complete, as one write, so that nothing
half-done is ever in there.  The choice is the same wherever the numbers of the trials are, which in float32 need not
hold from one engine or machine to another.
"""

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbench import cells, space
from fedbench.cells import Cell
from fedbench.errors import InputError
from fedbench.executors import Executor, Job, OnRound, Results, Setting
from fedbench.metrics import higher_is_better
from fedbench.options import one_line
from fedbench.store import CellError, Record, Store
from fedbench.studies import State, Study, Trial

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from fedbench.partition import Partition

_STARTUP = 5  # trials before the sampler or the pruner learns from them


def default_storage(store: Store) -> str:
    """Return the address of the studies' storage beside the cells."""
    return f"sqlite:///{(store.root / 'optuna.db').resolve()}"


def unfinished(found: Sequence[Cell], store: Store) -> list[Cell]:
    """Return one of the cells for each study that lacks trials: that which wants most of them."""
    most: dict[str, Cell] = {}
    for cell in (cell for cell in found if cell.tuned):
        before = most.get(cell.study_key)
        if before is None or _wanted(cell) > _wanted(before):
            most[cell.study_key] = cell
    return [cell for cell in most.values() if wanting(cell, store)]


def wanting(cell: Cell, store: Store) -> int:
    """Return how many trials a tuned cell's study lacks, as far as the store knows."""
    study = store.study(cell)
    return max(0, _wanted(cell) - (len(study.trials) if study else 0))


def probe(cell: Cell) -> Cell:
    """Return a trial of the suite's own values: what can be checked and estimated before any is run."""
    return cells.trial(cell, 0, _own(cell))


def chosen(cell: Cell, study: Study | None) -> dict[str, Any]:
    """Return the "values" that a tuned cell runs with, and where they are from; nothing if no trial was completed."""
    number = study.best(_wanted(cell)) if study else None
    if study is None or number is None:
        return {}
    best = study.trials[number]
    return {"values": dict(best.values), "study": cell.study_key, "trial": number, study.objective: best.value}


def why_not(cell: Cell, study: Study | None) -> str:
    """Return why there is nothing to choose from."""
    trials = study.trials[: _wanted(cell)] if study else ()
    first = next((trial.message for trial in trials if trial.state == "failed"), "none was run")
    return f"none of its {len(trials)} tuning trials was completed, so there are no values to run it with: {first}"


@contextmanager
def searches(tuned: Sequence[Cell], store: Store, url: str) -> Iterator[list["Search"]]:
    """Open the studies of some tuned cells in an Optuna storage; InputError if it cannot be reached."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _reaching(url):
        storage = optuna.storages.RDBStorage(url)
    try:
        found = []
        for cell in tuned:
            maximise = higher_is_better(cell.recipe["tuning"]["objective"])
            name = f"{cell.recipe['method']['name'].partition('@')[0]} {cell.study_key}"
            with _reaching(url):
                study = optuna.create_study(
                    storage=storage,
                    study_name=name,
                    load_if_exists=True,
                    direction="maximize" if maximise else "minimize",
                )
            found.append(Search(cell, study, store, url))
        yield found
    finally:
        storage.remove_session()
        storage.engine.dispose()


def run(
    found: Sequence["Search"],
    partitions: Mapping[str, "Partition"],
    execute: Executor,
    setting: Setting,
    on_round: OnRound,
) -> Results:
    """Run trials until every search has all of its own, and yield each one's result, which the caller stores.

    `partitions` are those of the trials, by their `partition_key`.
    """
    jobs: deque[Job] = deque()
    of_trial: dict[str, Search] = {}

    def add(search: "Search", trials: Sequence[Cell]) -> None:
        for trial in trials:
            of_trial[trial.key] = search
            jobs.append(Job(trial, partitions[trial.partition_key], objective=search.objective))

    for search in found:
        add(search, search.next())
    with closing(
        execute(jobs, setting, on_round, lambda cell, *round: of_trial[cell.key].ends(cell, *round))
    ) as results:
        for result in results:
            yield result
            search = of_trial[result.cell.key]
            add(search, search.note(result))


class Search:
    """One study under way."""

    def __init__(self, cell: Cell, study: "optuna.Study", store: Store, url: str) -> None:
        """Go on with what is in the Optuna study; `store` has the trials that finished, `url` is for messages."""
        self.cell = cell
        self._how: Mapping[str, Any] = cell.recipe["tuning"]
        self._study = study
        self._store = store
        self._url = url
        self._distributions = {place: _distribution(entry) for place, entry in self._how["space"].items()}
        self._own = _own(cell)
        self._batch: dict[str, tuple[Cell, space.Values]] = {}
        self._finished: dict[str, Trial] = {}
        self._reports: dict[str, dict[int, float]] = {}
        self._before: optuna.Study | None = None

    @property
    def objective(self) -> str:
        """The metric whose mean over clients in the last round is what counts."""
        return str(self._how["objective"])

    @property
    def to_run(self) -> int:
        """How many trials neither the study nor the store has."""
        self._draw()
        return self._left() - sum(self._store.has(trial) for trial, _ in self._batch.values())

    def next(self) -> list[Cell]:
        """Return the trials to run now, none if there are enough; those that the store has count at once."""
        while self._left():
            self._draw()
            missing = [trial for trial, _ in self._batch.values() if not self._store.has(trial)]
            if missing:
                return missing
            self._commit()
        self._keep()
        return []

    def note(self, result: Record | CellError) -> list[Cell]:
        """Take what became of a trial, and return the trials to run next: none before its batch is complete."""
        self._take(result)
        missing = [
            key for key, (trial, _) in self._batch.items() if not (key in self._finished or self._store.has(trial))
        ]
        if missing:
            return []
        self._commit()
        return self.next()

    def ends(self, cell: Cell, number: int, value: float) -> bool:
        """Note the objective of a running trial in a round, and return whether it is to end there."""
        from optuna.trial import TrialState, create_trial

        # What an attempt that died reported later than this round would judge it too.
        before = self._reports.get(cell.key, {})
        reports = {**{earlier: said for earlier, said in before.items() if earlier < number}, number: value}
        self._reports[cell.key] = reports
        trial = create_trial(
            state=TrialState.RUNNING,
            params=dict(self._batch[cell.key][1]),
            distributions=self._distributions,
            intermediate_values=reports,
        )
        assert self._before is not None
        return bool(_pruner(self._how["pruner"]).prune(self._before, trial))

    # --- the trials of one batch

    def _draw(self) -> None:
        """Choose the next trials up to the end of a batch, as far as they are wanted."""
        import optuna
        from optuna.trial import TrialState, create_trial

        history = self._history()
        size = self._how["batch"]
        first = len(history) // size * size
        memory = optuna.create_study(direction=self._study.direction)
        memory.add_trials(map(_learned, history[:first]))
        self._before = memory
        # A shorter study may have ended within this batch; its trials were chosen without knowing each other's values.
        for trial in history[first:]:
            memory.add_trial(
                create_trial(state=TrialState.RUNNING, params=trial.params, distributions=self._distributions)
            )
        self._batch, self._finished, self._reports = {}, {}, {}
        for number in range(len(history), min(first + size, _wanted(self.cell))):
            memory.sampler = _sampler(self._how, number)
            if number == 0 and self._how["sampler"] != "grid" and self._has_own():
                memory.enqueue_trial(self._own)
            values = memory.ask(self._distributions).params
            trial_cell = cells.trial(self.cell, number, values)
            self._batch[trial_cell.key] = (trial_cell, values)

    def _has_own(self) -> bool:
        return all(space.contains(entry, self._own[place]) for place, entry in self._how["space"].items())

    def _take(self, result: Record | CellError) -> None:
        key = result.cell.key
        self._finished[key] = _trial(result, self._batch[key][1], self.objective)

    def _commit(self) -> None:
        """Put the batch, of which every trial has finished, into Optuna's storage and the store."""
        for key in self._batch:
            if key not in self._finished:
                self._take(self._store.get(key))
        with _reaching(self._url):
            self._study.add_trials([_frozen(self._finished[key], self._distributions) for key in self._batch])
        self._keep()

    def _keep(self) -> None:
        trials = tuple(_thawed(trial) for trial in self._history())
        maximise = self._study.direction.name == "MAXIMIZE"
        self._store.put_study(self.cell, Study(self.objective, maximise, self._how["space"], self._own, trials))

    def _left(self) -> int:
        return max(0, _wanted(self.cell) - len(self._history()))

    def _history(self) -> "list[FrozenTrial]":
        """Return the study's trials in their order."""
        with _reaching(self._url):
            return [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.is_finished()]


def _wanted(cell: Cell) -> int:
    return int(cell.recipe["tuning"]["trials"])


def _own(cell: Cell) -> dict[str, Any]:
    return {place: space.at(cell.recipe, place) for place in cell.recipe["tuning"]["space"]}


def _trial(result: Record | CellError, values: space.Values, objective: str) -> Trial:
    """Return what became of a trial."""
    if isinstance(result, CellError):
        return Trial(values, "failed", None, result.line, (), 0.0, 0.0, 0.0, result.cell.key)
    outcome = result.outcome
    rows = {number: row[~np.isnan(row)] for number, row in enumerate(outcome.metrics.get(objective, ()), 1)}
    curve = tuple((number, float(row.mean())) for number, row in rows.items() if len(row))
    state: State = "pruned" if outcome.status == "stopped" else "completed"
    message = ""
    if outcome.status == "diverged":
        state, message = "failed", f"diverged in {outcome.message}"
    elif not curve:
        measured = ", ".join(name for name in outcome.metrics if name.startswith("validation/"))
        state, message = "failed", f"did not measure {objective}, but {measured}"
    return Trial(
        values=values,
        state=state,
        value=None if state == "failed" else curve[-1][1],
        message=message,
        curve=curve,
        steps=float(outcome.work["steps"].sum()) if outcome.work else 0.0,
        seconds=outcome.seconds["total"],
        up_scalars=float(outcome.traffic["up/scalars"].sum()) if outcome.traffic else 0.0,
        cell=result.cell.key,
    )


# --- in Optuna's terms

_STATES: Mapping[State, str] = {"completed": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
_SPENT = ("message", "steps", "seconds", "up_scalars", "cell")


def _frozen(trial: Trial, distributions: "dict[str, BaseDistribution]") -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState[_STATES[trial.state]],
        value=trial.value,
        params=dict(trial.values),
        distributions=distributions,
        intermediate_values=dict(trial.curve),
        user_attrs={name: getattr(trial, name) for name in _SPENT},
    )


def _learned(trial: "FrozenTrial") -> "FrozenTrial":
    """Return a trial as the sampler sees it: one that failed as worse than all others, or it would be tried again."""
    from optuna.trial import TrialState, create_trial

    if trial.state != TrialState.FAIL:
        return trial
    return create_trial(state=TrialState.PRUNED, params=trial.params, distributions=trial.distributions)


def _thawed(trial: "FrozenTrial") -> Trial:
    state = next(state for state, name in _STATES.items() if name == trial.state.name)
    curve = tuple(sorted(trial.intermediate_values.items()))
    spent = {name: trial.user_attrs[name] for name in _SPENT}
    return Trial(values=trial.params, state=state, value=trial.value, curve=curve, **spent)


def _distribution(entry: Mapping[str, Any]) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if "values" in entry:
        return CategoricalDistribution(entry["values"])
    whole = isinstance(entry["low"], int) and isinstance(entry["high"], int)
    return (IntDistribution if whole else FloatDistribution)(entry["low"], entry["high"], log=entry["log"])


def _sampler(how: Mapping[str, Any], number: int) -> "BaseSampler":
    """Return the sampler of one trial; a grid's is the same for all, which it deals out by their numbers."""
    from optuna import samplers

    digest = hashlib.sha256(f"{how['seed']} {number}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    if how["sampler"] == "grid":
        return samplers.GridSampler({place: entry["values"] for place, entry in how["space"].items()}, how["seed"])
    if how["sampler"] == "random":
        return samplers.RandomSampler(seed)
    return samplers.TPESampler(n_startup_trials=_STARTUP, seed=seed)


def _pruner(name: str) -> "BasePruner":
    from optuna import pruners

    made: dict[str, Callable[[], BasePruner]] = {
        "none": pruners.NopPruner,
        "median": lambda: pruners.MedianPruner(_STARTUP),
        "quartile": lambda: pruners.PercentilePruner(25.0, _STARTUP),
    }
    return made[name]()


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn whatever goes wrong with a storage into one line, without the password in its address."""
    try:
        yield
    except Exception as error:
        line = one_line(error).partition(" (Background on this error")[0]
        text = f"the Optuna storage {url} cannot be used: {line[:300]}"
        raise InputError(re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)) from error
