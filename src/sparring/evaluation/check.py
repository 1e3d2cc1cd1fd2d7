"""`sparring check`: checks the installation, an env or a policy, and prints problems and how to fix them."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from sparring.collect.collector import Collector
from sparring.config.resolve import resolve
from sparring.config.schema import SCHEMA, Config, load_config
from sparring.config.text import Setting, parse_overrides, shortened, value_text
from sparring.data.video import find_ffmpeg
from sparring.envs import SIMS
from sparring.envs.backend import drawn
from sparring.envs.configs import GymConfig
from sparring.envs.env import Env, make_env
from sparring.envs.gym import GymRobot
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError, describe_error
from sparring.evaluation.play import why_no_picture
from sparring.policies import POLICIES
from sparring.policies.policy import Policy
from sparring.policies.random import RandomPolicy
from sparring.record.overlay import filmstrip, write_png
from sparring.runs.run import Run

ROBOTS = 4
UNLIMITED_DECISIONS = 1000  # decisions in an env without a time limit
FRAMES = 300  # maximum number of recorded frames, from which a contact sheet is made
_IMPORT_S = 300.0  # timeout of an import
# policies that need a setting in addition to their name -> the setting, and an example
NEEDS = {
    "vla": ("model_class", "policy.model_class=package.module:Class policy.model_path=WEIGHTS 'env.cameras=[head]'"),
    "pi0": ("model_path", "policy.model_path=FOLDER 'env.cameras=[head,wrist]'"),
}
Finding = tuple[str, bool, str]  # (what was checked, passed, details)


def check(name: str | None, overrides: list[str]) -> int:
    """Print findings about the installation, or about the env or policy `name`; returns 1 if a check failed."""
    settings, is_policy = parse_overrides(overrides), name is not None and _is_policy(name)
    if name is not None:
        settings.append(Setting("policy.name", name, "command line") if is_policy else _env_setting(name, settings))
    config = load_config(None, settings, inherit=False)
    findings = _policy_findings(config) if is_policy else _env_findings(config)
    all_passed = True
    for what, passed, details in findings if name is not None else chain(_installation(), findings):
        all_passed &= passed
        print(f"{'ok  ' if passed else 'FAIL'}  {what}: {details}", flush=True)
    return 0 if all_passed else 1


def _installation() -> Iterator[Finding]:
    yield "python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer is needed)"
    for package in ("torch", "tensordict", "mujoco", "gymnasium", "numba", "accelerate", "safetensors", "pydantic"):
        yield package, True, importlib.metadata.version(package)
    yield _torchvision()
    yield "GPUs", True, f"{torch.cuda.device_count()} visible" if torch.cuda.is_available() else "none, the CPU is used"
    try:
        yield "video encoder", True, Path(find_ffmpeg()).name
    except UserError as error:
        yield "video encoder", False, str(error)


def _torchvision() -> Finding:
    """Checks the import of torchvision: with a CPU build of torch it fails, and so do all transformers models."""
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision", True, "not installed, which is right for a CPU build of torch"
    # in a separate process, because a failed import could damage this one; -P: without the working directory
    try:
        command = [sys.executable, "-P", "-c", "import torchvision"]
        attempt = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return "torchvision", False, f"its import did not end in {_IMPORT_S:g} seconds; pip uninstall torchvision"
    if attempt.returncode == 0:
        return "torchvision", True, "importable"
    reason = attempt.stderr.strip().splitlines()[-1]
    return "torchvision", False, f"installed but broken ({reason}); pip uninstall torchvision"


def _is_policy(name: str) -> bool:
    if name in POLICIES or ":" not in name or name.partition(":")[0] in ("gym", *SIMS):
        return name in POLICIES
    resolved = resolve(name, {}, "name")
    return isinstance(resolved, type) and issubclass(resolved, Policy)


def _env_setting(name: str, others: list[Setting]) -> Setting:
    """The setting for an env name; 'sparring/reach_d1' is the built-in arm with that task."""
    if name in TASKS:
        raise UserError(f"'{name}' is a task, not an env; write: sparring check sparring/{name}")
    if not name.startswith("sparring/"):
        return Setting("env.name", name, "command line")
    task = name.removeprefix("sparring/")
    for other in others:
        is_task = SCHEMA.aliases.get(other.key, other.key) in ("env.task", "task")
        if is_task and other.value not in (task, [task]):
            raise UserError(f"'{name}' and {other.key}={value_text(other.value)} name different tasks; keep one")
    return Setting("env.task", task, "command line")


def _policy_findings(config: Config) -> Iterator[Finding]:
    """Run one update: creates the policy, collects a rollout, scores its actions and learns."""
    name = config.policy.name
    key, example = NEEDS.get(name, (None, ""))
    if key is not None and getattr(config.policy, key) is None:
        needs = f"'{name}' needs policy.{key}; write: sparring check {name} {example} (docs/vla.md)"
        yield "policy", False, needs
        return
    run, doing = None, "policy"
    try:
        run = Run(config, folder=False, quiet=True)
        parameters = sum(p.numel() for p in run.phase.model.parameters())
        fresh = ", random weights (no policy.model_path)" if getattr(config.policy, "model_path", "") is None else ""
        yield "policy", True, f"{name}: {parameters:,} parameters{fresh}"
        doing = "act and evaluate"
        metrics = run.phase.step(0.0)
        yield "act and evaluate", True, f"parity {metrics['parity']:.3g} (limit {config.ppo.parity_tolerance:g})"
        yield "update", bool(np.isfinite(metrics["loss"])), f"loss {metrics['loss']:.4g}"
    except Exception as error:  # a policy is third-party code: every exception is a finding
        yield doing, False, str(error) if isinstance(error, UserError) else describe_error(error)
    finally:
        if run is not None:
            run.phase.env.close()


def _env_findings(config: Config) -> Iterator[Finding]:
    """Check observations and actions, then the contract, the ends of episodes, determinism and speed."""
    envs: list[Env] = []
    try:
        for _ in range(2):
            envs.append(make_env(config.env, ROBOTS, config.rollout.max_episode_steps))
        spec = envs[0].spec
        tasks = ", ".join(dict.fromkeys(task for task in spec.task_names if task))
        yield "env", True, f"{config.env.name}: {tasks or 'no task name'}"
        for key, (shape, dtype) in spec.observation.items():
            yield f"observation/{key}", True, f"{list(shape)} {dtype}"
        kind = f"one of {spec.discrete_actions}" if spec.discrete_actions else "continuous in [-1, 1]"
        yield "action", True, f"{spec.action_dim} dims, {kind}"
        if isinstance(config.env, GymConfig):
            yield from _roles(config)
        yield from _play_twice(envs[0], envs[1], config)
    except Exception as error:  # an env is third-party code as well
        yield "contract", False, str(error) if isinstance(error, UserError) else describe_error(error)
    finally:
        for env in envs:
            env.close()


def _roles(config: Config) -> Iterator[Finding]:
    """What becomes of each observation. Also checks observations of steps: training checks shapes at resets only, and
    numpy would broadcast a wrong shape."""
    robot = GymRobot(config.env, config.rollout.max_episode_steps)
    try:
        for name, use in robot.observations.describe():
            yield f"role of '{name}'", True, use
        _, info = robot.env.reset(seed=0)
        unused = [
            key for key, value in info.items() if isinstance(value, str) and key not in robot.observations.info_keys
        ]
        for key in unused:
            advice = f"to give it to the policy, set env.roles={{info/{key}: instruction}}"
            yield f"info['{key}']", True, f"text, not used ({shortened(repr(info[key]), 60)}); {advice}"
        robot.reset(seed=0)
        for _ in range(20):
            observation, _, terminated, truncated, _ = robot.env.step(robot.env.action_space.sample())
            robot.observations.check(observation, info)
            if terminated or truncated:
                break
    finally:
        robot.close()


def _play_twice(env: Env, again: Env, config: Config) -> Iterator[Finding]:
    """Take random actions until every robot should have ended an episode, twice from the same seed."""
    chunk = config.rollout.action_steps
    first, second = (Collector(e, RandomPolicy(env.spec, chunk), seed=0, chunk=chunk) for e in (env, again))
    digests = [_digest(first.decide())]
    # the speed excludes the first decision, which includes compilation and loading
    started, before = time.perf_counter(), first.env_steps
    digests += [_digest(first.decide()) for _ in range(env.spec.max_episode_steps or UNLIMITED_DECISIONS)]
    speed = (first.env_steps - before) / (time.perf_counter() - started)
    yield "contract", True, "reset and step return valid values"
    ended = len(first.episodes)
    advice = "" if ended else "; have it return terminated or truncated, or set rollout.max_episode_steps"
    yield "episodes end", ended > 0, f"{ended} ended in {len(digests)} decisions of {ROBOTS} robots{advice}"
    differs, frames = _replay(second, digests)
    if differs is None:
        yield "determinism", True, "the same seed gives the same trajectories"
    else:
        advice = "draw all randomness from the seed that reset() is given (self.np_random)"
        yield "determinism", False, f"the same seed gave another result in decision {differs + 1}; {advice}"
    saved = "none; a resume starts new episodes" if env.state() is None else "can be restored; runs resume exactly"
    yield "saved state", True, saved
    yield "speed", True, f"{speed:,.0f} env steps/s with {ROBOTS} robots and random actions"
    name = re.sub(r"[^\w.-]", "_", "_".join(getattr(config.env, "task", ())) or config.env.name)
    sheet = Path(os.environ.get("OUTPUT_BASE") or "outputs") / "check" / f"{name}.png"
    yield "images", True, str(write_png(sheet, filmstrip(frames))) if frames else f"none: {why_no_picture(again)}"


def _replay(collector: Collector, digests: list[bytes]) -> tuple[int | None, list[np.ndarray]]:
    """Returns the first decision that differs from `digests`, if any, and frames of one robot's first episode."""
    env, frames, recording = collector.env, list[np.ndarray](), True
    env.backend.record([0])  # as in training and evaluations, so that this check detects errors of render()
    for number, expected in enumerate(digests):
        digest = _digest(collector.decide())
        frames += map(drawn, env.last.frames.get(0, []))
        if recording and (0 in env.last.ended or len(frames) >= FRAMES):
            recording = False
            env.backend.record([])
        if digest != expected:
            return number, frames
    return None, frames


def _digest(td: TensorDict) -> bytes:
    digest = hashlib.blake2b()
    for _, value in sorted(td.select("observation", "next").items(True, True), key=lambda item: str(item[0])):
        digest.update(value.numpy().tobytes())
    return digest.digest()
