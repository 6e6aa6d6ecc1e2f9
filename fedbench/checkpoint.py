"""A federation's progress in a file, from which it goes on after its process was killed."""

import json
import logging
import os
import pickle
import platform
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch

from fedbench import durable
from fedbench.method import Rows
from fedbench.options import one_line

_log = logging.getLogger("fedbench")

_SHARE = 20
"""Between two checkpoints passes at least this many times what making and writing one takes."""


@final
class Checkpoint:
    """One file, written now and then: tensors and plain values only, aside first and then renamed.

    - `about`: plain values, all that the numbers may depend on; a file with others is not gone on from.
    - `seconds`: from one write to the next; 0 writes after every round.
    - `resumed`: the round after which this federation went on, 0 if it began anew.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], seconds: float) -> None:
        """Take the place of the file, in a folder that need not exist."""
        self._path, self._seconds = path, seconds
        self._about = json.loads(json.dumps(about))  # torch's version, for one, is not plain
        self._due = time.monotonic() + seconds
        self._failed = False
        self.resumed = 0

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last; None, and a warning, if that is damaged or about something else."""
        try:
            with zipfile.ZipFile(self._path) as archive:  # torch.load does not look at checksums
                if bad := archive.testzip():
                    raise zipfile.BadZipFile(f"bad checksum of {bad}")
            with torch.serialization.safe_globals([Rows]):
                held = torch.load(self._path, weights_only=True)
            about, progress = held["about"], held["progress"]
        except FileNotFoundError:
            return None
        except Exception as error:  # damage takes many forms
            alien = isinstance(error, pickle.UnpicklingError)
            reason = "it holds more than tensors and plain values" if alien else one_line(error)[:200]
            _log.warning("%s is damaged and not used: %s", self._path, reason)
            return None
        other = sorted(name for name in {*about, *self._about} if about.get(name) != self._about.get(name))
        if other:
            _log.warning("%s is not used, since it was made with another %s", self._path, ", ".join(other))
            return None
        self.resumed = progress["round"]
        return dict(progress)

    @property
    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() >= self._due

    def save(self, progress: Callable[[], Mapping[str, Any]]) -> None:
        """Save progress, with the "round" that it is after; what cannot be written costs a warning and no more.

        `progress` is called for it, so that what this takes counts too.
        """
        began = time.monotonic()
        try:
            self._write({"about": self._about, "progress": dict(progress())})
        except Exception as error:  # a full disk, or a method that keeps what cannot be written
            if not self._failed:
                _log.warning("%s cannot be written: %s", self._path, one_line(error)[:200])
            self._failed = True
        now = time.monotonic()
        self._due = now + max(self._seconds, _SHARE * (now - began) if self._seconds else 0)

    def _write(self, content: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A worker whose driver was killed may still be at it when the next one begins.
        part = self._path.with_name(f"{self._path.stem}.{platform.node()}.{os.getpid()}.part")
        try:
            with durable.written(part) as file:
                torch.save(content, file)
            part.replace(self._path)
        finally:
            part.unlink(missing_ok=True)
