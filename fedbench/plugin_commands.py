"""`fedbench check`: whether methods keep what every method keeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedbench.errors import InputError, unknown

if TYPE_CHECKING:
    from fedbench.method import Method


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
    import torch

    from fedbench import testing

    torch.set_num_threads(1)  # the clients are small
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
