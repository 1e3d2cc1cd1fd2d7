"""Turns settings (from a file, the command line or Python) into frozen, typed config sections, or says what is wrong.

All mistakes of a config are reported together, one line each: the key, where it came from, the nearest valid key
and the accepted values. This file knows no section by name: the tree itself is in tree.py.
"""

import difflib
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic

from sparring.config_text import Setting
from sparring.errors import UserError


class Section(pydantic.BaseModel):
    """A part of the config tree: frozen, typed, bounded; an unknown key is an error."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class ConfigError(UserError):
    """Everything that is wrong with a config, a line each."""

    def __init__(self, mistakes: list[str]):
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


# given all settings by dotted key, the class that reads a section; raises ValueError for a name nobody knows
SectionPicker = Callable[[dict[str, Any]], type[Section]]


@dataclass
class Tree:
    """The shape of a config: a root class whose fields are values or sections.

    `pickers` choose a section's class by its `name`; `aliases` are other spellings of a dotted key, and
    `check` finds mistakes that span sections.
    """

    root: type[Section]
    pickers: dict[str, SectionPicker] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    check: Callable[[Any], list[str]] = lambda config: []

    def build(self, settings: list[Setting]) -> Any:
        """The config that these settings describe, later ones winning; raises ConfigError with all mistakes."""
        mistakes: list[str] = []
        classes = self._section_classes(settings, mistakes)
        keys = self.keys(classes)
        # dotted key -> the last setting of it
        placed: dict[str, Setting] = {}
        for setting in settings:
            key = self._place(setting, keys, mistakes)
            if key:
                placed[key] = setting
        values = self._validate(classes, keys, placed, mistakes)
        config = None if mistakes else self.root.model_construct(**values)
        mistakes += self.check(config) if config else []
        if mistakes:
            raise ConfigError(mistakes)
        return config

    def default_classes(self) -> dict[str, type[Section]]:
        return self._section_classes([], [])

    def keys(self, classes: dict[str, type[Section]]) -> dict[str, Any]:
        """Every dotted key of the tree and its pydantic field."""
        keys = {name: info for name, info in self.root.model_fields.items() if name not in classes}
        for name, cls in classes.items():
            keys |= {f"{name}.{leaf}": info for leaf, info in cls.model_fields.items()}
        return keys

    def comments(self, config: Any) -> dict[str, str]:
        """Dotted key -> its one-line meaning."""
        classes = {name: type(value) for name, value in config if isinstance(value, Section)}
        meanings = {key: info.description for key, info in self.keys(classes).items() if info.description}
        return meanings | {name: (cls.__doc__ or "").strip().splitlines()[0] for name, cls in classes.items()}

    def _section_classes(self, settings, mistakes):
        classes = {}
        for name, info in self.root.model_fields.items():
            if name in self.pickers:
                try:
                    classes[name] = self.pickers[name]({s.key: s.value for s in settings})
                except ValueError as error:
                    sources = {s.key: s.source for s in settings}
                    mistakes.append(f"{name}.name (from {sources.get(f'{name}.name', 'command line')}): {error}")
                    classes[name] = self.pickers[name]({})
            elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                classes[name] = info.annotation
        return classes

    def _place(self, setting, keys, mistakes):
        """The dotted key a setting belongs to; None, and a mistake, where there is none."""
        key = self.aliases.get(setting.key, setting.key)
        # env.kwargs.gravity=1 goes into the dict-valued leaf env.kwargs
        owner = next((k for k in keys if key.startswith(f"{k}.") and _is_dict(keys[k])), None)
        if key in keys or owner:
            return key
        homes = [k for k in keys if k.rpartition(".")[2] == key]
        if len(homes) == 1:
            return homes[0]
        if key in self.root.model_fields and not setting.value:
            return None  # an empty section asks for nothing
        given = f"{setting.key} (from {setting.source})"
        if homes:
            mistakes.append(f"{given}: could be any of {', '.join(homes)}; write one of them")
        elif any(k.startswith(f"{key}.") for k in keys):
            mistakes.append(f"{given}: is a section, not a value; its keys are {', '.join(_leaves(keys, key))}")
        else:
            mistakes.append(f"{given}: unknown key; {_nearest(key, keys, self.aliases)}")
        return None

    def _validate(self, classes, keys, placed, mistakes):
        nested: dict[str, dict] = {name: {} for name in ("", *classes)}
        for key, setting in placed.items():
            section, _, leaf = key.partition(".")
            if section not in classes:
                nested[""][section] = setting.value
            elif leaf in classes[section].model_fields:
                nested[section][leaf] = setting.value
            else:
                _insert(nested[section], leaf, setting.value)
        values = {}
        for name, cls in classes.items():
            values[name] = _validated(cls, nested[name], f"{name}.", keys, placed, mistakes)
        # the root's own values, with its sections left out
        plain = pydantic.create_model(
            "Root", __base__=Section, **{k: (i.annotation, i) for k, i in self.root.model_fields.items() if k in keys}
        )
        top = _validated(plain, nested[""], "", keys, placed, mistakes)
        return values | (dict(top) if top else {})


def accepted(info) -> str:
    """What a field takes, in words: 'a number > 0 and <= 1', 'one of: ppo, grpo'."""
    kind, optional = _kind(info.annotation)
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in info.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if hasattr(bound, name)
    ]
    return f"{kind}{' ' + ' and '.join(bounds) if bounds else ''}{' or null' if optional else ''}"


def _kind(annotation) -> tuple[str, bool]:
    args = typing.get_args(annotation)
    if type(None) in args:
        inner = [a for a in args if a is not type(None)]
        return _kind(inner[0])[0], True
    if typing.get_origin(annotation) is Literal:
        return f"one of: {', '.join(map(str, args))}", False
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(args[0])
    if typing.get_origin(annotation) is tuple:
        return f"a list of ({_kind(args[0])[0]})", False
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "keys with values"}
    return names.get(annotation, str(annotation)), False


def _is_dict(info) -> bool:
    return info.annotation is dict


def _leaves(keys, section):
    return [k for k in keys if k.startswith(f"{section}.")]


def _nearest(key, keys, aliases):
    """Nearest by the whole dotted key, or by its last word when the section is what was mistaken."""
    close = difflib.get_close_matches(key, [*keys, *aliases], n=1, cutoff=0.6)
    if not close:
        last = key.rpartition(".")[2]
        word = difflib.get_close_matches(last, [k.rpartition(".")[2] for k in keys], n=1, cutoff=0.6)
        close = [k for k in keys if word and k.rpartition(".")[2] == word[0]][:1]
    if close:
        best = aliases.get(close[0], close[0])
        return f"nearest: {best} ({accepted(keys[best])})"
    section = key.partition(".")[0]
    known = _leaves(keys, section) or sorted({k.partition(".")[0] for k in keys})
    return f"valid here: {', '.join(known)}"


def _insert(values: dict, dotted: str, value):
    *parents, leaf = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[leaf] = value


def _validated(cls, values, prefix, keys, placed, mistakes):
    try:
        return cls.model_validate(values)
    except pydantic.ValidationError as error:
        for problem in error.errors():
            leaf = str(problem["loc"][0]) if problem["loc"] else ""
            key = prefix + leaf
            if problem["type"] == "missing":
                mistakes.append(f"{key}: has no default and was not given; expected {accepted(keys[key])}")
                continue
            setting = next((s for k, s in placed.items() if k == key or k.startswith(f"{key}.")), None)
            given = f"{key} = {setting.value!r} (from {setting.source})" if setting else key
            why = problem["msg"].removeprefix("Value error, ") if problem["type"] == "value_error" else None
            expected = accepted(keys[key]) if key in keys else "?"
            line = f"{given}: {why}" if why else f"{given}: expected {expected}"
            if line not in mistakes:
                mistakes.append(line)
        return None
