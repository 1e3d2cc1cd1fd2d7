"""Settings that come with what a run starts from: the policy of `pretrained` and how it is best fine-tuned, the env of
`imitate.demos`, the world model of `student.teacher` and `rollout.imagined`, both of `adversarial.teacher` and
`adversarial.student`.

They stand below everything that was given: whoever says nothing gets what fits. Torch-free where neither is given.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparring.config.phase_defaults import OF_PRETRAINED
from sparring.config.schema import USUAL, Config, build_config, given_settings, reading_of, run_folder
from sparring.config.text import Setting, read_settings
from sparring.errors import UserError
from sparring.phases import ALIASES
from sparring.policies.configs import OF_A_METHOD

# of an env: these say how a run is made, not what a policy sees and does
OF_THE_RUN = ("env.threads", "env.reward", "env.video_renderer", "env.vectorize", "env.workers", "env.success_return")


def load_config(
    source: str | Path | dict | None = None, overrides: list[Setting] | None = None, phase: str | None = None
) -> Config:
    """A file or a (nested) dict plus overrides, and below them what comes along; as the command line has it."""
    return build_config(with_inherited(given_settings(source, overrides, phase)))


def with_inherited(settings: list[Setting]) -> list[Setting]:
    """`settings`, and below them what comes with what they say it starts from."""
    given = {setting.key: setting.value for setting in reading_of(settings).settings}
    inherited: list[Setting] = []
    phase = given.get("phase", "finetune")
    phase = ALIASES.get(phase, phase)
    if isinstance(given.get("pretrained"), str):
        inherited += _of_checkpoint(given["pretrained"], given, ("env", "policy"), "pretrained")
        inherited += _careful(given) if phase == "finetune" else []
    # later ones win: what is imitated is imitated in the env it was recorded in
    if phase == "imitate":
        inherited += _of_demonstrations(given)
    if phase == "student" and isinstance(given.get("student.teacher"), str):
        inherited += _of_checkpoint(given["student.teacher"], given, ("env", "world_model"), "student.teacher")
    if isinstance(given.get("rollout.imagined"), str):
        inherited += _of_checkpoint(given["rollout.imagined"], given, ("env", "world_model"), "rollout.imagined")
    if phase == "adversarial":
        for key, kinds, also in (
            ("adversarial.teacher", ("env", "world_model"), ()),
            ("adversarial.student", ("policy",), ("student.cameras",)),
        ):
            if isinstance(given.get(key), str):
                inherited += _of_checkpoint(given[key], given, kinds, key, also)
    return inherited + settings


def told(settings: Iterable[Setting], config: Any) -> list[str]:
    """A line for each source: which of its settings hold, where they differ from the defaults."""
    lines: dict[str, list[str]] = {}
    for setting in settings:
        section, _, key = setting.key.partition(".")
        part = getattr(config, section)
        field = type(part).model_fields.get(key)
        value = part.model_dump(mode="json").get(key)
        if field is None or value != setting.value:
            continue
        # each kind of policy has a config of its own, whose default is its own name
        usual = USUAL.get(section) if key == "name" else _plain(field.default)
        if value != usual:
            lines.setdefault(setting.source, []).append(f"{setting.key}={_shown(value)}")
    return [f"from {source}: {' '.join(keys)}" for source, keys in lines.items()]


def _of_checkpoint(
    path: str, given: dict[str, Any], kinds: tuple[str, ...], key: str, also: tuple[str, ...] = ()
) -> list[Setting]:
    """What its config says about these sections and how long its decisions last; nothing of weights without a config.

    `key` is what `path` was given as; `also` are keys of other sections.
    """
    from sparring.runs.checkpoint import find_checkpoint

    saved = [] if Path(path).exists() else _of_the_run_itself(key, path, given)
    if not saved:
        found = find_checkpoint(path)
        file = (found.parent if found.is_file() else found) / "config.yaml"
        saved = read_settings(file) if file.is_file() else []
        trained = next((s.value for s in saved if s.key == "phase"), None)
        if "world_model" in kinds and trained in ("finetune", "imitate", "student"):
            # told before its env is found not to fit
            made = f"it was made by `sparring train {trained}`"
            raise UserError(f"{key} = '{path}': {made}; world models come of `sparring train teacher`")
    method = next((s.value for s in saved if s.key == "policy.method"), None)
    if given.get("policy.method", method) != method:
        saved = [s for s in saved if s.key not in [f"policy.{name}" for name in OF_A_METHOD]]
    names = {s.key: s.value for s in saved if s.key in [f"{kind}.name" for kind in kinds]}
    # another kind of env or network has other settings; whether it fits is found out when weights are loaded
    sections = [f"{named.partition('.')[0]}." for named, name in names.items() if given.get(named, name) == name]
    wanted = (*sections, "rollout.action_steps", *also)
    wanted = [s for s in saved if s.key.startswith(wanted) and s.key not in OF_THE_RUN]
    return [Setting(s.key, s.value, f"{key}={path}") for s in wanted]


def _careful(given: dict[str, Any]) -> list[Setting]:
    """How an algorithm learns where the policy can do something already; of one's own algorithm nothing is known."""
    name = str(given.get("algorithm", "ppo"))
    source = f"pretrained={given['pretrained']}"
    return [Setting(f"{name}.{key}", value, source) for key, value in OF_PRETRAINED.get(name, {}).items()]


def _of_the_run_itself(key: str, path: str, given: dict[str, Any]) -> list[Setting]:
    """The config of a run that started from `path` and goes on: it holds all that came along, wherever that is now."""
    from sparring.runs.checkpoint import checkpoints

    folder = run_folder(given.get("output"), given.get("phase", "finetune"))
    if given.get("resume", "auto") == "never" or not checkpoints(folder) or not (folder / "config.yaml").is_file():
        return []
    saved = read_settings(folder / "config.yaml")
    return saved if any(s.key == key and s.value == path for s in saved) else []


def _of_demonstrations(given: dict[str, Any]) -> list[Setting]:
    """The env that the first dataset was recorded in, with the tasks of all of them; nothing of others' datasets."""
    demos = given.get("imitate.demos") or []
    files = [Path(path) / "meta/sparring.json" for path in ([demos] if isinstance(demos, str) else demos)]
    if not files or not all(file.is_file() for file in files):
        return []
    envs = [_recorded_env(file) for file in files]
    if given.get("env.name", envs[0]["name"]) != envs[0]["name"]:
        return []
    tasks = list(dict.fromkeys(task for env in envs for task in env["task"]))
    values = {f"env.{key}": value for key, value in (envs[0] | {"task": tasks}).items()}
    source = f"imitate.demos={files[0].parents[1]}"
    return [Setting(key, value, source) for key, value in values.items() if key not in OF_THE_RUN]


def _recorded_env(file: Path) -> dict[str, Any]:
    """The env section that a dataset was recorded with."""
    from sparring.data.lerobot import DatasetError

    try:
        env = json.loads(file.read_text(encoding="utf-8"))["env"]
        return env | {"name": env["name"], "task": list(env["task"])}
    except (OSError, ValueError) as error:
        why = str(error)
    except (KeyError, TypeError):
        why = "it does not say env.name and env.task"
    mend = "copy the dataset again, or delete this file and say with env.* what the demonstrations were recorded in"
    raise DatasetError(f"'{file}' cannot be read ({why}); {mend}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
