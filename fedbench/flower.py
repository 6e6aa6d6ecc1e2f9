"""One party of a federation on Flower: `python -m fedbench.flower FOLDER HOST:PORT`, for a folder by `fedbench.deploy`.

Messages are packed by `fedbench.wire`, never pickled, and go over gRPC: a client calls the server and stays connected,
so that it is one process from the first round to the last.  Flower calls this API old; its SuperNodes speak HTTP, and
start a process for every message.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, final

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import flwr
import torch
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Parameters,
    ReconnectIns,
    Status,
    serde,
)
from flwr.server import History, ServerConfig, SimpleClientManager

from fedbench.apart import Answer, ClientHalf, Round, play
from fedbench.deploy import THREADS, in_words, read_party, write_rounds
from fedbench.setups import Setup

_PATIENCE = 120  # seconds to wait for all clients, and for the server
_WORK = 3600  # seconds for a client to train or evaluate in a round
_OK = Status(Code.OK, "")


def main(folder: str, address: str) -> None:
    """Be a party until the last round is over."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(THREADS)
    party = read_party(Path(folder))
    if party.client is None:
        server = _Server(party.setup, Path(folder))
        flwr.server.start_server(server_address=address, server=server, config=ServerConfig(1))
    else:
        client = _Client(party.setup, party.client)
        flwr.client.start_client(server_address=address, client=client, insecure=True, max_wait_time=_PATIENCE)


@final
class _Client(flwr.client.Client):
    """A client as Flower calls it."""

    def __init__(self, setup: Setup, client: int) -> None:
        self._half, self._client = ClientHalf(setup, client), client

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        """Say which client this is."""
        return GetPropertiesRes(_OK, {"client": self._client})

    def fit(self, ins: FitIns) -> FitRes:
        """Train in a round."""
        packed, metrics = self._half.train(int(ins.config["round"]), ins.parameters.tensors[0])
        return FitRes(_OK, _message(packed), 0, metrics)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        """Evaluate what was sent."""
        _, metrics = self._half.evaluate(ins.parameters.tensors[0])
        return EvaluateRes(_OK, 0.0, 0, metrics)


@final
class _Server:
    """The server as Flower calls it, and the `Link` to its clients."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self._setup, self._folder = setup, folder
        self._manager = SimpleClientManager()
        self._proxies: dict[int, Any] = {}

    def client_manager(self) -> SimpleClientManager:
        """Return what takes note of clients that connect."""
        return self._manager

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Play all rounds."""
        clients = self._setup.data.clients
        if not self._manager.wait_for(clients, _PATIENCE):
            there = self._manager.num_available()
            raise TimeoutError(f"{there} of {clients} clients are there after {_PATIENCE} seconds")
        self._proxies = _by_number(self._manager.all().values(), clients)
        played = play(self._setup, self, _say)
        if played.message:
            print(f"{played.status} in {played.message}", flush=True)
        write_rounds(played, self._folder)
        return History(), 0.0

    def disconnect_all_clients(self, timeout: float | None) -> None:
        """Send the clients home."""
        for proxy in list(self._manager.all().values()):
            with suppress(Exception):  # it hangs up, perhaps before it has answered
                proxy.reconnect(ReconnectIns(None), _PATIENCE, None)

    def train(self, number: int, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        """Let clients train, all at once."""

        def one(client: int, message: bytes) -> Answer:
            ins = FitIns(_message(message), {"round": number})
            res = self._proxies[client].fit(ins, _WORK, number)
            sizes = serde.fit_ins_to_proto(ins).ByteSize(), serde.fit_res_to_proto(res).ByteSize()
            return Answer(res.parameters.tensors[0], res.metrics, *sizes)

        return _at_once(one, packed)

    def evaluate(self, packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
        """Let clients evaluate, all at once."""

        def one(client: int, message: bytes) -> Answer:
            ins = EvaluateIns(_message(message), {})
            res = self._proxies[client].evaluate(ins, _WORK, None)
            sizes = serde.evaluate_ins_to_proto(ins).ByteSize(), serde.evaluate_res_to_proto(res).ByteSize()
            return Answer(b"", res.metrics, *sizes)

        return _at_once(one, packed)


def _by_number(proxies: Iterable[Any], clients: int) -> dict[int, Any]:
    """Ask those that have connected which client they are; ValueError unless each is one, and another."""
    found: dict[int, Any] = {}
    for proxy in proxies:
        number = proxy.get_properties(GetPropertiesIns({}), _PATIENCE, None).properties.get("client")
        if number not in range(clients):
            raise ValueError(f"somebody connected as client {number}; want 0 to {clients - 1}")
        if number in found:
            raise ValueError(f"two have connected as client {number}")
        found[int(number)] = proxy
    return found


def _say(played: Round) -> None:
    print(*in_words(played), sep="\n", flush=True)


def _at_once(one: Callable[[int, bytes], Answer], packed: Mapping[int, bytes]) -> Mapping[int, Answer]:
    with ThreadPoolExecutor(max(1, len(packed))) as pool:
        return dict(zip(packed, pool.map(one, packed, packed.values()), strict=True))


def _message(packed: bytes) -> Parameters:
    return Parameters([packed], "fedbench")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: gRPC's threads would go on
