"""The convolutional networks of the FedProto experiments."""

from collections import OrderedDict
from typing import Annotated, ClassVar, final

from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from fedbench.errors import InputError


class _Cnn(nn.Module):
    """Two convolutions and two fully connected layers; the embedding is the `width` values after the first of those.

    Sizes itself to the images.  Pooling comes before ReLU, and channel dropout before the second pooling; the
    embedding is taken before the last dropout, which belongs to the head (facts of the FedProto code, lib/models.py).

    - `channels`: width of the second convolution; mixed architectures differ in it (18, 20, 22).
    - `dropout`: rate of both dropout layers.

    Raises InputError for inputs that are no images, or too small for both poolings.
    """

    kernel: ClassVar[int]
    """Side of the first convolution's kernel."""

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        channels: Annotated[int, Ge(1)] = 20,
        dropout: Annotated[float, Ge(0), Le(1)] = 0.5,
        width: Annotated[int, Gt(0)] = 50,
    ) -> None:
        super().__init__()
        smallest = self.kernel + 11
        if len(shape) != 3 or min(shape[1:]) < smallest:
            raise InputError(
                f"model {type(self).__name__} takes images (channels, height, width) of at least "
                f"{smallest}x{smallest}, not inputs of shape {tuple(shape)}"
            )
        depth, height, breadth = shape
        self.width = width
        flat = channels * self._after(height) * self._after(breadth)
        self.body = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(depth, 10, self.kernel),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(10, channels, 5),
                drop=nn.Dropout2d(dropout),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(flat, width),
                relu3=nn.ReLU(),
            )
        )
        self.head = nn.Sequential(OrderedDict(drop=nn.Dropout(dropout), fc2=nn.Linear(width, classes)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits

    def _after(self, side: int) -> int:
        """Return the side of the feature map after both convolutions and poolings."""
        return ((side - self.kernel + 1) // 2 - 4) // 2


@final
class CnnMnist(_Cnn):
    """The FedProto network for MNIST: 5x5 convolutions, for images of at least 16x16; see `_Cnn`."""

    kernel = 5


@final
class CnnFemnist(_Cnn):
    """The FedProto network for FEMNIST: a 3x3 and a 5x5 convolution, for images of at least 14x14; see `_Cnn`.

    The FedProto code feeds it 128x128 pixels, which gives fully connected layers 35 times as large as 28x28 does.
    """

    kernel = 3
