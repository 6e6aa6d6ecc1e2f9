"""Files that are on the disk, and not only on their way to it, once they are closed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Give a new file to write into; a rename after it cannot come to the disk before its content."""
    with path.open("wb") as file:
        yield file
        file.flush()  # what Python still has, fsync does not know of
        os.fsync(file.fileno())
