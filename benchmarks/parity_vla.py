"""Does each pretrained policy score exactly what it sampled, with and without LoRA, and does the gate detect errors?

    python benchmarks/parity_vla.py [--device cuda] [--quick]

The policies are a custom VLA model (with a Gaussian head and with a flow head), pi0 of transformers from a tiny
checkpoint, and the native VLA `tiny`; each with all weights trainable and with LoRA on frozen weights, in fp32 and
bf16. A GPU adds the native VLA that acts through compiled CUDA graphs, its default there. They act in rollout batches
of 1, 6 and 16 robots (two cameras, instructions, chunks that are cut short, padding dims, a horizon longer than the
chunk); then 256 decisions are scored in one batch. The table shows the largest difference over all batches: of means in
standard deviations (drift), of squared z and of log-probabilities per scored number (sample, score), which the gate
limits, and of values, which it does not. The Gaussian model exposes no means: its drift is that of log-probabilities.
Mutants score with other adapters than they acted with. Exit status 1: a policy fails, or a mutant passes.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import report
import tiny_pi0
import torch
from parity import BATCHES, TOLERANCE, describe
from parity_cases import REPLAY
from vla_cases import KINDS, MUTANTS, ON_A_GPU_IN_BF16, rollout_of, settings_of

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import Parity, measure_parity
from sparring.processes.distributed import Distributed

RESULTS = report.RESULTS / "parity_vla.json"
COLUMNS = ("drift", "sample", "score", "value")


def cases(device: str, quick: bool):
    """(name, function that makes its config, whether with LoRA, precision)"""
    for precision in TOLERANCE:
        kinds = KINDS | (ON_A_GPU_IN_BF16 if device != "cpu" and precision == "bf16" else {})
        for name, kind in kinds.items():
            for lora in (True,) if quick else (False, True):
                yield name, kind, lora, precision


def measure(policy, buffer) -> dict[str, float]:
    flat = buffer.get()[:REPLAY]
    # PPO lays out the weights as in training
    PPO(PPOConfig(), policy)
    with torch.no_grad():
        scored = policy.evaluate(flat)
    parity = measure_parity(flat, scored, policy.averages_log_prob)
    return asdict(parity) | {"value": float((scored["value"] - flat["value"]).abs().max())}


def measure_policies(device: str, quick: bool, checkpoint: Path) -> list[dict]:
    found = []
    for name, kind, lora, precision in cases(device, quick):
        settings = settings_of(kind, lora, precision)
        robots = BATCHES[1:2] if quick else BATCHES
        batches = {n: measure(*rollout_of(kind, n, device, checkpoint, **settings)) for n in robots}
        largest = {term: max(one[term] for one in batches.values()) for term in batches[robots[0]]}
        about = {"policy": name, "lora": lora, "precision": precision}
        found.append(about | {"largest": largest, **judged(largest, precision), "batches": batches})
    return found


def measure_mutants(device: str, quick: bool, checkpoint: Path) -> list[dict]:
    found = []
    for name, kind, lora, precision in cases(device, quick):
        for mutant, change in MUTANTS.items() if lora else ():
            policy, buffer = rollout_of(kind, BATCHES[1], device, checkpoint, **settings_of(kind, lora, precision))
            change(policy)
            values = measure(policy, buffer)
            about = {"policy": name, "mutant": mutant, "precision": precision}
            found.append(about | {"values": values, **judged(values, precision)})
    return found


def judged(values: dict[str, float], precision: str) -> dict:
    limits = Parity.limits(TOLERANCE[precision])
    # `not <=` also catches NaN
    over = {term: values[term] for term, limit in limits.items() if not values[term] <= limit}
    return {"limits": limits, "over": over, "passes": not over}


def show(run: dict) -> None:
    rows = [("policy", "LoRA", "precision", *COLUMNS, "limits", "")]
    for one in run["policies"]:
        names = (one["policy"], "yes" if one["lora"] else "no", one["precision"])
        limits = ", ".join(f"{one['limits'][term]:g}" for term in COLUMNS if term in one["limits"])
        values = (f"{one['largest'][term]:.1e}" for term in COLUMNS)
        rows.append((*names, *values, limits, "passes" if one["passes"] else "FAILS"))
    print(report.table(rows), end="\n\n")
    rows = [("policy with LoRA", "mutant", "precision", "trips the gate by")]
    for one in run["mutants"]:
        rows.append(
            (one["policy"], one["mutant"], one["precision"], describe(one["over"]) if one["over"] else "NOT DETECTED")
        )
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
    about = report.metadata() | {"device": report.device(args.device), "replay": REPLAY, "batches": BATCHES}
    about["versions"] |= {name: version(name) for name in ("transformers", "peft")}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tiny_pi0.write(Path(folder))
        run = {
            "about": about,
            "policies": measure_policies(args.device, args.quick, checkpoint),
            "mutants": measure_mutants(args.device, args.quick, checkpoint),
        }
    show(run)
    if not args.quick:
        known = json.loads(RESULTS.read_text())["runs"] if RESULTS.is_file() else {}
        report.write_json(RESULTS, {"runs": known | {about["device"]: run}})
    good = all(one["passes"] for one in run["policies"]) and not any(one["passes"] for one in run["mutants"])
    print("every policy passes, every mutant is detected" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
