"""`sparring check`: is the installation, an env or a policy fit for training? Says what is wrong and how to mend it."""

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from sparring.config_text import Setting, parse_overrides
from sparring.errors import UserError
from sparring.tree import Config, load_config

# (what was looked at, whether it is right, what was seen)
Finding = tuple[str, bool, str]


def check(name: str | None, overrides: list[str]) -> int:
    """Print the findings about the installation, or about an env or policy by name; 1 if anything is wrong."""
    settings = parse_overrides(overrides)
    if name is None:
        findings = [*installation(), *_env_findings(load_config(None, settings))]
    elif _is_policy(name):
        findings = policy_findings(load_config(None, [*settings, Setting("policy.name", name, "command line")]))
    else:
        findings = _env_findings(load_config(None, [*settings, *_env_settings(name)]))
    good = True
    for what, fine, seen in findings:
        good &= fine
        print(f"{'ok  ' if fine else 'FAIL'}  {what}: {seen}")
    return 0 if good else 1


def installation() -> Iterator[Finding]:
    yield "python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer is needed)"
    for package in ("torch", "tensordict", "mujoco", "gymnasium", "numba", "accelerate", "safetensors", "pydantic"):
        yield package, True, importlib.metadata.version(package)
    yield torchvision_finding()
    import torch

    cuda = f"{torch.cuda.device_count()} visible" if torch.cuda.is_available() else "none, the CPU is used"
    yield "GPUs", True, cuda
    import imageio_ffmpeg

    yield "video encoder", True, imageio_ffmpeg.get_ffmpeg_version()


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


def _is_policy(name: str) -> bool:
    from sparring.policies import POLICIES

    if name in POLICIES:
        return True
    if ":" not in name or name.startswith("gym:"):
        return False
    from sparring.policies.policy import Policy
    from sparring.resolve import import_path

    thing = import_path(name, "name")
    return isinstance(thing, type) and issubclass(thing, Policy)


def _env_settings(name: str) -> list[Setting]:
    """'sparring/reach_d1' is the built-in arm with that task."""
    if name.startswith("sparring/"):
        return [Setting("env.task", name.removeprefix("sparring/"), "command line")]
    return [Setting("env.name", name, "command line")]


def _env_findings(config: Config) -> Iterator[Finding]:
    """The contract, the end of episodes, determinism, and speed."""
    from sparring.collect.collector import Collector
    from sparring.envs.make import make_env
    from sparring.policies.random import RandomPolicy

    def new_env():
        return make_env(config.env, 4, config.rollout.max_episode_steps)

    env = new_env()
    chunk = config.rollout.action_steps
    yield (
        "env",
        True,
        f"{config.env.name}: {', '.join(name for name in env.spec.task_names if name) or 'no named task'}",
    )
    for name, (shape, dtype) in env.spec.observation.items():
        yield f"observation/{name}", True, f"{list(shape)} {dtype}"
    kind = f"one of {env.spec.discrete_actions}" if env.spec.discrete_actions else "continuous in [-1, 1]"
    yield "action", True, f"{env.spec.action_dim} dims, {kind}"
    try:
        first = Collector(env, RandomPolicy(env.spec, chunk), seed=0, chunk=chunk)
        limit = env.spec.max_episode_steps or 1000
        started = time.perf_counter()
        trail = [
            td["observation", "state"].clone() if ("observation", "state") in td.keys(True) else None
            for td in first.decide(limit + 1)
        ]
        seconds = time.perf_counter() - started
    except UserError as error:
        yield "contract", False, str(error)
        return
    yield "contract", True, "reset and step return what they should"
    ended = len(first.episodes)
    yield "episodes end", ended > 0, f"{ended} ended in {limit + 1} decisions of 4 robots (limit: {limit} steps)"
    again = Collector(new_env(), RandomPolicy(env.spec, chunk), seed=0, chunk=chunk)
    repeated = [
        td["observation", "state"] if ("observation", "state") in td.keys(True) else None
        for td in again.decide(limit + 1)
    ]
    same = all(a is None or bool((a == b).all()) for a, b in zip(trail, repeated, strict=True))
    yield (
        "determinism",
        same,
        "the same seed gives the same trajectories"
        if same
        else ("the same seed gave another trajectory; draw all randomness from the seed that reset() is given"),
    )
    yield (
        "saved state",
        True,
        "can be put back; runs resume exactly"
        if env.state() is not None
        else ("none; a resumed run starts new episodes"),
    )
    yield "speed", True, f"{first.env_steps / seconds:,.0f} env steps/s with 4 robots and random actions"
    picture = env.backend.render(0)
    yield "pictures", True, "none" if picture is None else f"{list(np.asarray(picture).shape)}"
    env.close()
    again.env.close()


def policy_findings(config: Config) -> Iterator[Finding]:
    """Acts, scores what it did alike, and survives one update."""
    from sparring.run import Run

    run = Run(config, folder=False, quiet=True)
    parameters = sum(p.numel() for p in run.phase.model.parameters())
    yield "policy", True, f"{config.policy.name}: {parameters:,} parameters"
    try:
        metrics = run.phase.step(0.0)
    except UserError as error:
        yield "act and evaluate", False, str(error)
        return
    yield "act and evaluate", True, f"parity {metrics['parity']:.3g} (limit {config.ppo.parity_tolerance:g})"
    finite = bool(np.isfinite(metrics["loss"]))
    yield "update", finite, f"loss {metrics['loss']:.4g}"
    run.phase.env.close()
