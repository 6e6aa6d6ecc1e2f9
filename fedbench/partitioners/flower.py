"""Partitions by the package flwr-datasets, which deals rows of a table with the columns label and client."""

import importlib
import inspect
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, final

import numpy as np

from fedbench.data import Arrays
from fedbench.errors import InputError, unknown
from fedbench.options import one_line
from fedbench.partitioners import Fraction, Partitioner, Split
from fedbench.partitioners.dealing import HOLD_OUT, check_rows, cut_all, deal_test, label_counts


@final
@dataclass(frozen=True, kw_only=True)
class Flower(Partitioner):
    """What a partitioner of flwr-datasets deals (extra `flwr-datasets`).

    - `partitioner`: the name of its class, such as DirichletPartitioner.
    - `options`: what that takes.  Where it has `partition_by` and none is given, that is "label"; "client" is the data
      set's own.  Where it has `seed`, that is the partition seed.
    - `test`: as for partitions by a skew: `match` or `iid`.
    - `test_fraction` of each client's samples become its test samples if the data set has none.
    """

    partitioner: str
    options: dict[str, Any] = field(default_factory=dict)
    test: Literal["match", "iid"] = "match"
    test_fraction: Fraction = 0.2

    def split(self, arrays: Arrays, seed: int, /) -> Split:
        """Let the partitioner deal the training rows, and deal test rows to match."""
        train = [np.sort(rows) for rows in self._dealt(arrays, seed)]
        check_rows(train, len(arrays.y_train), "training", f"partition.partitioner: {self.partitioner}")
        notes = {"flwr_datasets": installed()}
        if not len(arrays.y_test):
            return Split(*cut_all(train, arrays.y_train, self.test_fraction, seed, HOLD_OUT), notes=notes)
        counts = label_counts(train, arrays.y_train, arrays.classes)
        return Split(train, deal_test(arrays, counts, self.test, seed), notes=notes)

    def _dealt(self, arrays: Arrays, seed: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        made = _partitioner(self.partitioner)
        accepted = inspect.signature(made).parameters
        usual = {"partition_by": "label", "seed": seed}
        options = {name: value for name, value in usual.items() if name in accepted} | self.options
        if strange := [name for name in self.options if name not in accepted]:
            raise InputError(f"partition.options: {unknown('option', strange[0], accepted)}")
        columns = {"row": np.arange(len(arrays.y_train)), "label": arrays.y_train}
        if arrays.client_train is not None:
            columns["client"] = arrays.client_train
        datasets = importlib.import_module("datasets")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of draws that it takes again
                datasets.disable_progress_bars()
                dealer = made(**options)
                dealer.dataset = datasets.Dataset.from_dict(columns)
                parts = [dealer.load_partition(client) for client in range(dealer.num_partitions)]
                return [np.asarray(part["row"], np.int64) for part in parts]
        except Exception as error:  # whatever the package raises for options that do not fit
            raise InputError(f"partition.options: {self.partitioner} of flwr-datasets: {one_line(error)}") from error


def installed() -> str:
    """Return the version of flwr-datasets; raises InputError if it is not installed."""
    try:
        return metadata.version("flwr-datasets")
    except metadata.PackageNotFoundError:
        raise InputError(
            "partition: 'flwr' wants the package flwr-datasets: pip install 'fedbench-suite[flwr-datasets]'"
        ) from None


def _partitioner(name: str) -> Any:
    installed()
    try:
        found = importlib.import_module("flwr_datasets.partitioner")
    except ImportError as error:
        raise InputError(f"partition: flwr-datasets cannot be imported: {one_line(error)}") from error
    known = [one for one in found.__all__ if one.endswith("Partitioner") and one != "Partitioner"]
    if name not in known:
        raise InputError(f"partition.partitioner: {unknown('partitioner', name, known)}")
    return getattr(found, name)
