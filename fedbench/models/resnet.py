"""ResNet-18 for colour images, from random or pretrained weights."""

import hashlib
import io
import socket
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
from annotated_types import Ge
from torch import Tensor, nn

from fedbench.errors import InputError

URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
"""torchvision's `ResNet18_Weights.IMAGENET1K_V1`."""

SHA256 = "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec"

_WANTED = "want none, imagenet, or a file with the state_dict of a torchvision ResNet-18"
_PATIENCE = 4.0  # seconds without an answer until a download is given up


@final
class ResNet18(nn.Module):
    """torchvision's ResNet-18 for images of three channels; the embedding is the output of layer4 before pooling.

    That is (B, 512, 1, 1) for 32x32 pixels, and so are all shapes whatever the strides: mixed strides can be averaged.

    - `stride1`, `stride2`: of the first convolution and of the pooling after it; mixed architectures differ in them
      (FedProto on CIFAR-10: half of the clients 1 and 4, half 2 and 2).
    - `weights`: `none`; `imagenet`, torchvision's file, from torch's cache or downloaded; or the path of a file with
      the `state_dict` of a torchvision ResNet-18, in a suite relative to its folder.  The head is always drawn anew.
    - `stem`: whether the first convolution and its batch norm are pretrained too, or random as in the FedProto code.

    `weights_sha256` is the sha256 of the file, None without one.  Raises InputError for inputs that are no such images,
    and for weights that cannot be had or belong to another network.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        stride1: Annotated[int, Ge(1)] = 2,
        stride2: Annotated[int, Ge(1)] = 2,
        weights: str = "none",
        stem: Literal["pretrained", "random"] = "pretrained",
    ) -> None:
        super().__init__()
        if len(shape) != 3 or shape[0] != 3:
            raise InputError(
                f"model ResNet18 takes images (3, height, width), of three channels, not inputs of shape {tuple(shape)}"
            )
        from torchvision.models import resnet18  # takes a second

        net = resnet18(num_classes=classes)
        net.conv1.stride = (stride1, stride1)
        net.maxpool.stride = stride2
        self.weights_sha256: str | None = None
        if weights != "none":
            path = _imagenet() if weights == "imagenet" else Path(weights)
            state, self.weights_sha256 = _state(path, SHA256 if weights == "imagenet" else None)
            _fill(net, state, ("fc.",) if stem == "pretrained" else ("fc.", "conv1.", "bn1."), path)
        body = OrderedDict((name, part) for name, part in net.named_children() if name not in ("avgpool", "fc"))
        self.body = nn.Sequential(body)
        self.head = nn.Sequential(OrderedDict(avgpool=net.avgpool, flatten=nn.Flatten(), fc=net.fc))
        self.width = 512 * _after(shape[1], stride1, stride2) * _after(shape[2], stride1, stride2)

    @staticmethod
    def located(options: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], str | None]:
        """Return options under which a weights file relative to `base` is found from anywhere, and the file's sha256.

        None stands for no weights.  InputError if there is no such file; torchvision's is known without looking.
        """
        weights = options.get("weights", "none")
        if weights in ("none", "imagenet"):
            return dict(options), SHA256 if weights == "imagenet" else None
        path = base / Path(weights).expanduser()
        return {**options, "weights": str(path)}, hashlib.sha256(_bytes(path)).hexdigest()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits


def _after(side: int, stride1: int, stride2: int) -> int:
    """Return the side of layer4's feature map; every convolution and pooling is padded, so a side is divided up."""
    for stride in (stride1, stride2, 2, 2, 2):
        side = -(-side // stride)
    return side


def _imagenet() -> Path:
    """Return torchvision's file in torch's cache, downloaded if it is not there."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / URL.rpartition("/")[2]
    if path.exists():
        return path
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)  # torch sets none, and would wait minutes for a network that drops packets
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(URL, str(path), SHA256, progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: of another checksum
        raise InputError(
            f"weights: imagenet: no file {path}, and no download ({' '.join(str(error).split())}); "
            f"put {URL} (sha256 {SHA256}) there, or set weights: none"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
    return path


def _state(path: Path, sha256: str | None) -> tuple[Mapping[str, Any], str]:
    """Return what a weights file holds and its sha256, which must be the given one if any."""
    content = _bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, found):
        raise InputError(f"weights: {path}: its sha256 is {found}, want {sha256}; remove it, or set weights: none")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling garbage comes to
        raise InputError(f"weights: {path}: not a file of plain tensors ({type(error).__name__}); {_WANTED}") from error
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise InputError(f"weights: {path}: holds a {type(state).__name__}, no tensors by name; {_WANTED}")
    return state, found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"weights: {path}: {error.strerror}; {_WANTED}") from error


def _fill(net: nn.Module, state: Mapping[str, Any], drawn: tuple[str, ...], path: Path) -> None:
    """Replace the parameters and buffers of a torchvision ResNet-18, but not those whose names begin as in `drawn`."""
    own = net.state_dict()
    for name in sorted(own.keys() | state.keys()):
        if name.startswith("fc.") or (name.endswith("num_batches_tracked") and name not in state):
            continue  # the head is another's, and files from before torch 0.4.1 have no counters
        want, have = _shape(own.get(name)), _shape(state.get(name))
        if want != have:
            raise InputError(f"weights: {path}: '{name}' is {have}, in ResNet-18 {want}; {_WANTED}")
    net.load_state_dict({**own, **{name: t for name, t in state.items() if not name.startswith(drawn)}})


def _shape(tensor: Any) -> str:
    return str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else "missing"
