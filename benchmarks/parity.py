"""Does each action head score exactly what it sampled, and does the parity gate detect every known error?

    python benchmarks/parity.py [--device cuda] [--quick]

Policies act in rollout batches of 1, 6 and 16 robots; then 256 of their decisions are scored in one batch. The cases
include images, points, dropout, normalisation layers and normalisers, padding dims, chunks that the end of an episode
cuts short, and a horizon longer than the executed chunk. The tables show the gate's value (the largest distance between
the means at sampling and at scoring, in standard deviations of the action), for each mutant the terms of the gate that
exceed their limits, and the value by denoising step. Exit status 1: a head fails, or a mutant passes.
"""

import argparse
import json
import sys
from dataclasses import asdict

import report
import torch
from parity_cases import HEADS, METHODS, MUTANTS, REPLAY, gate, rollout_of

from sparring.algorithms.scoring import Parity
from sparring.processes.distributed import Distributed

RESULTS = report.RESULTS / "parity.json"
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}
BATCHES = (1, 6, 16)
SEEN = {"images": True, "points": True}


def cases(quick: bool):
    """(head, reduction, precision)"""
    for precision in ("fp32",) if quick else TOLERANCE:
        for head in ("gaussian", "flow_sde") if quick else HEADS:
            for reduction in ("sum", "mean") if head in METHODS else ("sum",):
                yield head, reduction, precision


def head_parity(head: str, reduction: str, precision: str, robots: int, device: str) -> Parity:
    policy_class, config = HEADS[head]
    seen = SEEN | ({"choices": 4} if head == "discrete" else {"padding": 2})
    if head in METHODS:
        config = config | {"reduction": reduction, "horizon": 6}
    return gate(*rollout_of(policy_class, robots, device=device, seen=seen, dropout=0.3, precision=precision, **config))


def measure_heads(quick: bool, device: str) -> list[dict]:
    found = []
    for head, reduction, precision in cases(quick):
        values = {n: head_parity(head, reduction, precision, n, device) for n in BATCHES}
        passes = all(not value.excesses(TOLERANCE[precision]) for value in values.values())
        found.append(
            {
                "head": head,
                "reduction": reduction,
                "precision": precision,
                "limit": TOLERANCE[precision],
                "passes": passes,
                "batches": {n: asdict(value) for n, value in values.items()},
            }
        )
    return found


def measure_mutants(quick: bool, device: str) -> list[dict]:
    found = []
    for name, mutant in MUTANTS.items():
        for method, config in METHODS.items() if not quick else [("flow_sde", METHODS["flow_sde"])]:
            parity = gate(*rollout_of(mutant, device=device, seen=SEEN | {"padding": 2}, dropout=0.3, **config))
            trips, coarse = (parity.excesses(TOLERANCE[precision]) for precision in TOLERANCE)
            found.append({"mutant": name, "method": method, "trips": trips, "trips_at_bf16_limit": coarse})
    return found


def measure_steps(device: str) -> list[dict]:
    """Drift by step, in a long chain with little noise: sigma falls with the steps, the error of a mean does not."""
    policy, buffer = rollout_of(num_envs=1, sampling_steps=10, noise_level=0.25, seen=SEEN, device=device)
    flat = buffer.get()[:REPLAY]
    with torch.no_grad():
        scored = policy.evaluate(flat)["trace"]
    # [B, C, S, A] -> [S]
    off = (scored["mean"] - flat["trace", "mean"]).abs().amax((0, 1, 3)).cpu()
    std = policy.kernel.std.cpu()
    return [
        {"step": k, "sigma": float(std[k]), "mean_off": float(off[k]), "drift": float(off[k] / std[k])}
        for k in range(len(off))
    ]


def describe(excesses: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in excesses.items()) or "-"


def show(run: dict) -> None:
    rows = [("head", "reduction", "precision", *(f"batch {n}" for n in BATCHES), "limit", "")]
    for one in run["heads"]:
        drifts = (f"{one['batches'][n]['drift']:.1e}" for n in BATCHES)
        names = (one["head"], one["reduction"], one["precision"])
        rows.append((*names, *drifts, f"{one['limit']:g}", "passes" if one["passes"] else "FAILS"))
    print(report.table(rows), end="\n\n")
    rows = [("mutant", "method", "trips the gate at 1e-4 by", "and at 0.05 (bf16)")]
    for one in run["mutants"]:
        trips = describe(one["trips"]) if one["trips"] else "NOT DETECTED"
        rows.append((one["mutant"], one["method"], trips, describe(one["trips_at_bf16_limit"])))
    print(report.table(rows), end="\n\n")
    rows = [("step of 10", "sigma", "mean off by", "gate's value")]
    rows += [(s["step"], f"{s['sigma']:.3f}", f"{s['mean_off']:.1e}", f"{s['drift']:.1e}") for s in run["steps"]]
    print(report.table(rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="check that it runs: a few cases, results not stored")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    # sets on a GPU what a run sets: no TF32
    Distributed(args.device)
    run = {
        "about": report.metadata() | {"device": report.device(args.device), "replay": REPLAY},
        "heads": measure_heads(args.quick, args.device),
        "mutants": measure_mutants(args.quick, args.device),
        "steps": measure_steps(args.device),
    }
    show(run)
    if not args.quick:
        known = json.loads(RESULTS.read_text())["runs"] if RESULTS.is_file() else {}
        report.write_json(RESULTS, {"runs": known | {run["about"]["device"]: run}})
    good = all(one["passes"] for one in run["heads"]) and all(one["trips"] for one in run["mutants"])
    print("every head passes, every mutant is detected" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
