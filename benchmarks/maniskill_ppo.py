"""Does PPO learn ManiSkill's PickCube-v1 as well as ManiSkill's own PPO does, at equal steps?

    python benchmarks/maniskill_ppo.py sparring --seed 0                    # repeat the command to resume
    python benchmarks/maniskill_ppo.py peer --seed 0 --peer PATH/ppo.py     # cannot resume
    python benchmarks/maniskill_ppo.py --summary

The peer is the file examples/baselines/ppo/ppo.py of github.com/haosulab/ManiSkill at the commit below, unchanged; it
is not part of this repository. It asks for the GPU simulator, so `gymnasium.make` is wrapped to replace three arguments
by sim_backend=physx_cpu, render_backend=sapien_cpu and render_mode=None. The CPU simulator has one robot a process;
both learn from 1,000 steps of one robot an update, in 10 minibatches and 8 epochs. All other settings are the defaults
of that file (configs/maniskill_pickcube.yaml has the same ones), with these differences: ManiSkill ends an update at
the first minibatch whose KL exceeds 0.1, Sparring after the first such epoch; the gains of Sparring's last layers are
0.01 and 1 instead of 0.014 and 1.4; the seeds of the episodes differ.

Both are evaluated greedily before training and every 15,000 steps, on 20 episodes of 50 steps that do not end at
success. `return` is the mean sum of ManiSkill's normalized dense reward, `success` the share of episodes that succeed
at some step.

Target: our mean return over the seeds lies within the peer's lowest and highest seed, on average over the evaluations.
"""

import argparse
import contextlib
import hashlib
import json
import resource
import runpy
import statistics
import sys
import time
from pathlib import Path

import report

RESULTS = report.RESULTS / "maniskill_ppo.json"
RUNS = Path(__file__).parent / "runs"
CONFIG = Path(__file__).parents[1] / "configs" / "maniskill_pickcube.yaml"
COMMIT = "d80a0eceb23c70d62682192aa8dde566cd973044"
SHA256 = "3fa4818861d428480244aae889bc679b2c8e89b59d6289014003c266a84dbab0"
STEPS, EVERY, EPISODES, LIMIT, ROLLOUT = 300_000, 15_000, 20, 50, 1000
PEER_SETTINGS = {
    "env_id": "PickCube-v1",
    # one update more, because it evaluates before an update
    "total_timesteps": STEPS + ROLLOUT,
    "num_envs": 1,
    "num_steps": ROLLOUT,
    "num_minibatches": 10,
    "update_epochs": 8,
    "num_eval_envs": 1,
    "num_eval_steps": EPISODES * LIMIT,
    "eval_freq": EVERY // ROLLOUT,
    "eval_reconfiguration_freq": "None",
}
PEER_FLAGS = ["--no-cuda", "--no-capture-video", "--no-save-model"]


def train_sparring(args) -> dict:
    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides, read_settings
    from sparring.envs.env import make_env
    from sparring.evaluation.play import play
    from sparring.runs.run import Run

    folder = RUNS / "_".join(["maniskill_sparring", f"seed{args.seed}", *args.set])
    fixed = [f"seed={args.seed}", "device=cpu", f"output={folder}", f"training.total_timesteps={args.steps}"]
    config = load_config(None, read_settings(CONFIG) + parse_overrides([*fixed, *args.set]))
    run = Run(config, quiet=True)
    log = folder / "judged.json"
    record = json.loads(log.read_text()) if log.is_file() else {"seconds": 0.0, "cpu_seconds": 0.0, "curve": []}
    kwargs = config.env.kwargs | {"at_success": "continue"}
    judged = make_env(config.env.model_copy(update={"kwargs": kwargs}), 1, LIMIT)
    policy, progress, deadline = run.phase.policy, run.phase.progress, time.time() + 60 * args.minutes
    while True:
        started, used = time.time(), _cpu_seconds()
        due = len(record["curve"]) * EVERY
        if progress.env_steps >= due:
            played, _ = play(policy, judged, EPISODES, args.seed)
            _note(record, progress.env_steps, [episode.reward for episode in played], [e.success for e in played])
        elif run.fraction < 1:
            run.phase.step(run.fraction)
        record["seconds"] += time.time() - started
        record["cpu_seconds"] += _cpu_seconds() - used
        if progress.env_steps >= due:
            run.save()
            report.write_json(log, record)
        if run.fraction >= 1 and len(record["curve"]) > args.steps // EVERY or time.time() > deadline:
            return record | {"done": run.fraction >= 1}


def train_peer(args) -> dict:
    """Run the peer's file as a script in a folder of its own, and read the evaluations that it logged."""
    import gymnasium

    content = args.peer.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        sys.exit(f"{args.peer} has the SHA-256 {found}; expected that of ppo.py at commit {COMMIT}: {SHA256}")
    folder = RUNS / f"maniskill_peer_seed{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{int(time.time())}"
    settings = PEER_SETTINGS | {"seed": args.seed, "exp_name": name, "total_timesteps": args.steps + ROLLOUT}
    make = gymnasium.make

    def make_on_cpu(*given, **settings):
        cpu = {"sim_backend": "physx_cpu", "render_backend": "sapien_cpu", "render_mode": None}
        return make(*given, **settings | cpu)

    gymnasium.make = make_on_cpu
    sys.argv = [str(args.peer), *PEER_FLAGS, *(f"--{key}={value}" for key, value in settings.items())]
    script, started, used = args.peer.resolve(), time.time(), _cpu_seconds()
    with contextlib.chdir(folder):
        runpy.run_path(str(script), run_name="__main__")
    record: dict = {"seconds": time.time() - started, "cpu_seconds": _cpu_seconds() - used, "curve": []}
    returns, successes = _logged(folder / "runs" / name, "eval/return", "eval/success_once")
    for (steps, value), (_, success) in zip(returns, successes, strict=True):
        _note(record, steps, [value], [success])
    return record | {"done": True, "peer": {"commit": COMMIT, "sha256": SHA256}}


def _logged(folder: Path, *tags: str) -> list[list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [[(event.step, event.value) for event in events.Scalars(tag)] for tag in tags]


def _note(record: dict, steps: int, returns: list[float], successes: list[float]) -> None:
    point = {"steps": steps, "return": statistics.fmean(returns), "success": statistics.fmean(successes)}
    record["curve"].append(point)
    print(point, flush=True)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(runs: dict[str, dict]) -> str:
    rows = [("library", "seed", "mean return", "last return", "last success", "minutes", "CPU minutes")]
    for run in sorted(runs.values(), key=lambda run: (run["problem"], run["seed"])):
        last = run["curve"][-1]
        times = (f"{run['seconds'] / 60:.1f}", f"{run['cpu_seconds'] / 60:.1f}")
        rows.append(
            (
                run["problem"],
                run["seed"],
                f"{_mean(run):.2f}",
                f"{last['return']:.2f}",
                f"{last['success']:.0%}",
                *times,
            )
        )
    return "\n".join([report.table(rows), *_verdict(runs)])


def _mean(run: dict) -> float:
    """The mean return of the evaluations in training, without the one before it."""
    return statistics.fmean(point["return"] for point in run["curve"][1:])


def _verdict(runs: dict[str, dict]) -> list[str]:
    ours, theirs = ([run for run in runs.values() if run["problem"] == name] for name in ("sparring", "peer"))
    if not ours or not theirs:
        return []
    places = {"below": 0, "within": 0, "above": 0}
    for k in range(1, min(len(run["curve"]) for run in [*ours, *theirs])):
        spread = [run["curve"][k]["return"] for run in theirs]
        mean = statistics.fmean(run["curve"][k]["return"] for run in ours)
        places["below" if mean < min(spread) else "above" if mean > max(spread) else "within"] += 1
    low, high = min(map(_mean, theirs)), max(map(_mean, theirs))
    mean = statistics.fmean(map(_mean, ours))
    where = "within" if low <= mean <= high else "above" if mean > high else "BELOW"
    counts = ", ".join(f"{count} {place}" for place, count in places.items())
    return ["", f"mean return {mean:.2f}, {where} the peer's {low:.2f} to {high:.2f}; of the evaluations {counts}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=["sparring", "peer"])
    parser.add_argument("--peer", type=Path, help="the file ppo.py of ManiSkill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="other numbers are not stored")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop ours after this; repeat the command to resume")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not stored")
    parser.add_argument("--summary", action="store_true", help="only print the stored results")
    args = parser.parse_args()
    if args.library == "peer" and args.peer is None:
        parser.error("peer needs --peer PATH")
    if args.library and not args.summary:
        import torch

        torch.set_num_threads(1)
        about = {"problem": args.library, "seed": args.seed, "commit": report.commit(), "hardware": report.cpu_model()}
        outcome = about | (train_sparring if args.library == "sparring" else train_peer)(args)
        outcome |= {key: round(outcome[key], 1) for key in ("seconds", "cpu_seconds")}
        if not outcome["done"]:
            print("not finished, so not stored: the same call goes on")
        elif not args.set and args.steps == STEPS:
            report.keep_run(RESULTS, RUNS, outcome)
    if RESULTS.is_file():
        print(summary(json.loads(RESULTS.read_text())["runs"]))


if __name__ == "__main__":
    main()
