"""How often does each scripted expert succeed? All tasks and distributions, with 95 % Wilson intervals.

python benchmarks/experts.py                       # about a minute of one core; writes results/experts.json
python benchmarks/experts.py --tasks lift_d2 --noise 0.3 --control-mode delta_ee --dry-run
"""

import argparse

import numpy as np
from report import RESULTS, metadata, table, write_json

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.arm import CONTROLS
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.evaluation.play import wilson

# tasks that have an expert
TASKS_WITH_EXPERT = [name for name, task in TASKS.items() if task.expert is not None]
# default control modes: tasks in which a hand has to turn need a mode that can turn it
DEFAULT_MODE, MODES = "delta_ee_pos", {"handover": "delta_ee", "lift_tray": "delta_ee"}
# target success of 100 episodes, by distribution
TARGETS = {"d0": 0.95, "d1": 0.90, "d2": 0.85}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS_WITH_EXPERT, default=TASKS_WITH_EXPERT, metavar="TASK")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.2], help="standard deviation of action noise")
    parser.add_argument("--control-mode", nargs="+", choices=CONTROLS, default=[None], metavar="MODE")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    arguments = parser.parse_args()

    about, cells = metadata(), []
    for mode in arguments.control_mode:
        for noise in arguments.noise:
            for task in arguments.tasks:
                default = MODES.get(task[: -len("_d0")], DEFAULT_MODE)
                cells.append(measure(task, mode or default, noise, arguments.episodes, arguments.seed))
    rows = [("task", "control", "noise", "success", "95 % interval", "reward", "target")]
    print(table(rows + [_row(cell) for cell in cells]))
    if not arguments.dry_run:
        write_json(RESULTS / "experts.json", about | {"episodes": arguments.episodes, "cells": cells})


def measure(task: str, mode: str, noise: float, episodes: int, seed: int) -> dict:
    """Play one episode of each robot, from held-out starts."""
    env = Tabletop(TabletopConfig(task=(task,), control_mode=mode, threads=1), episodes)
    env.reset(EpisodeSeeds(seed, "eval", total_envs=episodes))
    expert, rewards = Expert(env, noise, seed), []
    for _ in range(env.spec.max_episode_steps):
        step = env.step(expert())
        rewards.append(step.reward)
    env.close()
    success = wilson(int(step.success.sum()), episodes)
    return {
        "task": task,
        "control_mode": mode,
        "noise": noise,
        "success": success.rate,
        "low": round(success.low, 4),
        "high": round(success.high, 4),
        "mean_reward": round(float(np.mean(rewards)), 4),
        "target": TARGETS[task[-2:]],
    }


def _row(cell: dict) -> tuple:
    met = "met" if cell["success"] >= cell["target"] else f"BELOW {cell['target']:.0%}"
    interval = f"{cell['low']:.3f} .. {cell['high']:.3f}"
    reward = f"{cell['mean_reward']:.3f}"
    return cell["task"], cell["control_mode"], cell["noise"], f"{cell['success']:.2f}", interval, reward, met


if __name__ == "__main__":
    main()
