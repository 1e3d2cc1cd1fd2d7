"""Phase 2: does an explorer that is rewarded for the uncertainty of a frozen world model find objects to interact with?

    python benchmarks/phases/teacher.py --seed 0               # first, the world model
    python benchmarks/phases/student.py --seed 0
    python benchmarks/phases/student.py --seed 0 --rewards original
    python benchmarks/phases/student.py --summary

One process trains one seed on one thread for at most 10 CPU minutes, so two seeds can run in parallel on two cores; an
interrupted run (--minutes) resumes when the command is repeated. Then the explorer, which
samples its actions as in training, runs held-out episodes and is compared with uniform and coloured noise on the same
episodes. Targets: the reward
rises; contact with an object in 10 % of the decisions and 3 times as often as the best coloured noise; objects reach
1.5 times as many voxels as with the best coloured noise. (The voxels that the hands reach are printed without a target:
noise enters a new one in every other decision, and an explorer that handles objects stays with them.)
"""

from dataclasses import asdict

from exploring import CURVES, explorer_config, rise
from script import RUNS, finish, flags, report, show, stored, suffix, teacher_of, with_teacher
from teacher import train

RESULTS = report.RESULTS / "phases_student.json"
EPISODES = 128
CONTACT, CONTACT_RATIO, COVERAGE_RATIO = 0.10, 3.0, 1.5


def outcome(args) -> dict:
    name, seed = args.rewards, args.seed
    folder = RUNS / (f"student_{name}_seed{seed}" + suffix(args))
    config = explorer_config(teacher_of(args), folder, seed, [f"rewards={name}", *args.set])
    run, record = train(config, args.minutes, CURVES)
    about = {"problem": name, "seed": seed, "commit": report.commit(), "cpu": report.cpu_model()}
    return about | record | {"paid": reward_rise(run, record["curve"]), "explored": judge(run, config)}


def reward_rise(run, curve: list[dict]) -> dict:
    """Mean reward of a decision in the first and in the last fifth of the updates.

    Both use the final normalisation; logged rewards use the statistics of their time.
    """
    rewards = run.phase.rewards
    weights = dict(zip(rewards.terms, (rewards.weights * rewards.normalizer.scale).tolist(), strict=True))
    rises = {name: rise(curve, f"reward/{name}") for name in weights}
    total = {when: sum(weights[name] * rises[name][when] for name in weights) for when in ("first", "last")}
    return total | {"terms": rises}


def judge(run, config) -> dict:
    """Compare the explorer with random actions on held-out episodes."""
    from sparring.envs.env import make_env
    from sparring.evaluation.exploration import _showing_objects, compare_with_random

    env = make_env(_showing_objects(config.env), 32)
    policy = run.phase.policy.eval()
    found = compare_with_random(policy, env, EPISODES, config.seed, config.rollout.action_steps)
    env.close()
    return {who: asdict(exploration) for who, exploration in found.items()}


def verdict(run: dict) -> dict:
    explored, reward = run["explored"], run["paid"]
    noise = [values for who, values in explored.items() if who.startswith("coloured")]
    best = {name: max(values[name] for values in noise) for name in ("contact", "object_voxels")}
    mine = explored["policy"]
    return {
        "reward rises": reward["last"] > reward["first"],
        "contact": mine["contact"] >= CONTACT,
        "contact ratio": mine["contact"] >= CONTACT_RATIO * best["contact"],
        "coverage ratio": mine["object_voxels"] >= COVERAGE_RATIO * best["object_voxels"],
    }


def summary(runs: dict[str, dict]) -> str:
    rows = [("rewards", "seed", "steps", "CPU min", "who", "contact", "voxels", "voxels of objects", "state entropy")]
    lines = []
    for run in runs.values():
        head = (run["problem"], run["seed"], f"{run['steps']:,}", f"{run['cpu_seconds'] / 60:.1f}")
        for who, e in run["explored"].items():
            numbers = f"{e['contact']:.1%}", e["voxels"], e["object_voxels"], f"{e['state_entropy']:.2f}"
            rows.append((*head, who, *numbers))
        reward = run["paid"]
        judged = ", ".join(f"{what} {'met' if met else 'MISSED'}" for what, met in verdict(run).items())
        hands = max(e["voxels"] for who, e in run["explored"].items() if who.startswith("coloured"))
        judged += f"; voxels of hands {run['explored']['policy']['voxels'] / hands:.1f} times the best noise's"
        lines.append(f"{run['problem']} {run['seed']}: reward {reward['first']:.2f} -> {reward['last']:.2f}; {judged}")
    return "\n".join([report.table(rows), *lines])


def main() -> None:
    parser = with_teacher(flags(__doc__))
    parser.add_argument("--rewards", choices=("default", "original"), default="default")
    args = parser.parse_args()
    if args.summary:
        return show(stored(RESULTS), summary)
    run = outcome(args)
    show(finish(args, run, RESULTS), summary)


if __name__ == "__main__":
    main()
