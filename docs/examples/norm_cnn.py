"""A small convolutional network with batch norm."""

from torch import nn


class NormCnn(nn.Module):
    """Two convolutions, each with batch norm, ReLU and pooling; then one fully connected layer.

    - `channels`: of the first convolution; the second has twice as many.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, *, channels: int = 8) -> None:
        """Make it for images of a shape (C, H, W)."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * channels * (shape[1] // 4) * (shape[2] // 4), classes)
