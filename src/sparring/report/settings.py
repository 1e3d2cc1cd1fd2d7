"""Which settings make runs differ, from each other or from the defaults."""

from pathlib import Path
from typing import Any

from sparring.config_text import Setting, flatten, read_settings, value_text
from sparring.errors import UserError
from sparring.tree import build_config

# these say where and how loudly, not what is trained
IDLE = ("output", "resume", "logging.")
# with more than so many, a name says more
_IN_A_LABEL = 3
# what the defaults of the others depend on
_CHOICES = ("phase", "algorithm", "env.name", "policy.name", "world_model.name", "rewards.name")


def read_config(folder: Path) -> dict[str, Any]:
    """Dotted keys and values of a run; none where there is no config, or none that can be read."""
    try:
        return {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
    except UserError:
        return {}


def differences(configs: list[dict[str, Any]]) -> list[dict]:
    """Keys whose values differ, each with the values of every config in words, None where a config lacks it."""
    keys = sorted({key for config in configs for key in config if not key.startswith(IDLE)})
    rows = [{"key": key, "values": [_words(config, key) for config in configs]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def defaults(config: dict[str, Any]) -> dict[str, Any] | None:
    """What a run of the same phase, env, policy, ... has where nothing else is said; None where that is not known."""
    chosen = [Setting(key, config[key], "the run") for key in _CHOICES if config.get(key) is not None]
    try:
        return flatten(build_config(chosen, to_run=False).dump())
    except UserError:  # of another version, or with classes that are not here
        return None


def labels(configs: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What to call runs beside each other: what differs, if that is little and tells them apart; else their names."""
    differ = differences(configs)
    if not 0 < len(differ) <= _IN_A_LABEL or not all(configs):
        return names
    told = [
        ", ".join(f"{row['key'].rpartition('.')[2]} {row['values'][i]}" for row in differ) for i in range(len(configs))
    ]
    return told if len(set(told)) == len(told) else names


def short_names(folders: list[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _words(config: dict[str, Any], key: str) -> str | None:
    return value_text(config[key]) if key in config else None
