import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights, resnet18, resnet34

from fedbench import ClientArrays, cells, config, data, simulate
from fedbench.errors import InputError
from fedbench.method import Method
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedrep import FedRep
from fedbench.methods.local import Local
from fedbench.models import resnet
from fedbench.models.cnn import CnnFemnist, CnnMnist
from fedbench.models.resnet import ResNet18
from fedbench.net import Net
from fedbench.partition import NWayKShot

MNIST, FEMNIST, CIFAR = (1, 28, 28), (1, 128, 128), (3, 32, 32)
Factory = Callable[[tuple[int, ...], int], nn.Module]


def sizes(model: nn.Module, *parts: str) -> int:
    """Return the number of entries of all parameters whose names begin with one of `parts`, by default all."""
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(parts or ("",)))


def drawn(factory: Factory, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model drawn from torch's generator, seeded."""
    torch.manual_seed(1)
    return factory(shape, classes)


def traffic(method: Method, factory: Factory, shape: tuple[int, ...], labels: list[list[int]], classes: int) -> int:
    """Return the scalars uploaded in one round by clients that hold one blank image of each of their labels."""
    clients = []
    for mine in labels:
        x = np.zeros((len(mine), *shape), np.float32)
        clients.append(ClientArrays(x, np.array(mine), x[:1], np.array(mine[:1])))
    outcome = simulate(method, factory, clients, classes=classes, rounds=1, batch_size=16)
    assert outcome.status == "completed"
    return int(outcome.traffic["up/scalars"].sum())


# --- the CNNs: counts are facts of the FedProto code


@pytest.mark.parametrize(
    ("factory", "shape", "classes", "channels", "parts"),
    [  # conv1, conv2, fc1, fc2, weights and biases
        (CnnMnist, MNIST, 10, 18, (260, 4_518, 14_450, 510)),
        (CnnMnist, MNIST, 10, 20, (260, 5_020, 16_050, 510)),
        (CnnMnist, MNIST, 10, 22, (260, 5_522, 17_650, 510)),
        (CnnFemnist, FEMNIST, 62, 18, (100, 4_518, 756_950, 3_162)),
        (CnnFemnist, FEMNIST, 62, 20, (100, 5_020, 841_050, 3_162)),
        (CnnFemnist, FEMNIST, 62, 22, (100, 5_522, 925_150, 3_162)),
        (CnnFemnist, MNIST, 62, 18, (100, 4_518, 14_450, 3_162)),  # by hand: 26 -> 13 -> 9 -> 4, and 16 * 18 * 50 + 50
        (CnnFemnist, MNIST, 62, 20, (100, 5_020, 16_050, 3_162)),
        (CnnFemnist, MNIST, 62, 22, (100, 5_522, 17_650, 3_162)),
    ],
)
def test_the_cnns_have_the_official_numbers_of_parameters(
    factory: type[nn.Module], shape: tuple[int, ...], classes: int, channels: int, parts: tuple[int, ...]
) -> None:
    model = factory(shape, classes, channels=channels)
    names = ("body.conv1.", "body.conv2.", "body.fc1.", "head.fc2.")
    assert tuple(sizes(model, name) for name in names) == parts
    assert sizes(model) == sum(parts)
    assert len(model.state_dict()) == 8


@pytest.mark.parametrize(
    ("factory", "shape", "totals"),
    [
        (CnnMnist, MNIST, {18: (4_778, 19_738), 20: (5_280, 21_840), 22: (5_782, 23_942)}),
        (CnnFemnist, FEMNIST, {18: (4_618, 764_730), 20: (5_120, 849_332), 22: (5_622, 933_934)}),
    ],
)
def test_the_cnns_have_the_official_totals(
    factory: type[nn.Module], shape: tuple[int, ...], totals: dict[int, tuple[int, int]]
) -> None:
    classes = 10 if factory is CnnMnist else 62
    models = {channels: factory(shape, classes, channels=channels) for channels in totals}
    assert {c: (sizes(m, "body.conv"), sizes(m)) for c, m in models.items()} == totals


def test_the_official_maps() -> None:
    x, y = torch.rand(2, *MNIST), torch.rand(2, *FEMNIST)
    small, large = (m.eval() for m in (CnnMnist(MNIST, 10).body, CnnFemnist(FEMNIST, 62).body))
    assert isinstance(small, nn.Sequential)
    assert isinstance(large, nn.Sequential)
    assert small[:3](x).shape == (2, 10, 12, 12)
    assert small[:7](x).shape == (2, 20, 4, 4)
    assert large[:3](y).shape == (2, 10, 63, 63)
    assert large[:7](y).shape == (2, 20, 29, 29)


@pytest.mark.parametrize(
    ("factory", "shape"),
    [(CnnMnist, MNIST), (CnnMnist, (3, 16, 33)), (CnnFemnist, FEMNIST), (CnnFemnist, MNIST), (CnnFemnist, (2, 45, 14))],
)
def test_the_cnns_size_themselves(factory: Factory, shape: tuple[int, ...]) -> None:
    net = Net(factory, shape, 7)
    embedding, logits = net(net.init(0), torch.randn(3, *shape))
    assert embedding.shape == (3, 50)
    assert logits.shape == (3, 7)
    assert embedding.min() == 0 < embedding.max()


@pytest.mark.parametrize(
    ("factory", "shape", "line"),
    [
        (CnnMnist, (1, 28, 15), "CnnMnist takes images .* of at least 16x16, not inputs of shape .1, 28, 15."),
        (CnnFemnist, (1, 13, 28), "CnnFemnist takes images .* of at least 14x14, not inputs of shape .1, 13, 28."),
        (CnnMnist, (784,), "CnnMnist takes images .* not inputs of shape .784,."),
        (ResNet18, MNIST, "ResNet18 takes images .3, height, width.*not inputs of shape .1, 28, 28."),
        (ResNet18, (13,), "ResNet18 takes images .3, height, width.*not inputs of shape .13,."),
    ],
)
def test_inputs_that_a_model_does_not_take(factory: Factory, shape: tuple[int, ...], line: str) -> None:
    with pytest.raises(InputError, match=line):
        Net(factory, shape, 10)


# --- ResNet-18


def test_resnet_has_the_official_numbers_of_parameters() -> None:
    ten, thousand = ResNet18(CIFAR, 10), ResNet18(CIFAR, 1000)
    parts = ("body.conv1.", "body.bn1.", *(f"body.layer{n}." for n in (1, 2, 3, 4)), "head.fc.")
    assert [sizes(ten, part) for part in parts] == [9_408, 128, 147_968, 525_568, 2_099_712, 8_393_728, 5_130]
    assert sizes(ten) == 11_181_642
    assert sizes(ten, "body.") == sizes(thousand, "body.") == 11_176_512
    assert sizes(thousand) == 11_689_512
    assert len(list(ten.parameters())) == 62
    assert len(ten.state_dict()) == 122
    normal = [module for module in ten.modules() if isinstance(module, nn.BatchNorm2d)]
    assert sum(sizes(module) for module in normal) == 9_600
    counters = [b.numel() for name, b in ten.named_buffers() if name.endswith("num_batches_tracked")]
    assert len(counters) == sum(counters) == 20
    assert sum(b.numel() for b in ten.buffers()) == 9_620


@pytest.mark.parametrize(("strides", "stem", "pooled"), [((2, 2), 16, 8), ((1, 4), 32, 8)])
def test_strides_change_the_stem_and_no_shape_after_it(strides: tuple[int, int], stem: int, pooled: int) -> None:
    model = ResNet18(CIFAR, 10, stride1=strides[0], stride2=strides[1]).eval()
    sides = {"conv1": (64, stem), "maxpool": (64, pooled), "layer1": (64, 8), "layer2": (128, 4), "layer3": (256, 2)}
    x = torch.randn(2, *CIFAR)
    for name, part in model.body.named_children():
        x = part(x)
        if name in sides:
            channels, side = sides[name]
            assert x.shape == (2, channels, side, side), name
    assert x.shape == (2, 512, 1, 1)
    assert model.head(x).shape == (2, 10)
    plain = ResNet18(CIFAR, 10).state_dict()
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in plain.items()}


@pytest.mark.parametrize(
    ("strides", "shape"), [((2, 2), (3, 64, 33)), ((1, 4), CIFAR), ((1, 1), (3, 1, 100)), ((3, 2), (3, 97, 96))]
)
def test_the_width_is_that_of_the_embedding(strides: tuple[int, int], shape: tuple[int, ...]) -> None:
    factory = partial(ResNet18, stride1=strides[0], stride2=strides[1])
    assert factory(shape, 2).width == Net(factory, shape, 2).width


def test_without_weights_it_is_torchvisions_drawn_from_the_same_generator() -> None:
    ours = drawn(ResNet18, CIFAR, 10).eval()
    after = torch.rand(1)
    theirs = drawn(lambda shape, classes: resnet18(num_classes=classes), CIFAR, 10).eval()
    assert torch.equal(torch.rand(1), after)
    same_tensors(ours, theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x))
    assert ours.weights_sha256 is None


def same_tensors(model: nn.Module, state: Mapping[str, Tensor], *parts: str) -> None:
    """Assert that a model's tensors are those of a torchvision state, by default all."""
    own = {name.partition(".")[2]: tensor for name, tensor in model.state_dict().items()}
    assert own.keys() == state.keys()
    different = [n for n in own if n.startswith(parts or ("",)) and not torch.equal(own[n], state[n])]
    assert not different


# --- pretrained weights


@pytest.fixture(scope="module")
def pretrained() -> dict[str, Tensor]:
    """A state like torchvision's, in which nothing has the value that a fresh model has."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return {
            n: t + torch.rand(t.shape) if t.is_floating_point() else t + 5 for n, t in resnet18().state_dict().items()
        }


@pytest.fixture(scope="module")
def file(pretrained: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "pretrained.pth"
    torch.save(pretrained, path)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


LAYERS = ("layer1.", "layer2.", "layer3.", "layer4.")


@pytest.mark.parametrize(
    ("stem", "loaded", "fresh"),
    [("pretrained", ("conv1.", "bn1.", *LAYERS), ("fc.",)), ("random", LAYERS, ("conv1.", "bn1.", "fc."))],
)
def test_what_is_pretrained_and_what_is_drawn(
    stem: Literal["pretrained", "random"],
    loaded: tuple[str, ...],
    fresh: tuple[str, ...],
    file: Path,
    pretrained: dict[str, Tensor],
) -> None:
    model = drawn(partial(ResNet18, weights=str(file), stem=stem), CIFAR, 1000)
    same_tensors(model, pretrained, *loaded)
    random = {name.partition(".")[2]: t for name, t in drawn(ResNet18, CIFAR, 1000).state_dict().items()}
    same_tensors(model, random, *fresh)
    assert not any(torch.equal(random[name], pretrained[name]) for name in random)
    assert model.weights_sha256 == digest(file)


def test_every_client_starts_from_the_weights_in_its_own_dtype(file: Path, pretrained: dict[str, Tensor]) -> None:
    net = Net(partial(ResNet18, weights=str(file)), CIFAR, 10, torch.float64)
    one, other = net.init(0), net.init(1)
    name = "layer3.0.conv2.weight"
    assert torch.equal(one[f"body.{name}"], other[f"body.{name}"])
    assert torch.equal(one[f"body.{name}"], pretrained[name].double())
    assert not torch.equal(one["head.fc.weight"], other["head.fc.weight"])


def small(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of the same shapes, all twos, that take no room in a file."""
    return {name: torch.full((), 2, dtype=t.dtype).expand(t.shape) for name, t in state.items()}


def test_a_file_older_than_batch_norms_counters(pretrained: dict[str, Tensor], tmp_path: Path) -> None:
    old = {name: t for name, t in small(pretrained).items() if not name.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "old.pth")
    state = ResNet18(CIFAR, 10, weights=str(tmp_path / "old.pth")).state_dict()
    assert (state["body.layer4.1.bn2.running_var"] == 2).all()
    assert state["body.bn1.num_batches_tracked"] == 0


def _without(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "layer2.0.bn1.bias"}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (_without, r"'layer2.0.bn1.bias' is missing, in ResNet-18 \(128,\)"),
        (lambda state: {**state, "conv1.weight": torch.zeros(64, 3, 3, 3)}, r"'conv1.weight' is \(64, 3, 3, 3\), in "),
        (lambda state: small(resnet34().state_dict()), r"'layer1.2.bn1.bias' is \(64,\), in ResNet-18 missing"),
        (lambda state: {"arch": "resnet18", "state_dict": state}, "'bn1.bias' is missing"),
        (lambda state: {1: state["bn1.bias"]}, "holds a dict, no tensors by name"),
        (lambda state: state["bn1.bias"], "holds a Tensor, no tensors by name"),
        (lambda state: Path("x"), "not a file of plain tensors .UnpicklingError."),  # an object, never unpickled
    ],
)
def test_a_file_of_something_else_is_named(
    content: Callable[[dict[str, Tensor]], Any], line: str, pretrained: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "other.pth"
    torch.save(content(small(pretrained)), path)
    with pytest.raises(InputError, match=f"^weights: {path}: {line}") as caught:
        ResNet18(CIFAR, 10, weights=str(path))
    assert "want none, imagenet, or a file" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 1_000, 40_000_000])
def test_a_truncated_file_is_named(length: int, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.pth"
    path.write_bytes(file.read_bytes()[:length])
    with pytest.raises(InputError, match=f"^weights: {path}: not a file of plain tensors"):
        ResNet18(CIFAR, 10, weights=str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"^weights: imagnet: No such file or directory; want none, imagenet, or"):
        ResNet18(CIFAR, 10, weights="imagnet")


# --- torchvision's file, here a stand-in of our own at another address


@pytest.fixture
def cache(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch keeps the file; empty, the file to be had at its address."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(resnet, "URL", file.as_uri())
    monkeypatch.setattr(resnet, "SHA256", digest(file))
    return tmp_path / "torch" / "hub" / "checkpoints" / file.name


def imagenet() -> ResNet18:
    return ResNet18(CIFAR, 10, weights="imagenet")


def test_the_address_is_torchvisions() -> None:
    assert ResNet18_Weights.IMAGENET1K_V1.url == resnet.URL
    assert f"-{resnet.SHA256[:8]}." in resnet.URL


def test_imagenet_is_downloaded_once(
    cache: Path, pretrained: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    same_tensors(imagenet(), pretrained, *LAYERS)
    assert digest(cache) == resnet.SHA256
    monkeypatch.setattr(resnet, "URL", f"http://127.0.0.1:1/{cache.name}")  # nobody answers there
    model = imagenet()
    same_tensors(model, pretrained, *LAYERS)
    assert model.weights_sha256 == resnet.SHA256


def test_a_download_with_another_checksum_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet, "SHA256", "0" * 64)
    with pytest.raises(InputError, match=f"^weights: imagenet: no file {cache}, and no download .invalid hash value"):
        imagenet()
    assert list(cache.parent.iterdir()) == []


def test_a_damaged_file_in_the_cache_is_never_used(cache: Path) -> None:
    imagenet()
    cache.write_bytes(cache.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"^weights: {cache}: its sha256 is .*, want {resnet.SHA256}; remove it"):
        imagenet()


@pytest.mark.parametrize("answers", [False, True])
def test_without_a_network_it_says_what_to_do(answers: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/{cache.name}"
        if not answers:
            server.close()  # refused; else it accepts and then says nothing
        monkeypatch.setattr(resnet, "URL", address)
        began = time.monotonic()
        with pytest.raises(InputError) as caught:
            imagenet()
        assert time.monotonic() - began < 5
    assert f"no file {cache}" in str(caught.value)
    assert f"put {address} (sha256 {resnet.SHA256}) there, or set weights: none" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert socket.getdefaulttimeout() is None


def test_a_wait_for_the_network_is_bearable() -> None:
    assert resnet._PATIENCE < 5


# --- in a suite


SUITE = {
    "dataset": {"name": "arrays", "path": "a.npz"},
    "model": {"name": "resnet18", "stride1": 4, "stride2": 4, "weights": "w.pth"},
    "partition": {"name": "iid", "clients": 2},
    "training": {"rounds": 1, "batch_size": 4, "last_batch": "drop_single"},
    "methods": {"local": {}},
}


def expanded(folder: Path, **model: object) -> cells.Cell:
    suite = SUITE | {"model": SUITE["model"] | model}  # type: ignore[operator]
    (folder / "s.yaml").write_text(yaml.safe_dump(suite))
    return cells.expand(config.load(folder / "s.yaml"), lambda dataset: "content")[0]


def test_the_weights_are_part_of_a_cells_key(file: Path, pretrained: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "w.pth").symlink_to(file)
    cell = expanded(tmp_path)
    assert cell.recipe["models"][0]["content"] == digest(file)
    (tmp_path / "w.pth").unlink()
    torch.save(small(pretrained), tmp_path / "w.pth")
    assert expanded(tmp_path).key != cell.key
    x = np.random.default_rng(0).normal(size=(12, *CIFAR)).astype(np.float32)
    y = np.arange(12) % 2
    arrays = data.Arrays(x, y, x[:0], y[:0], 2)
    partition = cells.draw_partition(cell, arrays)
    with pytest.raises(InputError, match=r"^resnet18: the file it reads has changed since the cells were made"):
        cells.run_cell(cell, arrays, partition, base=tmp_path)
    outcome = cells.run_cell(expanded(tmp_path), arrays, partition, base=tmp_path)
    assert outcome.status == "completed"


def test_imagenets_hash_is_in_the_recipe_without_the_file(tmp_path: Path) -> None:
    assert expanded(tmp_path, weights="imagenet").recipe["models"][0]["content"] == resnet.SHA256
    assert "content" not in expanded(tmp_path, weights="none").recipe["models"][0]


def test_a_suite_whose_weights_are_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"s.yaml: model: weights: {tmp_path}/w.pth: No such file or directory; want"):
        expanded(tmp_path)


def test_torchvision_is_imported_only_to_build_a_resnet() -> None:
    code = "import sys, fedbench.models.resnet; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what a round uploads (methods.md, part 5)


def class_lists(n: int, stdev: int) -> list[list[int]]:
    """Return what the official code's 20 clients hold under seed 1234."""
    return NWayKShot(n=n, k=100, stdev=stdev, noise="uniform").shots(10, 1234)[2]


DENSE = FedPer(personal="dense", weights="uniform")


@pytest.mark.parametrize(
    ("method", "factory", "shape", "classes", "scalars"),
    [
        (Local(), CnnMnist, MNIST, 10, 0),
        (FedAvg(), CnnMnist, MNIST, 10, 436_800),
        (DENSE, CnnMnist, MNIST, 10, 105_600),
        (FedRep(personal="dense"), CnnMnist, MNIST, 10, 105_600),
        (FedAvg(), CnnFemnist, FEMNIST, 62, 16_986_640),
        (DENSE, CnnFemnist, FEMNIST, 62, 102_400),
        (FedAvg(), ResNet18, CIFAR, 10, 223_632_840),
        (FedAvg(), ResNet18, CIFAR, 1000, 233_790_240),
        (DENSE, ResNet18, CIFAR, 10, 223_530_240),
    ],
)
def test_uploads_of_twenty_clients(
    method: Method, factory: Factory, shape: tuple[int, ...], classes: int, scalars: int
) -> None:
    clients = 2 if factory is ResNet18 else 20  # all upload the same
    assert traffic(method, factory, shape, [[0, 1]] * clients, classes) * (20 // clients) == scalars


def test_fedproto_uploads_the_prototypes_of_what_clients_hold() -> None:
    held = class_lists(3, 2)
    assert traffic(FedProto(), CnnMnist, MNIST, held, 10) == sum(map(len, held)) * 50 == 3_550


def test_fedproto_uploads_512_scalars_for_a_class_whatever_the_strides() -> None:
    held = class_lists(4, 1)
    assert sum(map(len, held)) * Net(ResNet18, CIFAR, 10).width == 40_448
    mixed = partial(ResNet18, stride1=1, stride2=4)
    assert traffic(FedProto(), mixed, CIFAR, held[:2], 10) == sum(map(len, held[:2])) * 512
