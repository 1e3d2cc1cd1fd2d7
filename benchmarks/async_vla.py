"""The `small` VLA on a GPU: is a run that collects while it learns as good as one in turns, and how much sooner?

Scripted experts show how to lift a cube; the VLA, which sees two cameras and what the robot feels, imitates them
(configs/vla_small_imitate.yaml) and is then fine-tuned by PPO (configs/vla_small_finetune.yaml), in turns and at the
same time, with the same seeds and as many steps. Each run has the machine and a process for itself, and uses it in the
way that was the fastest for its mode in a few updates before. All go on from one imitation.

Seconds are those of the updates after the first two, in which things are compiled, for as many updates as there were.
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
# updates that tell which way is the fastest
TRIED = 8
# of the async run, what is kept for the picture of its timeline
SHOWN = (10, 15)
# who works when -> ways to use the machine: the share of the cores that simulates a group of robots, and the groups
WAYS = {"sync": ((1.0, 1), (0.5, 2)), "async": ((0.75, 1), (0.5, 2))}
TOLD = (
    *(f"{stage}_seconds" for stage in ("simulate", "infer", "collect", "handover", "update")),
    *("staleness", "ess", "learner_idle", "actor_idle", "parity", "parity_ratio", "approx_kl", "explained_variance"),
)


def judge(policy, config) -> dict:
    return stages.rate(stages.play(policy, config, EPISODES, greedy=True))


def imitated(folder: Path, device: str, threads: int) -> stages.Stages:
    """The imitation that all runs go on from; made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    one = stages.Stages("vla", PROBLEM, *CONFIGS, judge, 0, folder, 0.0, threads, device, [])
    one.run()
    return one


def tried(one: stages.Stages, mode: str, way: tuple[float, int]) -> dict:
    """How long a few updates take."""
    run = _started(one, mode, 0, way)
    result = _timed(run, FIRST + TRIED)
    run.phase.env.close()
    return {key: result[key] for key in ("simulating_threads", "groups", "update", "stages")}


def finetune(one: stages.Stages, mode: str, seed: int, way: tuple[float, int]) -> dict:
    """From what was imitated to the last step: how long it took and what came of it."""
    run = _started(one, mode, seed, way)
    result = {"mode": mode, "seed": seed} | _timed(run) | judge(run.phase.policy, run.config)
    if (mode, seed) == ("sync", 0):
        result["gpu_seconds"] = round(gpu_seconds(lambda: run.phase.step(1.0)), 4)
    run.phase.env.close()
    return result


def _started(one: stages.Stages, mode: str, seed: int, way: tuple[float, int]):
    from sparring.runs.run import Run

    share, groups = way
    fixed = [f"pretrained={one.folder / 'imitate'}", f"output={one.folder / f'{mode}_{seed}'}", "resume=never"]
    fixed += [f"training.total_timesteps={PROBLEM.steps}", "rollout.render_episodes=0", f"rollout.mode={mode}"]
    fixed.append(f"rollout.groups={groups}")
    machine = replace(one, threads=max(1, round(share * one.threads)))
    config = machine.load(one.finetuning, fixed, ("imitate.",))
    return Run(config.model_copy(update={"seed": seed}), quiet=True)


def _timed(run, most: int | None = None) -> dict:
    """Updates to the last step, or so many."""
    import torch

    began = time.perf_counter()
    ends, spans, rows, shown = [], [], [], []
    # every turn of every stage, to the end
    run.phase.detailed_updates = PROBLEM.steps
    while run.fraction < 1 and (most is None or len(rows) < most):
        rows.append(run.phase.step(run.fraction))
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        new = run.phase.drain_spans()
        spans += new
        shown += new if SHOWN[0] <= len(rows) < SHOWN[1] else []
    each = (ends[-1] - ends[FIRST - 1]) / (len(ends) - FIRST)
    known = [name for name in TOLD if any(name in row for row in rows[FIRST:])]
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
