"""Flower's FedAvg over gRPC as a party of ``peers``.

Flower is no dependency of anything here. Whoever has it in a virtual environment names the Python of that
one, which then runs this module, with numpy and Flower alone: once as the server and once for each client.
The server does a round for each line it reads. These entry points of Flower's are the ones that need no
services beside them; its documentation calls them deprecated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from ports import free_port

from benchmarks.tcp_bytes import tcp_bytes

TOOLS: Final = Path(__file__).parent.parent
ENDLESS: Final = 1_000_000
MISSING: Final = (
    "Flower has no figure: name the Python of an environment that has it (pip install flwr) with "
    "--flower-python"
)


class Flower:
    """A server and its clients, all connected; a context manager."""

    def __init__(self, python: Path, folder: Path, *, learners: int, elements: int) -> None:
        """Start them.

        Args:
            python: of an environment with Flower.
            folder: where their logs go.
            learners: clients, all of them in every round.
            elements: of the whole model.
        """
        self._stack = ExitStack()
        self._folder = folder
        self._bytes: int | None = None
        address = f"127.0.0.1:{free_port()}"
        self._server = self._start(python, "server", address, str(learners), str(elements))
        for client in range(learners):
            self._start(python, "client", address, str(client), str(elements))

    def _start(self, python: Path, *words: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(TOOLS), "FLWR_TELEMETRY_ENABLED": "0"}
        with (self._folder / f"flower-{words[0]}-{words[2]}.log").open("w") as log:
            process = subprocess.Popen(
                [python, "-W", "ignore", "-m", "benchmarks.outer_flower", *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def __enter__(self) -> Flower:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self) -> int | None:
        """Send the model to all clients, and average what they return."""
        assert self._server.stdin is not None
        self._server.stdin.write("round\n")
        self._server.stdin.flush()
        before, self._bytes = self._bytes, self._answer()
        # A client tells what it had moved when it was asked: the answer of one round, the model of the next.
        return None if before is None or self._bytes is None else self._bytes - before

    def _answer(self) -> int | None:
        """Wait for the server.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._server.stdout is not None
        for line in self._server.stdout:
            word, _, number = line.strip().partition(" ")
            if word == "yeto-bench":
                return int(number) if number != "None" else None
        logs = sorted(self._folder.glob("flower-*.log"))
        said = " | ".join(log.read_text()[-500:] for log in logs)
        raise RuntimeError(f"Flower's server ended: {said}")


def _tell(number: object) -> None:
    print(f"yeto-bench {number}", flush=True)


def _serve(address: str, clients: int, elements: int) -> None:
    """Be the server."""
    import flwr
    import numpy as np

    class WhenTold(flwr.server.strategy.FedAvg):  # type: ignore[misc]
        """FedAvg that waits for a line before each round."""

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            if server_round == 1:
                client_manager.wait_for(clients)
                _tell(None)
            if not sys.stdin.readline():
                sys.exit()
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            if failures or len(results) != clients:
                raise RuntimeError(f"{len(results)} of {clients} clients answered: {failures}")
            aggregated = super().aggregate_fit(server_round, results, failures)
            counts = [fit.metrics["bytes"] for _, fit in results if fit.metrics["client"] == 0]
            _tell(counts[0] if counts[0] >= 0 else None)
            return aggregated

    strategy = WhenTold(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=flwr.common.ndarrays_to_parameters([np.zeros(elements, dtype=np.float32)]),
    )
    config = flwr.server.ServerConfig(num_rounds=ENDLESS)
    flwr.server.start_server(server_address=address, config=config, strategy=strategy)


def _train(address: str, client: int, elements: int) -> None:
    """Be a client."""
    import flwr
    import numpy as np

    delta = (0.01 * np.random.default_rng(client).standard_normal(elements)).astype(np.float32)

    class Adds(flwr.client.NumPyClient):  # type: ignore[misc]
        """A client whose training adds a constant."""

        def fit(self, parameters: Any, config: Any) -> Any:
            moved = tcp_bytes()
            return [parameters[0] + delta], 1, {"client": client, "bytes": -1 if moved is None else moved}

    flwr.client.start_client(server_address=address, client=Adds().to_client())


if __name__ == "__main__":
    {"server": _serve, "client": _train}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
