"""How long does `sparring report` take for a million lines, with how much memory, and how long a refresh of `watch`?

python benchmarks/report_speed.py [--quick]    # targets: report 10 s and 1 GB on one core, refresh 100 ms
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from threading import Thread

import numpy as np
import report

KEYS = ["episode", "avg_loss", "avg_acc", "episode_reward", "total_steps", "lr", "timestamp", "update"]
KEYS += [f"rollout/{name}" for name in ("success_rate", "episode_length")]
KEYS += [f"train/metric_{i}" for i in range(11)] + [f"perf/metric_{i}" for i in range(5)]
KEYS += [f"reward/term_{i}" for i in range(4)]
REFRESHES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 lines; results not stored")
    # for the child processes: each measurement has its own peak memory
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(json.dumps(MEASURES[arguments.measure](arguments.run) | {"peak_mb": peak_mb()}))
        return
    about, lines = report.metadata(), 20_000 if arguments.quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        size = write_run(Path(folder), lines)
        found = {name: measure_in_process(name, Path(folder)) for name in MEASURES}
    content = {"about": about | {"load_after": report.load()}, "lines": lines, "keys": len(KEYS), "megabytes": size}
    content |= found
    rows = [("measure", "seconds", "peak MB"), ("report", found["report"]["seconds"], found["report"]["peak_mb"])]
    rows += [("report, CPU time", found["report"]["cpu_seconds"], "")]
    rows += [("watch, first read", found["watch"]["first_seconds"], found["watch"]["peak_mb"])]
    rows += [("watch, a refresh", f"{found['watch']['refresh_ms'] / 1e3:.4f}", "")]
    rows += [("watch, slowest refresh", f"{found['watch']['slowest_refresh_ms'] / 1e3:.4f}", "")]
    print(f"{lines:,} lines of {len(KEYS)} keys, {size} MB\n{report.table(rows)}")
    if not arguments.quick:
        report.write_json(report.RESULTS / "report_speed.json", content)


def write_run(folder: Path, lines: int) -> int:
    """Write the metrics file of a very long run; return its size in MB."""
    file = folder / "episode_metrics.jsonl"
    random = np.random.default_rng(0)
    with file.open("w") as out:
        for begin in range(0, lines, 1000):
            values = random.normal(size=(1000, len(KEYS))).tolist()
            out.writelines(json.dumps(line(begin + i, row)) + "\n" for i, row in enumerate(values))
    return round(file.stat().st_size / 1e6)


def line(update: int, values: list[float]) -> dict:
    counted = {"update": update, "total_steps": 2048 * update, "episode": 40 * update, "timestamp": 1.79e9 + update}
    return dict(zip(KEYS, values, strict=True)) | counted | {"avg_acc": None}


def measure_in_process(name: str, folder: Path) -> dict:
    """Measure in a new process, on one core."""
    words = [sys.executable, __file__, "--measure", name, "--run", str(folder)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def measure_report(folder: Path) -> dict:
    """Time the command, including its imports."""
    began = time.perf_counter()
    from sparring.cli.main import main as sparring

    output = folder / "report.html"
    # stdout is reserved for the result of this process
    sys.stdout, own = sys.stderr, sys.stdout
    assert sparring(["report", str(folder), "--output", str(output)]) == 0
    sys.stdout = own
    taken = {"seconds": round(time.perf_counter() - began, 2), "cpu_seconds": round(time.process_time(), 2)}
    return taken | {"page_mb": round(output.stat().st_size / 1e6, 2)}


def measure_watch(folder: Path) -> dict:
    """Time HTTP requests for a refresh, as the page sends them, each after one new line."""
    from sparring.processes.server import HOST
    from sparring.report.page import open_server

    began = time.perf_counter()
    server = open_server([folder], 17500)
    first = time.perf_counter() - began
    Thread(target=server.serve_forever, daemon=True).start()
    connection, version, taken = HTTPConnection(HOST, server.server_address[1]), 0, []
    for i in range(REFRESHES + 1):
        with (folder / "episode_metrics.jsonl").open("a") as file:
            file.write(json.dumps(line(10_000_000 + i, [0.0] * len(KEYS))) + "\n")
        began = time.perf_counter()
        connection.request("GET", f"/data.json?since={version}")
        news = connection.getresponse().read()
        taken.append(1e3 * (time.perf_counter() - began))
        version = json.loads(news)["version"]
    # the first request fetches all data
    refreshes = taken[1:]
    return {
        "first_seconds": round(first, 2),
        "refresh_ms": round(median(refreshes), 1),
        "slowest_refresh_ms": round(max(refreshes), 1),
        "refresh_kb": round(len(news) / 1e3),
    }


def peak_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


MEASURES = {"report": measure_report, "watch": measure_watch}

if __name__ == "__main__":
    main()
