"""Is asynchronous RL of the `small` VLA on a GPU as successful as synchronous RL, and how much faster is it?

Scripted experts record demonstrations of lifting a cube. The VLA, whose inputs are two cameras and the proprioceptive
state, is trained on them by imitation (configs/vla_small_imitate.yaml) and fine-tuned by PPO
(configs/vla_small_finetune.yaml), synchronously and asynchronously, with the same seeds and number of steps. Each run
has its own process, and the machine use (`WAYS`) that was fastest for its mode in a few updates. All start from one
imitation. Seconds exclude the first two updates, which compile code; their mean is extrapolated to all updates.
"""

import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import stages
from async_speed import STAGES, gpu_seconds, overlaps
from stages import Problem

PROBLEM = Problem(("lift_d0",), ["env.cameras=[head,wrist]", "env.image_size=224"], 60, 256_000)
CONFIGS = ("vla_small_imitate.yaml", "vla_small_finetune.yaml")
EPISODES = 300
# updates that are not timed
FIRST = 2
# timed updates for choosing the fastest machine use
TRIAL_UPDATES = 8
# updates of the asynchronous run whose spans are stored for the picture of its timeline
SHOWN = (10, 15)
# mode -> machine uses: (share of the cores that simulates a group of robots, number of groups)
WAYS = {"sync": ((1.0, 1), (0.5, 2)), "async": ((0.75, 1), (0.5, 2))}
METRICS = (
    *(f"{stage}_seconds" for stage in ("simulate", "infer", "collect", "handover", "update")),
    *("staleness", "ess", "learner_idle", "actor_idle", "parity", "parity_ratio", "approx_kl", "explained_variance"),
)


def judge(policy, config) -> dict:
    return stages.rate(stages.play(policy, config, EPISODES, greedy=True))


def imitate(folder: Path, device: str, threads: int) -> stages.Stages:
    """Train the policy from which all runs start, unless its folder exists."""
    folder.mkdir(parents=True, exist_ok=True)
    one = stages.Stages("vla", PROBLEM, *CONFIGS, judge, 0, folder, 0.0, threads, device, [])
    one.run()
    return one


def try_machine_use(one: stages.Stages, mode: str, way: tuple[float, int]) -> dict:
    """Time a few updates."""
    run = _make_run(one, mode, 0, way)
    result = _time_updates(run, FIRST + TRIAL_UPDATES)
    run.phase.env.close()
    return {key: result[key] for key in ("simulating_threads", "groups", "update", "stages")}


def finetune(one: stages.Stages, mode: str, seed: int, way: tuple[float, int]) -> dict:
    """Fine-tune from the imitation to the last step; return times and success."""
    run = _make_run(one, mode, seed, way)
    result = {"mode": mode, "seed": seed} | _time_updates(run) | judge(run.phase.policy, run.config)
    if (mode, seed) == ("sync", 0):
        result["gpu_seconds"] = round(gpu_seconds(lambda: run.phase.step(1.0)), 4)
    run.phase.env.close()
    return result


def _make_run(one: stages.Stages, mode: str, seed: int, way: tuple[float, int]):
    from sparring.runs.run import Run

    share, groups = way
    fixed = [f"pretrained={one.folder / 'imitate'}", f"output={one.folder / f'{mode}_{seed}'}", "resume=never"]
    fixed += [f"training.total_timesteps={PROBLEM.steps}", "rollout.render_episodes=0", f"rollout.mode={mode}"]
    fixed.append(f"rollout.groups={groups}")
    machine = replace(one, threads=max(1, round(share * one.threads)))
    config = machine.load(one.finetuning, fixed, ("imitate.",))
    return Run(config.model_copy(update={"seed": seed}), quiet=True)


def _time_updates(run, most: int | None = None) -> dict:
    """Run and time updates to the last step, or at most `most`."""
    import torch

    began = time.perf_counter()
    ends, spans, rows, shown = [], [], [], []
    # record the spans of all updates
    run.phase.detailed_updates = PROBLEM.steps
    while run.fraction < 1 and (most is None or len(rows) < most):
        rows.append(run.phase.step(run.fraction))
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        new = run.phase.drain_spans()
        spans += new
        shown += new if SHOWN[0] <= len(rows) < SHOWN[1] else []
    each = (ends[-1] - ends[FIRST - 1]) / (len(ends) - FIRST)
    known = [name for name in METRICS if any(name in row for row in rows[FIRST:])]
    means = {name: round(fmean(row[name] for row in rows[FIRST:] if name in row), 4) for name in known}
    rollout, pictured = run.config.rollout, run.config.rollout.mode == "async" and run.config.seed == 0
    return {
        "simulating_threads": run.config.env.threads,
        "groups": rollout.groups,
        "updates": len(ends),
        "env_steps": run.phase.progress.env_steps,
        "seconds": round(each * len(ends), 1),
        "seconds_until_timed": round(ends[FIRST - 1] - began, 1),
        "update": round(each, 4),
        "stages": {s: means[f"{'update' if s == 'learn' else s}_seconds"] for s in STAGES},
        "metrics": means,
        "training_success": [round(row["success_rate"], 3) for row in rows if "success_rate" in row],
        "overlap": overlaps(spans),
    } | ({"spans": [vars(span) for span in shown]} if pictured else {})
