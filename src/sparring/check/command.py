"""`sparring check`: checks the installation, an env or a policy, and prints problems and how to fix them."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from sparring.check.env import env_findings
from sparring.check.findings import ERROR, Finding, report
from sparring.check.policy import policy_findings
from sparring.config.resolve import resolve
from sparring.config.schema import SCHEMA, load_config
from sparring.config.text import Setting, parse_overrides, value_text
from sparring.data.video import find_ffmpeg
from sparring.envs import SIMS
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError
from sparring.policies import POLICIES
from sparring.policies.policy import Policy

_IMPORT_S = 300.0  # timeout of an import


def check(name: str | None, overrides: list[str], output: Path | None) -> int:
    """Print findings about the installation, or about the env or policy `name`, and write a contact sheet of an env
    into the folder `output`; returns 1 if there is an error."""
    settings, policy = parse_overrides(overrides), _policy_settings(name)
    settings += policy if policy or name is None else [_env_setting(name, settings)]
    config = load_config(None, settings, inherit=False)
    if policy:
        if output is not None:
            raise UserError(f"--output {output}: a policy has no contact sheet; leave it out")
        return report(policy_findings(config))
    file = re.sub(r"[^\w.-]", "_", "_".join(getattr(config.env, "task", ())) or config.env.name)
    output = output or Path(os.environ.get("OUTPUT_BASE") or "outputs") / "check"
    findings = env_findings(config, output / f"{file}.png")
    return report(findings if name is not None else chain(_installation(), findings))


def _installation() -> Iterator[Finding]:
    version = f"{platform.python_version()} (3.11 or newer is needed)"
    yield Finding("python", version) if sys.version_info >= (3, 11) else Finding("python", version, ERROR, "install it")
    for package in ("torch", "tensordict", "mujoco", "gymnasium", "numba", "accelerate", "safetensors", "pydantic"):
        yield Finding(package, importlib.metadata.version(package))
    yield _torchvision()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Finding("GPUs", f"{gpus} visible" if gpus else "none, the CPU is used")
    try:
        yield Finding("video encoder", Path(find_ffmpeg()).name)
    except UserError as error:
        yield Finding.of_error("video encoder", error, "install ffmpeg")


def _torchvision() -> Finding:
    """Checks the import of torchvision: with a CPU build of torch it fails, and so do all transformers models."""
    if importlib.util.find_spec("torchvision") is None:
        return Finding("torchvision", "not installed, which is right for a CPU build of torch")
    fix = "pip uninstall torchvision"
    # in a separate process, because a failed import could damage this one; -P: without the working directory
    try:
        command = [sys.executable, "-P", "-c", "import torchvision"]
        attempt = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return Finding("torchvision", f"its import did not end in {_IMPORT_S:g} seconds", ERROR, fix)
    if attempt.returncode == 0:
        return Finding("torchvision", "importable")
    reason = attempt.stderr.strip().splitlines()[-1]
    return Finding("torchvision", f"installed but broken ({reason})", ERROR, fix)


def _policy_settings(name: str | None) -> list[Setting]:
    """The settings for the name of a policy, of a Policy class or of a VLA model; [] if it is none of these."""
    if name in POLICIES:
        return [Setting("policy.name", name, "command line")]
    if name is None or ":" not in name or name.partition(":")[0] in ("gym", *SIMS):
        return []
    found = resolve(name, {}, "name")
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        return []
    given = {"policy.name": name} if issubclass(found, Policy) else {"policy.name": "vla", "policy.model_class": name}
    return [Setting(key, value, "command line") for key, value in given.items()]


def _env_setting(name: str, others: list[Setting]) -> Setting:
    """The setting for an env name; 'reach_d1' and 'sparring/reach_d1' are the built-in arm with that task."""
    if not name.startswith("sparring/") and name not in TASKS:
        return Setting("env.name", name, "command line")
    task = name.removeprefix("sparring/")
    for other in others:
        is_task = SCHEMA.aliases.get(other.key, other.key) in ("env.task", "task")
        if is_task and other.value not in (task, [task]):
            raise UserError(f"'{name}' and {other.key}={value_text(other.value)} name different tasks; keep one")
    return Setting("env.task", task, "command line")
