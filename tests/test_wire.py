"""The counting channel: what is counted, what is blanked, and what cannot pass."""

import numpy as np
import pytest
import torch

from fedbench.method import Message, Rows, rows
from fedbench.wire import Diverged, Wire, pack, payload, unpack


def table(present: list[list[bool]], width: int = 3, dtype: torch.dtype = torch.float32) -> Rows:
    flags = torch.tensor(present)
    values = torch.arange(1, flags.numel() * width + 1, dtype=dtype).view(*flags.shape, width)
    return Rows(values, flags)


def test_scalars_are_counted_for_each_client_that_sends() -> None:
    wire = Wire(4, frozenset())
    wire.carry("up", [1, 3], {"a": torch.zeros(2, 3, 5), "b": torch.zeros(2)})
    counts = wire.take()
    assert counts["up/scalars"].tolist() == [0, 16, 0, 16]
    assert counts["up/bytes"].tolist() == [0, 64, 0, 64]
    assert counts["up/scalars"].dtype == np.int64
    assert {name for name, values in counts.items() if values.any()} == {"up/scalars", "up/bytes"}


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 8),
        (torch.float32, 4),
        (torch.float16, 2),
        (torch.bfloat16, 2),
        (torch.int64, 8),
        (torch.int8, 1),
    ],
)
def test_bytes_follow_the_dtype(dtype: torch.dtype, size: int) -> None:
    wire = Wire(1, frozenset())
    wire.carry("down", [0], {"a": torch.zeros(1, 10, dtype=dtype), "t": table([[True, False]], 4, dtype)})
    counts = wire.take()
    assert counts["down/scalars"].tolist() == [14]
    assert counts["down/bytes"].tolist() == [14 * size]


def test_buffers_are_counted_apart() -> None:
    wire = Wire(2, frozenset({"bn.running_mean", "bn.num_batches_tracked"}))
    message = {
        "bn.weight": torch.zeros(2, 6),
        "bn.running_mean": torch.zeros(2, 6),
        "bn.num_batches_tracked": torch.zeros(2, dtype=torch.int64),
    }
    wire.carry("up", [0, 1], message)
    counts = wire.take()
    assert counts["up/scalars"].tolist() == [6, 6]
    assert counts["up/bytes"].tolist() == [24, 24]
    assert counts["up/buffers"].tolist() == [7, 7]
    assert counts["up/buffer_bytes"].tolist() == [6 * 4 + 8] * 2


def test_only_present_rows_are_counted_and_their_labels_apart() -> None:
    wire = Wire(3, frozenset())
    wire.carry("up", [0, 2], {"t": table([[True, False, True, True], [False, False, True, False]], width=5)})
    counts = wire.take()
    assert counts["up/scalars"].tolist() == [15, 0, 5]
    assert counts["up/bytes"].tolist() == [60, 0, 20]
    assert counts["up/index_bytes"].tolist() == [12, 0, 4]


def test_rows_of_single_numbers_and_of_matrices_are_counted_too() -> None:
    wire = Wire(1, frozenset())
    present = torch.tensor([[True, True, False]])
    wire.carry("up", [0], {"counts": Rows(torch.ones(1, 3), present), "maps": Rows(torch.ones(1, 3, 2, 4), present)})
    counts = wire.take()
    assert counts["up/scalars"].tolist() == [2 + 16]
    assert counts["up/index_bytes"].tolist() == [16]


def test_rows_not_present_arrive_as_zeros_whatever_was_in_them() -> None:
    sent = table([[True, False], [False, True]], width=2)
    sent.values[0, 1] = float("nan")
    sent.values[1, 0] = 123.0
    received = rows(Wire(2, frozenset()).carry("up", [0, 1], {"t": sent}), "t")
    assert received.values.tolist() == [[[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [7.0, 8.0]]]
    assert received.present.tolist() == [[True, False], [False, True]]
    assert sent.values[1, 0, 0] == 123, "the sender's own table stays as it is"


def test_what_arrives_is_detached() -> None:
    weight = torch.ones(1, 2, requires_grad=True)
    message: Message = {"w": weight * 2, "t": Rows((weight * 3)[:, None], torch.tensor([[True]]))}
    received = Wire(1, frozenset()).carry("down", [0], message)
    assert isinstance(received["w"], torch.Tensor)
    assert not received["w"].requires_grad
    assert not rows(received, "t").values.requires_grad
    assert received["w"].tolist() == [[2.0, 2.0]]


def test_directions_and_rounds_are_kept_apart() -> None:
    wire = Wire(1, frozenset())
    wire.carry("up", [0], {"a": torch.zeros(1, 1)})
    wire.carry("down", [0], {"a": torch.zeros(1, 2)})
    wire.carry("evaluation", [0], {"a": torch.zeros(1, 3)})
    wire.carry("evaluation", [0], {"a": torch.zeros(1, 3)})
    first = wire.take()
    assert [int(first[f"{way}/scalars"][0]) for way in ("up", "down", "evaluation")] == [1, 2, 6]
    assert not any(values.any() for values in wire.take().values())


def test_an_empty_message_costs_nothing() -> None:
    wire = Wire(2, frozenset())
    assert wire.carry("up", [0, 1], {}) == {}
    assert not any(values.any() for values in wire.take().values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("in_table", [False, True])
def test_an_upload_that_is_not_finite_is_divergence_and_names_client_and_tensor(bad: float, in_table: bool) -> None:
    values = torch.ones(3, 2, 4)
    values[1, 0, 3] = bad
    entry = Rows(values, torch.ones(3, 2, dtype=torch.bool)) if in_table else values
    with pytest.raises(Diverged, match=r"client 7 sent 'layer\.weight'"):
        Wire(9, frozenset()).carry("up", [2, 7, 8], {"ok": torch.ones(3, 1), "layer.weight": entry})


def test_integers_pass_the_check_of_finiteness() -> None:
    received = Wire(1, frozenset()).carry("up", [0], {"n": torch.tensor([5])})
    assert isinstance(received["n"], torch.Tensor)
    assert received["n"].dtype == torch.int64


# --- a message as bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_what_is_packed_comes_out_again(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    message: Message = {
        "a": torch.randint(0, 2, (3, 2, 4), generator=generator).to(dtype).transpose(0, 1),
        "scalar": torch.ones((), dtype=dtype),
        "none": torch.zeros(0, 5, dtype=dtype),
        "table": Rows(torch.ones(4, 2, dtype=dtype), torch.tensor([True, False, True, False])),
        "empty": Rows(torch.ones(2, 3, dtype=dtype), torch.zeros(2, dtype=torch.bool)),
    }
    found = unpack(pack(message))
    assert found.keys() == message.keys()
    for name in ("a", "scalar", "none"):
        wanted, got = message[name], found[name]
        assert isinstance(wanted, torch.Tensor)
        assert isinstance(got, torch.Tensor)
        assert got.dtype == dtype
        assert torch.equal(got, wanted)
    assert rows(found, "table").values.tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert rows(found, "table").present.tolist() == [True, False, True, False]
    assert not rows(found, "empty").present.any()


def test_a_packed_message_is_as_long_as_what_is_counted() -> None:
    message: Message = {"a": torch.zeros(3, 5), "running": torch.zeros(7), "t": table([[True, False, True]])}
    one: Message = {"a": torch.zeros(3, 5), "running": torch.zeros(7), "t": Rows(*(e[0] for e in rows(message, "t")))}
    wire = Wire(1, frozenset({"running"}))
    wire.carry("up", [0], {"a": torch.zeros(1, 3, 5), "running": torch.zeros(1, 7), "t": message["t"]})
    counts = wire.take()
    assert payload(pack(one)) == sum(int(counts[f"up/{kind}"][0]) for kind in ("bytes", "index_bytes", "buffer_bytes"))
    assert payload(pack({})) == 0
