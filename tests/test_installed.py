"""What is tested is this checkout, and an installation of it is complete."""

import os
from collections.abc import Iterator
from pathlib import Path

import fedbench
from fedbench import config, plugins

CHECKOUT = Path(__file__).resolve().parents[1] / "fedbench"
INSTALLED = Path(fedbench.__file__).parent


def files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (str(Path(folder, name).relative_to(root)) for name in names)


def test_every_file_is_installed_as_it_is_here() -> None:
    """So a wheel lacks no data, and nobody tests an old installation: `pip install` again, or install with -e."""
    here = set(files(CHECKOUT))
    assert here == set(files(INSTALLED))
    assert [name for name in sorted(here) if (CHECKOUT / name).read_bytes() != (INSTALLED / name).read_bytes()] == []


def test_the_shipped_plugins_and_suites_are_found() -> None:
    for kind, folder in (("methods", CHECKOUT / "methods"), ("datasets", CHECKOUT / "datasets")):
        made = {plugins.load(kind, name).__module__.rpartition(".")[2] for name in plugins.names(kind)}  # type: ignore[arg-type]
        assert {path.stem for path in folder.glob("*.py") if not path.name.startswith("make_")} <= made
    assert config.shipped_suites().keys() == {path.stem for path in (CHECKOUT / "suites").glob("*.yaml")}
