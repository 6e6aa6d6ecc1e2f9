"""Data sets that have files of their own: what is expected where, how it gets there, how it is verified and read."""

import gzip
import hashlib
import shutil
import socket
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedbench.data import About, Arrays, DataSource, by_part, place, read_npz
from fedbench.errors import InputError

PROBE = 2.5
"""Seconds within which some server has to answer; else there is no network."""

STALL = 30.0
"""Seconds without a byte after which a download is given up."""


@dataclass(frozen=True)
class Published(DataSource):
    """A data set with files of its own, whose place an .npz with the data set's name takes if there is one.

    Both come to the same layout of arrays (see `fedbench.data.LAYOUTS`), which `arrays` makes a data set of.  `name` is
    the data set's name.
    """

    name: ClassVar[str]

    @abstractmethod
    def originals(self, root: Path, /) -> list[Path]:
        """Return the files that are read if there is no .npz."""

    @abstractmethod
    def read(self, root: Path, /) -> Mapping[str, NDArray[Any]]:
        """Return what the files hold, verified, under the names that an .npz has."""

    @abstractmethod
    def arrays(self, held: Mapping[str, NDArray[Any]], where: str, /) -> Arrays:
        """Return the data set; raises InputError, beginning with `where`, if it cannot be one."""

    def npz(self, root: Path) -> Path | None:
        """Return the .npz that is read in place of the files, if there is one."""
        path = root / f"{self.name}.npz"
        return path if path.is_file() else None

    def files(self, root: Path, /) -> list[Path]:
        """Return the .npz or the files."""
        npz = self.npz(root)
        return [npz] if npz else self.originals(root)

    def load(self, root: Path, /) -> Arrays:
        """Return the arrays; raises InputError naming the file if it is not what was published, or cannot be read."""
        npz = self.npz(root)
        if npz:
            return self.arrays(read_npz(npz), str(npz))
        return self.arrays(self.read(root), place(self.originals(root)))

    def describe(self, root: Path, /) -> About:
        """Return what the data set is, and that it was read from an .npz if so."""
        npz = self.npz(root)
        if not npz:
            return self.about
        about = self.about
        return replace(about, title=f"{about.title} ({npz.name})", source=f"{npz.name} in place of {about.source}")


def images(held: Mapping[str, NDArray[Any]], where: str, channels: int) -> dict[str, Any]:
    """Return arrays under the names of `Arrays`, images (samples, C, H, W).

    They may be given as (samples, C, H, W), as (samples, H, W, C), and with one channel as (samples, H, W); raises
    InputError, beginning with `where`, if they are none of these.
    """
    parts = by_part(held, where)
    for part in ("x_train", "x_test"):
        x = parts[part]
        if x.ndim == 3 and channels == 1:
            parts[part] = x[:, None]
        elif x.ndim == 4 and x.shape[1] != channels and x.shape[3] == channels:
            parts[part] = np.ascontiguousarray(np.moveaxis(x, 3, 1))
        elif x.ndim != 4 or x.shape[1] != channels:
            raise InputError(f"{where}: {part} has shape {x.shape}; want images with {channels} channels")
    return parts


# --- files with a checksum


@dataclass(frozen=True)
class Download:
    """A published file: its place in the data folder, its md5, and where it can be had."""

    path: str
    md5: str
    urls: tuple[str, ...]


def obtain(download: Download, root: Path, offline: str) -> Path:
    """Return a published file, verified, downloaded if it is not there.

    `offline` says what can be done without a network.  Raises InputError if the file is not what was published, or
    cannot be downloaded; without a network within a few seconds.
    """
    target = root / download.path
    if target.is_file():
        verify(target, {target.name: download.md5})
        return target
    try:
        retrieve(download, target)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{target}: no such file, and no download ({reason}); put it there from {download.urls[0]} "
            f"(md5 {download.md5}), or name another data folder, or {offline}"
        ) from None
    return target


def verify(path: Path, md5: Mapping[str, str]) -> None:
    """Check a file against the md5 under its name; raises InputError that says if it is another one of those named."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found == md5[path.name]:
        return
    other = [name for name, value in md5.items() if value == found]
    what = f"it is {other[0]}" if other else "it is truncated or altered"
    raise InputError(
        f"{path}: md5 {found}, published was {md5[path.name]}: {what}; remove it, and it is downloaded again"
    )


def retrieve(download: Download, target: Path) -> None:
    """Download a file with torchvision; it appears when it is complete and verified.

    Raises OSError: if nobody answers within `PROBE` seconds, or from the last of those who do.
    """
    probes = [_Probe(url) for url in download.urls]
    deadline = time.monotonic() + PROBE
    failure = OSError("nobody publishes it")
    for probe in probes:
        try:
            probe.wait(deadline - time.monotonic())
            print(f"fedbench: {target} is missing; downloading {probe.url}", file=sys.stderr, flush=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=target.parent, prefix=".part-") as aside:
                _download(probe.url, Path(aside) / target.name, download.md5)
                (Path(aside) / target.name).replace(target)
            return
        except OSError as error:
            failure = error
            if isinstance(error, urllib.error.HTTPError):  # which is an open connection too
                error.close()
        except RuntimeError:  # torchvision's word for a wrong checksum
            failure = OSError(f"{probe.url} gives another file than was published")
    raise failure


def _download(url: str, path: Path, md5: str) -> None:
    from torchvision.datasets.utils import download_url

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL)
    try:
        download_url(url, path.parent, path.name, md5)
    finally:
        socket.setdefaulttimeout(before)


class _Probe:
    """Asks a server for an answer, beside everything else: the look-up of a name knows no time limit."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failure: OSError | None = TimeoutError(f"no answer from {url} in {PROBE} s")
        self.thread = Thread(target=self._ask, daemon=True)
        self.thread.start()

    def wait(self, seconds: float) -> None:
        """Return as soon as there is an answer; raises OSError if there is none."""
        self.thread.join(max(0.0, seconds))
        if self.failure:
            raise self.failure

    def _ask(self) -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(self.url, method="HEAD"), timeout=PROBE).close()
        except urllib.error.HTTPError as error:  # an answer too, and the download will say which
            error.close()
        except OSError as error:
            self.failure = error
            return
        self.failure = None


def unpack(archive: Path, members: Mapping[str, Path]) -> None:
    """Write files of a .zip or .tar.gz archive (name in it -> path), each of which appears when it is complete.

    Raises InputError if one is not in the archive or cannot be written.
    """
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                for name, path in members.items():
                    with packed.open(name) as stream:
                        _write(stream, path)
        else:
            with tarfile.open(archive) as tape:
                for name, path in members.items():
                    with tape.extractfile(name) or _nothing(name) as stream:
                        _write(stream, path)
    except (OSError, EOFError, KeyError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise InputError(f"{archive}: cannot be unpacked ({' '.join(str(error).split())})") from None


def _nothing(name: str) -> Any:
    raise KeyError(f"{name} is no file")


def _write(stream: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as out:
        shutil.copyfileobj(stream, out)
    part.replace(path)


# --- idx, the format of MNIST and its kin


def idx_file(folder: Path, name: str) -> Path:
    """Return the place of an idx file: unpacked only if that alone is there, else compressed with gzip.

    So the content that is hashed stays the same when somebody unpacks it.
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    return plain if plain.is_file() and not packed.is_file() else packed


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Return the array of bytes in an idx file, compressed or not, in the shape that its head says.

    Raises InputError if the file is truncated, damaged or of another kind.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08":
            raise ValueError("it does not begin like one")
        shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise InputError(f"{path}: not a whole idx file of bytes ({' '.join(str(error).split())})") from None
