"""`fedbench new` and `fedbench check`: for the authors of methods and data sets."""

import keyword
import re
import shutil
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbench.errors import InputError, unknown

if TYPE_CHECKING:
    from fedbench import plugins
    from fedbench.method import Method

app = typer.Typer(
    help="Write a package with a method or a data set that works as it stands.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="What suites will call it, such as my_method.")]
_To = Annotated[Path | None, typer.Option(help="Folder to write, which is not there yet; else ./NAME.")]
_TEMPLATES = Path(__file__).with_name("templates")


@app.command()
def method(name: _Name, to: _To = None) -> None:
    """Write a package with a method, its tests and a suite."""
    folder = _write("methods", "method", name, to)
    print(f"written to {folder}; next: cd {folder} && pytest && fedbench run {name}.yaml")


@app.command()
def dataset(name: _Name, to: _To = None) -> None:
    """Write a package with a data set, its tests and a suite."""
    folder = _write("datasets", "dataset", name, to)
    print(f"written to {folder}; next: cd {folder} && pytest && fedbench run {name}.yaml")


def _write(kind: "plugins.Kind", word: str, name: str, to: Path | None) -> Path:
    """Write the package aside, and then name it."""
    folder = to or Path(name)
    texts = {file.name.removesuffix(".in"): file.read_text(encoding="utf-8") for file in (_TEMPLATES / word).iterdir()}
    cls = "".join(part.capitalize() for part in name.split("_"))
    _check_name(kind, name, cls, texts.values())
    if folder.exists():
        raise InputError(f"{folder}: is there already; want a new folder, with --to")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file, text in texts.items():
        content = Template(text).substitute(name=name, dashed=name.replace("_", "-"), cls=cls)
        (part / file.replace("NAME", name)).write_text(content, encoding="utf-8")
    part.rename(folder)
    return folder


def _check_name(kind: "plugins.Kind", name: str, cls: str, texts: Iterable[str]) -> None:
    from fedbench import plugins

    if keyword.iskeyword(name):
        raise InputError(f"{name}: is a keyword of Python; want another name, such as my_{name}")
    if not re.fullmatch("[a-z](_?[a-z0-9])*", name) or len(name) > 40:
        raise InputError(f"{name}: want a name of lower-case letters, digits and single underscores, such as my_method")
    if name in plugins.names(kind):
        raise InputError(f"{name}: is registered already, see `fedbench list {kind}`; want another name")
    found = find_spec(name)
    if found and found.origin:  # a mere folder has none, and hides nothing
        raise InputError(f"{name}: a module of Python is called that, and a folder may hide it; want another name")
    if cls.startswith("Test") or any(re.search(rf"\b{cls}\b", text) for text in texts):
        raise InputError(f"{name}: its class would be called {cls}, which something else is; want another name")


def check(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD", help="Names, or classes such as ./mine.py:Mine or package.module:Mine."),
    ],
    sets: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter, such as mu=0.1; repeatable.")
    ] = [],  # noqa: B006 (typer reads it)
    preset: Annotated[str, typer.Option(help="Published hyperparameters of the method; --set comes on top.")] = "",
) -> None:
    """Check that methods keep what every method keeps, and say what to do where one does not."""
    from fedbench import testing

    made = [_method(spec, sets, preset) for spec in methods]
    broken = 0
    for spec, method in zip(methods, made, strict=True):
        found = 0
        for verdict in testing.verdicts(method):
            found += bool(verdict.broken)
            said = (
                f"BROKEN  {verdict.broken}" if verdict.broken else f"ok      {verdict.remark or verdict.check.promise}"
            )
            print(f"{spec}: {verdict.check.name:13}  {said}", flush=True)
        if found:
            print(
                f"{spec}: {found} of {len(testing.CHECKS)} checks fail; begin with the first, others may follow from it"
            )
        broken += found
    raise typer.Exit(1 if broken else 0)


def _method(spec: str, sets: Sequence[str], preset: str) -> "Method":
    from fedbench import plugins
    from fedbench.config import read_options

    options: dict[str, Any] = read_options(sets, "mu=0.1")
    if preset:
        presets = plugins.load("methods", spec).presets
        if preset not in presets:
            raise InputError(f"{spec}: {unknown('preset', preset, presets)}")
        options = {**presets[preset], **options}
    options, _ = plugins.located("methods", spec, options, Path())
    made: Method = plugins.build("methods", spec, options, where=spec)
    return made
