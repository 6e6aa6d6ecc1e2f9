"""The checks that every method passes notice what they are for, and say it in words."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import broken_methods as broken
import numpy as np
import pytest
import torch

from fedbench import apart, plugins, testing
from fedbench.averaging import Averaging
from fedbench.method import Method
from fedbench.net import Net
from fedbench.wire import DIRECTIONS

CASES: list[tuple[type[Method], str, str]] = [
    (broken.SmugglesUp, "processes", r"^the server, in a process of its own, raised KeyError: .* global variable"),
    (
        broken.SmugglesDown,
        "processes",
        r"^client 0, in a process of its own, raised KeyError: .* attribute of the class",
    ),
    (broken.LooksAtTheLast, "processes", "client 0 is another in round 1 .* something passes between them"),
    (
        broken.LooksAtTheLast,
        "order",
        r"last client first gives other numbers \(round 1, the uploads, .* global variable",
    ),
    (broken.SaysAbsent, "messages", "client 0 sends 'head' with numbers in rows that are not marked present"),
    (
        broken.SaysBuffer,
        "messages",
        r"'body.1.running_mean' of shape \(200,\), counted apart .*: give it a name of its",
    ),
    (broken.SaysNoAndSends, "messages", r"sends client 0 'body.0.bias', of which shares\(\) says no"),
    (broken.SaysNoAndSends, "contract", "SaysNoAndSends overrides init_server, which is final in Averaging"),
    (broken.Packs, "messages", "'body.0.weight' as torch.complex64, where a scalar of the model is torch.float32"),
    (broken.PacksIntegers, "messages", "'body.0.weight' with integers beyond 32 bits"),
    (broken.IgnoresPrivate, "messages", "'body.1.running_mean', which is to stay with each client"),
    (broken.OffersNothing, "messages", "offers gives a client that comes after the last round nothing"),
    (broken.ChangesParams, "inputs", "^reply changes its argument params in place"),
    (broken.ChangesServer, "inputs", "^merge changes its argument server in place"),
    (broken.DrawsFromTorch, "repeats", "draws from a global generator .* fedbench.keys"),
    (
        broken.DrawsAfresh,
        "repeats",
        r"the same run again gives other numbers \(round 1, the server's state, .* fedbench.keys",
    ),
    (broken.KeepsOnSelf, "repeats", "keeps something on itself or on its class: .* the server's state"),
    (broken.KeepsOnSelf, "resume", r"goes on from the saved state ends otherwise \(.*\): what lasts belongs"),
    (
        broken.MeanLoss,
        "loss",
        r"^MeanLoss.loss gives float64 \(\) as the total for .*: do not average, the engine does$",
    ),
    (
        broken.Embeds,
        "scores",
        r"^Embeds.scores gives float64 \(\d, 5\) as 'head' for .*; want floating point \(\d, 4\)$",
    ),
    (broken.ScoresNan, "scores", "^scores 'head' are NaN: want numbers, and -inf for a class that cannot be chosen"),
    (broken.SeesPadding, "loss", "padding changes the loss of other examples: weigh examples by batch.valid"),
    (broken.ObservesPadding, "loss", "padding changes 'seen' in the memory"),
    (broken.HidesNan, "divergence", "outputs are NaN, and the run goes on"),
    (
        broken.CrashesOnNan,
        "divergence",
        r"^ValueError: the loss is not finite \(broken_methods.py, line \d+, in reply\)$",
    ),
    (broken.WantsEverybody, "participation", r"^IndexError: .* \(broken_methods.py, line \d+, in merge\)$"),
    (
        broken.DividesByZero,
        "odd_clients",
        "has diverged: round 1: client 2 sent 'body.0.weight' with values that are not",
    ),
    (broken.KeepsNumbers, "resume", "^the server's state: int under 'round', want a tensor"),
    (broken.SinglePrecision, "precision", "must have the same dtype.*; make tensors with dtype=net.dtype$"),
    (broken.WrongPreset, "contract", "preset paper: unknown key 'mu'"),
    (broken.WrongRange, "contract", "the range of pull.pull: should be a whole number, not 0.5"),
    (broken.Undecorated, "contract", r"is not a frozen dataclass: put @dataclass\(frozen=True\) above it"),
    (broken.TakesAnything, "contract", "takes a hyperparameter that it does not have: leave __init__ to the dataclass"),
]

BY_NAME = {check.name: check for check in testing.CHECKS}


@pytest.mark.parametrize(("method", "name", "words"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_promise_is_noticed_and_said(method: type[Method], name: str, words: str) -> None:
    with pytest.raises(testing.Broken) as caught:
        BY_NAME[name](method)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_method_that_breaks_a_promise_stands_above() -> None:
    there = {c for c in vars(broken).values() if isinstance(c, type) and c.__module__ == broken.__name__}
    assert there - {broken.Plain, broken.Branches, broken.Dies} == {method for method, _, _ in CASES}


def test_verdicts_are_of_all_checks_and_an_honest_method_keeps_them() -> None:
    verdicts = list(testing.verdicts(broken.Plain))
    assert [verdict.check for verdict in verdicts] == list(testing.CHECKS)
    assert [verdict.broken for verdict in verdicts] == [""] * len(verdicts)
    assert {verdict.check.name for verdict in verdicts if verdict.remark} == {"mixed_models"}


def test_a_method_whose_clients_find_the_servers_model_fails_no_check_of_the_numbers_but_two() -> None:
    """Separate processes notice it, and so do runs of other seeds."""
    failed = {verdict.check.name for verdict in testing.verdicts(broken.SmugglesDown) if verdict.broken}
    assert failed == {"repeats", "processes"}


def test_a_method_that_cannot_be_stacked_is_told_so_and_passes() -> None:
    assert "its clients are trained one by one, which is slower: RuntimeError" in BY_NAME["engines"](broken.Branches)


def test_a_class_inside_of_a_function_is_told_where_it_belongs() -> None:
    @dataclass(frozen=True)
    class Inner(Averaging):
        def shares(self, net: Net, name: str) -> bool:
            return True

    with pytest.raises(testing.Broken, match="Inner is defined inside of a function, where no other process finds it"):
        BY_NAME["processes"](Inner)


def test_a_method_in_a_file_is_found_by_the_other_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(broken.__file__).read_text(encoding="utf-8"))
    for name, holds in (("Plain", True), ("SmugglesUp", False)):
        method = plugins.build("methods", f"./mine.py:{name}", {}, tmp_path)
        if holds:
            assert BY_NAME["processes"](method) == ""
        else:
            with pytest.raises(testing.Broken, match="KeyError"):
                BY_NAME["processes"](method)


def test_a_process_that_dies_is_named() -> None:
    with pytest.raises(testing.Broken, match=r"the process of client \d died \(exit code 9\)"):
        BY_NAME["processes"](broken.Dies)


def test_other_numbers_of_threads_are_left_as_they_are() -> None:
    before = torch.get_num_threads()
    BY_NAME["order"](broken.Plain)
    assert torch.get_num_threads() == before


def test_a_check_takes_an_instance_or_a_class() -> None:
    for method in (broken.Plain, broken.Plain()):
        checked: Any = method
        assert BY_NAME["contract"](checked) == ""


def test_processes_play_what_one_process_plays() -> None:
    here = testing._parties(broken.Plain())
    there = list(apart.in_processes(broken.Plain(), testing._federation))
    assert len(here) == len(there) == 2
    for (played, models), wanted in zip(there, here, strict=True):
        assert played.traffic["up/bytes"].min() > 0
        for client, model in models.items():
            found = {f"'{name}' of its model": values for name, values in model.items()}
            told = {**played.metrics, **played.traffic}
            found |= {name: np.array(values[client]) for name, values in told.items()}
            assert "local/loss" in found
            assert testing._difference(wanted[client], found, 1e-9) == ""
        assert all(played.fits(direction) for direction in DIRECTIONS)
