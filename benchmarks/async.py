"""How much faster is training with asynchronous collection, at equal success, and is it bit-identical at staleness 0?

    python benchmarks/async.py bound                     # CPU: camera policy, all cores; minutes
    python benchmarks/async.py vla --device cuda         # the small VLA on a GPU, three seeds; 20 minutes
    python benchmarks/async.py bits [--device cuda]      # weights with staleness 0 and with synchronous collection
    python benchmarks/async.py summary

- bound: speedup over synchronous collection, as a share of the largest possible speedup (async_speed.py). Target: 0.85.
- vla: the same for complete training runs on a GPU, and their success rates (async_vla.py). Targets: 1.4 times as fast;
  overlapping Wilson intervals of success.
- bits: number of weight tensors that are equal after five updates. Target: all.

async_stale.py measures how staleness affects learning, `chaos.py async` what happens when a process fails.
An interrupted part `vla` skips the runs that are already stored for this commit; --again discards them first.
"""

import argparse
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import async_speed
import async_vla
import report
from stages import RUNS

RESULTS = report.RESULTS / "async.json"
SEEDS = (0, 1, 2)
# a CNN on camera images; learning and collecting take about as long
CAMERA = [
    "env.task=push_d0",
    "env.cameras=[head,wrist]",
    "env.object_state=hidden",
    "device=cpu",
    "rollout.n_envs=32",
    "rollout.steps=32",
    "ppo.mini_batch_size=256",
]


def bound(args) -> dict:
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    # in a synchronous run each stage may use all cores; in an asynchronous run the stages share them
    sync = [[f"env.threads={cores}", f"threads={threads}"] for threads in sorted({1, half, cores})]
    sync.append([f"env.threads={cores}", f"threads={cores}", "rollout.groups=2"])
    proximals = ("ppo.proximal=exact", "ppo.proximal=interpolated")
    overlapped = [
        [f"env.threads={half}", f"threads={threads}", "ppo.correction=decoupled", proximal]
        for threads in sorted({max(1, half // 2), half})
        for proximal in proximals
    ]
    found = {}
    for epochs in (1, 4):
        found[f"{epochs} epochs"] = async_speed.compare([*CAMERA, f"ppo.ppo_epochs={epochs}"], sync, overlapped, 10, 2)
        found[f"{epochs} epochs"].pop("spans")
    return found


def vla(args) -> dict:
    one = async_vla.imitate(args.runs / "async_vla", args.device, args.threads)
    known = _stored_of_this_commit("vla")
    known["imitated"] = json.loads((one.folder / "judged.json").read_text())["imitated"]
    for mode in args.modes:
        for way in async_vla.WAYS[mode]:
            _measure_missing(known, f"{mode} tried/{way}", args, async_vla.try_machine_use, one, mode, way)
    for seed in args.seeds:
        for mode in args.modes:
            ways = async_vla.WAYS[mode]
            fastest = min(ways, key=lambda way: known[f"{mode} tried/{way}"]["update"])
            _measure_missing(known, f"{mode}/{seed}", args, async_vla.finetune, one, mode, seed, fastest)
    return known


def _stored_of_this_commit(part: str) -> dict:
    """The stored results of a part; empty if they were measured at another commit."""
    about = json.loads(RESULTS.read_text())["about"] if RESULTS.is_file() else {}
    return _stored()[part] if about.get(part, {}).get("commit") == report.commit() else {}


def _measure_missing(known: dict, name: str, args, function: Callable, *arguments) -> None:
    if name not in known:
        known[name] = found = in_new_process(function, *arguments)
        print(json.dumps({k: v for k, v in found.items() if k != "spans"}), flush=True)
        _store("vla", known, args.device)


def in_new_process(function: Callable, *arguments):
    """Call `function` in a new process, without state or caches of earlier runs."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        return pool.submit(function, *arguments).result()


def bits(args) -> dict:
    """For each setting, the number of weight tensors that are equal after five updates, sync and async."""
    import torch

    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides
    from sparring.phases.finetune import Finetune
    from sparring.processes.distributed import Distributed, seed_everything

    small = ["rollout.n_envs=8", "rollout.steps=16", "threads=1", f"device={args.device}", "rollout.render_episodes=0"]
    flow = ["policy.name=flow", "policy.method=flow_noise", "rollout.action_steps=4"]
    native = ["policy.name=native_vla", "policy.method=flow_sde", "rollout.action_steps=5", "env.cameras=[head]"]
    cases = {"state": [], "camera": ["env.cameras=[head]"], "flow": flow, "native VLA": native}
    cases |= {"two groups": ["rollout.groups=2"], "normalize_value": ["ppo.normalize_value=true"]}
    found = {}
    for name, more in cases.items():
        weights = []
        for mode in (["rollout.mode=sync"], ["rollout.mode=async", "rollout.staleness=0"]):
            config = load_config(None, parse_overrides(["phase=finetune", *small, *more, *mode]))
            torch.set_num_threads(1)
            seed_everything(config.seed)
            phase = Finetune.from_config(config, Distributed(config.device))
            for _ in range(5):
                phase.step(0.5)
            weights.append({name: weight.clone() for name, weight in phase.model.state_dict().items()})
            phase.env.close()
        one, other = weights
        found[name] = {"weights": len(one), "equal": sum(torch.equal(w, other[key]) for key, w in one.items())}
        print(name, found[name], flush=True)
    return found


def summary() -> str:
    known, rows = _stored(), [("question", "found", "target")]
    for name, case in known.get("bound", {}).items():
        text = f"{case['gain']:.2f}x of {case['bound']:.2f}x: {case['of_bound']:.2f} of the bound"
        rows.append((f"camera policy on {case['cores']} cores, {name}", text, _met(case["of_bound"] >= 0.85)))
    rows += _vla_rows(known.get("vla", {}))
    for part in ("bits", "bits cuda"):
        for name, case in known.get(part, {}).items():
            text = f"{case['equal']} of {case['weights']} tensors equal"
            rows.append((f"{part}: staleness 0, {name}", text, _met(case["equal"] == case["weights"])))
    return report.table(rows)


def _vla_rows(known: dict) -> list[tuple]:
    seeds = [seed for seed in SEEDS if f"sync/{seed}" in known and f"async/{seed}" in known]
    if not seeds:
        return []
    ways = [run for name, run in known.items() if name.startswith("sync")]
    # for each stage the shortest time of any synchronous run, as in async_speed.py
    needed = [min(run["stages"][stage] for run in ways) for stage in async_speed.STAGES]
    needed += [run["gpu_seconds"] for run in ways if "gpu_seconds" in run]
    rows = [("success after imitation", report.rate_in_words(known["imitated"]), "")]
    for seed in seeds:
        sync, overlapped = known[f"sync/{seed}"], known[f"async/{seed}"]
        gain = sync["update"] / overlapped["update"]
        best = sync["update"] / max(needed)
        text = f"{sync['seconds']} s / {overlapped['seconds']} s = {gain:.2f}x, {gain / best:.2f} of bound {best:.2f}x"
        rows.append((f"small VLA, seed {seed}", text, f"{_met(gain >= 1.4)}, {_met(gain / best >= 0.85)}"))
        text = f"{report.rate_in_words(sync)} / {report.rate_in_words(overlapped)}"
        apart = sync["low"] > overlapped["high"] or overlapped["low"] > sync["high"]
        rows.append((f"success sync / async, seed {seed}", text, _met(not apart)))
        text = ", ".join(f"{stage} {share:.0%}" for stage, share in overlapped["overlap"].items())
        rows.append((f"share of learning time with other stages active, seed {seed}", text, ""))
    gain = sum(known[f"sync/{seed}"]["seconds"] for seed in seeds) / sum(
        known[f"async/{seed}"]["seconds"] for seed in seeds
    )
    rows.append(("small VLA, all seeds together", f"{gain:.2f}x", _met(gain >= 1.4)))
    text = ", ".join(f"{100 * part:+.1f}" for part in _success_difference(known, seeds))
    return [*rows, ("success async minus sync, points: difference, low, high (95 %)", text, "")]


def _success_difference(known: dict, seeds: list[int]) -> tuple[float, float, float]:
    """(difference, low, high) over all seeds: Newcombe's interval for two unpaired rates (1998, method 10)."""
    from sparring.evaluation.play import wilson

    each, modes = async_vla.EPISODES, ("sync", "async")
    shares = [sum(known[f"{mode}/{seed}"]["success"] for seed in seeds) for mode in modes]
    sync, overlapped = (wilson(round(share * each), each * len(seeds)) for share in shares)
    found = overlapped.rate - sync.rate
    low = found - math.hypot(overlapped.rate - overlapped.low, sync.high - sync.rate)
    return found, low, found + math.hypot(overlapped.high - overlapped.rate, sync.rate - sync.low)


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def _stored() -> dict:
    return json.loads(RESULTS.read_text())["parts"] if RESULTS.is_file() else {}


def _store(part: str, found: dict, device: str) -> None:
    """Each part has its own metadata: parts are measured at different times, on different machines."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"about": {}, "parts": {}}
    results["about"][part] = report.metadata() | {"hardware": report.device(device)}
    results["parts"][part] = found
    report.write_json(RESULTS, results)


PARTS = {"bound": bound, "vla": vla, "bits": bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "summary"])
    parser.add_argument("--device", default="cpu", help="device for vla and bits: cpu or cuda")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="seeds of vla")
    parser.add_argument("--modes", nargs="+", choices=[*async_vla.WAYS], default=[*async_vla.WAYS], help="modes of vla")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="simulator threads of vla")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the checkpoints")
    parser.add_argument("--again", action="store_true", help="discard the stored results of this part")
    args = parser.parse_args()
    if args.part != "summary":
        # results on a GPU do not replace those on a CPU
        stored_as = f"{args.part} cuda" if args.part == "bits" and args.device != "cpu" else args.part
        if args.again:
            _store(stored_as, {}, args.device)
        _store(stored_as, PARTS[args.part](args), args.device)
    print(summary())


if __name__ == "__main__":
    main()
