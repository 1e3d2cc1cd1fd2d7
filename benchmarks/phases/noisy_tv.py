"""The noisy TV: which rewards are captured by a screen of static that nobody can foretell?

    python benchmarks/phases/noisy_tv.py --seed 0               # again to go on
    python benchmarks/phases/noisy_tv.py --summary

`explore` with env.noise_screen=true. A world model is trained where the screen is on, as it is taught everywhere (half
uniform, half coloured noise); then two explorers, alike but for what pays them: prediction_error and disagreement
(phase 2, the world model is frozen). The latter goes on under learning_progress (phase 3: so does the world model).
All play the same held-out episodes beside the noise that taught the world model, and the pixels of the screen in the
wrist camera's view are counted (254 in a segmentation). Wanted: under prediction_error at least 2 times the noise's
share, under the others at most 1.2 times. results/phases_noisy_tv.png shows them side by side.

One process computes on one thread: the world model for --teacher-minutes, each explorer for --minutes of CPU; or with
--device cuda on a GPU, where the results are kept as well, and say so.
"""

from pathlib import Path

from exploring import CURVES, explorer_config
from script import RUNS, conclude, flags, known, report, tell, tried, with_teacher
from teacher import SETTINGS, train

RESULTS = report.RESULTS / "phases_noisy_tv.json"
FIGURE = RESULTS.with_suffix(".png")
EPISODES = 128
CAPTURED, IMMUNE = 2.0, 1.2
# what pays -> (phase, settings)
PAID = {
    "prediction_error": ("student", ["rewards.disagreement=0", "rewards.prediction_error=1"]),
    "disagreement": ("student", []),
    "learning_progress": ("adversarial", ["rewards.disagreement=0", "rewards.learning_progress=1"]),
}
# the explorer learns from the first update on
ADVERSARIAL = ["adversarial.warmup_steps=0", "adversarial.wm_updates_per_iter=20"]


def teach(seed: int, minutes: float, folder: Path, device: str) -> Path | None:
    """A world model of the scene with the screen on; None where it is not done."""
    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides

    given = [*SETTINGS, f"seed={seed}", f"output={folder}", f"device={device}", "env.noise_screen=true"]
    run, record = train(load_config(None, parse_overrides(given)), minutes)
    run.phase.close()
    print(f"world model: {record['cpu_seconds'] / 60:.1f} CPU minutes, {record['steps']:,} steps", flush=True)
    return folder if record["done"] else None


def explore(paid: str, teacher: Path, args) -> tuple:
    folders = {name: RUNS / (f"noisy_tv_{name}_seed{args.seed}" + tried(args)) for name in PAID}
    folder, (phase, rewards) = folders[paid], PAID[paid]
    settings = ["rewards.memory_divergence=0", *rewards]
    if phase == "adversarial":
        settings += [*ADVERSARIAL, f"adversarial.student={folders['disagreement']}"]
    config = explorer_config(teacher, folder, args.seed, [*settings, f"device={args.device}", *args.set], phase)
    run, record = train(config, args.minutes, CURVES)
    # in phase 3 the explorer is a part
    return getattr(run.phase, "explorer", run.phase).policy.eval().cpu(), config, record


def screen_share(policy, config) -> float:
    """Mean share of the wrist camera's pixels that show the screen."""
    from sparring.collect.collector import Collector
    from sparring.envs.env import make_env
    from sparring.envs.tabletop.render.renderer import SCREEN_LABEL

    env = make_env(config.env.model_copy(update={"segmentation": True}), 32)
    collector = Collector(env, policy, config.seed, split="eval", chunk=config.rollout.action_steps)
    decisions = EPISODES // env.num_envs * -(-env.spec.max_episode_steps // config.rollout.action_steps)
    views = (collector.decide()["next", "observation", "segmentation", "wrist"] for _ in range(decisions))
    shares = [float((view == SCREEN_LABEL).float().mean()) for view in views]
    env.close()
    return sum(shares) / len(shares)


def the_noise(config):
    """What the world model was taught with: half of the robots uniform, half coloured."""
    from sparring.envs.env import make_env
    from sparring.policies.random import ColouredNoise

    env = make_env(config.env, 1)
    env.close()
    teacher = config.teacher
    return ColouredNoise(
        env.spec, config.rollout.action_steps, ColouredNoise.share_of(32, teacher.coloured) * teacher.correlation
    )


def outcome(args) -> dict | None:
    """None where a part is not done, and others start from it. --set: of the explorers' settings."""
    seed, device = args.seed, args.device
    teacher = args.teacher or teach(seed, args.teacher_minutes, RUNS / f"noisy_tv_teacher_seed{seed}", device)
    shares, curves = {}, {}
    if teacher is None:
        return None
    for paid in PAID:
        policy, config, record = explore(paid, teacher, args)
        if not record["done"]:
            return None
        shares.setdefault("noise", screen_share(the_noise(config), config))
        shares[paid] = screen_share(policy, config)
        curves[paid] = {name: record[name] for name in ("curve", "steps", "cpu_seconds", "done")}
        print(f"seed {seed}: {shares}", flush=True)
    about = {"problem": "noisy_tv", "seed": seed, "commit": report.commit(), "device": report.device(device)}
    return about | {"done": True, "screen_share": shares, "runs": curves}


def ratios(run: dict) -> dict[str, float]:
    shares = run["screen_share"]
    return {paid: shares[paid] / shares["noise"] for paid in PAID}


def summary(runs: dict[str, dict]) -> str:
    rows = [("seed", "paid", "screen in view", "times noise", "wanted", "")]
    for run in runs.values():
        shares = run["screen_share"]
        rows.append((run["seed"], "noise", f"{shares['noise']:.2%}", "1.00", "", ""))
        for paid, times in ratios(run).items():
            captured = paid == "prediction_error"
            met = times >= CAPTURED if captured else times <= IMMUNE
            wanted = f">= {CAPTURED:g}" if captured else f"<= {IMMUNE:g}"
            rows.append((run["seed"], paid, f"{shares[paid]:.2%}", f"{times:.2f}", wanted, "met" if met else "MISSED"))
    return report.table(rows)


def draw(runs: dict[str, dict], path: Path) -> None:
    """A bar for each explorer of each seed, in times of the noise's share; lines where they should end."""
    from PIL import Image, ImageDraw

    bars = [(f"seed {run['seed']}  {paid}", times) for run in runs.values() for paid, times in ratios(run).items()]
    left, unit, row = 220, 420 / max(3.0, *(times for _, times in bars)), 26
    picture = Image.new("RGB", (left + 500, row * len(bars) + 60), "white")
    pen = ImageDraw.Draw(picture)
    pen.text((left, 8), "screen in the wrist camera's view, times that under noise", fill="black")
    for number, (name, times) in enumerate(bars):
        top = 32 + row * number
        colour = (214, 96, 77) if "error" in name else (67, 147, 195)
        pen.text((8, top + 4), name, fill="black")
        pen.rectangle((left, top, left + times * unit, top + row - 8), fill=colour)
        pen.text((left + times * unit + 6, top + 4), f"{times:.2f}", fill="black")
    for times, colour in ((1.0, "grey"), (IMMUNE, (67, 147, 195)), (CAPTURED, (214, 96, 77))):
        x = left + times * unit
        pen.line((x, 28, x, 32 + row * len(bars)), fill=colour)
        pen.text((x - 8, 36 + row * len(bars)), f"{times:g}x", fill=colour)
    picture.save(path)


def main() -> None:
    parser = with_teacher(flags(__doc__))
    parser.add_argument("--teacher-minutes", type=float, default=15, help="of CPU for the world model")
    parser.add_argument("--device", default="cpu", help="where the networks compute: cpu or cuda")
    args = parser.parse_args()
    runs = known(RESULTS)
    if not args.summary:
        run = outcome(args)
        runs = conclude(args, run, RESULTS)
    tell(runs, summary)
    if runs and not args.set:
        draw(runs, FIGURE)
        print(f"figure: {FIGURE}")


if __name__ == "__main__":
    main()
