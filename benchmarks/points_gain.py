"""Does RL improve a flow policy that sees point clouds and was trained on a few demonstrations?

    python benchmarks/points_gain.py stack_d0 --seed 0 --device cuda --threads 4    # repeat the command to resume
    python benchmarks/points_gain.py --summary

Scripted experts record demonstrations of the built-in stack_d0; a flow policy is trained on them by imitation; PPO
fine-tunes it with a sparse reward. The policy sees its joints, gripper and a cloud of coloured points `[P, 6]` from the
head and wrist cameras, no poses of objects. It is evaluated greedily on 200 held-out episodes, outside of the training
time. Settings and number of demonstrations were chosen on seed 100.

Target on each seed: success rises by at least 25 points and to at least 90 %.
"""

import stages
from stages import Problem, report

RESULTS = report.RESULTS / "points_gain.json"
EPISODES = 200
GAIN, ENOUGH = 0.25, 0.90
POINTS = ["env.cameras=[head,wrist]", "env.points=256"]
PROBLEMS = {"stack_d0": Problem(("stack_d0",), POINTS, 8, 1_200_000)}


def judge(policy, config) -> dict:
    return stages.rate(stages.play(policy, config, EPISODES, greedy=True))


def summary(runs: dict[str, dict]) -> str:
    rows = [("problem", "seed", "imitated", "fine-tuned (200 episodes)", "env steps", "minutes", "target")]
    for run in sorted(runs.values(), key=lambda run: (run["problem"], run["seed"])):
        before, last = run["imitated"], run["curve"][-1]
        met = last["success"] >= max(before["success"] + GAIN, ENOUGH)
        words = (report.rate_in_words(before), report.rate_in_words(last))
        length = (f"{last['steps']:,}", f"{last['seconds'] / 60:.1f}")
        rows.append((run["problem"], run["seed"], *words, *length, "met" if met else "MISSED"))
    return report.table(rows)


def main() -> None:
    configs = ("points_imitate.yaml", "points_finetune.yaml")
    stages.command(__doc__, "points", PROBLEMS, configs, judge, RESULTS, summary)


if __name__ == "__main__":
    main()
