"""Which engine computes the clients changes no number: methods x models x options, in float64 to 1e-9."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TwoParts, blobs, plain_mlp, small_cnn
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbench import evaluation, memory, plugins
from fedbench import federation as federation_module
from fedbench.averaging import Averaging
from fedbench.engines import Engine, Job, Model, Part, choice, exam
from fedbench.engines.choice import EngineName
from fedbench.engines.loop import Loop
from fedbench.engines.lowering import Lowering
from fedbench.engines.vectorised import Vectorised, trial
from fedbench.evaluation import Examples
from fedbench.federation import play
from fedbench.method import Batch, Loss, Message, Method, Rows, cross_entropy, parameters
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedproto import FedProto
from fedbench.methods.fedrep import FedRep
from fedbench.methods.local import Local
from fedbench.models.cnn import CnnFemnist, CnnMnist
from fedbench.models.mlp import Mlp
from fedbench.models.resnet import ResNet18
from fedbench.net import ModelFactory, Net, Params
from fedbench.newcomers import Newcomers
from fedbench.samples import from_clients
from fedbench.settings import Optimizer, Training
from fedbench.setups import Group, Setup, check, make_net

SIZES = (9, 1, 4, 5, 3)  # round a batch of 4, not sorted
LEAST = 1e-9


class Residual(nn.Module):
    """A body that has no lowering: a sum of two paths, and normalisation by group."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.drop = nn.GroupNorm(2, 4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        return torch.mean(self.drop(h + self.norm(self.second(h))), (2, 3))


def maps(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model whose body gives maps of one pixel, and whose head begins with ReLU."""
    body = nn.Sequential(nn.Conv2d(shape[0], 3, 3), nn.AdaptiveAvgPool2d(1))
    return TwoParts(body, nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(3, classes)))


def untracked(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a model whose batch norm takes the statistics of the batch in evaluation too."""
    body = nn.Sequential(nn.Conv2d(shape[0], 3, 3), nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten())
    return TwoParts(body, nn.Linear(48, classes))


def residual(shape: tuple[int, ...], classes: int) -> nn.Module:
    return TwoParts(Residual(shape[0]), nn.Linear(4, classes))


@dataclass(frozen=True)
class Kind:
    """A model and the shape of the inputs that it gets here."""

    model: ModelFactory
    shape: tuple[int, ...]


KINDS = {
    "cnn_mnist": Kind(CnnMnist, (1, 16, 16)),
    "cnn_femnist": Kind(CnnFemnist, (1, 14, 14)),
    "mlp": Kind(partial(Mlp, hidden=(6, 5), dropout=0.3), (1, 6, 6)),
    "logistic": Kind(partial(Mlp, hidden=()), (1, 6, 6)),
    "small_cnn": Kind(small_cnn, (1, 6, 6)),
    "residual": Kind(residual, (2, 6, 6)),
    "maps": Kind(maps, (1, 6, 6)),
    "untracked": Kind(untracked, (1, 6, 6)),
    "cnn_mnist 28x28": Kind(CnnMnist, (1, 28, 28)),
    "cnn_femnist 28x28": Kind(CnnFemnist, (1, 28, 28)),
    "resnet18": Kind(ResNet18, (3, 16, 16)),
    "resnet18 strides 1 and 4": Kind(partial(ResNet18, stride1=1, stride2=4), (3, 16, 16)),
}

DECAY = Optimizer(momentum=0.9, nesterov=True, weight_decay=0.05, weight_decay_bias=0.0)
ADAM = Optimizer("adam", lr=0.01, weight_decay=0.1)
TOGETHER: dict[str, Any] = {"optimizer": DECAY, "epochs": 2, "participation": 0.7, "last_batch": "drop_single"}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no momentum": {"optimizer": Optimizer(momentum=0.0)},
    "much momentum": {"optimizer": Optimizer(momentum=0.9)},
    "nesterov and decay": {"optimizer": DECAY},
    "adam and decay": {"optimizer": ADAM},
    "drop": {"last_batch": "drop"},
    "drop single": {"last_batch": "drop_single"},
    "epochs": {"epochs": 3},
    "participation": {"participation": 0.5, "rounds": 3},
    "one common start": {"init": "common"},
    "unshuffled": {"shuffle": False},
    "batches of all": {"batch_size": 100},
    "batches of one": {"batch_size": 1, "optimizer": ADAM},
    "augmented": {"augment": "crop_flip"},
    "together": {"augment": "crop_flip", **TOGETHER},
}


@cache
def nets(models: tuple[ModelFactory, ...], shape: tuple[int, ...], training: Training) -> list[Net]:
    return [make_net(model, shape, 4, training) for model in models]


@cache
def drawn(net: Net, seed: int) -> Params:
    return net.init(seed)


def federation(
    method: Method,
    models: Sequence[ModelFactory],
    shape: tuple[int, ...],
    sizes: Sequence[int] = SIZES,
    augment: str = "none",
    **options: Any,
) -> Setup:
    """Return a federation of clients with so many samples, two rounds of batches of 4 if not told otherwise."""
    chosen: dict[str, Any] = {"rounds": 2, "batch_size": 4, "dtype": "float64", "evaluate_every": 2} | options
    training = Training(**chosen)
    dtype = getattr(torch, training.dtype)
    data = from_clients(blobs(sizes, shape=shape, test=3), 4, dtype, torch.device("cpu"))
    test = [index[: (3, 1, 0, 2)[client % 4]] for client, index in enumerate(data.test)]
    data = replace(data, test=test, augment=augment, fill=torch.linspace(-0.5, 0.5, shape[0], dtype=dtype))
    kinds = nets(tuple(models), shape, Training(dtype=training.dtype, batch_norm=training.batch_norm))
    check(method, kinds, training, sizes, data)
    blocks = np.array_split(np.arange(len(sizes)), len(kinds))
    groups = [Group(net, block.tolist()) for net, block in zip(kinds, blocks, strict=True)]
    common = training.init == "common"
    initial = [drawn(group.net, 0 if common else client) for group in groups for client in group.clients]
    return Setup(method, groups, data, training, 3, initial.__getitem__, Loop())


def found(setup: Setup, engine: Engine) -> dict[str, NDArray[Any]]:
    """Return everything that a federation computes under an engine."""
    seen: dict[str, NDArray[Any]] = {}
    calls: Counter[str] = Counter()

    def note(name: str, message: Message) -> None:
        calls[name] += 1
        for key, entry in message.items():
            for part, tensor in enumerate(entry if isinstance(entry, Rows) else [entry]):
                seen[f"{name} {calls[name]}: {key} {part}"] = tensor.detach().numpy().copy()

    def probe(stage: str, client: int, params: Params) -> None:
        note(f"client {client} {stage}", params)

    def merged(uploads: Message, server: Message) -> None:
        note("uploads", uploads)
        note("server", server)

    outcome = play(replace(setup, engine=engine, probe=probe, watch_merge=merged))
    assert outcome.status == "completed", outcome.message
    work = {name: values for name, values in outcome.work.items() if name != "seconds"}
    return {**seen, **outcome.metrics, **outcome.traffic, **work}


def assert_equal(setup: Setup, engine: Engine | None = None, tolerance: float = LEAST) -> None:
    """Fail unless an engine gives the numbers of the loop: integers exactly, all others to a tolerance."""
    wanted, got = found(setup, Loop()), found(setup, engine or Vectorised())
    assert [(n, v.shape, v.dtype) for n, v in wanted.items()] == [(n, got[n].shape, got[n].dtype) for n in wanted]
    assert wanted.keys() == got.keys()
    assert any("trained" in name for name in wanted)
    for name, values in wanted.items():
        allowed = tolerance if values.dtype.kind == "f" else 0
        near = np.allclose(got[name], values, rtol=allowed, atol=allowed, equal_nan=True)
        assert near, f"{name}: off by {np.nanmax(np.abs(got[name] - values))}"


def registered(name: str, **options: Any) -> Method:
    made: Method = plugins.build("methods", name, options)
    return made


def presets() -> list[tuple[str, str]]:
    return [(name, preset) for name in plugins.names("methods") for preset in plugins.load("methods", name).presets]


# --- methods x models x options


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["cnn_mnist", "cnn_femnist", "mlp", "logistic"])
@pytest.mark.parametrize("method", plugins.names("methods"))
def test_both_engines_give_the_same_numbers(method: str, kind: str, options: dict[str, Any]) -> None:
    assert_equal(federation(registered(method), [KINDS[kind].model], KINDS[kind].shape, **options))


@pytest.mark.parametrize("options", ["defaults", "adam and decay", "batches of one", "together"])
@pytest.mark.parametrize("kind", ["small_cnn", "residual", "maps", "untracked"])
@pytest.mark.parametrize("method", plugins.names("methods"))
def test_other_peoples_models_too(method: str, kind: str, options: str) -> None:
    assert_equal(federation(registered(method), [KINDS[kind].model], KINDS[kind].shape, **OPTIONS[options]))


@pytest.mark.parametrize("kind", [k for k in KINDS if "28x28" in k])
@pytest.mark.parametrize(("method", "preset"), presets())
def test_with_every_preset_and_images_of_full_size(method: str, preset: str, kind: str) -> None:
    options = plugins.load("methods", method).presets[preset]
    setup = federation(registered(method, **options), [KINDS[kind].model], KINDS[kind].shape, **OPTIONS["together"])
    assert_equal(setup)


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return 2 * x


class Centred(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean(), self.bias)


def hooked() -> nn.Module:
    layer = nn.Linear(25, 5)
    layer.register_forward_hook(lambda _module, _given, found: 2 * found)
    return nn.Sequential(nn.Flatten(), layer)


def twice_the_same() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(25, 6), relu, nn.Linear(6, 5), relu)


@pytest.mark.parametrize(
    "body",
    [
        lambda: Doubled(nn.Flatten(), nn.Linear(25, 5)),
        lambda: nn.Sequential(Centred(1, 2, 4), nn.Flatten(), nn.Linear(8, 5)),
        hooked,
        twice_the_same,
    ],
    ids=("container", "layer", "hook", "one layer in two places"),
)
def test_what_only_looks_like_a_common_layer_is_computed_as_it_is(body: Callable[[], nn.Module]) -> None:
    assert_equal(federation(FedAvg(), [lambda _, classes: TwoParts(body(), nn.Linear(5, classes))], (1, 5, 5)))


@pytest.mark.parametrize("batch_norm", ["average", "local"])
@pytest.mark.parametrize("method", plugins.names("methods"))
def test_batch_norm_statistics_are_the_same(method: str, batch_norm: str) -> None:
    kind = KINDS["small_cnn"]
    options: dict[str, Any] = {"batch_norm": batch_norm, "epochs": 2, "augment": "crop_flip"}
    assert_equal(federation(registered(method), [kind.model], kind.shape, **options))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fedavg", "resnet18"),
        ("fedproto", "resnet18"),
        ("fedrep", "resnet18"),
        ("fesem", "resnet18"),
        ("fedavg", "resnet18 strides 1 and 4"),
    ],
)
def test_resnet_goes_through_vmap(method: str, kind: str) -> None:
    model, shape = KINDS[kind].model, KINDS[kind].shape
    assert Lowering.of(nets((model,), shape, Training(dtype="float64"))[0]) is None
    # One step each: batch norm over the four values of a 1x1 map magnifies rounding tenfold with every further one.
    options: dict[str, Any] = {"rounds": 1, "evaluate_every": 1, "optimizer": DECAY, "augment": "crop_flip"}
    assert_equal(federation(registered(method), [model], shape, (4, 4), **options))


# --- options of methods


@pytest.mark.parametrize("aggregation", ["mean", "weighted", "eq6"])
@pytest.mark.parametrize("prototypes", ["training", "final"])
@pytest.mark.parametrize("regulariser", ["sample", "prototype"])
@pytest.mark.parametrize("distance", ["mse", "squared_l2", "l2", "l1", "emd"])
def test_every_variant_of_fedproto(distance: Any, regulariser: Any, prototypes: Any, aggregation: Any) -> None:
    far = None if distance == "mse" else 2.0
    method = FedProto(0.5, distance, regulariser, prototypes, aggregation, "prototype", "all", far)
    assert_equal(federation(method, [KINDS["mlp"].model], KINDS["mlp"].shape, rounds=3, evaluate_every=3, epochs=2))


@pytest.mark.parametrize("personal", ["none", "head", "dense", "all", ("body.conv2", "head")])
@pytest.mark.parametrize("epochs", [(1, 1), (2, 1), (0, 2), (1, 0)])
def test_every_split_and_phase_of_fedrep(personal: Any, epochs: tuple[int, int]) -> None:
    method = FedRep(personal=personal, head_epochs=epochs[0], body_epochs=epochs[1])
    assert_equal(federation(method, [KINDS["cnn_mnist"].model], KINDS["cnn_mnist"].shape, optimizer=DECAY))


@pytest.mark.parametrize("personal", ["none", "head", "dense", "all"])
def test_every_split_of_fedper(personal: Any) -> None:
    assert_equal(federation(FedPer(personal=personal), [KINDS["small_cnn"].model], KINDS["small_cnn"].shape))


@pytest.mark.parametrize("method", [Local(), FedProto(), FedPer(personal="all")], ids=lambda m: type(m).__name__)
def test_mixed_architectures(method: Method) -> None:
    models = [partial(CnnMnist, channels=channels) for channels in (3, 4)]
    assert_equal(federation(method, [*models, partial(Mlp, hidden=(50,), dropout=0.5)], (1, 16, 16)))


# --- clients and chunks


@pytest.mark.parametrize(("chunk", "threads"), [(1, 1), (2, 1), (2, 2), (20, 2), (20, 5)])
@pytest.mark.parametrize("kind", ["small_cnn", "residual"])
@pytest.mark.parametrize("method", [FedAvg(), FedProto(), FedRep()], ids=lambda m: type(m).__name__)
def test_neither_chunks_nor_threads_change_a_number(method: Method, kind: str, chunk: int, threads: int) -> None:
    setup = federation(method, [KINDS[kind].model], KINDS[kind].shape, epochs=2, augment="crop_flip")
    assert_equal(setup, Vectorised(chunk, threads))


def with_tests(setup: Setup, counts: Sequence[int]) -> Setup:
    """Return a federation whose clients are tested on so many samples of anybody's."""
    pool = torch.arange(len(setup.data.x))
    test = [pool.roll(client)[:count] for client, count in enumerate(counts)]
    return replace(setup, data=replace(setup.data, test=test))


@pytest.mark.parametrize("counts", [(17, 2, 0, 23, 12), (0, 0, 0, 5, 0), (10, 20, 5, 15, 10)], ids=str)
@pytest.mark.parametrize("engine", [Vectorised(), Vectorised(3, 2), Vectorised(samples=8)], ids=range(3))
@pytest.mark.parametrize("kind", ["small_cnn", "residual"])
def test_clients_with_more_test_samples_than_are_examined_at_once(
    kind: str, engine: Engine, counts: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prototype term is a property of a block of samples, so blocks have to be the same too."""
    for module in (evaluation, exam):
        monkeypatch.setattr(module, "BLOCK", 5)
    method = FedProto(0.5, regulariser="prototype", prediction="prototype")
    setup = federation(method, [KINDS[kind].model], KINDS[kind].shape)
    assert_equal(with_tests(setup, counts), engine)


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=30),
    clients=st.integers(1, 9),
    samples=st.sampled_from([1, 100, 5000]),
)
def test_every_client_with_samples_is_examined_once_and_no_more_of_them_together_than_may_be(
    sizes: list[int], clients: int, samples: int
) -> None:
    chunks = list(exam.chunks(sizes, clients, samples))
    assert sorted(client for chunk in chunks for client in chunk) == [n for n, size in enumerate(sizes) if size]
    for chunk in chunks:
        held = [sizes[client] for client in chunk]
        assert held == sorted(held, reverse=True)
        assert len(chunk) <= clients
        assert len(chunk) == 1 or len(chunk) * min(held[0], evaluation.BLOCK) <= samples


@dataclass(frozen=True)
class Asking(Method):
    """Starts from a mixture of two models, after what the own one says of some images."""

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return initial

    def send(self, server: Message, client: int | Tensor) -> Message:
        return server

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        return server

    def init_client(self, net: Net, initial: Params) -> Params:
        return initial

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        received = parameters(down)
        with torch.no_grad():
            sure = net(kept, torch.ones(200, *net.shape, dtype=net.dtype))[1].softmax(1).max()
        return {name: tensor + sure * (kept[name] - tensor) for name, tensor in received.items()}

    def reply(self, net: Net, params: Params, *rest: Any) -> tuple[Params, Message]:
        return params, {}


def test_threads_do_not_meet_in_a_net_that_a_method_asks() -> None:
    wide = partial(Mlp, hidden=(256, 256))  # so that threads are in it at the same time
    assert_equal(federation(Asking(), [wide], (1, 6, 6), (5, 4, 6) * 8), Vectorised(4, 4))


def test_there_are_no_more_threads_and_nets_than_pieces_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, copies = [], []
    copy = Net.with_own_modules

    def start(count: int, **more: Any) -> Any:
        threads.append(count)
        return ThreadPoolExecutor(count, **more)

    def copied(net: Net) -> Net:
        copies.append(net)
        return copy(net)

    monkeypatch.setattr("fedbench.engines.vectorised.ThreadPoolExecutor", start)
    monkeypatch.setattr(Net, "with_own_modules", copied)
    found(federation(FedAvg(), [plain_mlp], (6,)), Vectorised(threads=1000))
    assert max(threads) == len(SIZES)
    assert len(copies) == sum(threads)


def test_evaluation_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [partial(Mlp, hidden=hidden) for hidden in ((5,), (6, 5))]
    setup = replace(federation(FedProto(), models, (1, 6, 6)), newcomers=Newcomers((1,), (1,)))
    whole = play(setup)
    monkeypatch.setattr(federation_module, "_DOWNLOADS", 2)
    pieces = play(setup)
    assert whole.traffic.keys() == pieces.traffic.keys()
    for name in whole.traffic:
        np.testing.assert_array_equal(whole.traffic[name], pieces.traffic[name])
    for name in whole.metrics:
        np.testing.assert_array_equal(whole.metrics[name], pieces.metrics[name])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=1, max_size=7),
    chunk=st.integers(1, 8),
    batch=st.integers(1, 6),
    epochs=st.integers(1, 3),
    last=st.sampled_from(["keep", "drop", "drop_single"]),
)
def test_clients_of_any_sizes(sizes: list[int], chunk: int, batch: int, epochs: int, last: str) -> None:
    options: dict[str, Any] = {"batch_size": batch, "epochs": epochs, "last_batch": last, "optimizer": ADAM}
    setup = federation(FedProto(regulariser="prototype"), [KINDS["mlp"].model], (1, 6, 6), sizes, **options)
    assert_equal(setup, Vectorised(chunk))


@pytest.mark.parametrize("kind", [k for k in KINDS if "resnet" not in k])
def test_single_precision_agrees_to_rounding(kind: str) -> None:
    # After a few steps from equal weights; batch norm over few values magnifies rounding the most.
    setup = federation(FedProto(), [KINDS[kind].model], KINDS[kind].shape, dtype="float32", **OPTIONS["epochs"])
    assert_equal(setup, tolerance=2e-4)


# --- which engine it is


class Deciding(nn.Module):
    """A body whose computation depends on the values in it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x.flatten(1))
        return h if h.sum() > 0 else -h


def deciding(shape: tuple[int, ...], classes: int) -> nn.Module:
    return TwoParts(Deciding(shape[0]), nn.Linear(5, classes))


@dataclass(frozen=True)
class Clipped(Averaging):
    """FedAvg whose loss looks at its own value to choose what to compute."""

    def shares(self, net: Net, name: str) -> bool:
        return True

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        loss = cross_entropy(net, params, batch)[0]
        return Loss(loss.clamp(max=2.0) if loss.max() > 2 else loss, {})


CPU = torch.device("cpu")


class Spy(Engine):
    """An engine that notes its jobs."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.jobs = engine, list[Job]()

    def train(self, job: Job) -> Iterator[Part]:
        self.jobs.append(job)
        return self.engine.train(job)

    def examine(self, job: Job, places: Sequence[int], model: Model, split: Sequence[Tensor]) -> dict[int, Examples]:
        return self.engine.examine(job, places, model, split)


def chosen(setup: Setup, name: EngineName, caplog: pytest.LogCaptureFixture) -> tuple[str, list[str]]:
    """Return the kind of engine that trains a federation's clients, and what the log says of it."""
    spy = Spy(choice.engine(name, CPU))
    with caplog.at_level("INFO", "fedbench"):
        assert_equal(setup, spy)
    kind = spy.engine.choose(spy.jobs[-1]) if isinstance(spy.engine, choice.Chosen) else spy.engine
    return type(kind).__name__, [record.message for record in caplog.records if record.name == "fedbench"]


@pytest.mark.parametrize("name", ["loop", "vectorised", "auto"])
def test_a_net_with_a_lowering_is_stacked_if_wanted(name: EngineName, caplog: pytest.LogCaptureFixture) -> None:
    setup = federation(FedProto(), [KINDS["small_cnn"].model], KINDS["small_cnn"].shape)
    assert chosen(setup, name, caplog) == ("Loop" if name == "loop" else "Vectorised", [])


@pytest.mark.parametrize("name", ["vectorised", "auto"])
def test_a_net_without_one_is_stacked_on_the_cpu_only_if_told_to(
    name: EngineName, caplog: pytest.LogCaptureFixture
) -> None:
    setup = federation(FedProto(), [KINDS["residual"].model], KINDS["residual"].shape)
    assert chosen(setup, name, caplog) == ("Loop" if name == "auto" else "Vectorised", [])


@pytest.mark.parametrize(
    ("method", "model", "name"),
    [(FedAvg(), deciding, "vectorised"), (Clipped(), plain_mlp, "vectorised"), (Clipped(), plain_mlp, "auto")],
    ids=("model", "method", "method, auto"),
)
def test_what_vmap_cannot_take_goes_client_by_client_and_the_log_says_why(
    method: Method, model: ModelFactory, name: EngineName, caplog: pytest.LogCaptureFixture
) -> None:
    kind, lines = chosen(federation(method, [model], (6,)), name, caplog)
    assert kind == "Loop"
    assert len(lines) == 1  # not once a round
    assert "one after the other" in lines[0]
    assert "data-dependent control flow" in lines[0]


@dataclass(frozen=True)
class Doubting(Averaging):
    """FedAvg that answers nothing if its mean confidence in a batch is low."""

    def shares(self, net: Net, name: str) -> bool:
        return True

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        logits = net(params, x)[1]
        sure = float(logits.softmax(1).max(1).values.mean()) > 0.3
        return {"head": logits if sure else torch.full_like(logits, -torch.inf)}


def test_scores_that_vmap_cannot_take_are_found_client_by_client(caplog: pytest.LogCaptureFixture) -> None:
    kind, lines = chosen(federation(Doubting(), [plain_mlp], (6,), rounds=3, evaluate_every=1), "auto", caplog)
    assert kind == "Vectorised"
    assert len(lines) == 1  # not once a round
    assert "clients are examined one after the other: " in lines[0]


def test_what_fails_in_scores_is_raised_as_it_is() -> None:
    @dataclass(frozen=True)
    class Failing(Doubting):
        def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
            raise ZeroDivisionError("mine")

    setup = federation(Failing(), [plain_mlp], (6,))
    with pytest.raises(ZeroDivisionError, match="mine"):
        play(replace(setup, engine=choice.engine("auto", CPU)))


def test_the_trial_leaves_no_trace() -> None:
    for kind in ("small_cnn", "residual"):
        setup = federation(FedProto(), [KINDS[kind].model], KINDS[kind].shape)
        with_trial, without = (found(setup, engine) for engine in (choice.engine("vectorised", CPU), Vectorised()))
        assert all(np.array_equal(with_trial[name], values, equal_nan=True) for name, values in without.items())


def test_chunks_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = federation(FedAvg(), [KINDS["cnn_mnist"].model], KINDS["cnn_mnist"].shape)
    spy = Spy(Loop())
    found(setup, spy)
    job = spy.jobs[0]
    needed, parameters = trial([job]), sum(tensor.nbytes for tensor in setup.initial(0).values())
    assert needed > 3 * parameters
    with_adam = replace(job, training=replace(job.training, optimizer=ADAM))
    assert trial([with_adam]) == needed + parameters
    assert trial([replace(job, training=replace(job.training, batch_size=8))]) > needed
    for room, sizes in ((10**12, [5]), (2 * needed, [2, 2, 1]), (needed // 2, [1] * 5)):
        monkeypatch.setattr(memory, "share", lambda device, room=room: room)
        assert [len(part.places) for part in choice.engine("vectorised", CPU).train(job)] == sizes


def test_scores_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedProto holds a sample's embedding against every prototype, which takes more than to train on it."""
    needed = {}
    for method in (FedAvg(), FedProto()):
        spy = Spy(Loop())
        found(federation(method, [partial(Mlp, hidden=(500,))], (1, 6, 6)), spy)
        needed[type(method)] = exam.trial(spy.jobs[0])
    assert needed[FedProto] >= needed[FedAvg] + 2 * 4 * 500 * 8  # classes x width, float64
    job, split = spy.jobs[0], [torch.arange(10)] * len(SIZES)
    together: list[int] = []

    def note(of: Any, job: Job, places: Sequence[int], *rest: Any) -> Any:
        together.append(len(places))
        return of(job, places, *rest)

    monkeypatch.setattr("fedbench.engines.vectorised.examine_together", partial(note, exam.examine_together))
    monkeypatch.setattr("fedbench.engines.vectorised.trial", lambda jobs: 1)  # any number of clients
    for samples, sizes in ((1000, [5]), (20, [2, 2, 1])):
        room = needed[FedProto] * samples
        monkeypatch.setattr(memory, "share", lambda device, room=room: room)
        engine = choice.engine("vectorised", CPU)
        engine.examine(job, range(5), Job.start, split)
        assert together == sizes
        together.clear()
