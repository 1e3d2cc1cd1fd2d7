"""Every phase at learning rates from 1e-6 to 1e30: does it train, or end with a sentence? It must never crash.

    python benchmarks/divergence.py [--only teacher,imitate] [--rates 1e0,1e10]

Each cell is `sparring train` of a few updates in a child process. Kept in benchmarks/results/divergence.json.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import RESULTS, metadata, table, write_json

from sparring.cli.main import main as sparring
from sparring.demos.plan import Plan
from sparring.demos.record import record
from sparring.envs.configs import TabletopConfig
from sparring.runs.run import Run  # noqa: F401  imports, once for all cells, what training does

RATES = [f"1e{exponent}" for exponent in range(-6, 31)]
LIMIT_S = 180
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


def train(words: list[str], output: Path) -> tuple[str, str]:
    """How `sparring train` ends, in a child process, and what it said last: trained; diverged, with what to lower;
    refused, with another sentence; traceback; signal N; hung."""
    output.parent.mkdir(exist_ok=True)
    said = output.with_name(f"{output.name}.txt")
    child = multiprocessing.get_context("fork").Process(target=_train_here, args=(words, output, said))
    child.start()
    child.join(LIMIT_S)
    if child.is_alive():
        child.kill()
        child.join()
        return "hung", _last(said)
    text = said.read_text(errors="replace")
    if child.exitcode < 0:
        return f"signal {-child.exitcode}", _last(said)
    if "Traceback (most recent call last)" in text:
        return "traceback", _last(said)
    last = _last(said)
    return ("trained", "") if child.exitcode == 0 else ("diverged" if "lower " in last else "refused", last)


def _train_here(words: list[str], output: Path, said: Path) -> None:
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    code = 1
    try:
        code = sparring(["train", *words, "--output", str(output)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _last(said: Path) -> str:
    lines = said.read_text(errors="replace").strip().splitlines()
    line = lines[-1] if lines else ""
    return re.sub(r"/\S+/", "", line.removeprefix("sparring: "))


def record_demos(base: Path) -> None:
    env = TabletopConfig(object_state="state", cameras=(), threads=1)
    record(Plan(env, max_episode_steps=8, keep_failures=True), 3, base / "demos", quiet=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help="names of cases")
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    arguments = parser.parse_args()
    about, base = metadata(), Path(tempfile.mkdtemp(prefix="divergence"))
    context = multiprocessing.get_context("fork")
    # in a child: what has run in this process must not be forked
    recording = context.Process(target=record_demos, args=(base,))
    recording.start()
    recording.join()
    made, last = train(["teacher", *SMALL, *ROBOTS, *TEACHER], base / "taught")
    if made != "trained":
        raise SystemExit(f"the teacher ended with {made}: {last}")
    rates, results = arguments.rates.split(","), RESULTS / "divergence.json"
    cells: dict[str, dict[str, dict[str, str]]] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for case in arguments.only.split(","):
            phase, setting, settings = CASES[case]
            settings = settings if any(word.startswith("env.name=") for word in settings) else [*ROBOTS, *settings]
            words = [phase, *(word.format(base=base, phase=phase) for word in (*SMALL, *settings))]
            ends = pool.map(
                train, [[*words, f"{setting}={rate}"] for rate in rates], [base / case / rate for rate in rates]
            )
            cells[case] = {
                rate: {"outcome": outcome, "said": last} for rate, (outcome, last) in zip(rates, ends, strict=True)
            }
            for rate, cell in cells[case].items():
                if cell["outcome"] not in ("trained", "diverged"):
                    print(f"{case} {setting}={rate}: {cell['outcome']}: {cell['said']}", flush=True)
            shutil.rmtree(base / case)
            if rates == RATES:
                kept = json.loads(results.read_text())["cells"] if results.is_file() else {}
                write_json(results, {"about": about, "cells": kept | {case: cells[case]}})
    shutil.rmtree(base)
    counts = {case: Counter(cell["outcome"] for cell in row.values()) for case, row in cells.items()}
    outcomes = sorted({outcome for count in counts.values() for outcome in count}, reverse=True)
    print(table([("case", *outcomes), *((case, *(count[o] for o in outcomes)) for case, count in counts.items())]))
    return int(bool({*outcomes} - {"trained", "diverged", "refused"}))


if __name__ == "__main__":
    sys.exit(main())
