"""Embeddings in the plane: t-SNE of what cells keep, computed by scikit-learn as the report is made."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedbench.report.plots import Group, Scatter

_TABLE = "table/"


def scatter(kept: Mapping[str, NDArray[np.generic]]) -> Scatter:
    """Return all test samples by class, and on top the rows of the server's tables, placed together with them.

    The settings are scikit-learn's of today, with its seed fixed.
    """
    tables = sorted(name for name in kept if name.startswith(_TABLE) and not name.endswith("/labels"))
    samples = kept["embeddings"]
    points = np.concatenate([samples, *(kept[name] for name in tables)]).astype(np.float32)
    placed = _placed(points) if len(points) > 1 else np.zeros((len(points), 2))
    labels = np.concatenate([kept["labels"], *(kept[f"{name}/labels"] for name in tables)]).astype(np.int64)
    large = np.arange(len(points)) >= len(samples)
    return Scatter(_groups(placed, labels, ~large), _groups(placed, labels, large))


def _placed(points: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return two points or more (N, width) in the plane."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    start = "pca" if min(points.shape) > 1 else "random"
    perplexity = min(30.0, (len(points) - 1) / 3)
    model = TSNE(2, perplexity=perplexity, init=start, learning_rate="auto", random_state=0)
    with threadpool_limits(1):  # sums in the same order on every machine, and no threads that wait for each other
        return np.asarray(model.fit_transform(points), np.float64)


def _groups(placed: NDArray[np.float64], labels: NDArray[np.int64], chosen: NDArray[np.bool_]) -> tuple[Group, ...]:
    groups = []
    for label in np.unique(labels[chosen]).tolist():
        rows = placed[chosen & (labels == label)]
        groups.append(Group(f"class {label}", label, tuple((float(x), float(y)) for x, y in rows)))
    return tuple(groups)
