"""A model as a pure function of its parameters: what methods and engines see of an `nn.Module`."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fedbench import keys
from fedbench.errors import InputError
from fedbench.options import one_line

Params = dict[str, Tensor]
"""Parameters and buffers of one client by their `state_dict` names."""

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""Builds a model with `body` and `head` for (input shape without the batch, number of classes)."""

Forward = Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, Tensor]]
"""Computes embeddings and logits of (params, inputs)."""

_DRAWING = Lock()  # torch's global generator is one for all threads

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class MaskedDropout(nn.Module):
    """Dropout by a mask that is made elsewhere: a factor of 0 or 1 / (1 - p) per entry, or per channel.

    Masks are hashes of a key and the position in the batch (`Net.masks`), so they are equal under every engine and do
    not depend on how many examples a batch is padded to.  `unit` is the shape of one example's mask.
    """

    mask: Tensor

    def __init__(self, p: float, per_channel: bool) -> None:
        super().__init__()
        self.p, self.per_channel = p, per_channel
        self.unit: tuple[int, ...] = ()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x in evaluation mode, else x times the mask."""
        if not self.training:
            return x
        mask = self.mask
        if mask.dim() == 0:  # the trial run of a new net, which finds out the shapes
            unit = (x.shape[1], *(1 for _ in x.shape[2:])) if self.per_channel else tuple(x.shape[1:])
            if self.unit not in ((), unit):
                raise ValueError(f"one dropout layer is used on {self.unit} and on {unit}")
            self.unit = unit
        return x * mask


class _BodyHead(nn.Module):
    """The one call that engines make: embedding and logits together."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = cast(nn.Module, self.net.body)(x)
        return h.flatten(1), cast(nn.Module, self.net.head)(h)


class Net:
    """A model as pure functions of its parameters, made of any `nn.Module` with submodules `body` and `head`.

    - `shape`, `classes`, `width`: input shape, number of outputs, length of the embedding (the flattened output of
      `body`); `dtype` and `device`: where its parameters live.
    - `parameters`, `buffers`: their names in `state_dict` order; `shapes`: the shape of each.
    - `head`, `dense`: names of the tensors of the head, and of all fully connected layers.
    - `has_batch_norm`: whether the examples of a batch influence each other in training, and `mixes_examples`, in
      evaluation (batch norm without running statistics); `trains_on_one`: whether a batch may have a single one.
    - `private`: names that no method may share (the batch-norm policy).
    - `alone`: whether it trains one client at a time, so that nothing it computes is under vmap.

    It computes head(body(x)), and never calls the model's own `forward`.

    Raises `InputError` for a model without body and head, one that does not fit the data, and one that is more than
    head(body(x)) of its parameters: see `_check_parts` and `_measure`.
    """

    def __init__(
        self,
        factory: ModelFactory,
        shape: tuple[int, ...],
        classes: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.classes, self.dtype, self.device = shape, classes, dtype, torch.device(device)
        self._factory = factory
        name = _name(factory)
        try:
            model = _draw(factory, shape, classes, seed=0)
        except InputError:
            raise
        except Exception as error:  # a fault in somebody's model
            reason = one_line(error)
            raise InputError(
                f"model {name} cannot be made for inputs {shape} and {classes} classes: {reason}"
            ) from error
        if not isinstance(model, nn.Module):
            raise InputError(f"model {name} gives a {type(model).__name__} for an input shape; want an nn.Module")
        _check_parts(model)
        self.parameters = tuple(name for name, _ in model.named_parameters())
        self.buffers = tuple(name for name in model.state_dict() if name not in set(self.parameters))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.head = frozenset(name for name in self.shapes if name.startswith("head."))
        self.dense = frozenset(
            f"{path}.{name}"
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear)
            for name in module.state_dict()
        )
        self.private: frozenset[str] = frozenset()
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.has_batch_norm = bool(norms)
        self.mixes_examples = any(module.running_mean is None for module in norms)
        self._convolves = any(len(shape) == 4 for shape in self.shapes.values())
        self._dropouts = _mask_dropouts(model)
        self.alone = False
        self._layers: list[MaskedDropout] = []
        self.evaluation_module = _BodyHead(model.to(self.device, dtype)).eval()
        self.training_module = copy.deepcopy(self.evaluation_module).train()
        self._forward: Forward = lambda params, x: _call(self.evaluation_module, params, x)
        self.width = self._measure()

    def init(self, seed: int) -> Params:
        """Return freshly drawn parameters and buffers; drawn in the model's own dtype, so float64 starts equal."""
        state = _draw(self._factory, self.shape, self.classes, seed).state_dict()
        return {
            name: tensor.detach().to(self.device, self.dtype if tensor.is_floating_point() else None, copy=True)
            for name, tensor in state.items()
        }

    def __call__(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, width) and logits (B, classes) of inputs (B, *shape).

        In training mode batch norm updates its running statistics in `params`, in place.
        """
        return self._forward(params, x)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Return images or a convolution's weights in the memory layout in which this device is fastest.

        That is channels-last on the CPU, where pooling then takes a tenth of the time; but not with batch norm, by
        which a step of ResNet-18 takes a third longer in it.  A single channel lies in memory as it should, but has
        strides that the next layer takes for channels-first, and that `contiguous` leaves as they are.
        """
        if tensor.dim() != 4 or not self._convolves or self.has_batch_norm or self.device.type != "cpu":
            return tensor
        _, channels, height, width = tensor.shape
        if channels == 1 and tensor.is_contiguous():
            return tensor.as_strided(tensor.shape, (height * width, 1, width, 1))
        return tensor.clone(memory_format=torch.channels_last)

    def masks(self, step_keys: Tensor, batch: int) -> list[Tensor]:
        """Return the masks (steps, batch, *unit) of every dropout layer for steps with these keys (steps,) int64."""
        masks = []
        for number, layer in enumerate(self._dropout_layers(), 1):
            drawn = keys.bits(step_keys ^ keys.derive("dropout", number), batch * math.prod(layer.unit))
            kept = drawn >= math.floor((layer.p - 0.5) * 2**64)  # p of all signed integers lie below this
            scale = 1 / (1 - layer.p) if layer.p < 1 else 0.0
            masks.append((kept.to(self.dtype) * scale).view(len(step_keys), batch, *layer.unit))
        return masks

    def training(self, masks: Sequence[Tensor]) -> Self:
        """Return the net in training mode with the dropout masks (B, *unit) of one step."""
        if self.alone:
            for layer, mask in zip(self._layers, masks, strict=True):
                layer._buffers["mask"] = mask  # past the checks of `nn.Module`, which take longer than the product
            return self
        extra = {f"net.{path}.mask": mask for path, mask in zip(self._dropouts, masks, strict=True)}
        return self.calling(lambda params, x: _call(self.training_module, params, x, extra))

    def bound(self, params: Params) -> Self:
        """Return a training net whose modules hold `params` themselves, which saves putting them in at every step.

        Only for one thread, and as long as the tensors in `params` stay the same ones.
        """
        module = self.training_module
        for name, tensor in params.items():
            path, _, leaf = f"net.{name}".rpartition(".")
            owner = module.get_submodule(path)
            held: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            held[leaf] = tensor
        view = self.calling(lambda p, x: module(x) if p is params else _call(module, p, x))
        view.alone, view._layers = True, self._dropout_layers()
        return view

    def calling(self, forward: Forward) -> Self:
        """Return a view of this net that computes embeddings and logits by another function of (params, x)."""
        view = copy.copy(self)
        view._forward = forward
        return view

    def remembering(self) -> Self:
        """Return a view of this net that answers the last question again without computing it again."""
        asked: list[Any] = [None, None, None]

        def forward(params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            if asked[0] is not params or asked[1] is not x:
                asked[:] = params, x, self(params, x)
            return cast(tuple[Tensor, Tensor], asked[2])

        return self.calling(forward)

    def knowing(self, params: Mapping[str, Tensor], x: Tensor, answer: tuple[Tensor, Tensor]) -> Self:
        """Return a view of this net that knows the answer to one question, and computes that to any other."""
        return self.calling(lambda p, inputs: answer if p is params and inputs is x else self(p, inputs))

    @property
    def mask_entries(self) -> int:
        """The number of mask entries of one example, over all dropout layers."""
        return sum(math.prod(layer.unit) for layer in self._dropout_layers())

    def with_own_modules(self) -> Self:
        """Return a net that shares no module with this one, for use in another thread."""
        shared = {
            id(tensor): tensor for tensor in (*self.training_module.parameters(), *self.training_module.buffers())
        }
        shared |= {id(t): t for t in (*self.evaluation_module.parameters(), *self.evaluation_module.buffers())}
        view = copy.copy(self)
        view.training_module = copy.deepcopy(self.training_module, shared)
        view.evaluation_module = copy.deepcopy(self.evaluation_module, shared)
        return view.calling(lambda params, x: _call(view.evaluation_module, params, x))

    def keep_private(self, names: frozenset[str]) -> Self:
        """Return a view of this net whose tensors `names` are never shared."""
        view = copy.copy(self)
        view.private = names
        return view

    def _dropout_layers(self) -> list[MaskedDropout]:
        layers = [self.training_module.get_submodule(f"net.{path}") for path in self._dropouts]
        return [layer for layer in layers if isinstance(layer, MaskedDropout)]

    def _measure(self) -> int:
        """Run numbers through the model: its embedding's width, its masks' shapes, and whether model and data fit.

        Refuses what a pure function of parameters and inputs cannot stand for, as far as one small batch tells.
        """
        name = type(self.evaluation_module.net).__name__
        draw = torch.Generator().manual_seed(0)
        x = torch.rand(2, *self.shape, generator=draw).to(self.device, self.dtype)
        try:
            with torch.no_grad(), _DRAWING:
                before = _generator_state(self.device)
                tried = [self._tried(self.evaluation_module, x) for _ in range(2)]
                trained = [self._tried(self.training_module, x) for _ in range(2)]  # finds out the masks' shapes
                drew = not torch.equal(before, _generator_state(self.device))
        except Exception as error:  # also faults in somebody's model
            raise InputError(f"model {name} does not take inputs of shape {self.shape}: {_reason(error)}") from error
        if drew:
            raise InputError(
                f"model {name} draws random numbers outside of nn.Dropout layers "
                "that stand in one place, so its training cannot be repeated"
            )
        if not all(_close(first, again) for pair in (tried, trained) for first, again in zip(*pair, strict=True)):
            raise InputError(
                f"model {name} gives other outputs when it is called again: "
                "its output depends on more than parameters, buffers and input"
            )
        embedding, logits = tried[0]
        if logits.shape != (2, self.classes):
            raise InputError(f"the head gives {tuple(logits.shape[1:])} scores for data with {self.classes} classes")
        self._check_forward(x, logits)
        self.trains_on_one = self._takes_one()
        return int(embedding.shape[1])

    def _tried(self, module: _BodyHead, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and logits of a module's own parameters; its buffers and x stay as they are."""
        state = module.net.state_dict()
        return _call(module, state | {name: state[name].clone() for name in self.buffers}, x.clone())

    def _check_forward(self, x: Tensor, logits: Tensor) -> None:
        """Raise `InputError` if the model has a `forward` of its own that computes anything but head(body(x))."""
        model = self.evaluation_module.net
        said = f"fedbench computes head(body(x)), and forward of model {type(model).__name__}"
        if getattr(model.forward, "__func__", None) is nn.Module.forward:
            return
        try:
            with torch.no_grad():
                found = model(x.clone())
        except NotImplementedError:
            return
        except Exception as error:  # a fault in somebody's model
            raise InputError(f"{said} fails on inputs of shape {self.shape}: {_reason(error)}") from error
        if not isinstance(found, Tensor) or not _close(found, logits):
            raise InputError(
                f"{said} gives something else: move what it does besides into body or head, or leave forward out"
            )

    def _takes_one(self) -> bool:
        """Return whether a batch of one sample can be trained on: batch norm refuses one value per channel."""
        try:
            with torch.no_grad():
                self.training_module(torch.zeros(1, *self.shape, dtype=self.dtype, device=self.device))
        except ValueError:
            return False
        return True


def _call(
    module: nn.Module, params: Mapping[str, Tensor], x: Tensor, extra: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    state = {f"net.{name}": tensor for name, tensor in params.items()}
    embedding, logits = functional_call(module, {**state, **(extra or {})}, (x,), tie_weights=False)
    return embedding, logits


def _check_parts(model: nn.Module) -> None:
    """Raise `InputError` unless all that a model learns is in `body` or `head`, once, has a size and may be trained."""
    name = type(model).__name__
    for part in ("body", "head"):
        if not isinstance(getattr(model, part, None), nn.Module):
            raise InputError(f"model {name} has no submodule '{part}': fedbench needs body and head")
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for path, tensor in tensors.items():
        if is_lazy(tensor):
            raise InputError(
                f"model {name}: '{path}' has no size yet: make it with one, not lazily; "
                "the input's shape is the first thing that a model's class is given"
            )
    first: dict[int, str] = {}
    for path, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), path) != path:
            raise InputError(
                f"model {name} uses a parameter under two names, '{first[id(tensor)]}' and '{path}', "
                "which fedbench cannot"
            )
    things = [*tensors.items(), *((path, m) for path, m in model.named_modules() if isinstance(m, _DROPOUTS))]
    outside = [f"'{path}'" for path, _ in things if path.partition(".")[0] not in ("body", "head")]
    if outside:
        more = f" and {len(outside) - 3} more" if len(outside) > 3 else ""
        raise InputError(
            f"model {name} has {', '.join(outside[:3])}{more} outside of body and head, but fedbench computes "
            "head(body(x)): move that into body or head, or leave it out"
        )
    frozen = [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise InputError(
            f"model {name}: '{frozen[0]}' has requires_grad=False, but what is trained is the method's to say: "
            "set it to True, and take a method with a phase that does not train it (Phase.trains)"
        )


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results are the same up to rounding, for their size."""
    size = float(b.nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a.to(b), b, rtol=0, atol=1e-4 * size, equal_nan=True)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _name(factory: ModelFactory) -> str:
    """Return what to call a model that is not made yet."""
    made = factory.func if isinstance(factory, functools.partial) else factory
    return str(getattr(made, "__name__", type(made).__name__))


def _generator_state(device: torch.device) -> Tensor:
    """Return the state of torch's global generator on a device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _draw(factory: ModelFactory, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Build a model under a seed of its own without touching torch's global generator."""
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(keys.derive(seed, "init"))
        return factory(shape, classes)


def _mask_dropouts(model: nn.Module) -> list[str]:
    """Replace the dropout layers of a model by masked ones, in place; return the paths of those that drop anything."""
    paths = [path for path, module in model.named_modules() if isinstance(module, _DROPOUTS)]
    for path in paths:
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        assert isinstance(old, _DROPOUTS)
        masked = MaskedDropout(old.p, not isinstance(old, nn.Dropout)) if old.p else nn.Identity()
        setattr(model.get_submodule(parent), name, masked)
    return [path for path in paths if isinstance(model.get_submodule(path), MaskedDropout)]
