"""The noisy-TV problem: which intrinsic rewards are captured by a screen of static that nothing can predict?

    python benchmarks/phases/noisy_tv.py --seed 0               # repeat the command to resume
    python benchmarks/phases/noisy_tv.py --summary

The env is `explore` with env.noise_screen=true. A world model is trained with the screen on, on random actions (half
uniform, half coloured noise). The explorers differ only in their reward: prediction_error and disagreement (phase 2,
with a frozen world model); learning_progress continues the latter in phase 3, where the world model also learns. All
play the same held-out episodes, compared with the noise that trained the world model; counted is the share of the wrist
camera's pixels that show the screen (label 254 of the segmentation). Targets, as a ratio to the noise's share: at least
2 for prediction_error, at most 1.2 for the others. results/phases_noisy_tv.png shows the ratios.

One process computes on one thread: --teacher-minutes of CPU for the world model, --minutes for each explorer.
--device cuda uses a GPU; the results name the device.
"""

from pathlib import Path

from exploring import CURVES, explorer_config
from script import RUNS, finish, flags, report, show, stored, suffix, with_teacher
from teacher import SETTINGS, train

RESULTS = report.RESULTS / "phases_noisy_tv.json"
FIGURE = RESULTS.with_suffix(".png")
EPISODES = 128
CAPTURED, IMMUNE = 2.0, 1.2
# reward term -> (phase, settings)
TERMS = {
    "prediction_error": ("student", ["rewards.disagreement=0", "rewards.prediction_error=1"]),
    "disagreement": ("student", []),
    "learning_progress": ("adversarial", ["rewards.disagreement=0", "rewards.learning_progress=1"]),
}
# the explorer learns from the first update on
ADVERSARIAL = ["adversarial.warmup_steps=0", "adversarial.wm_updates_per_iter=20"]


def train_teacher(seed: int, minutes: float, folder: Path, device: str) -> Path | None:
    """Train a world model with the screen on; None if it is not finished."""
    from sparring.config.schema import load_config
    from sparring.config.text import parse_overrides

    settings = [*SETTINGS, f"seed={seed}", f"output={folder}", f"device={device}", "env.noise_screen=true"]
    run, record = train(load_config(None, parse_overrides(settings)), minutes)
    run.phase.close()
    print(f"world model: {record['cpu_seconds'] / 60:.1f} CPU minutes, {record['steps']:,} steps", flush=True)
    return folder if record["done"] else None


def explore(term: str, teacher: Path, args) -> tuple:
    folders = {name: RUNS / (f"noisy_tv_{name}_seed{args.seed}" + suffix(args)) for name in TERMS}
    folder, (phase, rewards) = folders[term], TERMS[term]
    settings = ["rewards.memory_divergence=0", *rewards]
    if phase == "adversarial":
        settings += [*ADVERSARIAL, f"adversarial.student={folders['disagreement']}"]
    config = explorer_config(teacher, folder, args.seed, [*settings, f"device={args.device}", *args.set], phase)
    run, record = train(config, args.minutes, CURVES)
    # in phase 3 the explorer is a part of the phase
    return getattr(run.phase, "explorer", run.phase).policy.eval().cpu(), config, record


def screen_share(policy, config) -> float:
    """Mean share of the pixels of the wrist camera that show the screen."""
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


def training_noise(config):
    """The training noise of the world model: half of the robots uniform, half coloured."""
    from sparring.envs.env import make_env
    from sparring.policies.random import ColouredNoise

    env = make_env(config.env, 1)
    env.close()
    teacher = config.teacher
    return ColouredNoise(
        env.spec, config.rollout.action_steps, ColouredNoise.share_of(32, teacher.coloured) * teacher.correlation
    )


def outcome(args) -> dict | None:
    """Run all parts; None if one is not finished, since others start from it. --set applies to the explorers."""
    seed, device = args.seed, args.device
    teacher = args.teacher or train_teacher(seed, args.teacher_minutes, RUNS / f"noisy_tv_teacher_seed{seed}", device)
    shares, curves = {}, {}
    if teacher is None:
        return None
    for term in TERMS:
        policy, config, record = explore(term, teacher, args)
        if not record["done"]:
            return None
        shares.setdefault("noise", screen_share(training_noise(config), config))
        shares[term] = screen_share(policy, config)
        curves[term] = {name: record[name] for name in ("curve", "steps", "cpu_seconds", "done")}
        print(f"seed {seed}: {shares}", flush=True)
    about = {"problem": "noisy_tv", "seed": seed, "commit": report.commit(), "device": report.device(device)}
    return about | {"done": True, "screen_share": shares, "runs": curves}


def ratios(run: dict) -> dict[str, float]:
    shares = run["screen_share"]
    return {term: shares[term] / shares["noise"] for term in TERMS}


def summary(runs: dict[str, dict]) -> str:
    rows = [("seed", "term", "screen in view", "times noise", "target", "")]
    for run in runs.values():
        shares = run["screen_share"]
        rows.append((run["seed"], "noise", f"{shares['noise']:.2%}", "1.00", "", ""))
        for term, times in ratios(run).items():
            captured = term == "prediction_error"
            met = times >= CAPTURED if captured else times <= IMMUNE
            target = f">= {CAPTURED:g}" if captured else f"<= {IMMUNE:g}"
            rows.append((run["seed"], term, f"{shares[term]:.2%}", f"{times:.2f}", target, "met" if met else "MISSED"))
    return report.table(rows)


def draw(runs: dict[str, dict], path: Path) -> None:
    """Draw the ratio of each explorer to noise as a bar, and the targets as lines."""
    from PIL import Image, ImageDraw

    bars = [(f"seed {run['seed']}  {term}", times) for run in runs.values() for term, times in ratios(run).items()]
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
    parser.add_argument("--teacher-minutes", type=float, default=15, help="CPU minutes of the world model")
    parser.add_argument("--device", default="cpu", help="device of the networks: cpu or cuda")
    args = parser.parse_args()
    runs = stored(RESULTS)
    if not args.summary:
        run = outcome(args)
        runs = finish(args, run, RESULTS)
    show(runs, summary)
    if runs and not args.set:
        draw(runs, FIGURE)
        print(f"figure: {FIGURE}")


if __name__ == "__main__":
    main()
