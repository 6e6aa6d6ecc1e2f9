"""Common layers computed for many clients at once, the clients side by side along the channels.

A convolution over A clients is one grouped convolution with A groups, a fully connected layer one batched matrix
product.  Feature maps are (B, A * C, H, W) in channels-last memory from the first layer to the last, and parameters are
laid out so that neither they nor their gradients are copied between layers.  Batch norm works per channel, which is per
client.

Bias, channel dropout and ReLU act on each value alone and never reverse an order, so they commute with the maximum of a
pooling and are done after it, on a quarter of the values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbench.net import MaskedDropout, Net

Answer = tuple[Tensor, Tensor] | tuple[()]
"""What a lowering gives: embeddings and logits; nothing where there is no lowering."""

_SUPPORTED = (
    nn.Conv2d,
    nn.Linear,
    nn.BatchNorm2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ReLU,
    nn.Flatten,
    nn.Identity,
    MaskedDropout,
)


@dataclass
class _Stack:
    """Activations of A clients: `value` is (A, B, ...) or, as `maps`, (B, A * C, H, W) with work left to do on it.

    `pending` holds, in order, what is still to be done per value: a bias (A * C,), a mask (B, A * C, 1, 1), or None for
    ReLU.
    """

    value: Tensor
    clients: int
    maps: bool = False
    pending: list[Tensor | None] = field(default_factory=list)

    def settle(self) -> None:
        """Do what is pending; in place, since no earlier layer needs the values it gave."""
        for factor in self.pending:
            if factor is None:
                self.value = self.value.relu_()
            elif factor.dim() == 1:
                self.value = self.value.add_(factor[:, None, None])
            else:
                self.value = self.value.mul_(factor)
        self.pending = []

    def spread(self) -> Tensor:
        """Return the activations as (A, B, ...)."""
        self.settle()
        if not self.maps:
            return self.value
        batch, _, *size = self.value.shape
        return self.value.view(batch, self.clients, -1, *size).transpose(0, 1)


class Lowering:
    """A net whose layers all have a stacked form; `of` makes one, or gives None."""

    def __init__(self, body: list[tuple[str, nn.Module]], head: list[tuple[str, nn.Module]]) -> None:
        self._body, self._head = body, head
        layers = dict([*body, *head])
        self._convolutions = {f"{path}.weight" for path, layer in layers.items() if isinstance(layer, nn.Conv2d)}
        self._matrices = {f"{path}.weight" for path, layer in layers.items() if isinstance(layer, nn.Linear)}

    @classmethod
    def of(cls, net: Net, training: bool = True) -> "Lowering | None":
        """Return the lowering of a net in training or evaluation mode, or None if one of its layers has none."""
        model = (net.training_module if training else net.evaluation_module).net
        body, head = (_flat(part, cast(nn.Module, getattr(model, part))) for part in ("body", "head"))
        if not all(_has_lowering(layer) for _, layer in [*body, *head]):
            return None
        flattened = [isinstance(layer, nn.Flatten) for _, layer in [*body, *head]]
        spatial = [isinstance(layer, nn.Conv2d | nn.BatchNorm2d) for _, layer in [*body, *head]]
        if any(spatial) and any(flattened[: len(spatial) - spatial[::-1].index(True)]):
            return None  # a convolution after flattening
        return cls(body, head)

    def allocate(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy of a stacked parameter (A, ...) in the memory layout in which its layer computes."""
        if name in self._convolutions:
            ordered = tensor.permute(0, 1, 3, 4, 2)
            return ordered.clone(memory_format=torch.contiguous_format).permute(0, 1, 4, 2, 3)
        if name in self._matrices:
            return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        return tensor.clone(memory_format=torch.contiguous_format)

    def run(self, params: Mapping[str, Tensor], masks: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (A, B, width) and logits (A, B, classes) of stacked parameters, masks and inputs.

        There are masks in training mode only.
        """
        stack = _Stack(x, len(x))
        queue = list(masks)
        for path, layer in self._body:
            _apply(stack, path, layer, params, queue)
        embedding = stack.spread().flatten(2)
        if stack.maps:  # which the head may go on with in place, and the embedding may be the same memory
            stack.value = stack.value.clone()
        for path, layer in self._head:
            _apply(stack, path, layer, params, queue)
        return embedding, stack.spread()


def _flat(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of nested containers in order, with their paths."""
    if isinstance(module, nn.Sequential) and _is_torchs(module, nn.Sequential):
        return [
            layer
            for name, child in module._modules.items()
            if child is not None
            for layer in _flat(f"{path}.{name}", child)
        ]
    return [(path, module)]


def _is_torchs(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether calling a module does what torch's class does: no other forward, and no hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return getattr(module.forward, "__func__", None) is kind.forward and not any(hooks)


def _has_lowering(layer: nn.Module) -> bool:
    if type(layer) not in _SUPPORTED or not _is_torchs(layer, type(layer)):
        return False
    if isinstance(layer, nn.Conv2d):
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if isinstance(layer, nn.BatchNorm2d):
        return layer.momentum is not None and layer.track_running_stats and layer.affine
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    if isinstance(layer, nn.Flatten):
        return layer.start_dim == 1 and layer.end_dim == -1
    return True


def _apply(stack: _Stack, path: str, layer: nn.Module, params: Mapping[str, Tensor], masks: list[Tensor]) -> None:
    """Let one layer work on the stack."""
    if isinstance(layer, nn.Conv2d):
        _convolve(stack, layer, params[f"{path}.weight"], params.get(f"{path}.bias"))
    elif isinstance(layer, nn.Linear):
        _multiply(stack, params[f"{path}.weight"], params.get(f"{path}.bias"))
    elif isinstance(layer, nn.BatchNorm2d):
        _normalise(stack, path, layer, params)
    elif isinstance(layer, MaskedDropout):
        if layer.training:
            _drop(stack, layer, masks.pop(0))
    elif isinstance(layer, nn.ReLU):
        if stack.maps:
            stack.pending.append(None)
        else:
            stack.value = stack.value.relu()
    elif isinstance(layer, nn.MaxPool2d):
        _as_maps(stack)
        stack.value = layer(stack.value)  # before what is pending
    elif isinstance(layer, nn.AvgPool2d | nn.AdaptiveAvgPool2d):
        _as_maps(stack)
        stack.settle()
        stack.value = layer(stack.value)
    elif isinstance(layer, nn.Flatten):
        stack.value, stack.maps = stack.spread().flatten(2), False


def _as_maps(stack: _Stack) -> None:
    """Bring inputs (A, B, C, H, W) into the form of feature maps."""
    if not stack.maps:
        clients, batch, channels, *size = stack.value.shape
        value = stack.value.transpose(0, 1).reshape(batch, clients * channels, *size)
        stack.value, stack.maps = value.contiguous(memory_format=torch.channels_last), True


def _convolve(stack: _Stack, layer: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
    _as_maps(stack)
    stack.settle()
    groups = stack.clients * layer.groups
    padding = cast("tuple[int, ...]", layer.padding)
    stack.value = F.conv2d(stack.value, weight.flatten(0, 1), None, layer.stride, padding, layer.dilation, groups)
    if bias is not None:
        stack.pending.append(bias.flatten())


def _multiply(stack: _Stack, weight: Tensor, bias: Tensor | None) -> None:
    value = stack.spread()
    if bias is None:
        stack.value = torch.bmm(value, weight.transpose(1, 2))
    else:
        stack.value = torch.baddbmm(bias[:, None], value, weight.transpose(1, 2))
    stack.maps = False


def _drop(stack: _Stack, layer: MaskedDropout, mask: Tensor) -> None:
    if not stack.maps:
        stack.value = stack.value * mask
        return
    factor = mask.transpose(0, 1).flatten(1, 2)
    if layer.per_channel:
        stack.pending.append(factor)
    else:
        stack.settle()
        stack.value = stack.value * factor


def _normalise(stack: _Stack, path: str, layer: nn.BatchNorm2d, params: Mapping[str, Tensor]) -> None:
    """Normalise every client's channels, as torch's layer does: in training mode over the client's own batch, and the
    running statistics move in place; in evaluation mode by these."""
    _as_maps(stack)
    stack.settle()
    if layer.training:
        params[f"{path}.num_batches_tracked"].add_(1)
    mean, variance, weight, bias = (
        params[f"{path}.{name}"].flatten() for name in ("running_mean", "running_var", "weight", "bias")
    )
    momentum = cast(float, layer.momentum)
    stack.value = F.batch_norm(stack.value, mean, variance, weight, bias, layer.training, momentum, layer.eps)
