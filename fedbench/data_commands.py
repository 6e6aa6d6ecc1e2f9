"""`fedbench data`: what data sets there are, where their files go, whether they are what they should be."""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbench.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedbench.data import Arrays, DataSource

app = typer.Typer(help="Data sets: list, fetch, verify, where.", no_args_is_help=True, rich_markup_mode=None)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set.")]
_Sets = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="An option of the data set, such as source=leaf.")
]
_Data = Annotated[Path | None, typer.Option(help="Folder of your data; else $FEDBENCH_DATA, else ./data.")]


@app.command("list")
def list_(data: _Data = None) -> None:
    """List the data sets, and which of them have their files here."""
    from fedbench import plugins

    rows = []
    for name in plugins.names("datasets"):
        try:
            about = plugins.load("datasets", name).about
            source = _source_or_none(name)
            state = "" if source is None else "here" if _is_here(source, _root(data)) else "missing"
            rows.append((name, state, about.title if source is None else source.describe(_root(data)).title))
        except InputError as error:
            rows.append((name, "broken", str(error)))
    width = max(len(name) for name, _, _ in rows)
    for name, state, title in rows:
        print(f"{name:{width}}  {state:7}  {title}")


@app.command()
def fetch(name: _Name, sets: _Sets = [], data: _Data = None) -> None:  # noqa: B006 (typer reads it)
    """Download a data set's files, as far as they are missing and somebody publishes them."""
    from fedbench.data import place, present

    print(f"{name}: {place(present(_source(name, sets), _root(data)))}")


@app.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A data set; else all whose files are here.")] = "",
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    data: _Data = None,
) -> None:
    """Read a data set from its files, past every cache, and check whatever can be checked."""
    from fedbench import plugins

    root, bad = _root(data), False
    for one in [name] if name else plugins.names("datasets"):
        try:
            source = _source(one, sets) if name else _source_or_none(one)
            if source is not None and (name or _is_here(source, root)):
                print(f"{one}: {_verified(one, source, root)}", flush=True)
        except InputError as error:
            bad = True
            print(f"fedbench: {one}: {error}", file=sys.stderr)
    if bad:
        raise typer.Exit(2)


@app.command()
def where(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A data set; else the folders.")] = "",
    sets: _Sets = [],  # noqa: B006 (typer reads it)
    data: _Data = None,
) -> None:
    """Say where a data set's files are or should be, and what they are; or where all data are."""
    from fedbench.data import cache_folder

    root = _root(data)
    if not name:
        kept = sum(file.stat().st_size for file in cache_folder(root).rglob("*") if file.is_file())
        print(f"data: {root.absolute()}\ncache: {cache_folder(root).absolute()} ({kept / 2**20:.0f} MiB)")
        return
    source = _source(name, sets)
    about = source.describe(root)
    for word in ("title", "source", "licence", "citation"):
        print(f"{word}: {getattr(about, word)}")
    files = source.files(root)
    for file in files[:8]:
        print(f"file: {file.absolute()}{'' if file.is_file() else ' (missing)'}")
    if len(files) > 8:
        print(f"file: and {len(files) - 8} more")


def _root(data: Path | None) -> Path:
    from fedbench.data import data_root

    return data_root(data)


def _source(name: str, sets: Sequence[str]) -> "DataSource":
    from fedbench import plugins
    from fedbench.config import read_options

    source: DataSource = plugins.build("datasets", name, read_options(sets, "source=leaf"), Path(), name)
    return source


def _source_or_none(name: str) -> "DataSource | None":
    """Return a data set without options; None if it needs some."""
    from fedbench import plugins

    fields = dataclasses.fields(plugins.load("datasets", name))
    missing = dataclasses.MISSING
    needed = any(field.init and field.default is missing and field.default_factory is missing for field in fields)
    return None if needed else _source(name, [])


def _is_here(source: "DataSource", root: Path) -> bool:
    return all(file.is_file() for file in source.files(root))


def _verified(name: str, source: "DataSource", root: Path) -> str:
    from fedbench.data import decode, hash_files

    files = source.files(root)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise InputError(f"{missing[0]}: no such file; see `fedbench data where {name}`, `fedbench data fetch {name}`")
    arrays = decode(source, root, files)
    size = "x".join(map(str, arrays.shape))
    said = [
        f"ok, {len(arrays.y_train):,} training and {len(arrays.y_test):,} test samples of {size}",
        f"{arrays.classes} classes",
        *_peculiar(arrays),
        f"sha256 {hash_files(files)}",
        source.describe(root).title,
    ]
    return "; ".join(said)


def _peculiar(arrays: "Arrays") -> list[str]:
    """Say what a reader of results should know: samples that are in both parts, classes without samples."""
    import numpy as np

    def digests(x: "NDArray[Any]") -> Iterator[bytes]:
        return (hashlib.blake2b(sample.tobytes(), digest_size=16).digest() for sample in x)

    trained = set(digests(arrays.x_train))
    both = sum(digest in trained for digest in digests(arrays.x_test))
    empty = np.flatnonzero(np.bincount(arrays.y_train, minlength=arrays.classes) == 0)
    said = [f"{both:,} of the test samples equal a training sample"] if both else []
    return said + ([f"no training sample of class {', '.join(map(str, empty))}"] if len(empty) else [])
