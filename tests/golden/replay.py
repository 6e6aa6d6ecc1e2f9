"""Replay recorded cases of other implementations, and compare everything they recorded.

    python tests/golden/replay.py CASE_DIR...

A case is a folder with case.json and arrays.npz in the format of tests/golden/README.md.  Prints, per case, how many
quantities were compared and the largest difference; exits with 1 on a mismatch and with 2 without a case.
"""

import json
import sys
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedbench import ClientArrays, Outcome, simulate
from fedbench.averaging import average, client_weights
from fedbench.data import Arrays
from fedbench.engines.choice import EngineName
from fedbench.evaluation import predict
from fedbench.method import Message, Method, Rows, parameters, rows
from fedbench.methods.fedavg import FedAvg
from fedbench.methods.fedper import FedPer
from fedbench.methods.fedproto import FedProto, aggregate, cumulative, last_batch_mean, nearest
from fedbench.methods.fedprox import FedProx
from fedbench.methods.fedrep import FedRep
from fedbench.methods.fesem import FeSEM, squared_distances
from fedbench.methods.local import Local
from fedbench.models.cnn import CnnMnist
from fedbench.net import ModelFactory, Params
from fedbench.partition import NWayKShot
from fedbench.settings import Optimizer, Training

Array = NDArray[Any]


@dataclass
class Comparison:
    """What was compared with the recorded arrays of one case."""

    arrays: dict[str, Array]
    tolerance: float
    compared: int = 0
    largest: float = 0.0
    where: str = ""
    mismatches: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def check(self, name: str, found: Any) -> None:
        """Compare one quantity if the case recorded it: integers exactly, floats within the absolute tolerance."""
        if name not in self.arrays:
            return
        wanted = self.arrays[name]
        found = np.asarray(found)
        self.compared += 1
        self.seen.add(name)
        if found.shape != wanted.shape:
            self.mismatches.append(f"{name}: shape {found.shape}, recorded {wanted.shape}")
            return
        gap = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
        worst = float(gap.max()) if gap.size else 0.0
        exact = wanted.dtype.kind in "iub"
        if exact and found.dtype.kind not in "iub" and not np.array_equal(found, np.rint(found)):
            self.mismatches.append(f"{name}: not integers")
        if not worst <= (0 if exact else self.tolerance):
            self.mismatches.append(f"{name}: off by {worst:.3g}")
        if worst > self.largest:
            self.largest, self.where = worst, name

    def unseen(self, inputs: tuple[str, ...]) -> list[str]:
        """Return recorded quantities that nothing was compared with."""
        return [name for name in self.arrays if name not in self.seen and not name.startswith(inputs)]


def replay(folder: Path, engine: EngineName = "auto") -> Comparison:
    """Run one case and return the comparison; raises ValueError if recorded quantities were left uncompared."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    with np.load(folder / "arrays.npz", allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    comparison = Comparison(arrays, case["tolerance"].get("float", 0.0))
    runners: dict[str, Callable[[dict[str, Any], Comparison], tuple[str, ...]]] = {
        "partition": _partition,
        "prototype_aggregation": _aggregation,
        "evaluation": _evaluation,
        "averaging": _averaging,
    }
    runner = runners.get(case["method"], partial(_training, engine))
    inputs = runner(case, comparison)
    left = comparison.unseen(inputs)
    if left:
        raise ValueError(f"{folder.name}: nothing was compared with {', '.join(left[:5])} ({len(left)} in all)")
    return comparison


# --- training cases

_NAMES = {
    "mlp": {"fc1": "body.fc1", "fc2": "head"},
    "cnn": {"conv1": "body.conv1", "conv2": "body.conv2", "fc1": "body.fc1", "fc2": "head.fc2"},
    "bnnet": {n: f"body.{n}" for n in ("conv1", "bn1", "conv2", "bn2")} | {"fc": "head"},
    "mclr": {"fc": "head"},
}


def _pair(body: nn.Module, head: nn.Module) -> nn.Module:
    model = nn.Module()
    model.body, model.head = body, head
    return model


def _model(name: str, channels: int) -> ModelFactory:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        if name == "cnn":
            return CnnMnist(shape, classes, channels=channels, dropout=0.0)
        if name == "mclr":
            return _pair(nn.Flatten(), nn.Linear(20, classes))
        if name == "mlp":
            return _pair(nn.Sequential(OrderedDict(fc1=nn.Linear(20, 16), relu=nn.ReLU())), nn.Linear(16, classes))
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(1, 4, 3)),
            ("bn1", nn.BatchNorm2d(4)),
            ("relu1", nn.ReLU()),
        ]
        layers += [
            ("pool", nn.MaxPool2d(2)),
            ("conv2", nn.Conv2d(4, 6, 3)),
            ("bn2", nn.BatchNorm2d(6)),
            ("relu2", nn.ReLU()),
        ]
        return _pair(nn.Sequential(OrderedDict([*layers, ("flatten", nn.Flatten())])), nn.Linear(6, classes))

    return build


@dataclass
class _Names:
    """Translates between the recorded names and those of the models here."""

    ours_of: dict[str, str]

    def ours(self, name: str) -> str:
        module, _, tensor = name.rpartition(".")
        return f"{self.ours_of[module]}.{tensor}"

    def theirs(self, params: Message | Params) -> Params:
        back = {ours: theirs for theirs, ours in self.ours_of.items()}
        return {
            f"{back[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": t
            for n, t in params.items()
            if isinstance(t, Tensor)
        }

    def read(self, arrays: dict[str, Array], prefix: str) -> Params:
        return {
            self.ours(name.removeprefix(prefix)): torch.from_numpy(array)
            for name, array in arrays.items()
            if name.startswith(prefix)
        }


def _method(case: dict[str, Any], names: _Names, arrays: dict[str, Array], folder: Path) -> Method:
    personal = tuple(sorted({names.ours(name).rpartition(".")[0] for name in case.get("personal", ())}))
    kind = case["method"]
    if kind == "local":
        return Local()
    if kind == "fedavg":
        return FedAvg(weights=case["aggregation"])
    if kind == "fedprox":
        return FedProx(weights=case["aggregation"], mu=case["mu"])
    if kind == "fedper":
        return FedPer(weights=case["aggregation"], personal=personal)
    if kind == "fedrep":
        epochs = {"head_epochs": case["head_epochs"], "body_epochs": case["body_epochs"]}
        return FedRep(weights=case["aggregation"], personal=personal, **epochs)
    if kind == "fedproto":
        return FedProto(lam=case["lam"])
    centres = [names.read(arrays, f"init_center_{k}/") for k in range(case["K"])]
    stacked: dict[str, Any] = {name: np.stack([centre[name] for centre in centres]) for name in centres[0]}
    np.savez(folder / "centres.npz", **stacked)
    return FeSEM(k=case["K"], init="given", centres=str(folder / "centres.npz"))


def _settings(case: dict[str, Any]) -> Training:
    given = case["optimizer"]
    optimizer = Optimizer(
        lr=given["lr"],
        momentum=given["momentum"],
        weight_decay=given["weight_decay"]["weight"],
        weight_decay_bias=given["weight_decay"]["bias"],
    )
    last = "drop" if case["drop_last"] else "drop_single" if case.get("skip_batches_of_one") else "keep"
    return Training(
        rounds=case["rounds"] + (case["method"] == "fesem"),  # whose recording ends in the middle of a round
        epochs=case.get("local_epochs", 1),
        batch_size=case["batch_size"],
        last_batch=last,  # type: ignore[arg-type]
        shuffle=False,
        optimizer=optimizer,
        dtype="float64",
    )


def _training(engine: EngineName, case: dict[str, Any], comparison: Comparison) -> tuple[str, ...]:
    arrays = comparison.arrays
    names = _Names(_NAMES[case["model"]["name"]])
    count = case["clients"]
    training = _settings(case)
    watcher = _Watcher(case, comparison, names, count)
    initial: Any = names.read(arrays, "init/") or [names.read(arrays, f"init_{i}/") for i in range(count)]
    channels = case["model"].get("channels") or [20]
    models = [_model(case["model"]["name"], c) for c in dict.fromkeys(channels)]
    blocks = [list(b) for b in np.array_split(np.array(channels), len(models))] if len(models) > 1 else []
    if any(len(set(block)) > 1 for block in blocks):  # architectures that are not in contiguous blocks
        models = [_model(case["model"]["name"], c) for c in channels]
    clients = [
        ClientArrays(*(arrays[f"{kind}_{i}"] for kind in ("x_train", "y_train", "x_test", "y_test")))
        for i in range(count)
    ]
    classes = case["model"]["num_classes"]
    with tempfile.TemporaryDirectory() as scratch:
        method = _method(case, names, arrays, Path(scratch))
        run = {
            "engine": engine,
            "training": training,
            "classes": classes,
            "initial": initial,
            "participants": case.get("participants"),
        }
        outcome = simulate(method, models, clients, probe=watcher.probe, watch_merge=watcher.merged, **run)
    _check_outcome(case, comparison, outcome)
    if case["method"] == "fedproto":
        _check_counts(
            case,
            comparison,
            lambda watch: simulate(
                FedProto(lam=case["lam"], aggregation="weighted"), models, clients, watch_merge=watch, **run
            ),
        )
    return ("x_", "y_", "idx_", "init")


class _Watcher:
    """Compares parameters while the federation runs; the stages of a round come in a fixed order."""

    def __init__(self, case: dict[str, Any], comparison: Comparison, names: _Names, clients: int) -> None:
        self._case, self._comparison, self._names = case, comparison, names
        self._done: dict[str, int] = defaultdict(int)
        self._clients = clients
        self._centres: Params = {}
        if case["method"] == "fesem":
            given = [names.read(comparison.arrays, f"init_center_{k}/") for k in range(case["K"])]
            self._centres = {name: torch.stack([centre[name] for centre in given]) for name in given[0]}

    @property
    def _round(self) -> int:
        return self._done["merge"] + 1

    def probe(self, stage: str, client: int, params: Params) -> None:
        fesem = self._case["method"] == "fesem"
        if stage == "trained":
            self._compare(f"r{self._round - fesem}/local_{client}", params)
        if stage == "phase/head":
            self._compare(f"r{self._round}/after_head_{client}", params)
        if stage == "evaluated" and not fesem:  # after the merge of the round
            self._compare(f"r{self._round - 1}/client_{client}", params)

    def merged(self, uploads: Message, server: Message) -> None:
        number = self._round
        self._done["merge"] += 1
        if self._case["method"] == "fesem":
            self._fesem(number, parameters(uploads), parameters(server))
        elif self._case["method"] == "fedproto":
            self._fedproto(number, uploads, server)
        else:
            self._compare(f"r{number}/global", parameters(server))

    def _compare(self, prefix: str, params: Params) -> None:
        for name, tensor in self._names.theirs(params).items():
            self._comparison.check(f"{prefix}/{name}", tensor.detach().numpy().copy())

    def _fesem(self, number: int, models: Params, server: Params) -> None:
        looked_at = [name for name in models if models[name].is_floating_point() and "running" not in name]
        apart = squared_distances(models, self._centres, looked_at)
        moved = {name.removeprefix("centre/"): t for name, t in server.items() if name.startswith("centre/")}
        own = server["assignment"]
        after = squared_distances(models, moved, looked_at).gather(1, own[:, None])
        self._comparison.check(f"r{number}/distance", apart)
        self._comparison.check(f"r{number}/assign", own)
        self._comparison.check(f"r{number}/objective_after_assign", apart.gather(1, own[:, None]).mean())
        self._comparison.check(f"r{number}/objective_after_mean", after.mean())
        for k in range(self._case["K"]):
            self._compare(f"r{number}/center_{k}", {name: tensor[k] for name, tensor in moved.items()})
        self._centres = moved

    def _fedproto(self, number: int, uploads: Message, server: Message) -> None:
        local, merged = rows(uploads, "prototypes"), rows(server, "prototypes")
        self._comparison.check(f"r{number}/local_protos", local.values)
        self._comparison.check(f"r{number}/local_protos_mask", local.present)
        self._comparison.check(f"r{number}/protos", merged.values)
        self._comparison.check(f"r{number}/protos_mask", merged.present)


def _check_outcome(case: dict[str, Any], comparison: Comparison, outcome: Outcome) -> None:
    fesem = case["method"] == "fesem"
    sizes = outcome.sizes["test"]
    hits = {
        "correct_head": "test/accuracy/head",
        "correct_local": "local/accuracy/head",
        "correct_proto_own": "test/accuracy/prototype_own",
        "correct_proto_all": "test/accuracy/prototype_all",
    }
    plain = {
        "legacy_l": "test/accuracy/cumulative/head",
        "legacy_g": "test/accuracy/cumulative/prototype",
        "legacy_proto_loss": "test/last_batch/proto",
    }
    regulariser = {"fedprox": "prox", "fedproto": "proto"}.get(case["method"])
    losses = {"loss_total": "loss", "loss_head": "loss/head", "loss_body": "loss/body"}
    losses |= {"loss_ce": "loss/ce", "loss_reg": f"loss/{regulariser}"} if regulariser else {"loss_ce": "loss"}
    for number in range(1, case["rounds"] + 1):
        for theirs, ours in hits.items():
            if ours in outcome.metrics:
                counts = (outcome.metrics[ours][number - 1] * sizes).round(9)
                comparison.check(f"r{number}/{theirs}", np.where(np.isnan(counts), -1, counts))  # -1: did not take part
        for theirs, ours in plain.items():
            if ours in outcome.metrics:
                comparison.check(f"r{number}/{theirs}", outcome.metrics[ours][number - 1])
    for number in range(1, len(outcome.work["steps"]) + 1):
        for theirs, ours in losses.items():
            if f"train/{ours}" in outcome.metrics:
                name = f"r{number - fesem}/{theirs}"
                comparison.check(name, np.nan_to_num(outcome.metrics[f"train/{ours}"][number - 1]))
    comparison.check("upload_scalars", outcome.traffic["up/scalars"][: case["rounds"]])


def _check_counts(
    case: dict[str, Any], comparison: Comparison, run: Callable[[Callable[[Message, Message], None]], Any]
) -> None:
    """Compare the samples behind each prototype: only the weighted aggregation sends them; the data decide them."""
    counted: list[Tensor] = []
    run(lambda uploads, _: counted.append(rows(uploads, "counts").values))
    for number, counts in enumerate(counted, 1):
        comparison.check(f"r{number}/local_protos_count", counts)


# --- cases without training


def _partition(case: dict[str, Any], comparison: Comparison) -> tuple[str, ...]:
    mnist = case["dataset"] == "mnist"
    for j, setting in enumerate(case["settings"]):
        shots = 40 if mnist else setting["test_shots"]
        rule = NWayKShot(
            n=setting["ways"],
            k=setting["shots"],
            stdev=setting["stdev"],
            noise="uniform",
            k_noise="narrow" if mnist else "wide",
            assignment="slots",
            clients=setting["num_users"],
            train_shots_max=setting["train_shots_max"],
            test_shots=shots,
        )
        n, k, held = rule.shots(case["num_classes"], setting["seed"])
        mask = np.zeros((len(n), case["num_classes"]), bool)
        for client, labels in enumerate(held):
            mask[client, labels] = True
        for name, found in {"n": n, "k": k, "class_mask": mask}.items():
            comparison.check(f"s{j}/{name}", found)
        _indices(f"s{j}", rule, case["num_classes"], setting["seed"], comparison)
    return ("train_labels", "test_labels")


def _indices(prefix: str, rule: NWayKShot, classes: int, seed: int, comparison: Comparison) -> None:
    widths = {"train": rule.train_shots_max, "test": rule.test_shots}
    # Where only a layout was recorded, every class is a pool of exactly the clients' slots.
    y_train, y_test = (
        comparison.arrays.get(f"{split}_labels", np.repeat(np.arange(classes), rule.clients * width)).astype(np.int64)
        for split, width in widths.items()
    )
    pixels = [np.zeros((len(y), 1), np.float32) for y in (y_train, y_test)]
    split = rule.split(Arrays(pixels[0], y_train, pixels[1], y_test, classes), seed)
    for name, lists in {"train": split.train, "test": split.test}.items():
        comparison.check(f"{prefix}/{name}_index", np.concatenate(lists))
        comparison.check(f"{prefix}/{name}_start", np.cumsum([0, *map(len, lists)]))


def _evaluation(case: dict[str, Any], comparison: Comparison) -> tuple[str, ...]:
    arrays = {name: torch.from_numpy(array) for name, array in comparison.arrays.items()}
    prototypes = Rows(arrays["protos"], arrays["protos_mask"])
    head, own, totals, official_loss, full_loss = [], [], [], [], []
    for i, classes in enumerate(case["classes"]):
        labels = arrays[f"labels_{i}"]
        mine = torch.zeros(case["num_classes"], dtype=torch.bool)
        mine[classes] = True
        by_head = predict(arrays[f"logits_{i}"])
        by_prototype = predict(-nearest("mse", arrays[f"embedding_{i}"], prototypes, mine, far=100.0))
        comparison.check(f"pred_head_{i}", by_head)
        comparison.check(f"pred_proto_{i}", by_prototype)
        head.append(int((by_head == labels).sum()))
        own.append(int((by_prototype == labels).sum()))
        totals.append(len(labels))
        apart = (arrays[f"embedding_{i}"] - prototypes.values[labels]).square().mean(1)
        per_example = torch.where(prototypes.present[labels], apart, 0).numpy()
        official_loss.append(last_batch_mean(per_example, case["legacy_batch"]))
        full_loss.append(float(per_example.mean()))
    legacy_l, legacy_g = cumulative(head, own, totals)
    found: dict[str, Any] = {
        "correct_head": np.array(head),
        "correct_proto_own": np.array(own),
        "accuracy_head": np.array(head) / totals,
        "accuracy_proto_own": np.array(own) / totals,
        "legacy_l": legacy_l,
        "legacy_g": legacy_g,
        "legacy_proto_loss": official_loss,
        "proto_loss_full": full_loss,
    }
    for name, values in found.items():
        comparison.check(name, values)
        if name in case["mean_and_std"]:
            comparison.arrays[f"mean_and_std/{name}"] = np.array(case["mean_and_std"][name])
            comparison.check(f"mean_and_std/{name}", [np.mean(values), np.std(values)])
    return ("logits_", "embedding_", "labels_", "protos")


def _aggregation(case: dict[str, Any], comparison: Comparison) -> tuple[str, ...]:
    arrays = {name: torch.from_numpy(array) for name, array in comparison.arrays.items()}
    local = Rows(arrays["local_protos"], arrays["local_protos_mask"])
    counts = arrays["local_protos_count"].double()
    rules = {
        "plain_mean": aggregate(local, local.present.double()),
        "size_weighted": aggregate(local, counts),
        "eq6_literal": aggregate(local, counts, literal=True),
    }
    for name, merged in rules.items():
        comparison.check(name, merged.values)
        comparison.check("protos_mask", merged.present)
    width = local.values.shape[2]
    everybody = rules["plain_mean"].present
    comparison.check("upload_scalars", local.present.sum(1) * width)
    comparison.check("download_scalars", torch.full((len(local.present),), int(everybody.sum()) * width))
    comparison.check("download_own_classes", (local.present & everybody).sum(1) * width)
    return ("local_protos",)


def _averaging(case: dict[str, Any], comparison: Comparison) -> tuple[str, ...]:
    """Compare the averages; counters are recorded under three foreign rules too, which are computed here by hand."""
    arrays = comparison.arrays
    sizes = torch.tensor(case["n_train"], dtype=torch.float64)
    names = [name.removeprefix("in_0/") for name in arrays if name.startswith("in_0/")]
    stacked = {
        name: torch.from_numpy(np.stack([arrays[f"in_{i}/{name}"] for i in range(len(sizes))])) for name in names
    }
    for rule in ("uniform", "size"):
        weights = client_weights(rule, sizes)
        merged = average(stacked, weights)
        for name, tensor in merged.items():
            counter = not stacked[name].is_floating_point()
            mean = float((weights * stacked[name]).sum()) if counter else 0.0
            comparison.check(f"{rule}/{name}", np.array(mean) if counter else tensor)
            comparison.check(f"{rule}_loaded/{name}", np.array(int(mean)) if counter else tensor)
            comparison.check(f"max/{name}", tensor)
    return ("in_", "n_train")


def _lines(folders: list[Path]) -> Iterator[tuple[str, bool]]:
    for folder in folders:
        try:
            done = replay(folder)
        except (OSError, ValueError, KeyError) as error:
            yield f"{folder}: cannot be replayed: {error}", False
            continue
        verdict = "equal" if not done.mismatches else "DIFFERENT: " + "; ".join(done.mismatches[:5])
        at = f" ({done.where})" if done.where else ""
        yield (
            f"{folder.name}: {done.compared} quantities, largest difference {done.largest:.2g}{at}: {verdict}",
            not done.mismatches,
        )


def main(arguments: list[str]) -> int:
    """Replay the named folders and print a line for each."""
    if not arguments:
        print(__doc__)
        return 2
    good = True
    for line, equal in _lines([Path(a) for a in arguments]):
        print(line, flush=True)
        good &= equal
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
