"""A model as pure functions: what it starts from, its dropout masks, and what does not fit."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers import TwoParts, blobs, copied, part, plain_mlp, same, small_cnn, watch
from torch import Tensor, nn

from fedbench import keys
from fedbench.errors import InputError
from fedbench.methods.local import Local
from fedbench.models.cnn import CnnMnist
from fedbench.models.mlp import Mlp
from fedbench.net import Net, Params


def net_of(body: nn.Module, head: nn.Module, shape: tuple[int, ...], classes: int = 3) -> Net:
    model = TwoParts(body, head)
    return Net(lambda _shape, _classes: model, shape, classes)


def train(net: Net, params: Params, x: Tensor, key: int = 1) -> tuple[Tensor, Tensor]:
    """Return embeddings and logits in training mode, with the dropout masks of one step."""
    masks = net.masks(torch.tensor([key]), len(x))
    return net.training([mask[0] for mask in masks])(params, x)


# --- initial parameters


def test_a_seed_draws_the_same_parameters_and_another_seed_others() -> None:
    net = Net(plain_mlp, (6,), 4)
    assert same(net.init(3), net.init(3))
    for name, tensor in net.init(3).items():
        assert not torch.equal(tensor, net.init(4)[name])


def test_double_precision_starts_from_the_same_draw() -> None:
    single, double = (Net(small_cnn, (1, 5, 5), 4, dtype) for dtype in (torch.float32, torch.float64))
    wide = double.init(7)
    for name, tensor in single.init(7).items():
        if tensor.is_floating_point():
            assert wide[name].dtype == torch.float64
            assert torch.equal(wide[name], tensor.double())
        else:
            assert wide[name].dtype == tensor.dtype == torch.int64


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    net = Net(small_cnn, (1, 5, 5), 4)
    drawn = net.init(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert same(net.init(5), drawn)


def test_initial_parameters_are_a_copy() -> None:
    net = net_of(nn.Linear(6, 5), nn.Linear(5, 3), (6,))
    first = net.init(0)
    before = copied(first)
    for tensor in net.init(0).values():
        tensor += 1
    assert same(first, before)
    assert same(net.init(0), before)


# --- what a net knows


def test_names_of_parts() -> None:
    net = Net(small_cnn, (1, 5, 5), 4)
    model = small_cnn((1, 5, 5), 4)
    assert net.parameters == tuple(name for name, _ in model.named_parameters())
    assert set(net.buffers) == {f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert net.shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert net.head == {"head.1.weight", "head.1.bias"}
    assert net.dense == {"body.5.weight", "body.5.bias", *net.head}
    assert net.has_batch_norm
    assert not Net(plain_mlp, (6,), 4).has_batch_norm


@pytest.mark.parametrize(
    ("body", "head", "shape", "width"),
    [
        (nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 2, 2), 12),
        (nn.Conv2d(1, 4, 2), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), (1, 3, 3), 16),
        (nn.Linear(6, 5), nn.Linear(5, 3), (6,), 5),
    ],
)
def test_the_embedding_is_the_flattened_output_of_the_body(
    body: nn.Module, head: nn.Module, shape: tuple[int, ...], width: int
) -> None:
    net = net_of(body, head, shape)
    embedding, logits = net(net.init(0), torch.ones(2, *shape))
    assert net.width == width
    assert embedding.shape == (2, width)
    assert logits.shape == (2, 3)


@pytest.mark.parametrize("model", [plain_mlp, CnnMnist, small_cnn], ids=("mlp", "cnn_mnist", "small_cnn"))
def test_evaluation_is_the_modules_own_forward(model: Any) -> None:
    shape = (1, 16, 16)
    net = Net(model, shape, 3)
    params = net.init(2)
    module = model(shape, 3).eval()
    module.load_state_dict(params)
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedding, logits = net(params, x)
        torch.testing.assert_close(logits, module.head(module.body(x)))
        torch.testing.assert_close(embedding, module.body(x).flatten(1))


def test_a_private_view_leaves_the_net_as_it_is() -> None:
    net = Net(small_cnn, (1, 5, 5), 4)
    view = net.keep_private(frozenset(net.buffers))
    assert view.private == set(net.buffers)
    assert net.private == frozenset()


# --- dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_scales_the_rest(p: float) -> None:
    net = net_of(nn.Dropout(p), nn.Linear(100, 3), (100,))
    x = torch.full((400, 100), 2.0)
    dropped = train(net, net.init(0), x)[0]
    rate = float((dropped == 0).float().mean())
    assert rate == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    torch.testing.assert_close(dropped[dropped != 0], torch.full_like(dropped[dropped != 0], 2 / (1 - p)))
    assert torch.equal(net(net.init(0), x)[0], x)


def test_dropping_nothing_and_everything() -> None:
    x = torch.ones(4, 6)
    nothing, everything = (net_of(nn.Dropout(p), nn.Linear(6, 3), (6,)) for p in (0.0, 1.0))
    assert torch.equal(train(nothing, nothing.init(0), x)[0], x)
    assert not train(everything, everything.init(0), x)[0].any()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.5), (40, 7)), (nn.Dropout2d(0.5), (40, 3, 5)), (nn.Dropout3d(0.5), (40, 2, 3, 2))],
    ids=("1d", "2d", "3d"),
)
def test_channel_dropout_drops_whole_channels(layer: nn.Module, shape: tuple[int, ...]) -> None:
    net = net_of(nn.Sequential(layer, nn.Flatten()), nn.Linear(int(np.prod(shape)), 3), shape)
    kept = train(net, net.init(0), torch.ones(50, *shape))[0].view(50, 40, -1)
    assert torch.equal(kept.amin(2), kept.amax(2))
    assert float((kept[:, :, 0] == 0).float().mean()) == pytest.approx(0.5, abs=0.06)
    assert torch.equal(kept * (kept - 2), torch.zeros_like(kept))


def test_plain_dropout_of_images_drops_single_entries() -> None:
    net = net_of(nn.Sequential(nn.Dropout(0.5), nn.Flatten()), nn.Linear(40 * 9, 3), (40, 3, 3))
    kept = train(net, net.init(0), torch.ones(50, 40, 3, 3))[0].view(50, 40, 9)
    assert not torch.equal(kept.amin(2), kept.amax(2))


def test_masks_do_not_depend_on_how_far_a_batch_is_padded() -> None:
    net = Net(small_cnn, (1, 5, 5), 4)
    some = torch.tensor([5, keys.derive("x"), -3])
    for short, long in zip(net.masks(some, 3), net.masks(some, 8), strict=True):
        assert torch.equal(short, long[:, :3])
    for together, alone in zip(net.masks(some, 3), net.masks(some[1:2], 3), strict=True):
        assert torch.equal(together[1:2], alone)


def test_layers_and_steps_have_masks_of_their_own() -> None:
    body = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    net = net_of(body, nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 3)), (50,))
    masks = [mask for layer in net.masks(torch.tensor([1, 2, 3]), 4) for mask in layer]
    assert len(masks) == 9
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    rows = list(masks[0])
    assert not any(torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


def test_a_body_that_is_nothing_but_dropout_still_learns_through_the_head() -> None:
    model = TwoParts(nn.Dropout(0.5), nn.Linear(6, 4))
    seen = watch(Local(), model, blobs(), rounds=2, batch_size=4)
    again = watch(Local(), model, blobs(), rounds=2, batch_size=4)
    assert same(seen.models[2, "trained", 1], again.models[2, "trained", 1])
    assert not same(seen.models[2, "trained", 1], copied(model.state_dict()))


# --- batch norm


def test_batch_norm_trains_as_torchs_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))
    net = net_of(model, nn.Linear(5, 3), (6,))
    params = net.init(0)
    reference = nn.BatchNorm1d(6)
    for step in range(3):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step)) + step
        embedding, _ = train(net, params, x)
        wanted = nn.functional.linear(reference(x), params["body.1.weight"], params["body.1.bias"])
        torch.testing.assert_close(embedding, wanted)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(params[f"body.0.{name}"], reference.get_buffer(name))
    assert params["body.0.num_batches_tracked"].dtype == torch.int64


def test_batch_norm_in_evaluation_uses_and_keeps_the_running_statistics() -> None:
    net = net_of(nn.BatchNorm1d(6), nn.Linear(6, 3), (6,))
    params = net.init(0)
    params["body.running_mean"] = torch.arange(6.0)
    params["body.running_var"] = torch.full((6,), 4.0)
    before = copied(params)
    embedding, _ = net(params, torch.zeros(2, 6))
    torch.testing.assert_close(embedding, (-torch.arange(6.0) / (4 + 1e-5) ** 0.5).expand(2, 6))
    assert same(params, before)


def test_the_statistics_of_a_new_net_are_untouched_by_its_trial_run() -> None:
    fresh = part(Net(small_cnn, (1, 5, 5), 4).init(0), frozenset({"body.1.running_mean", "body.1.num_batches_tracked"}))
    assert all(not tensor.any() for tensor in fresh.values())


# --- what does not fit


class OnlyBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.head = "linear"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(6, 3), ["Linear", "'body'"]),
        (OnlyBody(), ["OnlyBody", "'head'"]),
        (TwoParts(nn.Linear(5, 4), nn.Linear(4, 3)), ["TwoParts", "(6,)"]),
        (TwoParts(nn.Linear(6, 4), nn.Linear(5, 3)), ["TwoParts", "(6,)"]),
        (TwoParts(nn.Linear(6, 4), nn.Linear(4, 2)), ["(2,)", "3 classes"]),
        (TwoParts(nn.Conv2d(1, 4, 3), nn.Linear(4, 3)), ["(6,)"]),
        (TwoParts(nn.BatchNorm2d(6), nn.Linear(6, 3)), ["(6,)"]),
    ],
    ids=("no body", "no head", "body", "head", "classes", "convolution", "batch norm"),
)
def test_a_model_that_does_not_fit_is_one_clear_line(model: nn.Module, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Net(lambda shape, classes: model, (6,), 3)
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_a_parameter_under_two_names_is_refused() -> None:
    layer = nn.Linear(6, 6)
    body = nn.Sequential(layer, nn.ReLU(), layer)
    body.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(InputError, match=r"two names, 'body\.0\.weight' and 'body\.2\.weight'"):
        net_of(body, nn.Linear(6, 3), (6,))


class More(TwoParts):
    """A model with something between body and head, in `forward` only."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__(nn.Linear(6, 5), nn.Linear(5, 3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.between(self.body(x))))


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (nn.LayerNorm(5), ["'between.weight', 'between.bias' outside of body and head"]),
        (nn.BatchNorm1d(5, affine=False), ["'between.running_mean'", "outside of body and head"]),
        (nn.Sequential(*(nn.Linear(5, 5) for _ in range(9))), ["'between.0.weight'", "and 15 more outside"]),
        (nn.Dropout(), ["'between' outside of body and head"]),
        (nn.Tanh(), ["head(body(x)), and forward of model More gives something else"]),
        (nn.Linear(4, 4, bias=False).requires_grad_(False), ["'between.weight'", "outside of body and head"]),
        (nn.Unflatten(1, (2, 2)), ["forward of model More fails", "(6,)"]),
    ],
    ids=("parameters", "buffers", "many", "dropout", "activation", "frozen too", "fails"),
)
def test_what_a_model_does_beside_body_and_head_is_refused(between: nn.Module, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Net(lambda shape, classes: More(between), (6,), 3)
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in [*words, "head(body(x))"]), line


class Flat(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.body(x).flatten(1)))


class Open(TwoParts):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Pair(TwoParts):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.head(h), h


@pytest.mark.parametrize("kind", [TwoParts, Flat, Open])
def test_a_forward_may_be_missing_or_flatten(kind: type[TwoParts]) -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    assert Net(lambda shape, classes: kind(nn.Identity(), head), (3, 2, 2), 3).width == 12


def test_a_forward_gives_logits_alone() -> None:
    with pytest.raises(InputError, match="forward of model Pair gives something else"):
        Net(lambda shape, classes: Pair(nn.Linear(6, 5), nn.Linear(5, 3)), (6,), 3)


def test_frozen_parameters_are_refused() -> None:
    body = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5).requires_grad_(False))
    with pytest.raises(InputError, match=r"'body\.1\.weight' has requires_grad=False.*Phase\.trains"):
        net_of(body, nn.Linear(5, 3), (6,))


def test_layers_without_a_size_are_refused() -> None:
    with pytest.raises(InputError, match=r"'body\.weight' has no size yet"):
        net_of(nn.LazyLinear(5), nn.Linear(5, 3), (6,))
    with pytest.raises(InputError, match=r"'body\.1\.running_mean' has no size yet"):
        net_of(nn.Sequential(nn.Linear(6, 5), nn.LazyBatchNorm1d(affine=False)), nn.Linear(5, 3), (6,))


class Counting(nn.Module):
    """A body that halves every other output, in training mode or in both."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.layer, self.always, self.calls = nn.Linear(6, 5), always, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.always or self.training
        h: Tensor = self.layer(x)
        return h / (1 + self.calls % 2)


@pytest.mark.parametrize("always", [True, False])
def test_a_model_that_remembers_its_calls_is_refused(always: bool) -> None:
    with pytest.raises(InputError, match="depends on more than parameters, buffers and input"):
        net_of(Counting(always), nn.Linear(5, 3), (6,))


def test_layers_may_change_their_buffers_and_their_input() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
    body = nn.Sequential(nn.SiLU(inplace=True), spectral, nn.BatchNorm1d(5, momentum=None))
    assert net_of(body, nn.Linear(5, 3), (6,)).width == 5


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.wide = nn.Dropout(0.5), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.drop(self.wide(self.drop(x))))


def in_two_places() -> nn.Module:
    drop = nn.Dropout(0.5)
    return nn.Sequential(drop, nn.Linear(6, 6), drop)


@pytest.mark.parametrize(
    "body",
    [FunctionalDropout(), nn.AlphaDropout(0.5), in_two_places(), nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)],
    ids=("functional", "alpha", "in two places", "attention"),
)
def test_random_numbers_that_no_key_controls_are_refused(body: nn.Module) -> None:
    shape = (3, 6) if isinstance(body, nn.TransformerEncoderLayer) else (6,)
    head = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    with pytest.raises(InputError, match=r"outside of nn\.Dropout"):
        net_of(body, head, shape)


def test_a_dropout_layer_that_serves_two_shapes_is_refused() -> None:
    with pytest.raises(InputError, match="one dropout layer"):
        net_of(Twice(), nn.Linear(8, 3), (6,))


def test_shipped_models_say_what_they_take() -> None:
    with pytest.raises(InputError, match="CnnMnist"):
        Net(CnnMnist, (784,), 10)
    with pytest.raises(InputError, match="CnnMnist"):
        Net(CnnMnist, (1, 8, 8), 10)
    assert Net(Mlp, (1, 28, 28), 10).width == 64
