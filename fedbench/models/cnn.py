"""The convolutional network of the FedProto experiments on MNIST."""

from collections import OrderedDict
from typing import Annotated

from annotated_types import Ge, Gt, Le
from torch import Tensor, nn


class CnnMnist(nn.Module):
    """Two 5x5 convolutions and two fully connected layers; the embedding is the 50 values after the first of those.

    Takes images of at least 16x16.  Pooling comes before ReLU, and channel dropout before the second pooling; the
    embedding is taken before the last dropout, which belongs to the head (facts of the FedProto code, lib/models.py).

    - `channels`: width of the second convolution; mixed architectures differ in it (18, 20, 22).
    - `dropout`: rate of both dropout layers.
    """

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
        depth, height, breadth = shape
        self.width = width
        flat = channels * _after(height) * _after(breadth)
        self.body = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(depth, 10, 5),
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


def _after(side: int) -> int:
    """Return the side of the feature map after both convolutions and poolings."""
    return ((side - 4) // 2 - 4) // 2
