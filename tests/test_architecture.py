"""The map in docs/architecture.md is that of the code: every module is in it, and imports only what it may."""

import ast
import os
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {
    "torch",
    "torchvision",
    "mlflow",
    "optuna",
    "pandas",
    "matplotlib",
    "scipy",
    "sklearn",
    "jinja2",
    "ray",
    "flwr",
}
PLUGINS = ("methods", "datasets")


def section(title: str) -> str:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], flags=re.MULTILINE)[0]


def layers() -> dict[str, str]:
    """Return module -> layer, as the map says."""
    parts = re.split(r"^### (\w+)$", section("Modules"), flags=re.MULTILINE)[1:]
    named: dict[str, str] = {}
    for layer, text in zip(parts[::2], parts[1::2], strict=True):
        for name in re.findall(r"^- `([^`]+)`: ", text, flags=re.MULTILINE):
            assert name not in named, f"{name} stands twice"
            named[name] = layer
    return named


def rules() -> dict[str, set[str]]:
    """Return layer -> layers and modules that it may import."""
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", section("Who may import whom"), flags=re.MULTILINE)
    return {layer: {name.strip(" `") for name in allowed.split(",")} for layer, allowed in rows if layer != "layer"}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield every module as the map names it: `cells.py`, `engines/loop.py`, `engines/` for a package."""
    package = ROOT / "fedbench"
    for folder, _, files in os.walk(package, followlinks=True):
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                name = path.relative_to(package).as_posix()
                yield name.removesuffix("__init__.py") if "/" in name else name, path


MODULES = dict(modules())


def module(dotted: str) -> str | None:
    """Return the module that `fedbench.<dotted>` is, if it is one."""
    parts = dotted.replace(".", "/")
    return next((name for name in (f"{parts}.py", f"{parts}/") if name in MODULES), None)


def imported(path: Path) -> set[str]:
    """Return the modules of fedbench that one imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in dotted:
            package, _, rest = name.partition(".")
            if package == "fedbench":
                found.add(module(rest) or module(rest.rpartition(".")[0]) or "__init__.py")
    return found


def layer_of(name: str) -> str:
    folder = name.partition("/")[0]
    return folder if folder in PLUGINS else layers().get(name, "not in the map")


def test_every_module_is_in_the_map() -> None:
    assert set(layers()) == {name for name in MODULES if not name.startswith(PLUGINS)}
    assert set(rules()) == {*layers().values(), *PLUGINS}


def test_modules_import_only_what_they_may() -> None:
    allowed = rules()
    wrong = [
        f"{name} ({layer_of(name)}) imports {other} ({layer_of(other)})"
        for name, path in MODULES.items()
        for other in imported(path)
        if other != "__init__.py" and not {layer_of(other), other} & allowed.get(layer_of(name), set())
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_the_command_line_or_a_plugin_by_its_module() -> None:
    for name, path in MODULES.items():
        if layer_of(name) != "doors":
            doors = {other for other in imported(path) if other == "cli.py" or other.endswith("_commands.py")}
            assert doors == set(), name
        assert {other for other in imported(path) if other.startswith(PLUGINS)} == set(), name


def test_no_two_modules_import_each_other_by_any_detour() -> None:
    graph = {name: imported(path) for name, path in MODULES.items() if name != "__init__.py"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_commands_that_need_no_torch_do_not_load_it() -> None:
    """What stands at the top of a module that every command goes through is imported by every command."""
    light = {name for name in MODULES if layer_of(name) in ("base", "harness", "doors")} - {
        "keys.py",
        "estimate.py",
        "flower.py",
    }  # a program of its own
    dealt = [name for name in MODULES if name.startswith("partition")]
    for name in (*light, *dealt, "data.py", "results.py", "reference.py"):
        for node in ast.parse(MODULES[name].read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert HEAVY.isdisjoint(full.partition(".")[0] for full in names), name
