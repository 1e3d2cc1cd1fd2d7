"""Phase 3: does training both against each other improve the world model, and does it forget random data?

    python benchmarks/phases/teacher.py --seed 0               # first, the world model,
    python benchmarks/phases/student.py --seed 0               # and the explorer
    python benchmarks/phases/adversarial.py --seed 0
    python benchmarks/phases/adversarial.py --seed 0 --minutes 5       # repeat the command to resume
    python benchmarks/phases/adversarial.py --summary

Two runs of the same length start from the same teacher: `sparring`, and `noise`, which differs only in its actions:
random ones like those that trained the teacher, in new scenes (updates, windows and episodes are equal). One process
computes on one thread, each run for at most --minutes of CPU.

The error is the cross-entropy in nats per token. Targets: on the held-out episodes of all generations of explorers but
the last, at least 30 % below the teacher and 15 % below `noise`; on held-out random episodes at most 2 % above the
teacher. Also printed, without a target: the error relative to that of the world models at collection time, which had
already learned for a while.
"""

from pathlib import Path

from script import RUNS, finish, flags, report, show, stored, student_of, suffix, teacher_of, with_student
from teacher import train

RESULTS = report.RESULTS / "phases_adversarial.json"
CURVES = ("reward/", "episode_reward", "contact_share", "wm_", "accuracy", "generations_", "reference_kl")
EPISODES = 64
DOWN, BETTER, UP, NEW_SCENES = 0.30, 0.15, 0.02, 1_000_000
SETTINGS = ["phase=adversarial", "device=cpu", "threads=1", "env.threads=1", "training.iterations=32"]
SETTINGS += ["adversarial.generation_every=4", "training.save_every=4"]
# the run for comparison: it collects, and its explorer stays in the warm-up
NOISE = ["policy.name=noise_policy:Noise", "policy.robots=16", "rollout.n_envs=16", "adversarial.warmup_steps=1000000"]


def outcome(args) -> dict:
    from sparring.api import load_world_model

    seed, teacher, student, minutes, changes = args.seed, teacher_of(args), student_of(args), args.minutes, args.set
    folders = {who: RUNS / f"adversarial_{who}_seed{seed}{suffix(args)}" for who in ("sparring", "noise")}
    # with the seed of the teacher, noise would repeat the actions that trained it
    own = {"sparring": [f"adversarial.student={student}"], "noise": [*NOISE, f"seed={seed + NEW_SCENES}"]}
    models, records = {"teacher": load_world_model(teacher)}, {}
    for who, folder in folders.items():
        config = _config(teacher, folder, seed, [*changes, *own[who]])
        run, records[who] = train(config, minutes, CURVES)
        run.phase.close()
        models[who] = run.phase.world_model.eval()
    done = all(record["done"] for record in records.values())
    about = {"problem": "adversarial", "seed": seed, "commit": report.commit(), "cpu": report.cpu_model(), "done": done}
    generations = on_generations(models, folders["sparring"] / "generations")
    return about | {"runs": records, "generations": generations, "random": on_random(models, config, seed)}


def _config(teacher: Path, folder: Path, seed: int, changes: list[str]):
    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides

    fixed = [*SETTINGS, f"adversarial.teacher={teacher}", f"seed={seed}", f"output={folder}"]
    return load_config(None, parse_overrides([*fixed, *changes]))


def on_generations(models: dict, folder: Path) -> list[dict]:
    """For each generation, the error at collection time and the present error of each world model."""
    from sparring.data.episodes import EpisodeStore
    from sparring.phases.replay import Generations

    found = []
    for path in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        store = EpisodeStore(path, read_only=True)
        if not len(store):
            continue
        errors = {who: Generations.errors(model, store) for who, model in models.items()}
        now = {who: error for who, (_, error) in errors.items()}
        found.append({"generation": int(path.name), "decisions": store.num_steps, "then": errors["teacher"][0]} | now)
    return found


def on_random(models: dict, config, seed: int) -> dict[str, float]:
    """The error of each world model on held-out episodes of random actions."""
    import torch
    from noise_policy import Noise, NoiseConfig

    from sparring.envs.env import make_env
    from sparring.evaluation.play import held_out_episodes

    chunk, robots = config.rollout.action_steps, 16
    env = make_env(config.env, robots, config.rollout.max_episode_steps)
    episodes = held_out_episodes(env, Noise(NoiseConfig(robots=robots), env.spec, chunk), EPISODES, seed, chunk)
    env.close()
    totals = {}
    with torch.no_grad():
        for who, model in models.items():
            memory, total = model.empty_memory(len(episodes)), 0.0
            for t in range(episodes.shape[1]):
                here = episodes["mask"][:, t]
                scored = model.score(episodes[:, t][here].set(("memory", "world_model"), memory[here]))
                memory[here] = scored["memory"]
                total += float(scored["error"].double().sum())
            totals[who] = total / int(episodes["mask"].sum())
    return totals


def figures(run: dict) -> dict[str, float]:
    """Relative differences: below the teacher, below `noise`, above on random data, below collection time."""
    earlier = run["generations"][:-1] or run["generations"]
    decisions = sum(found["decisions"] for found in earlier)
    sides = ("teacher", "then", "sparring", "noise")
    mean = {who: sum(f[who] * f["decisions"] for f in earlier) / decisions for who in sides}
    return {
        "down": 1 - mean["sparring"] / mean["teacher"],
        "better": 1 - mean["sparring"] / mean["noise"],
        "up": run["random"]["sparring"] / run["random"]["teacher"] - 1,
        "since collection": 1 - mean["sparring"] / mean["then"],
    }


def summary(runs: dict[str, dict]) -> str:
    rows = [("seed", "set", "decisions", "then", "teacher now", "sparring now", "noise now")]
    lines = []
    for run in runs.values():
        for found in run["generations"]:
            errors = [f"{found[who]:.3f}" for who in ("then", "teacher", "sparring", "noise")]
            rows.append((run["seed"], f"generation {found['generation']}", found["decisions"], *errors))
        errors = [f"{run['random'][who]:.3f}" for who in ("teacher", "sparring", "noise")]
        rows.append((run["seed"], "random", "", "", *errors))
        got = figures(run)
        met = {"down": got["down"] >= DOWN, "better": got["better"] >= BETTER, "up": got["up"] <= UP}
        text = ", ".join(f"{name} {got[name]:+.1%} {'met' if met[name] else 'MISSED'}" for name in met)
        text += f", down since collection {got['since collection']:+.1%}"
        minutes = ", ".join(f"{who} {record['cpu_seconds'] / 60:.1f}" for who, record in run["runs"].items())
        lines.append(f"seed {run['seed']}: {text}; CPU minutes: {minutes}")
    return "\n".join([report.table(rows), *lines])


def main() -> None:
    args = with_student(flags(__doc__)).parse_args()
    if args.summary:
        return show(stored(RESULTS), summary)
    run = outcome(args)
    show(finish(args, run, RESULTS), summary)


if __name__ == "__main__":
    main()
