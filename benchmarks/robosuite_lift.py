"""How far does RL improve a policy on robosuite's Lift in 4 hours of training, from point clouds and demonstrations?

    python benchmarks/robosuite_lift.py lift --seed 0 --minutes 240     # repeat the command to resume
    python benchmarks/robosuite_lift.py --summary

One process takes one seed through three stages: the scripted expert of the adapter, with noise, records demonstrations;
a flow policy is trained on them by imitation; PPO fine-tunes it with a reward of 1 for success. The policy sees 128
points (x, y, z, r, g, b) of two 64-pixel depth cameras, in the frame of the gripper, and the state of the robot; it has
no other knowledge of the cube. The number and the noise of the demonstrations were chosen on seed 100, so that
imitation succeeds in 30 to 70 % of episodes (8 of 20). The policy is evaluated greedily on 100 held-out episodes of at
most 100 steps (5 s), every 50,000 steps and at the end. RL ends after 4 hours of training time (CPU hours on one
core), or after 400,000 steps; the whole curve is stored.

Target on each seed: success rises by at least 25 points, or to at least 90 %.
"""

import stages
from stages import Problem, report

RESULTS = report.RESULTS / "robosuite_lift.json"
EPISODES, ROBOTS = 100, 10
GAIN, ENOUGH = 0.25, 0.90
ENV = [
    "env.vectorize=process",
    "env.kwargs={state: robot, reward: sparse, cameras: [agentview, robot0_eye_in_hand], depth: true}",
    "env.points=128",
    "env.points_frame=gripper",
    # the space above the table, without its top
    "env.points_low=[-0.3, -0.3, 0.81]",
    "env.points_high=[0.3, 0.3, 1.2]",
    "rollout.max_episode_steps=100",
]
PROBLEMS = {"lift": Problem(("robosuite:Lift",), ENV, 5, 400_000, 50_000, noise=0.5, hours=4)}


def judge(policy, config) -> dict:
    return stages.rate(stages.play(policy, config, EPISODES, greedy=True, robots=ROBOTS))


def summary(runs: dict[str, dict]) -> str:
    rows = [("seed", "imitated", "after RL (100 episodes)", "best", "env steps", "minutes", "target")]
    for run in sorted(runs.values(), key=lambda run: run["seed"]):
        last, before = run["curve"][-1], run["imitated"]
        met = last["success"] >= min(before["success"] + GAIN, ENOUGH)
        best = f"{max(point['success'] for point in run['curve']):.0%}"
        rates = report.rate_in_words(before), report.rate_in_words(last), best
        took = f"{last['steps']:,}", f"{last['seconds'] / 60:.1f}"
        rows.append((run["seed"], *rates, *took, "met" if met else "MISSED"))
    return report.table(rows)


def main() -> None:
    configs = ("robosuite_lift_points.yaml", "robosuite_lift_finetune.yaml")
    stages.command(__doc__, "robosuite", PROBLEMS, configs, judge, RESULTS, summary)


if __name__ == "__main__":
    main()
