import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from fedbench import plugins
from fedbench.errors import InputError
from fedbench.method import Method

METHOD = """
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Ge
from fedbench.averaging import Averaging
from fedbench.method import Log

@dataclass(frozen=True)
class Mine(Averaging):
    mu: Annotated[float, Ge(0), Log(1e-4, 1)] = 0.5

    def shares(self, net, name):
        return True
"""
DATASET = """
from dataclasses import dataclass
from fedbench.data import About, DataSource

@dataclass(frozen=True)
class Mine(DataSource):
    about = About("mine", "nowhere", "none")
    size: int = 3

    def files(self, root):
        return []

    def load(self, root):
        raise NotImplementedError
"""
MODEL = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int, *, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.body = nn.Flatten()
        self.head = nn.Linear(shape[0], classes)
"""
SOURCES: dict[plugins.Kind, str] = {"methods": METHOD, "datasets": DATASET, "models": MODEL}


def write(folder: Path, source: str, name: str = "mine.py") -> str:
    """Write a plugin file and return what a suite in that folder calls its class."""
    (folder / name).write_text(source)
    return f"./{name}:Mine"


def install(folder: Path, points: dict[str, dict[str, str]], name: str = "third-party") -> None:
    """Make an installed distribution that registers entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def test_names_are_listed_without_importing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, {"fedbench.methods": {"third": "no_such_package:Third"}, "fedbench.models": {"net": "x:Net"}})
    monkeypatch.syspath_prepend(tmp_path)
    assert {"third", "fedavg", "fedproto"} <= set(plugins.names("methods"))
    assert {"net", "cnn_mnist"} <= set(plugins.names("models"))
    assert "mnist_mini" in plugins.names("datasets")
    assert plugins.names("methods") == sorted(plugins.names("methods"))


def test_suites_and_names_need_no_heavy_library() -> None:
    code = """
import sys
from fedbench import cells, config, plugins
config.load("quickstart"), config.schema(), plugins.names("methods")
print({"torch", "mlflow", "optuna", "pandas", "matplotlib"} & set(sys.modules))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


def test_everything_that_comes_with_fedbench_loads() -> None:
    for kind in plugins.KINDS:
        for name in plugins.names(kind):
            assert plugins.load(kind, name).__module__.startswith(f"fedbench.{kind}.")


def test_a_registered_plugin_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, METHOD, "third_party_method.py")
    install(tmp_path, {"fedbench.methods": {"third": "third_party_method:Mine"}})
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.load("methods", "third") is plugins.load("methods", "third_party_method:Mine")
    assert plugins.identity("third") == "third"


def test_a_name_registered_for_two_classes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, {"fedbench.methods": {"fedavg": "other:FedAvg"}})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"method 'fedavg': registered more than once, as .* and other:FedAvg"):
        plugins.load("methods", "fedavg")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_class_in_a_file(kind: plugins.Kind, tmp_path: Path) -> None:
    spec = write(tmp_path, SOURCES[kind])
    cls = plugins.load(kind, spec, tmp_path)
    assert cls.__name__ == "Mine"
    assert plugins.load(kind, spec, tmp_path) is cls
    assert plugins.load(kind, f"{tmp_path}/mine.py:Mine") is cls


def test_an_edited_file_is_another_plugin(tmp_path: Path) -> None:
    spec = write(tmp_path, METHOD)
    first, before = plugins.build("methods", spec, {}, tmp_path), plugins.identity(spec, tmp_path)
    write(tmp_path, METHOD.replace("0.5", "0.7"))
    second, after = plugins.build("methods", spec, {}, tmp_path), plugins.identity(spec, tmp_path)
    assert (first.mu, second.mu) == (0.5, 0.7)
    assert before != after
    assert before.partition("@")[0] == after.partition("@")[0] == "Mine"
    assert len(after.partition("@")[2]) == 64


def test_the_same_file_elsewhere_has_the_same_identity(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    spec = write(tmp_path, METHOD)
    write(tmp_path / "other", METHOD)
    assert plugins.identity(spec, tmp_path) == plugins.identity(spec, tmp_path / "other")


def test_build_sets_the_options(tmp_path: Path) -> None:
    method = plugins.build("methods", write(tmp_path, METHOD), {"mu": 2, "weights": "uniform"}, tmp_path)
    assert isinstance(method, Method)
    assert (method.mu, method.weights) == (2.0, "uniform")  # type: ignore[attr-defined]
    model = plugins.build("models", write(tmp_path, MODEL), {"width": 7}, tmp_path)((5,), 3)
    assert isinstance(model, nn.Module)
    assert model.width == 7
    assert plugins.build("datasets", write(tmp_path, DATASET), {"size": 9}, tmp_path).size == 9


def test_build_says_whose_option_is_wrong(tmp_path: Path) -> None:
    spec = write(tmp_path, METHOD)
    with pytest.raises(InputError, match=r"^s.yaml: methods.a.mu: should be greater than or equal to 0, not -1$"):
        plugins.build("methods", spec, {"mu": -1}, tmp_path, "s.yaml: methods.a")
    with pytest.raises(InputError, match=r"^s.yaml: methods.a: unknown method 'fedavgg'; did you mean 'fedavg'\?$"):
        plugins.build("methods", "fedavgg", {}, tmp_path, "s.yaml: methods.a")


BROKEN: list[tuple[plugins.Kind, str, str]] = [
    ("methods", "import nothing_of_this_name", "cannot be imported: ModuleNotFoundError: No module named 'nothing"),
    ("methods", "1 +", "cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)"),
    ("methods", "x = 1\nraise ValueError('two\\nlines')", "cannot be imported: ValueError: two lines (line 2)"),
    ("methods", "import sys; sys.exit(3)", "cannot be imported: SystemExit: 3 (line 1)"),
    ("methods", METHOD.replace("(frozen=True)", ""), "cannot be imported: TypeError: cannot inherit non-frozen"),
    ("methods", METHOD.replace("@dataclass(frozen=True)", ""), "put @dataclass(frozen=True) above it"),
    ("datasets", DATASET.replace("(frozen=True)", ""), "put @dataclass(frozen=True) above it"),
    ("methods", METHOD.replace("def shares", "def share"), "Mine does not define shares"),
    ("methods", METHOD.replace("Mine", "Mime"), "unknown class 'Mine'; did you mean 'Mime'?"),
    ("methods", DATASET, "Mine is not a subclass of fedbench.method.Method"),
    ("datasets", METHOD, "Mine is not a subclass of fedbench.data.DataSource"),
    ("models", METHOD, "Mine is not a subclass of torch.nn.modules.module.Module"),
    ("datasets", DATASET.replace("about =", "_about ="), "Mine does not say what it is"),
    ("models", MODEL.replace("shape: tuple[int, ...], ", ""), "the constructor should be Mine(shape, classes, "),
    (
        "models",
        MODEL.replace("width: int", "width: 'Nobody'"),
        "its options cannot be understood: NameError: name 'Nob",
    ),
]


@pytest.mark.parametrize(("kind", "source", "line"), BROKEN)
def test_a_broken_plugin_is_named_and_breaks_nothing_else(
    kind: plugins.Kind, source: str, line: str, tmp_path: Path
) -> None:
    spec = write(tmp_path, source)
    before = set(sys.modules)
    with pytest.raises(InputError) as caught:
        plugins.load(kind, spec, tmp_path)
    message = str(caught.value)
    assert message.startswith(({"methods": "method", "datasets": "data set", "models": "model"}[kind]) + f" '{spec}'")
    assert line in message
    assert "\n" not in message
    if "imported" in line:
        assert not any(name.startswith("fedbench_plugin") for name in set(sys.modules) - before)
    assert plugins.load("methods", "fedavg").__name__ == "FedAvg"


@pytest.mark.parametrize("name", plugins.ROW_KEYS)
def test_a_hyperparameter_named_like_a_key_of_a_row_is_refused(name: str, tmp_path: Path) -> None:
    spec = write(tmp_path, METHOD.replace("mu:", f"{name}:"))
    with pytest.raises(InputError, match=f"option '{name}' has a name that suites use for something else"):
        plugins.load("methods", spec, tmp_path)


@pytest.mark.parametrize(("kind", "option"), [("datasets", "size"), ("models", "width")])
def test_an_option_called_name_is_refused(kind: plugins.Kind, option: str, tmp_path: Path) -> None:
    source = SOURCES[kind].replace(f"{option}: int", "name: int").replace("= width", "= name")
    with pytest.raises(InputError, match="option 'name'"):
        plugins.load(kind, write(tmp_path, source), tmp_path)


def test_wrong_specs(tmp_path: Path) -> None:
    write(tmp_path, METHOD)
    for spec, line in {
        "./mine:Mine": "method './mine:Mine': './mine' is no module; a class in a file is written './mine.py:Mine'",
        "./mine.py": "method './mine.py': name the class too, as in './mine.py:Mine'",
        "./nine.py:Mine": f"plugin file {tmp_path}/nine.py: No such file or directory",
        "no_such_package.a:B": "method 'no_such_package.a:B' cannot be imported: ModuleNotFoundError: No module named",
        "fedproto_": "unknown method 'fedproto_'; did you mean 'fedproto'?",
    }.items():
        with pytest.raises(InputError) as caught:
            plugins.load("methods", spec, tmp_path)
        assert str(caught.value).startswith(line)
