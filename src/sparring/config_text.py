"""Config as text: YAML and JSON files with the line of every value, command-line overrides, and printing.

What the values mean, and whether they are right, is decided in config.py.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sparring.errors import UserError


@dataclass(frozen=True)
class Setting:
    """One value somebody gave: under which key, and where."""

    key: str
    value: Any
    source: str


class ConfigTextError(UserError):
    """A file or an override that cannot be read at all."""


def read_settings(path: str | Path) -> list[Setting]:
    """The leaves of a YAML or JSON file (JSON may have // comments), each with its line."""
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigTextError(f"--config {path}: cannot read it ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigTextError(f"--config {path}: is not text; give a YAML or JSON file") from None
    if path.suffix == ".json":
        text = _without_json_comments(text)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigTextError(f"--config {path}: expected keys with values at the top level, e.g. 'seed: 1'")
        return list(_leaves(loader, root, "", path.name))
    except yaml.YAMLError as error:
        where = f" line {error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        raise ConfigTextError(f"--config {path}{where}: not valid YAML or JSON ({_problem(error)})") from None


def parse_overrides(arguments: list[str]) -> list[Setting]:
    """`ppo.clip_ratio=0.1`, `--ppo.clip_ratio 0.1`, `--ppo.clip_ratio=0.1` and the bare flag `--x` (true) alike."""
    settings, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--"):
                raise ConfigTextError(f"'{word}' is not an override; write key=value or --key value")
            value = rest.pop(0) if rest and not _looks_like_a_key(rest[0]) else "true"
        if not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise ConfigTextError(f"'{word}' is not an override; write key=value or --key value")
        settings.append(Setting(key, _scalar(value, word), "command line"))
    return settings


def to_yaml(values: dict, comments: dict[str, str] | None = None) -> str:
    """Nested values as YAML; `comments` maps a dotted key to the words that follow it."""
    return "\n".join(_yaml_lines(values, comments or {}, "")) + "\n"


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"gamma": 1}} -> {"ppo.gamma": 1}; empty dicts stay as leaves."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _leaves(loader, node, prefix, filename):
    for key_node, value_node in node.value:
        key = f"{prefix}{loader.construct_object(key_node)}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(loader, value_node, f"{key}.", filename)
        else:
            line = key_node.start_mark.line + 1
            yield Setting(key, loader.construct_object(value_node, deep=True), f"{filename} line {line}")


def _without_json_comments(text: str) -> str:
    # a string literal is matched first, so that "http://..." survives
    return re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda match: match.group(1) or "", text)


def _looks_like_a_key(word: str) -> bool:
    return word.startswith("--") or re.match(r"[A-Za-z_][\w.]*=", word) is not None


def _scalar(text: str, word: str):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigTextError(f"'{word}': the value is not valid YAML ({_problem(error)})") from None


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]


def _yaml_lines(values, comments, prefix, indent=""):
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        comment = f"  # {comments[dotted]}" if dotted in comments else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:{comment}"
            yield from _yaml_lines(value, comments, f"{dotted}.", indent + "  ")
        else:
            # JSON is YAML: one line, and `null`, `true`, "text" come out right
            text = value if _plain(value) else json.dumps(value)
            yield f"{indent}{key}: {text}{comment}"


def _plain(value) -> bool:
    """A string that YAML reads back as itself needs no quotes."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and yaml.safe_load(value) == value
