"""Does RL improve policies on Meta-World that were trained on a few scripted demonstrations?

    python benchmarks/metaworld_gain.py push --seed 0 --minutes 20     # repeat the command to resume
    python benchmarks/metaworld_gain.py push --seed 0 --scratch        # the baseline
    python benchmarks/metaworld_gain.py --summary

One process takes one seed through three stages: Meta-World's scripted policy, with noise, records demonstrations; a
flow policy is trained on them by imitation; PPO fine-tunes it with a reward of 1 for success. All tasks use the same
recipe (configs/metaworld_imitate.yaml, configs/metaworld_finetune.yaml) and the full state. The number and the noise of
the demonstrations were chosen for each task on seeds from 100 on, so that imitation succeeds in 30 to 70 % of episodes.
The policy is evaluated greedily on 100 held-out episodes of at most 200 steps; success means that the task was solved
at some step of the episode. `--scratch` trains a Gaussian policy by PPO on Meta-World's dense reward, from random
weights and for the same number of env steps.

Target on each seed: success rises by at least 25 points, or to at least 90 %.
"""

import stages
from stages import Problem, report

RESULTS = report.RESULTS / "metaworld_gain.json"
EPISODES, ROBOTS = 100, 10
GAIN, ENOUGH = 0.25, 0.90
ENV = ["env.kwargs.reward=sparse", "rollout.max_episode_steps=200"]
# task -> demonstrations, noise
DEMONSTRATIONS = {
    "push": (10, 0.3),
    "pick-place": (10, 0.3),
    "door-open": (5, 0.3),
    "drawer-open": (5, 0.6),
    "peg-insert-side": (12, 0.3),
}
PROBLEMS = {
    task: Problem((f"metaworld:{task}-v3",), ENV, count, 300_000, 100_000, noise=noise)
    for task, (count, noise) in DEMONSTRATIONS.items()
}


def judge(policy, config) -> dict:
    return stages.rate(stages.play(policy, config, EPISODES, greedy=True, robots=ROBOTS))


def scratch(args) -> None:
    """Train the baseline and store its success under `<task>/scratch/<seed>`."""
    import torch

    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides, read_settings
    from sparring.runs.run import Run

    torch.set_num_threads(1)
    problem = PROBLEMS[args.problem]
    settings = read_settings(stages.CONFIGS / "metaworld_scratch.yaml")
    fixed = [f"env.name={problem.tasks[0]}", f"seed={args.seed}", f"device={args.device}", "threads=1"]
    folder = args.runs / f"metaworld_scratch_{args.problem}_seed{args.seed}"
    fixed += [f"output={folder}", f"training.total_timesteps={problem.steps}"]
    run = Run(load_config(None, settings + parse_overrides([*fixed, *args.set])), quiet=True)
    run.run()
    found = judge(run.phase.policy, run.config)
    print(f"{args.problem} seed {args.seed}, PPO from scratch: {found}")
    if not args.set:
        about = {"problem": f"{args.problem}/scratch", "seed": args.seed, "commit": report.commit()}
        about |= {"hardware": report.device(args.device), "steps": run.phase.progress.env_steps}
        report.keep_run(RESULTS, stages.RUNS, about | found)


def summary(runs: dict[str, dict]) -> str:
    rows = [
        ("task", "seed", "imitated", "after RL (100 episodes)", "env steps", "minutes", "PPO from scratch", "target")
    ]
    baselines = {
        (run["problem"].removesuffix("/scratch"), run["seed"]): run
        for run in runs.values()
        if run["problem"].endswith("/scratch")
    }
    learned = [run for run in runs.values() if not run["problem"].endswith("/scratch")]
    for run in sorted(learned, key=lambda run: (run["problem"], run["seed"])):
        last, before = run["curve"][-1], run["imitated"]
        met = last["success"] >= min(before["success"] + GAIN, ENOUGH)
        baseline = baselines.get((run["problem"], run["seed"]))
        rows.append(
            (
                *(run["problem"], run["seed"], report.rate_in_words(before), report.rate_in_words(last)),
                *(f"{last['steps']:,}", f"{last['seconds'] / 60:.1f}"),
                *(report.rate_in_words(baseline) if baseline else "-", "met" if met else "MISSED"),
            )
        )
    return report.table(rows)


def main() -> None:
    parser = stages.make_parser(__doc__)
    parser.add_argument("problem", nargs="?", choices=PROBLEMS)
    parser.add_argument("--scratch", action="store_true", help="train the baseline instead")
    args = parser.parse_args()
    if args.problem and args.scratch:
        scratch(args)
    elif args.problem and not args.summary:
        configs = ("metaworld_imitate.yaml", "metaworld_finetune.yaml")
        stages.run(args, "metaworld", args.problem, PROBLEMS[args.problem], configs, judge, RESULTS)
    stages.print_summary(RESULTS, summary)


if __name__ == "__main__":
    main()
