"""FedBN keeps what every method keeps, and batch norm stays where it is."""

import pytest
from fedbn import FedBN
from norm_cnn import NormCnn

from fedbench import testing
from fedbench.errors import InputError
from fedbench.models.mlp import Mlp
from fedbench.net import Net


@pytest.mark.parametrize("check", testing.CHECKS, ids=str)
def test_it_keeps_what_every_method_keeps(check: testing.Check) -> None:
    check(FedBN())


def test_batch_norm_is_not_shared_and_everything_else_is() -> None:
    net = Net(NormCnn, (1, 28, 28), 10)
    kept = {name for name in net.shapes if not FedBN().shares(net, name)}
    assert kept == {f"body.{layer}.{name}" for layer in (1, 5) for name in ("weight", "bias")} | set(net.buffers)


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(InputError, match="no batch norm"):
        FedBN().check(Net(Mlp, (8,), 3))
