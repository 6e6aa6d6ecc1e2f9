"""What a method must not give is refused before any training, in one line; scores that become NaN end the run."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from broken_methods import Plain
from conftest import Run, Tiny
from helpers import blobs, plain_mlp
from torch import Tensor

from fedbench import simulate
from fedbench.averaging import Averaging
from fedbench.errors import InputError
from fedbench.method import Batch, Loss, Message, Method, Phase, cross_entropy
from fedbench.net import Net, Params
from fedbench.testing import convolutional

Gift = Callable[[Any], Any]
CLASSES = 4


@dataclass(frozen=True)
class Gives(Plain):
    """Gives what it is told to."""

    what: str = "nothing"

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        made: Gift = SCORES.get(self.what, lambda z: {"head": z})
        given: dict[str, Tensor] = made(net(params, x)[1])
        return given

    def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
        made: Gift = LOSSES.get(self.what, lambda ce: Loss(ce, {}))
        given: Loss = made(cross_entropy(net, params, batch)[0])
        return given

    def phases(self, net: Net, epochs: int) -> Sequence[Phase]:
        return PHASES.get(self.what, [Phase("all", epochs)])

    def start(self, net: Net, kept: Params, down: Message) -> Params:
        made: Gift = STARTS.get(self.what, lambda params: params)
        given: Params = made(super().start(net, kept, down))
        return given

    def summaries(self, examples: Sequence[Any]) -> dict[str, list[float]]:
        made: Gift = SUMMARIES.get(self.what, lambda count: {})
        given: dict[str, list[float]] = made(len(examples))
        return given


PHASES: dict[str, Sequence[Phase]] = {
    "phase": [Phase("first", 1), Phase("part", 1)],
    "twins": [Phase("first", 1), Phase("second", 1), Phase("first", 1)],
    "one phase": Phase("all", 1),  # type: ignore[dict-item]  # which is what is wrong
    "half an epoch": [Phase("all", 1.5)],  # type: ignore[arg-type]  # which is what is wrong
}
STARTS: dict[str, Gift] = {
    "more than the model": lambda params: {**params, "control": torch.zeros(3)},
    "half a model": lambda params: {name: t for name, t in params.items() if not name.startswith("head.")},
    "other shapes": lambda params: {name: t[:1] for name, t in params.items()},
    "no model": list,
}
SCORES: dict[str, Gift] = {
    "no score": lambda z: {},
    "tensor": lambda z: z,
    "none": lambda z: None,
    "labels": lambda z: {"head": z.argmax(1)},
    "whole numbers": lambda z: {"head": z.long()},
    "more classes": lambda z: {"mine": torch.cat([z, z], 1)},
    "one row": lambda z: {"mine": z[:1]},
    "nan": lambda z: {"mine": z, "second": z * torch.nan},
    "unnamed": lambda z: {"": z},
    "slash": lambda z: {"a/b": z},
    "comma": lambda z: {"a, b": z},
    "number": lambda z: {1: z},
    "head_own": lambda z: {"head_own": z},
}
LOSSES: dict[str, Gift] = {
    "mean": lambda ce: Loss(ce.mean(), {}),
    "bare": lambda ce: ce,
    "long part": lambda ce: Loss(ce, {"part": ce[:1].repeat(7)}),
    "float part": lambda ce: Loss(ce, {"part": 1.0}),  # type: ignore[dict-item]  # which is what is wrong
    "slash part": lambda ce: Loss(ce, {"a/b": ce}),
    "phase": lambda ce: Loss(ce, {"part": ce}),
}
SUMMARIES: dict[str, Gift] = {
    "list": lambda count: [1.0] * count,
    "one value": lambda count: {"foo": [1.0]},
    "words": lambda count: {"foo": ["a"] * count},
    "accuracy": lambda count: {"accuracy": [1.0] * count},
    "a score": lambda count: {"accuracy/head": [1.0] * count},
    "the loss": lambda count: {"loss": [1.0] * count},
    "silhouette": lambda count: {"silhouette/class": [1.0] * count},
    "no path": lambda count: {"foo//bar": [1.0] * count},
}
REFUSED = {
    "no score": "scores gives {}; want a dict of named class scores, such as {'head': logits}, the headline first",
    "tensor": "scores gives float32 (2, 4); want a dict",
    "none": "scores gives None; want a dict",
    "labels": "scores gives int64 (2,) as 'head' for 2 samples and 4 classes; want floating point (2, 4)",
    "whole numbers": "scores gives int64 (2, 4) as 'head'",
    "more classes": "scores gives float32 (2, 8) as 'mine' for 2 samples and 4 classes; want floating point (2, 4)",
    "one row": "scores gives float32 (1, 4) as 'mine'",
    "nan": "scores gives NaN as 'second' before round 1, and loss is finite; want numbers, and -inf",
    "unnamed": "scores names a score ''; want letters, digits, '_', '-' and '.'",
    "slash": "scores names a score 'a/b'",
    "comma": "scores names a score 'a, b'",
    "number": "scores names a score 1",
    "head_own": "scores names a score 'head_own', which is what fedbench makes of 'head'",
    "mean": "loss gives float32 () as the total for 2 examples; want floating point (2,): do not average",
    "bare": "loss gives float32 (2,); want Loss(total, parts)",
    "long part": "loss gives float32 (7,) as the part 'part' for 2 examples; want floating point (2,) or ()",
    "float part": "loss gives a float as the part 'part'",
    "slash part": "loss names a part 'a/b'",
    "phase": "phases names a phase 'part', as loss does one of its parts",
    "twins": "phases names two phases 'first'; want a name for each",
    "one phase": "phases gives a Phase; want a list of Phase(name, epochs)",
    "half an epoch": "phases gives phase 'all' 1.5 epochs; want a whole number from 0",
    "more than the model": "start gives 'control', which is no tensor of the model; want the model and nothing else",
    "half a model": "start gives no 'head.",
    "other shapes": "start gives float32 (1, 6) as 'body.",
    "no model": "start gives a list; want the model's tensors by their names",
    "list": "summaries gives a list; want a dict of lists by name",
    "one value": "summaries gives values of shape (1,) under 'foo' for 3 clients; want one for each",
    "words": "summaries gives a list under 'foo'; want a number for each client",
    "accuracy": "summaries names a metric 'accuracy', as fedbench does its own; want another, such as 'my/accuracy'",
    "a score": "summaries names a metric 'accuracy/head'",
    "the loss": "summaries names a metric 'loss'",
    "silhouette": "summaries names a metric 'silhouette/class'",
    "no path": "summaries names a metric 'foo//bar'",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_method_must_not_give_is_refused_before_any_training(what: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(f'Gives.{REFUSED[what]}')}") as caught:
        simulate(Gives(what), plain_mlp, blobs(), probe=lambda *_: pytest.fail("it trains"))
    assert "\n" not in str(caught.value)


def test_epochs_of_a_phase_may_be_a_number_of_numpy() -> None:
    @dataclass(frozen=True)
    class Twice(Plain):
        def phases(self, net: Net, epochs: int) -> Sequence[Phase]:
            return [Phase("all", np.int64(2))]  # type: ignore[arg-type]

    assert simulate(Twice(), plain_mlp, blobs(), rounds=1).work["steps"].sum() == 2 * (
        simulate(Plain(), plain_mlp, blobs(), rounds=1).work["steps"].sum()
    )


def test_what_is_to_stay_with_each_client_is_not_sent() -> None:
    @dataclass(frozen=True)
    class Sends(Plain):
        def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
            return dict(initial)

    settings: dict[str, Any] = {"classes": CLASSES, "rounds": 1, "last_batch": "drop_single"}
    simulate(Sends(), convolutional, _images(), **settings)
    simulate(Plain(), convolutional, _images(), batch_norm="local", **settings)
    with pytest.raises(InputError, match=r"^Sends\.send gives '\S*running_mean', which is to stay with each client"):
        simulate(Sends(), convolutional, _images(), batch_norm="local", **settings)


def test_it_is_said_of_the_suite_and_the_row(fedbench: Run, tiny: Tiny) -> None:
    (tiny.file.parent / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedbench.averaging import Averaging\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Averaging):\n"
        "    def shares(self, net, name): return True\n"
        "    def scores(self, net, params, down, x, own): return {}\n"
    )
    tiny.change(methods={"mine": {"method": "./mine.py:Mine"}})
    code, _, err = fedbench("run", str(tiny.file), "--dry-run")
    assert code == 2
    assert re.search(r"mine on .*: Mine\.scores gives \{\}; want a dict of named class scores", err)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_loss_that_changes_its_batch_is_refused_before_any_training(engine: Any) -> None:
    @dataclass(frozen=True)
    class Halves(Plain):
        def loss(self, net: Net, params: Params, batch: Batch, down: Message) -> Loss:
            return Loss(cross_entropy(net, params, batch)[0] * batch.valid.mul_(0.5), {})

    with pytest.raises(InputError, match=r"^Halves\.loss changes valid of its batch in place; want a new tensor$"):
        simulate(Halves(), plain_mlp, blobs(), engine=engine, probe=lambda *_: pytest.fail("it trains"))


def test_two_classes_are_told_from_two_samples() -> None:
    @dataclass(frozen=True)
    class Turned(Plain):
        def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
            return {"head": net(params, x)[1].T}

    with pytest.raises(InputError, match=r"float32 \(2, 3\) as 'head' for 3 samples and 2 classes"):
        simulate(Turned(), plain_mlp, blobs(classes=2), classes=2)


def test_a_method_may_name_further_metrics_by_paths() -> None:
    @dataclass(frozen=True)
    class Further(Plain):
        def summaries(self, examples: Sequence[Any]) -> dict[str, list[float]]:
            assert all(client["correct/head"].dtype == bool for client in examples)
            return {"accuracy/mine/head": [0.5] * len(examples), "last": [float("nan")] * len(examples)}

    outcome = simulate(Further(), plain_mlp, blobs(), rounds=1)
    assert outcome.status == "completed"
    assert outcome.metrics["test/accuracy/mine/head"].tolist() == [[0.5] * len(blobs())]


@dataclass(frozen=True)
class Wanders(Plain):
    """Scores that depend on a counter that the server sends: in the second round they are NaN."""

    def init_server(self, net: Net, initial: Params, clients: int, seed: int) -> Message:
        return {**super().init_server(net, initial, clients, seed), "round": torch.zeros((), dtype=net.dtype)}

    def merge(self, net: Net, server: Message, uploads: Message, clients: Tensor, sizes: Tensor) -> Message:
        merged = super().merge(net, server, uploads, clients, sizes)
        return {**merged, "round": server["round"] + 1}  # type: ignore[operator]  # it is a tensor

    def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
        return {"mine": torch.where(torch.as_tensor(down["round"]) < 2, net(params, x)[1], torch.nan)}


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_scores_that_become_nan_end_the_run_and_count_as_no_answer(engine: Any) -> None:
    outcome = simulate(Wanders(), plain_mlp, blobs(), rounds=3, engine=engine)
    assert outcome.status == "diverged"
    assert outcome.message == "round 2: the scores 'mine' of client 0's test samples are NaN"
    assert len(outcome.metrics["test/accuracy"]) == 1
    assert np.isfinite(outcome.metrics["test/accuracy"]).all()


def test_a_refusal_to_answer_is_a_wrong_answer_and_no_divergence() -> None:
    @dataclass(frozen=True)
    class Refuses(Plain):
        def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
            return {"none": torch.full_like(net(params, x)[1], -torch.inf)}

    outcome = simulate(Refuses(), plain_mlp, blobs(), rounds=1)
    assert outcome.status == "completed"
    assert not outcome.metrics["test/accuracy"].any()
    assert "test/accuracy/head_own" not in outcome.metrics


@pytest.mark.parametrize("said", ["yes", None, 1])
def test_shares_says_yes_or_no(said: Any) -> None:
    @dataclass(frozen=True)
    class Says(Averaging):
        def shares(self, net: Net, name: str) -> bool:
            return said  # type: ignore[no-any-return]  # which is what is wrong

    wanted = rf"^Says\.shares gives {said!r} for 'body\.[\w.]+'; want True or False$"
    with pytest.raises(InputError, match=wanted):
        simulate(Says(), plain_mlp, blobs())


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
def test_a_model_asked_in_reply_is_in_evaluation_mode(engine: Any) -> None:
    asked: list[bool] = []

    @dataclass(frozen=True)
    class Asks(Plain):
        def reply(
            self, net: Net, params: Params, kept: Params, down: Message, data: Any, memory: dict[str, Tensor]
        ) -> tuple[Params, Message]:
            batch, before = data(), {name: tensor.clone() for name, tensor in params.items()}
            alone, together = net(params, batch.x[:1])[1], net(params, batch.x)[1]
            asked.append(torch.allclose(alone, together[:1]) and bool(batch.valid.all()))
            assert all(torch.equal(before[name], tensor) for name, tensor in params.items())
            return super().reply(net, params, kept, down, data, memory)

    simulate(Asks(), convolutional, _images(), classes=CLASSES, rounds=1, batch_size=4, dtype="float64", engine=engine)
    assert asked == [True] * 3


def test_cross_entropy_is_the_same_number_alone_and_among_others() -> None:
    net = Net(plain_mlp, (6,), 4)
    params = {name: tensor.requires_grad_() for name, tensor in net.init(0).items()}
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 6, generator=draw), torch.randint(4, (9,), generator=draw)
    found = []
    for asked in (net, net.bound(params)):
        loss, _ = cross_entropy(asked, params, Batch(x, y, torch.ones(9)))
        found.append([loss, *torch.autograd.grad(loss.mean(), list(params.values()))])
    assert (net.alone, net.bound(params).alone) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _images() -> Any:
    return blobs((6, 9, 12), shape=(1, 5, 5))


def test_a_fault_of_the_method_is_raised_where_its_numbers_are_needed() -> None:
    @dataclass(frozen=True)
    class Fails(Plain):
        def scores(self, net: Net, params: Params, down: Message, x: Tensor, own: Tensor) -> dict[str, Tensor]:
            raise ZeroDivisionError("mine")

    method: Method = Fails()
    with pytest.raises(ZeroDivisionError, match="mine"):
        simulate(method, plain_mlp, blobs())
