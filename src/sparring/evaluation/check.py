"""`sparring check`: is the installation, an env or a policy fit for training? Says what is wrong and how to fix it."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparring.config.resolve import describe_error, import_path
from sparring.config.schema import SCHEMA, Config, load_config
from sparring.config.text import Setting, parse_overrides, value_text
from sparring.envs.backend import drawn
from sparring.envs.configs import GymConfig
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError

ROBOTS = 4
# of an env that has no time limit
PATIENCE = 1000
# pictures that a contact sheet picks from
FILM = 300
# policies that a name alone does not make -> the setting they cannot do without, and words that would
NEEDS = {
    "vla": ("model_class", "policy.model_class=package.module:Class policy.model_path=WEIGHTS 'env.cameras=[head]'"),
    "pi0": ("model_path", "policy.model_path=FOLDER 'env.cameras=[head,wrist]'"),
}
# (what was looked at, whether it is right, what was seen)
Finding = tuple[str, bool, str]


def check(name: str | None, overrides: list[str]) -> int:
    """Print the findings about the installation, or about an env or policy by name; 1 if anything is wrong."""
    good = True
    for what, fine, seen in _findings(name, parse_overrides(overrides)):
        good &= fine
        print(f"{'ok  ' if fine else 'FAIL'}  {what}: {seen}", flush=True)
    return 0 if good else 1


def _findings(name: str | None, settings: list[Setting]) -> Iterator[Finding]:
    if name is None:
        yield from installation()
        yield from env_findings(load_config(None, settings, inherit=False))
    elif _is_policy(name):
        settings = [*settings, Setting("policy.name", name, "command line")]
        yield from policy_findings(load_config(None, settings, inherit=False))
    else:
        yield from env_findings(load_config(None, [*settings, _env_setting(name, settings)], inherit=False))


def installation() -> Iterator[Finding]:
    yield "python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer is needed)"
    for package in ("torch", "tensordict", "mujoco", "gymnasium", "numba", "accelerate", "safetensors", "pydantic"):
        yield package, True, importlib.metadata.version(package)
    yield torchvision_finding()
    import torch

    cuda = f"{torch.cuda.device_count()} visible" if torch.cuda.is_available() else "none, the CPU is used"
    yield "GPUs", True, cuda
    yield encoder_finding()


def encoder_finding() -> Finding:
    from sparring.data.video import find_ffmpeg

    try:
        return "video encoder", True, Path(find_ffmpeg()).name
    except UserError as error:
        return "video encoder", False, str(error)


def torchvision_finding() -> Finding:
    """Beside a CPU build of torch, torchvision's import fails, and every transformers model with it."""
    if importlib.util.find_spec("torchvision") is None:
        return "torchvision", True, "absent, as it should be beside a CPU build of torch"
    # in a process of its own: a broken one can poison this one
    attempt = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if attempt.returncode == 0:
        return "torchvision", True, "importable"
    reason = attempt.stderr.strip().splitlines()[-1]
    return "torchvision", False, f"installed but broken ({reason}); pip uninstall torchvision"


def env_findings(config: Config) -> Iterator[Finding]:
    """What it shows and takes, and then whether it does so: the contract, the end of episodes, determinism, speed."""
    from sparring.envs.env import make_env

    envs = []
    try:
        for _ in range(2):
            envs.append(make_env(config.env, ROBOTS, config.rollout.max_episode_steps))
        yield from _shown_and_taken(config.env.name, envs[0].spec)
        if isinstance(config.env, GymConfig):
            _check_shapes(config)
        yield from _played(*envs, config.rollout.action_steps, _sheet_path(config))
    except Exception as error:  # an env is somebody else's code: whatever it raises is a finding
        yield "contract", False, _in_words(error)
    finally:
        for env in envs:
            env.close()


def policy_findings(config: Config) -> Iterator[Finding]:
    """Acts, scores what it did alike, and survives one update."""
    from sparring.runs.run import Run

    if (needed := _needed(config.policy)) is not None:
        yield "policy", False, needed
        return
    run, doing = None, "policy"
    try:
        run = Run(config, folder=False, quiet=True)
        parameters = sum(p.numel() for p in run.phase.model.parameters())
        fresh = ", fresh weights (no policy.model_path)" if getattr(config.policy, "model_path", "") is None else ""
        yield "policy", True, f"{config.policy.name}: {parameters:,} parameters{fresh}"
        doing = "act and evaluate"
        metrics = run.phase.step(0.0)
        yield "act and evaluate", True, f"parity {metrics['parity']:.3g} (limit {config.ppo.parity_tolerance:g})"
        yield "update", bool(np.isfinite(metrics["loss"])), f"loss {metrics['loss']:.4g}"
    except Exception as error:  # a policy is somebody else's code too
        yield doing, False, _in_words(error)
    finally:
        if run is not None:
            run.phase.env.close()


def _needed(policy) -> str | None:
    """What more a policy has to be told, in words; None: nothing."""
    key, words = NEEDS.get(policy.name, (None, ""))
    if key is None or getattr(policy, key) is not None:
        return None
    return f"'{policy.name}' is not made by its name alone; write: sparring check {policy.name} {words} (docs/vla.md)"


def _is_policy(name: str) -> bool:
    from sparring.policies import POLICIES

    if name in POLICIES:
        return True
    if ":" not in name or name.startswith("gym:"):
        return False
    from sparring.policies.policy import Policy

    thing = import_path(name, "name")
    return isinstance(thing, type) and issubclass(thing, Policy)


def _env_setting(name: str, others: list[Setting]) -> Setting:
    """'sparring/reach_d1' is the built-in arm with that task."""
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


def _shown_and_taken(name: str, spec) -> Iterator[Finding]:
    tasks = ", ".join(dict.fromkeys(task for task in spec.task_names if task))
    yield "env", True, f"{name}: {tasks or 'no named task'}"
    for key, (shape, dtype) in spec.observation.items():
        yield f"observation/{key}", True, f"{list(shape)} {dtype}"
    kind = f"one of {spec.discrete_actions}" if spec.discrete_actions else "continuous in [-1, 1]"
    yield "action", True, f"{spec.action_dim} dims, {kind}"


def _check_shapes(config: Config) -> None:
    """In training only resets are looked at; a wrong shape of a step would be spread over the state by numpy."""
    from sparring.envs.gym import GymRobot

    robot = GymRobot(config.env, config.rollout.max_episode_steps)
    robot.reset(seed=0)
    for _ in range(20):
        observation, _, terminated, truncated, _ = robot.env.step(robot.env.action_space.sample())
        robot.observations.check(observation)
        if terminated or truncated:
            break
    robot.close()


def _played(env, again, chunk: int, sheet: Path) -> Iterator[Finding]:
    """Random actions until every robot must have ended an episode, twice from the same seed; a film goes to `sheet`."""
    from sparring.collect.collector import Collector
    from sparring.policies.random import RandomPolicy
    from sparring.record.overlay import filmstrip, write_png

    first = Collector(env, RandomPolicy(env.spec, chunk), seed=0, chunk=chunk)
    limit = env.spec.max_episode_steps or PATIENCE
    trail = [_digest(first.decide())]
    # what is compiled or loaded on first use is not part of the speed
    started, before = time.perf_counter(), first.env_steps
    trail += [_digest(first.decide()) for _ in range(limit)]
    speed = (first.env_steps - before) / (time.perf_counter() - started)
    yield "contract", True, "reset and step return what they should"
    ended = len(first.episodes)
    advice = "" if ended else "; have it return terminated or truncated, or set rollout.max_episode_steps"
    yield "episodes end", ended > 0, f"{ended} ended in {len(trail)} decisions of {ROBOTS} robots{advice}"
    differs, film = _replayed(Collector(again, RandomPolicy(env.spec, chunk), seed=0, chunk=chunk), trail)
    yield "determinism", differs is None, _determinism(differs)
    resuming = (
        "none; resumed runs start episodes anew" if env.state() is None else "can be put back; runs resume exactly"
    )
    yield "saved state", True, resuming
    yield "speed", True, f"{speed:,.0f} env steps/s with {ROBOTS} robots and random actions"
    yield "pictures", True, str(write_png(sheet, filmstrip(film))) if film else "none"


def _replayed(collector, trail: list[bytes]) -> tuple[int | None, list[np.ndarray]]:
    """The first decision that went otherwise than in `trail`, if any, and a film of one robot's first episode."""
    env, film = collector.env, []
    filming = env.backend.render(0) is not None
    env.backend.record([0] if filming else [])
    for number, before in enumerate(trail):
        digest = _digest(collector.decide())
        film += map(drawn, env.last.frames.get(0, []))
        if filming and (0 in env.last.ended or len(film) >= FILM):
            filming = False
            env.backend.record([])
        if digest != before:
            return number, film
    return None, film


def _determinism(differs: int | None) -> str:
    if differs is None:
        return "the same seed gives the same trajectories"
    return (
        f"the same seed gave something else in decision {differs + 1}; "
        "draw all randomness from the seed that reset() is given (self.np_random)"
    )


def _digest(td) -> bytes:
    """Of all that an env decides in a step."""
    digest = hashlib.blake2b()
    for _, value in sorted(td.select("observation", "next").items(True, True), key=lambda item: str(item[0])):
        digest.update(value.numpy().tobytes())
    return digest.digest()


def _sheet_path(config: Config) -> Path:
    """Where the pictures of this env go."""
    name = "_".join(getattr(config.env, "task", ())) or config.env.name
    safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
    return Path(os.environ.get("OUTPUT_BASE", "outputs")) / "check" / f"{safe}.png"


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else describe_error(error)
