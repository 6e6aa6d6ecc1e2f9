"""Heart disease in four hospitals, from the files of the UCI repository: 13 findings on each of 920 patients."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from fedbench.data import About, Arrays, by_part
from fedbench.errors import InputError
from fedbench.published import Download, Published, obtain, verify

FOLDER = "fed_heart"
URL = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
MD5 = {
    "processed.cleveland.data": "2d91a8ff69cfd9616aa47b59d6f843db",
    "processed.hungarian.data": "22e96bee155b5973568101c93b3705f6",
    "processed.switzerland.data": "9a87f7577310b3917730d06ba9349e20",
    "processed.va.data": "4249d03ca7711e84f4444768c9426170",
}
FINDINGS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
NEVER_ZERO = ("trestbps", "chol")


@dataclass(frozen=True)
class FedHeart(Published):
    """Who of 920 patients has heart disease; the four hospitals are the clients of the partition `natural`.

    Read from fed_heart/processed.*.data in the data folder, or from fed_heart.npz beside it (x with NaN where a finding
    is missing, y, client; or x_train, ...).  What is done to them, with the training patients of all hospitals
    together, never with test patients:

    - Test patients are every `test_every`th of each hospital's sick and of its healthy ones, in the order of the files
      (unless the .npz says who they are).
    - A missing finding, and a blood pressure or cholesterol of zero, which stands for one, becomes the median.
      All 13 findings stay, categories as the numbers they are written with.
    - Then each finding is standardised to mean 0 and deviation 1.
    """

    name: ClassVar[str] = "fed_heart"
    about: ClassVar[About] = About(
        title="Heart disease: 920 patients of four hospitals (Cleveland, Budapest, Zurich and Basel, Long Beach)",
        source=f"{URL}, md5 " + ", ".join(f"{md5} {name}" for name, md5 in MD5.items()),
        licence="CC BY 4.0",
        citation="A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano: Heart Disease. UCI Machine Learning Repository, "
        "1989, doi 10.24432/C52P4X",
    )

    test_every: Annotated[int, Ge(2)] = 5

    def originals(self, root: Path, /) -> list[Path]:
        """Return the file of each hospital."""
        return [root / FOLDER / name for name in MD5]

    def fetch(self, root: Path, /) -> None:
        """Download the files that are missing."""
        offline = f"put fed_heart.npz (x, y, client) into {root}"
        for name, md5 in MD5.items():
            obtain(Download(f"{FOLDER}/{name}", md5, (URL + name,)), root, offline)

    def read(self, root: Path, /) -> Mapping[str, NDArray[Any]]:
        """Return findings (920, 13) float64, NaN where missing, disease 0 or 1, and hospital 0 to 3."""
        tables = []
        for file in self.originals(root):
            verify(file, MD5)
            tables.append(np.genfromtxt(file, delimiter=",", missing_values="?"))
        rows = np.concatenate(tables)
        hospital = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        return {"x": rows[:, :13], "y": (rows[:, 13] > 0).astype(np.int64), "client": hospital}

    def arrays(self, held: Mapping[str, NDArray[Any]], where: str, /) -> Arrays:
        """Return the data set."""
        parts = by_part(held, where)
        for part in ("train", "test"):
            x = parts[f"x_{part}"]
            if x.ndim != 2 or x.shape[1] != len(FINDINGS) or not np.issubdtype(x.dtype, np.floating):
                raise InputError(f"{where}: x is {x.dtype} of shape {x.shape}; want {len(FINDINGS)} floating columns")
            if np.isinf(x).any():
                raise InputError(f"{where}: x is infinite in row {np.argmax(np.isinf(x).any(axis=1))}")
        x, y, client = parts["x_train"], parts["y_train"], parts.get("client_train")
        if client is None or not len(x) == len(y) == len(client):
            raise InputError(f"{where}: want x, y and client of the same length, one row for each patient")
        if not len(parts["y_test"]):
            test = self._test_patients(y, client)
            parts = {
                f"{name}_{part}": rows
                for name, values in (("x", x), ("y", y), ("client", client))
                for part, rows in (("train", values[~test]), ("test", values[test]))
            }
        known = {part: _known(parts[f"x_{part}"]) for part in ("train", "test")}
        if (lost := np.isnan(known["train"]).all(axis=0)).any():
            raise InputError(f"{where}: {FINDINGS[int(np.argmax(lost))]} is missing in every training row")
        median = np.nanmedian(known["train"], axis=0)
        filled = {part: np.where(np.isnan(rows), median, rows) for part, rows in known.items()}
        mean, std = filled["train"].mean(axis=0), filled["train"].std(axis=0)
        std[std == 0] = 1  # a finding that is the same for everybody
        parts |= {f"x_{part}": ((rows - mean) / std).astype(np.float32) for part, rows in filled.items()}
        return Arrays(**parts, classes=2)

    def _test_patients(self, y: NDArray[np.int64], client: NDArray[np.int64]) -> NDArray[np.bool_]:
        test = np.zeros(len(y), bool)
        for hospital in np.unique(client):
            for disease in np.unique(y):
                rows = np.flatnonzero((client == hospital) & (y == disease))
                test[rows[self.test_every - 1 :: self.test_every]] = True
        return test


def _known(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return findings with NaN for each that was not taken."""
    known = x.astype(np.float64)
    columns = [FINDINGS.index(name) for name in NEVER_ZERO]
    known[:, columns] = np.where(known[:, columns] == 0, np.nan, known[:, columns])
    return known
