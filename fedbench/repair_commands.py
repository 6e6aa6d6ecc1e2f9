"""`fedbench repair`: what cannot be read is moved aside."""

import os
from pathlib import Path

from fedbench.run_commands import locked
from fedbench.words import counted


def run(suite: str, out: Path) -> None:
    """Move what is damaged in the folder of a suite aside, and the MLflow database beside it.

    `suite` is a suite, whose folder is in `out`, or the folder itself.  InputError if it is not there.
    """
    from fedbench import config
    from fedbench.store import Store, damage_of
    from fedbench.tracking import local_uri

    folder = Path(suite)
    if (folder / "version").is_file():
        root, out = folder, Path(os.path.normpath(folder / ".."))
    else:
        root = out / config.load(suite).name
    store, database = Store(root), out / "mlflow.db"
    store.check_begun()
    with locked(store):
        found = list(store.damaged())
        if reason := damage_of(database):
            found.append((database, reason))
        for path, reason in found:
            print(f"{reason}; moved to {store.set_aside(path)}")
        if under_way := len(list(store.checkpoints.glob("*.pt"))):  # of this suite as it is, or as it was before
            print(
                f"{store.checkpoints}: {counted(under_way, 'checkpoint')} of cells that have not ended; can be deleted"
            )
    if database in dict(found):  # after its own lock, so that two repairs never wait for each other
        for other in (Store(marker.parent) for marker in sorted(out.glob("*/version"))):
            with locked(other):
                other.forget_tracked(local_uri(out))
    print(f"{len(found)} moved aside" + (", the next run makes them anew" if found else ": everything can be read"))
