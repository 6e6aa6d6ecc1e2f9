"""What a GPU gives: whether it computes the CPU's numbers, and how long rounds take on it.

    python benchmarks/gpu.py [--device cuda] [--small] [--write]

Checks that both engines agree with the loop on the CPU, in float64 and float32, for every method; then times the
workload and its evaluation with 20, 200 and 2,000 clients, several seeds of it as one program, and ResNet-18 on
photographs of CIFAR-10's size.  With --device cpu, and at a small size, it runs anywhere.  Prints Markdown tables;
--write puts them into README.md.  Exits with 1 if numbers differ by more than they may.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial

import federations
import readme
import torch
from torch import Tensor

from fedbench import memory, plugins
from fedbench.engines import Engine
from fedbench.engines.choice import Chosen, EngineName
from fedbench.engines.together import play_together
from fedbench.method import Rows

ENGINES: tuple[EngineName, ...] = ("loop", "vectorised")
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}


def tensors(federation: federations.Federation) -> Iterator[Tensor]:
    """Yield everything that a federation carries from round to round, and the losses of every client."""
    for entry in federation.state.server.values():
        yield from entry if isinstance(entry, Rows) else (entry,)
    for kept in federation.state.kept:
        yield from kept.values()
    for name, values in federation.examine()[1].items():
        if "loss" in name:  # a single rounding can turn an answer
            yield torch.from_numpy(values)


def difference(method: str, model: str, engine: EngineName, device: str, dtype: torch.dtype) -> float:
    """Return how far two rounds end from those of the loop on the CPU in float64, relative to 1 + the value."""
    found = []
    for where, kind, name in ((device, dtype, engine), ("cpu", torch.float64, "loop")):
        data = federations.digits(5, 21, where, kind)
        federation = federations.make(method, model, data, engine=name)
        for _ in range(2):
            federation.play()
        found.append([tensor.cpu().double() for tensor in tensors(federation)])
    return max(float(((a - b).abs() / (1 + b.abs())).max()) for a, b in zip(*found, strict=True))


def agreement(device: str) -> tuple[str, bool]:
    """Return a table of the largest differences to the loop on the CPU, and whether all are small enough."""
    rows, good = [], True
    for method in plugins.names("methods"):
        for engine in ENGINES:
            row = [f"{method}, {engine}"]
            for dtype, allowed in ALLOWED.items():
                worst = max(difference(method, model, engine, device, dtype) for model in ("cnn_mnist", "mlp"))
                good &= worst <= allowed
                row.append(f"{worst:.1e}")
            rows.append(row)
    return readme.table([f"{device} against the loop on the CPU", *(str(dtype) for dtype in ALLOWED)], rows), good


def timed(federation: federations.Federation, rounds: int) -> list[str]:
    """Return the columns of a table: seconds of a round and of an evaluation, µs per client-step and per sample, and
    peak memory on a GPU."""
    cuda = federation.setup.data.x.device.type == "cuda"
    federation.play()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = min(federation.play() for _ in range(rounds))
    examined = min(federation.examine()[0] for _ in range(1 + rounds))
    peak = f"{torch.cuda.max_memory_allocated() / 2**20:,.0f}" if cuda else ""
    samples = sum(map(len, federation.setup.data.train))
    times = [f"{seconds:.3f}", f"{1e6 * seconds / federation.steps:,.0f}"]
    return [*times, f"{examined:.3f}", f"{1e6 * examined / samples:,.1f}", peak]


HEAD = ["s per round", "µs per client-step", "s per evaluation", "µs per sample", "peak MB on the GPU"]


def workloads(device: str, small: bool) -> str:
    """Return a table of the workload's times by number of clients."""
    counts, samples = ((2, 4, 8), 40) if small else ((20, 200, 2000), 300)
    rows = []
    for clients in counts:
        data = federations.digits(clients, samples, device)
        for engine in ENGINES if clients <= counts[1] else ENGINES[1:]:
            federation = federations.make("fedavg", "cnn_mnist", data, engine=engine)
            rows.append([f"{clients} clients, {engine}", *timed(federation, 3)])
    return readme.table(["the workload, cnn_mnist", *HEAD], rows)


def seeds(device: str, small: bool) -> str:
    """Return a table of the times of several seeds of the workload as one program."""
    counts, clients, samples = ((1, 2), 2, 40) if small else ((1, 4, 16), 20, 300)
    data = federations.digits(clients, samples, device)
    rows = []
    for count in counts:
        chosen = Chosen(torch.device(device), threads=1, measured=False)

        def play(engine: Engine, seed: int) -> tuple[float, int]:
            federation = federations.make("fedavg", "cnn_mnist", data, engine=engine, seed=seed)
            federation.play()
            began = time.perf_counter()
            for _ in range(3):
                federation.play()
            return (time.perf_counter() - began) / 3, federation.steps

        done = play_together([partial(play, seed=seed) for seed in range(count)], chosen)
        seconds, steps = max(second for second, _ in done), sum(step for _, step in done)
        rows.append([f"{count} seed{'s' * (count > 1)}", f"{seconds:.3f}", f"{1e6 * seconds / steps:,.0f}"])
    return readme.table(["seeds of the workload together", *HEAD[:2]], rows)


def photographs(device: str, small: bool) -> str:
    """Return a table of ResNet-18's times."""
    clients, samples, batches = (2, 8, (4,)) if small else (20, 96, (8, 32))
    data = federations.photographs(clients, samples, device)
    rows = []
    for batch in batches:
        for engine in ENGINES:
            federation = federations.make("fedavg", "resnet18", data, engine=engine, batch=batch)
            rows.append([f"batches of {batch}, {engine}", *timed(federation, 2)])
    return readme.table([f"resnet18, {clients} clients, 3x32x32", *HEAD], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny federations, to see that all of it runs")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    given = parser.parse_args()
    memory.keep_freed()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    parts = [f"{time.strftime('%Y-%m-%d')}, {readme.machine()}."]
    same, good = agreement(given.device)
    for part in (same, *(make(given.device, given.small) for make in (workloads, seeds, photographs))):
        parts.append(part)
        print(part, end="\n\n", flush=True)
    if given.write:
        readme.write("gpu", "\n\n".join(parts))
    if not good:
        sys.exit("numbers differ by more than they may")


if __name__ == "__main__":
    main()
