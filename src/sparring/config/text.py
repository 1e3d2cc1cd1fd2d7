"""Config as text: reads YAML and JSON files with line numbers, parses command-line overrides, and writes YAML."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sparring.errors import UserError
from sparring.processes.files import read_small


@dataclass(frozen=True)
class Setting:
    """A given value, with its key and its source."""

    key: str
    value: Any
    source: str  # "command line" or the name of a file
    line: int | None = None  # in a file
    written: str | None = None  # the key as given, if it differs from `key`
    sha256: str | None = field(default=None, compare=False, repr=False)  # of the content of the file

    @property
    def as_written(self) -> str:
        return self.written or self.key

    @property
    def where(self) -> str:
        return self.source if self.line is None else f"{self.source} line {self.line}"


# limits of a config file, so that reading takes at most two seconds; a typical one has 200 keys and 20 kB
_FILE_BYTES, _NODES, _DEPTH = 200_000, 5000, 40
_CORE = "tag:yaml.org,2002:"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


class _UnsupportedYamlError(yaml.MarkedYAMLError):
    """Valid YAML that is not supported here."""


class _Loader(yaml.SafeLoader):
    """Loads YAML of limited size, without pitfalls: `1e-4` is a number; `12:30`, `010` and `2024-01-02` are text."""

    yaml_implicit_resolvers: dict = {}

    def __init__(self, text: str):
        super().__init__(text)
        self._depth, self._values = 0, 0
        self._sizes: dict[int, int] = {}  # number of values in each complete node, by id

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, counting its depth and values; an alias counts as all values of its anchor."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            self._count(self._sizes.get(id(node)), event)
            return node
        before, self._depth = self._values, self._depth + 1
        self._count(1, event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._values - before
        if event.tag not in (None, "!"):
            self._check_tag(node)
        return node

    def _count(self, values: int | None, event: yaml.Event) -> None:
        self._values += values or 0
        problem = None if values else f"the alias *{event.anchor} contains itself"
        if self._depth > _DEPTH:
            problem = f"values are nested more than {_DEPTH} deep"
        elif self._values > _NODES:
            problem = f"there are more than {_NODES:,} values, including those of aliases"
        if problem:
            raise _UnsupportedYamlError(problem=problem, problem_mark=event.start_mark)

    @staticmethod
    def _check_tag(node: yaml.Node) -> None:
        kind = node.tag.removeprefix(_CORE)
        if kind in ("str", "seq", "map"):
            return
        read_as = {"float": ("int", "float")}.get(kind, (kind,))
        patterns = [_SCALARS[name][0] for name in read_as if name in _SCALARS]
        if not (isinstance(node, yaml.ScalarNode) and any(re.fullmatch(pattern, node.value) for pattern in patterns)):
            why = f"the tag {node.tag.replace(_CORE, '!!')} is not supported; write the value without it"
            raise _UnsupportedYamlError(problem=why, problem_mark=node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would read as another type."""

    yaml_implicit_resolvers: dict = {}

    def ignore_aliases(self, data) -> bool:
        return True

    def represent_text(self, data: str):
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


# with a colon: rewards.my.module:term
_KEY = r"[A-Za-z_][\w.:]*"
_FLOAT = r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan"
_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first)
_Dumper.add_representer(str, _Dumper.represent_text)


def read_settings(path: str | Path) -> list[Setting]:
    """The leaves of a YAML or JSON file (JSON may have // comments), each with its line."""
    path = Path(path)
    try:
        content = read_small(path, _FILE_BYTES)
        text = content.decode()
    except OSError as error:
        raise UserError(f"config file '{path}' cannot be read ({error.strerror})") from None
    except ValueError:
        raise UserError(f"config file '{path}' is not text; give a YAML or JSON file") from None
    if path.suffix.lower() == ".json":
        # remove // comments, and tabs, which YAML refuses; strings match first, so that "http://..." is kept
        text = re.sub(r'("(?:\\.|[^"\\])*+"?)|//[^\n]*|\t', lambda match: match.group(1) or " ", text)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return []
        if not isinstance(root, yaml.MappingNode):
            hint = "; overrides like seed=1 belong on the command line" if "=" in text.splitlines()[0] else ""
            expected = f"expected keys with values at the top level, e.g. 'seed: 1'{hint}"
            raise UserError(f"config file '{path}' line 1: {expected}")
        sha256 = hashlib.sha256(content).hexdigest()
        settings = [*_leaves(loader, root, "", path.name)]
        # only there, because in any other file such text is meant as it is
        settings = [*_dereferenced(settings)] if is_of_hydra(settings) else settings
        return [replace(setting, sha256=sha256) for setting in settings]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"config file '{path}'{line}: {_problem(error, 'not valid YAML or JSON')}") from None


def is_of_hydra(settings: list[Setting]) -> bool:
    """Whether these are the settings of a config of Hydra (ManiFlow's), which names classes."""
    return any(setting.key == "policy._target_" for setting in settings)


def _dereferenced(settings: list[Setting]) -> Iterator[Setting]:
    """A value `${key}` (OmegaConf) is the value of that key in the same file; any other text is kept."""
    values = {setting.key: setting.value for setting in settings}
    ends = dict[str, Any]()  # key -> the value at the end of its references
    for setting in settings:
        value, passed = setting.value, dict[str, None]()
        while isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
            key = found[1]
            if key not in values or key in passed or key == setting.key:
                break
            passed[key] = None
            value = ends.get(key, values[key])
        ends |= dict.fromkeys(passed, value)
        yield replace(setting, value=value)


def saved_settings(folder: Path) -> dict[str, Any]:
    """Dotted keys and values of the config.yaml in a run folder or checkpoint; empty if there is none."""
    file = folder / "config.yaml"
    return {setting.key: setting.value for setting in read_settings(file)} if file.exists() else {}


def parse_overrides(arguments: list[str]) -> list[Setting]:
    """Parse `ppo.clip_ratio=0.1`, `--ppo.clip_ratio 0.1`, `--ppo.clip_ratio=0.1` and the flag `--x` (true)."""
    settings, problems = [], []
    overrides, others = split_overrides(arguments, {})
    for word in [*others, *overrides]:
        key, equals, text = word.removeprefix("--").partition("=")
        if word in others or not re.fullmatch(_KEY, key):
            problems.append(f"'{shortened(word)}' is not an override; write key=value or --key value")
            continue
        if equals and not text:
            problems.append(f"{key}= has no value (a shell variable that is not set?); give one, or {key}=null")
            continue
        try:
            settings.append(Setting(key, yaml.load(text, _Loader) if equals else True, "command line"))
        except (yaml.YAMLError, ValueError) as error:
            problems.append(
                f"{key} = {shortened(text)} (from command line): {_problem(error, 'the value is not valid YAML')}"
            )
    if problems:
        raise UserError("\n".join(problems))
    return settings


def split_overrides(arguments: list[str], flags: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The overrides among arguments, each as one argument (`--ppo.gamma=0.9`), and the other arguments. `flags` are not
    overrides; their value is True if the next argument belongs to the flag."""
    overrides, others, rest = [], [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name in flags:
            others.append(word)
            others += [rest.pop(0)] if flags[name] and not equals and rest else []
        elif word.startswith("--"):
            bare = not equals and (not rest or _looks_like_a_key(rest[0]))
            overrides.append(word if equals or bare else f"{word}={rest.pop(0)}")
        else:
            (overrides if _looks_like_a_key(word) else others).append(word)
    return overrides, others


def to_yaml(values: dict, comments: dict[str, str] | None = None) -> str:
    return "\n".join(_yaml_lines(values, comments or {}, "")) + "\n"


def value_text(value: Any) -> str:
    # dumped as a list, without the brackets: a scalar would get a document end marker
    return yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=math.inf).rstrip("\n")[1:-1]


def shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 20]}... ({len(text):,} characters)"


def flatten(values: dict, prefix: str = "") -> dict[str, Any]:
    """{"ppo": {"gamma": 1}} -> {"ppo.gamma": 1}; empty dicts stay as leaves."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _leaves(loader: _Loader, node: yaml.MappingNode, prefix: str, filename: str) -> Iterator[Setting]:
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _UnsupportedYamlError(problem="a key must be text", problem_mark=key_node.start_mark)
        if key_node.value == "<<":
            why = "merge keys (<<) are not supported; write the merged keys out"
            raise _UnsupportedYamlError(problem=why, problem_mark=key_node.start_mark)
        key = f"{prefix}{key_node.value}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(loader, value_node, f"{key}.", filename)
        else:
            try:
                value = loader.construct_object(value_node, deep=True)
            except ValueError as error:  # e.g. `!!int abc`
                raise yaml.MarkedYAMLError(problem=str(error), problem_mark=value_node.start_mark) from None
            yield Setting(key, value, filename, key_node.start_mark.line + 1)


def _looks_like_a_key(word: str) -> bool:
    return word.startswith("--") or re.match(f"{_KEY}=", word) is not None


def _problem(error: Exception, kind: str) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return problem if isinstance(error, _UnsupportedYamlError) else f"{kind} ({problem})"


def _yaml_lines(values: dict, comments: dict[str, str], prefix: str, indent: str = "") -> Iterator[str]:
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        comment = f"  # {comments[dotted]}" if dotted in comments else ""
        if isinstance(value, dict) and value:
            yield f"{indent}{value_text(key)}:{comment}"
            yield from _yaml_lines(value, comments, f"{dotted}.", indent + "  ")
        else:
            yield f"{indent}{value_text(key)}: {value_text(value)}{comment}"
