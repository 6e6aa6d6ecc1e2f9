"""How every method of a comparison is trained: plain values, without torch, checked when they are made.

The constraints stand on the fields as `annotated_types` marks, so that pydantic checks the same rules in a suite file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from fedbench.errors import InputError

MOST = 2**31 - 1
"""What nobody counts beyond; larger numbers are slips, and do not fit everywhere."""

Count = Annotated[int, Ge(1), Le(MOST)]
"""How many of something there are."""

OptimizerName = Literal["sgd", "adam"]
LACKS: Mapping[str, tuple[str, ...]] = {"sgd": (), "adam": ("momentum", "nesterov")}
"""The settings that each optimiser does not have."""


@dataclass(frozen=True)
class Optimizer:
    """One client's optimiser; its state starts afresh in every round and every phase.

    `weight_decay` acts on every trained parameter, except that `weight_decay_bias`, when given, acts on those whose
    name contains "bias" (the FedRep authors decay weights only).  Adam uses torch's default betas and epsilon, and has
    neither `momentum` nor `nesterov`.
    """

    name: OptimizerName = "sgd"
    lr: Annotated[float, Gt(0)] = 0.01
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.5
    nesterov: bool = False
    weight_decay: Annotated[float, Ge(0)] = 0.0
    weight_decay_bias: Annotated[float, Ge(0)] | None = None


def check_optimizer(name: str, given: Mapping[str, Any], where: str) -> None:
    """Raise InputError, beginning with `where`, for a setting that was given and that the optimiser does not have.

    Says nothing of a name that no optimiser has, which is refused with the other settings.
    """
    for setting in LACKS.get(name, ()):
        if setting in given:
            value = str(given[setting]).lower()
            raise InputError(f"{where}.{setting}: {value} is for sgd, {name} has none; leave it out, or take name: sgd")


@dataclass(frozen=True)
class Training:
    """The rounds and the local training that all methods share.

    - `last_batch`: what happens to a batch shorter than `batch_size`: it is kept, dropped (the FedProto code), or
      dropped only if it has a single sample.  A client whose samples make no batch at all trains on one batch of all
      of them.
    - `init`: every client starts from one common model, or each from its own draw (the FedProto code; what a method
      shares is common from the first round either way).
    - `batch_norm`: running statistics travel with the parameters a method shares, or stay with each client.
    - `participation`: fraction of the clients drawn, without replacement, in every round (at least one).
    - `evaluate_every`: rounds between evaluations; the last round is always evaluated.
    """

    rounds: Count = 100
    epochs: Count = 1
    batch_size: Count = 8
    last_batch: Literal["keep", "drop", "drop_single"] = "keep"
    shuffle: bool = True
    optimizer: Optimizer = field(default_factory=Optimizer)
    participation: Annotated[float, Gt(0), Le(1)] = 1.0
    init: Literal["common", "per_client"] = "per_client"
    batch_norm: Literal["average", "local"] = "average"
    evaluate_every: Count = 1
    dtype: Literal["float32", "float64"] = "float32"
