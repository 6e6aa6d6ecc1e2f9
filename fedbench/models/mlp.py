"""A multilayer perceptron for inputs of any shape."""

import itertools
import math
from collections import OrderedDict
from typing import Annotated

from annotated_types import Ge, Le
from torch import Tensor, nn


class Mlp(nn.Module):
    """Fully connected layers with ReLU; the embedding is the output of the last hidden one.

    - `hidden`: widths of the hidden layers.  An empty list makes logistic regression, whose embedding is the input.
    - `dropout`: rate after every hidden layer; the embedding is taken before it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        *,
        hidden: tuple[Annotated[int, Ge(1)], ...] = (64,),
        dropout: Annotated[float, Ge(0), Le(1)] = 0.0,
    ) -> None:
        super().__init__()
        widths = [math.prod(shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for number, (wide, narrow) in enumerate(itertools.pairwise(widths)):
            layers += [nn.Dropout(dropout)] if number else []
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.width = widths[-1]
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(
            OrderedDict(drop=nn.Dropout(dropout if hidden else 0.0), fc=nn.Linear(widths[-1], classes))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits
