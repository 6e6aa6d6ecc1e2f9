"""Plays rounds of a federation of many clients in a process of its own, and prints time and peak memory as JSON.

    python benchmarks/clients.py CLIENTS [METHOD]

All federations have the data of the workload: 6,000 digits, shared among more clients or fewer.
"""

import json
import sys
from pathlib import Path

import federations
import torch
import workload

from fedbench import memory


def peak_kb() -> int:
    """Return the most memory that this program had, in kB (Linux).

    Not getrusage's: that begins with what the process had before it became this program.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main(clients: int, method: str) -> None:
    memory.keep_freed()
    torch.set_num_threads(1)
    data = federations.digits(clients, workload.CLIENTS * workload.SAMPLES // clients)
    federation = federations.make(method, "cnn_mnist", data)
    seconds = [federation.play() for _ in range(4)][1:]
    print(
        json.dumps(
            {
                "us_per_client_step": 1e6 * min(seconds) / federation.steps,
                "us_per_sample": 1e6 * min(seconds) / federation.record.work["samples"].sum(),
                "peak_MB": peak_kb() / 1024,
                "data_MB": (data.x.nbytes + data.y.nbytes) / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "fedavg")
