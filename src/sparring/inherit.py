"""Settings that come with what a run starts from: the policy of `pretrained`, the env of `imitate.demos`, the world
model of `student.teacher`.

They stand below everything that was given: whoever says nothing gets what fits. Torch-free where neither is given.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparring.config_text import Setting, read_settings
from sparring.phases import ALIASES
from sparring.tree import tree_of

# of an env: these say how a run is made, not what a policy sees and does
OF_THE_RUN = ("env.threads", "env.reward", "env.video_renderer", "env.vectorize", "env.workers", "env.success_return")


def with_inherited(settings: list[Setting]) -> list[Setting]:
    """`settings`, and below them what comes with what they say it starts from."""
    aliases = tree_of(settings).aliases
    given = {aliases.get(setting.key, setting.key): setting.value for setting in settings}
    inherited: list[Setting] = []
    if isinstance(given.get("pretrained"), str):
        inherited += _of_checkpoint(given["pretrained"], given, ("env", "policy"), "pretrained")
    # later ones win: what is imitated is imitated in the env it was recorded in
    phase = ALIASES.get(given.get("phase"), given.get("phase"))
    if phase == "imitate":
        inherited += _of_demonstrations(given)
    if phase == "student" and isinstance(given.get("student.teacher"), str):
        inherited += _of_checkpoint(given["student.teacher"], given, ("env", "world_model"), "student.teacher")
    return inherited + settings


def told(settings: Iterable[Setting], config: Any) -> list[str]:
    """A line for each source: which of its settings hold, where they differ from the defaults."""
    lines: dict[str, list[str]] = {}
    for setting in settings:
        section, _, key = setting.key.partition(".")
        part = getattr(config, section)
        field = type(part).model_fields.get(key)
        value = part.model_dump(mode="json").get(key)
        if field is not None and value == setting.value and value != _plain(field.default):
            lines.setdefault(setting.source, []).append(f"{setting.key}={_shown(value)}")
    return [f"from {source}: {' '.join(keys)}" for source, keys in lines.items()]


def _of_checkpoint(path: str, given: dict[str, Any], kinds: tuple[str, ...], key: str) -> list[Setting]:
    """What its config says about these sections and how long its decisions last; nothing of weights without a config.

    `key` is what `path` was given as.
    """
    from sparring.checkpoint import find_checkpoint

    found = find_checkpoint(path)
    file = (found.parent if found.is_file() else found) / "config.yaml"
    if not file.is_file():
        return []
    saved = read_settings(file)
    names = {s.key: s.value for s in saved if s.key in [f"{kind}.name" for kind in kinds]}
    # another kind of env or network has other settings; whether it fits is found out when weights are loaded
    sections = [f"{named.partition('.')[0]}." for named, name in names.items() if given.get(named, name) == name]
    wanted = [s for s in saved if s.key.startswith((*sections, "rollout.action_steps")) and s.key not in OF_THE_RUN]
    return [Setting(s.key, s.value, f"{key}={path}") for s in wanted]


def _of_demonstrations(given: dict[str, Any]) -> list[Setting]:
    """The env that the first dataset was recorded in, with the tasks of all of them; nothing of others' datasets."""
    demos = given.get("imitate.demos") or []
    files = [Path(path) / "meta/sparring.json" for path in ([demos] if isinstance(demos, str) else demos)]
    if not files or not all(file.is_file() for file in files):
        return []
    envs = [json.loads(file.read_text())["env"] for file in files]
    if given.get("env.name", envs[0]["name"]) != envs[0]["name"]:
        return []
    tasks = list(dict.fromkeys(task for env in envs for task in env["task"]))
    values = {f"env.{key}": value for key, value in (envs[0] | {"task": tasks}).items()}
    source = f"imitate.demos={files[0].parents[1]}"
    return [Setting(key, value, source) for key, value in values.items() if key not in OF_THE_RUN]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
