"""Is what a pretrained policy scores what it did, with and without LoRA, and does the parity gate notice when not?

    python benchmarks/parity_vla.py [--device cuda] [--quick]

A VLA model of one's own (with a Gaussian, and with a flow head), transformers' pi0 from a tiny checkpoint that
save_pretrained wrote, and the native VLA `tiny`; each with all weights learning and with LoRA on frozen ones, in fp32
and bf16; on a GPU also the native VLA as it acts there, by compiled CUDA graphs. They act in rollout batches of 1, 6
and 16 robots (two cameras, instructions, chunks that are cut short, padding dims, more planned than executed); 256
decisions are then scored at once. Shown is the largest difference over all batches: of means in sigmas (drift), of
squared z and of log-probs per number scored (sample, score), which the gate limits, and of values, which it does not.
Of the Gaussian model only scores are known: its drift is that of log-probs. Then each mutant: adapters are scored
otherwise than they acted. Exit code 1 where a policy does not pass or a mutant does.
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
    """(name, what makes its config, whether with LoRA, precision)"""
    for precision in TOLERANCE:
        kinds = KINDS | (ON_A_GPU_IN_BF16 if device != "cpu" and precision == "bf16" else {})
        for name, kind in kinds.items():
            for lora in (True,) if quick else (False, True):
                yield name, kind, lora, precision


def measure(policy, buffer) -> dict[str, float]:
    flat = buffer.get()[:REPLAY]
    # it lays the weights out as they are when they learn
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
            (one["policy"], one["mutant"], one["precision"], describe(one["over"]) if one["over"] else "NOT NOTICED")
        )
    print(report.table(rows))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="does it work? A few of all cases, results not kept")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    # what a run sets on a GPU: no TF32
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
    print("every policy passes, every mutant is noticed" if good else "NOT AS IT SHOULD BE")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
