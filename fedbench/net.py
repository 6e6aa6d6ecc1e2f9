"""A model as a pure function of its parameters: what methods and engines see of an `nn.Module`."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedbench import keys
from fedbench.errors import InputError

Params = dict[str, Tensor]
"""Parameters and buffers of one client by their `state_dict` names."""

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""Builds a model with `body` and `head` for (input shape without the batch, number of classes)."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of a key and the position in the batch, equal under every engine.

    `per_channel` drops whole channels, as `nn.Dropout2d` does.  `salt` tells the layers of a model apart.
    """

    key: Tensor

    def __init__(self, p: float, per_channel: bool, salt: int) -> None:
        super().__init__()
        self.p, self.per_channel, self.salt = p, per_channel, salt
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x in evaluation mode, else x with entries or channels zeroed at rate p and the rest scaled up."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return x * 0
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self.per_channel else x.shape
        drawn = keys.bits(self.key ^ self.salt, math.prod(shape)).view(shape)
        dropped = drawn < math.floor((self.p - 0.5) * 2**64)  # signed integers: p of them lie below this
        return x.masked_fill(dropped, 0) / (1 - self.p)


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
    - `private`: names that no method may share (the batch-norm policy).

    Raises `InputError` for a model without body and head, or one that does not fit the data.
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
        model = _draw(factory, shape, classes, seed=0)
        for part in ("body", "head"):
            if not isinstance(getattr(model, part, None), nn.Module):
                raise InputError(
                    f"model {type(model).__name__} has no submodule '{part}': fedbench needs body and head"
                )
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
        self._key: Tensor | None = None
        self._key_names = tuple(f"net.{name}.key" for name in _key_dropouts(model))
        self._evaluating = _BodyHead(model.to(self.device, dtype)).eval()
        self._training = copy.deepcopy(self._evaluating).train()
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
        state = {f"net.{name}": tensor for name, tensor in params.items()}
        if self._key is None:
            embedding, logits = functional_call(self._evaluating, state, (x,))
        else:
            embedding, logits = functional_call(
                self._training, {**state, **dict.fromkeys(self._key_names, self._key)}, (x,)
            )
        return embedding, logits

    def training(self, key: Tensor) -> Self:
        """Return the net in training mode, its dropout masks drawn under `key` (a scalar int64 tensor)."""
        view = copy.copy(self)
        view._key = key
        return view

    def keep_private(self, names: frozenset[str]) -> Self:
        """Return a view of this net whose tensors `names` are never shared."""
        view = copy.copy(self)
        view.private = names
        return view

    def _measure(self) -> int:
        """Run one empty sample through the model: its embedding's width, and whether model and data fit at all."""
        try:
            with torch.no_grad():
                embedding, logits = self._evaluating(torch.zeros(1, *self.shape, dtype=self.dtype, device=self.device))
        except RuntimeError as error:
            name = type(self._evaluating.net).__name__
            reason = str(error).splitlines()[0]
            raise InputError(f"model {name} does not take inputs of shape {self.shape}: {reason}") from error
        if logits.shape != (1, self.classes):
            raise InputError(f"the head gives {tuple(logits.shape[1:])} scores for data with {self.classes} classes")
        return int(embedding.shape[1])


def _draw(factory: ModelFactory, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Build a model under a seed of its own without touching torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.derive(seed, "init"))
        return factory(shape, classes)


def _key_dropouts(model: nn.Module) -> list[str]:
    """Replace the dropout layers of a model by keyed ones, in place; return their paths."""
    paths = [path for path, module in model.named_modules() if isinstance(module, _DROPOUTS)]
    for salt, path in enumerate(paths, 1):
        parent, _, name = path.rpartition(".")
        old = model.get_submodule(path)
        assert isinstance(old, _DROPOUTS)
        keyed = KeyedDropout(old.p, not isinstance(old, nn.Dropout), keys.derive("dropout", salt))
        setattr(model.get_submodule(parent), name, keyed)
    return paths
