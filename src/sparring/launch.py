"""`--gpus N`: this command again, in N processes that find each other. Starts fast: no torch here."""

import os
import socket
import subprocess
import sys


def launch(processes: int, arguments: list[str]) -> int:
    """Run `sparring ARGUMENTS` in `processes` processes of this machine; the first failure ends them all."""
    environment = os.environ | {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "sparring", *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    return _wait_for_all(workers)


def _wait_for_all(workers: list[subprocess.Popen]) -> int:
    code = 0
    while workers:
        for worker in list(workers):
            try:
                worker.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:
                continue  # the terminal told the workers too; they save and leave on their own
            workers.remove(worker)
            if worker.returncode and not code:
                code = worker.returncode
                for other in workers:
                    other.terminate()
    return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
