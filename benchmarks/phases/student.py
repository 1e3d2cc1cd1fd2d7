"""Phase 2: does an explorer that is paid for what a frozen world model does not know find things to play with?

    python benchmarks/phases/teacher.py --seed 0               # first, the world model
    python benchmarks/phases/student.py --seed 0
    python benchmarks/phases/student.py --seed 0 --rewards original
    python benchmarks/phases/student.py --summary

One process trains one seed on one thread for at most 10 CPU minutes, so two seeds can run side by side on two cores; a
run that is cut short (--minutes) goes on by the same call. Then the explorer, as it acts in training, plays held-out
episodes beside uniform and coloured noise, the same ones. Wanted: what is paid rises; in touch with an object at least
3 times as often as the best coloured noise, and in 10 % of the decisions; objects get to 1.5 times as many places as
with the best of them. (The places that its hand gets to are told as well: noise is in a new one at every other
decision, and who plays with things stays with them.)
"""

from dataclasses import asdict

from exploring import CURVES, explorer_config, rise
from script import RUNS, conclude, flags, known, report, teacher_of, tell, tried, with_teacher
from teacher import train

RESULTS = report.RESULTS / "phases_student.json"
EPISODES = 128
CONTACT, CONTACT_RATIO, COVERAGE_RATIO = 0.10, 3.0, 1.5


def outcome(args) -> dict:
    name, seed = args.rewards, args.seed
    folder = RUNS / (f"student_{name}_seed{seed}" + tried(args))
    config = explorer_config(teacher_of(args), folder, seed, [f"rewards={name}", *args.set])
    run, record = train(config, args.minutes, CURVES)
    about = {"problem": name, "seed": seed, "commit": report.commit(), "cpu": report.cpu_model()}
    return about | record | {"paid": paid(run, record["curve"]), "explored": judge(run, config)}


def paid(run, curve: list[dict]) -> dict:
    """A decision's pay in the first and in the last fifth of the updates, in the units of the run's end.

    What was paid on the way is relative to what was usual then.
    """
    rewards = run.phase.rewards
    weights = dict(zip(rewards.terms, (rewards.weights * rewards.normalizer.scale).tolist(), strict=True))
    rises = {name: rise(curve, f"reward/{name}") for name in weights}
    total = {when: sum(weights[name] * rises[name][when] for name in weights) for when in ("first", "last")}
    return total | {"terms": rises}


def judge(run, config) -> dict:
    """The explorer beside random actions, on held-out episodes."""
    from sparring.envs.env import make_env
    from sparring.evaluation.exploration import _showing_objects, compare_with_random

    env = make_env(_showing_objects(config.env), 32)
    policy = run.phase.policy.eval()
    found = compare_with_random(policy, env, EPISODES, config.seed, config.rollout.action_steps)
    env.close()
    return {who: asdict(exploration) for who, exploration in found.items()}


def verdict(run: dict) -> dict:
    explored, paid = run["explored"], run["paid"]
    noise = [values for who, values in explored.items() if who.startswith("coloured")]
    best = {name: max(values[name] for values in noise) for name in ("contact", "object_voxels")}
    mine = explored["policy"]
    return {
        "paid rises": paid["last"] > paid["first"],
        "contact": mine["contact"] >= CONTACT,
        "contact ratio": mine["contact"] >= CONTACT_RATIO * best["contact"],
        "coverage ratio": mine["object_voxels"] >= COVERAGE_RATIO * best["object_voxels"],
    }


def summary(runs: dict[str, dict]) -> str:
    rows = [("rewards", "seed", "steps", "CPU min", "who", "contact", "places", "of objects", "state entropy")]
    lines = []
    for run in runs.values():
        head = (run["problem"], run["seed"], f"{run['steps']:,}", f"{run['cpu_seconds'] / 60:.1f}")
        for who, e in run["explored"].items():
            numbers = f"{e['contact']:.1%}", e["voxels"], e["object_voxels"], f"{e['state_entropy']:.2f}"
            rows.append((*head, who, *numbers))
        paid = run["paid"]
        judged = ", ".join(f"{what} {'met' if met else 'MISSED'}" for what, met in verdict(run).items())
        hands = max(e["voxels"] for who, e in run["explored"].items() if who.startswith("coloured"))
        judged += f"; places of hands {run['explored']['policy']['voxels'] / hands:.1f} times the best noise's"
        lines.append(f"{run['problem']} {run['seed']}: paid {paid['first']:.2f} -> {paid['last']:.2f}; {judged}")
    return "\n".join([report.table(rows), *lines])


def main() -> None:
    parser = with_teacher(flags(__doc__))
    parser.add_argument("--rewards", choices=("default", "original"), default="default")
    args = parser.parse_args()
    if args.summary:
        return tell(known(RESULTS), summary)
    run = outcome(args)
    tell(conclude(args, run, RESULTS), summary)


if __name__ == "__main__":
    main()
