"""At learning rates from 1e-6 to 1e30, does every phase train or end with a one-line error?

Each trial is `sparring train` with a few updates at one learning rate, in a child process. Verdicts: `trained`,
`diverged` (an error that names the setting to lower), `refused` (another error); bad: `traceback`, `died`, `hang`.
"""

import argparse
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from chaos_corruption import preload, run_or_exit

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
from forks import fork  # noqa: E402

RATES = [f"1e{exponent}" for exponent in range(-6, 31)]
HANG_S = 180
SMALL = ["device=cpu", "threads=1", "rollout.n_envs=2", "rollout.steps=4", "rollout.max_episode_steps=8"]
SMALL += ["rollout.render_episodes=0", "training.bptt_length=2", "training.iterations=2", "training.save_every=1"]
SMALL += ["evaluation.episodes=2", "evaluation.baseline=false"]
ROBOTS = ["env.threads=1", "env.image_size=32", "rollout.action_steps=2"]
STATE = ["env.cameras=[]", "env.object_state=state", "policy.hidden=[16]"]
WORLD_MODEL = ["world_model.tokenizer_steps=4", "world_model.channels=8", "world_model.width=16"]
WORLD_MODEL += ["world_model.members=2", "world_model.memory_channels=8"]
TEACHER = [*WORLD_MODEL, "teacher.gradient_steps=4", "teacher.batch_size=2"]
SEEING = ["policy.channels=[4,4]", "policy.hidden=[8]", "policy.image_features=8"]
PPO = ["ppo.mini_batch_size=4", "ppo.ppo_epochs=2"]
SPARRING = ["adversarial.wm_updates_per_iter=4", "adversarial.batch_size=2", "adversarial.burn_in=1"]
SPARRING += ["adversarial.warmup_steps=0", "rewards.disagreement=1", "rewards.rnd=0.1"]
DEMOS = ["imitate.batch_size=8", "imitate.steps_per_update=4", "imitate.demos={base}/demos"]
NATIVE = ["policy.name=native_vla", "policy.layers=1", "policy.vision_layers=1", "policy.text_tokens=64"]
GROUPS = ["rollout.n_envs=4", "rollout.n_episodes_per_batch=8", "rollout.group_size=2", "grpo.mini_batch_size=4"]
EXPLORER = [*SEEING, *PPO, "{phase}.teacher={base}/taught"]
# name -> phase, the setting that varies, other settings
CASES = {
    "teacher": ("teacher", "teacher.learning_rate", TEACHER),
    "teacher vq": ("teacher", "teacher.learning_rate", [*TEACHER, "world_model.tokenizer=vq"]),
    "student": ("student", "ppo.policy_lr", [*EXPLORER, "rewards.rnd=0.1"]),
    "adversarial": ("adversarial", "adversarial.learning_rate", [*EXPLORER, *SPARRING]),
    "adversarial explorer": ("adversarial", "ppo.policy_lr", [*EXPLORER, *SPARRING]),
    "imitate": ("imitate", "imitate.learning_rate", [*STATE, *DEMOS]),
    "imitate flow": ("imitate", "imitate.learning_rate", [*STATE[:2], *DEMOS, "policy.name=flow"]),
    "gaussian": ("finetune", "ppo.policy_lr", [*STATE, *PPO]),
    "tokens": ("finetune", "ppo.policy_lr", [*STATE, *PPO, "policy.distribution=tokens"]),
    "flow": ("finetune", "ppo.policy_lr", [*STATE[:2], *PPO, "policy.name=flow"]),
    "native vla": ("finetune", "ppo.policy_lr", [*STATE[:2], *PPO, *NATIVE]),
    "grpo": ("finetune", "grpo.policy_lr", [*STATE, "algorithm=grpo", *GROUPS]),
    "async": ("finetune", "ppo.policy_lr", [*STATE, *PPO, "rollout.mode=async"]),
}


BAD = ("traceback", "died", "hang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help="(default: 1e-6, 1e-5 ... 1e30)")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    preload()
    phase, setting, settings = CASES[name]
    settings = [*SMALL, *ROBOTS, *(word.format(base=work, phase=phase) for word in settings)]
    prepare(work, " ".join(settings))
    # in random order, so that an interrupted case covers the range
    for rate in random.Random(f"{args.seed} {name}").sample(args.rates, len(args.rates)):
        output = work / name / rate
        words = ["train", phase, *settings, f"{setting}={rate}", "--output", str(output)]
        yield {"rate": rate, **judged(*fork(words, HANG_S)), "of": len(args.rates)}
        shutil.rmtree(output, ignore_errors=True)


def summary(trials: list[dict]) -> dict:
    by_rate = sorted(trials, key=lambda trial: float(trial["rate"]))
    return {"rates": {trial["rate"]: {key: trial[key] for key in ("verdict", "output")} for trial in by_rate}}


def prepare(base: Path, settings: str) -> None:
    """Make the demonstrations and the teacher that the settings name, if missing."""
    if f"{base}/demos" in settings and not (base / "demos").exists():
        # in a fork: this process must not start threads, because it forks later
        code, text = fork([], HANG_S, lambda _: record_demos(base))
        if code:
            raise SystemExit(f"the recording of demonstrations ended with {code}:\n{text}")
    if f"{base}/taught" in settings and not (base / "taught").exists():
        run_or_exit(["train", "teacher", *SMALL, *ROBOTS, *TEACHER, "--output", str(base / "taught")])


def record_demos(base: Path) -> int:
    from sparring.demos.plan import Plan
    from sparring.demos.record import record
    from sparring.envs.configs import TabletopConfig

    env = TabletopConfig(object_state="state", cameras=(), threads=1)
    record(Plan(env, max_episode_steps=8, keep_failures=True), 3, base / "demos", quiet=True)
    return 0


def judged(code: int | None, text: str) -> dict:
    """The verdict, and the last printed line if it did not train."""
    lines = text.strip().splitlines() or [""]
    last = re.sub(r"/\S+/", "", lines[-1].removeprefix("sparring: "))
    if code is None:
        verdict = "hang"
    elif code < 0:
        verdict = "died"
    elif "Traceback (most recent call last)" in text:
        verdict = "traceback"
    else:
        verdict = "trained" if code == 0 else "diverged" if "lower " in last else "refused"
    return {"verdict": verdict, "output": "" if verdict == "trained" else last}
