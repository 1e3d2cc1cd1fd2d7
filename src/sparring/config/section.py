"""Turns settings (from a file, the command line or Python) into frozen, typed config sections, or says what is wrong.

All mistakes of a config are reported together, one line each: the key, where it came from, the nearest valid key
and the accepted values. This file knows no section by name: the tree itself is in tree.py.
"""

import difflib
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from sparring.config.text import Setting, value_text
from sparring.errors import UserError


class _Spoken(type(pydantic.BaseModel)):
    """`SomeConfig(key=value)` says what is wrong as `load_config` does, not as pydantic would."""

    def __call__(cls, *args, **values):
        try:
            return super().__call__(*args, **values)
        except pydantic.ValidationError as error:
            raise ConfigError(_spoken(cls, values, error)) from None


class Section(pydantic.BaseModel, metaclass=_Spoken):
    """A part of the config tree: frozen, typed, bounded; an unknown key is an error."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """A flag that was meant to have a value (`--ppo_epochs`) must not count as 1."""
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[info.field_name].annotation):
            raise PydanticCustomError("bool", "true or false is not a value of this field")
        return value


class ConfigError(UserError):
    """Everything that is wrong with a config, a line each."""

    def __init__(self, mistakes: list[str]):
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


# given a name (None: the default one), the class that reads a section; raises ValueError for a name nobody knows
SectionPicker = Callable[[Any], type[Section]]


@dataclass
class Tree:
    """The shape of a config: a root class whose fields are values or sections of values.

    `pickers` choose a section's class by the value of a key; `aliases` are other spellings of a dotted key, or of how
    keys begin (with a dot at the end); `check` finds mistakes that span sections, each a key and what is wrong with it;
    `explain` says more of an unknown setting (its key as it is spelled here) than which key is nearest, if it can.
    """

    root: type[Section]
    # section -> (deciding key, picker)
    pickers: dict[str, tuple[str, SectionPicker]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    check: Callable[[Any], list[tuple[str, str]]] = lambda config: []
    explain: Callable[[str, Setting], str | None] = lambda key, setting: None

    def build(self, settings: list[Setting]) -> Any:
        """The config that these settings describe, later ones winning; raises ConfigError with all mistakes."""
        mistakes: list[str] = []
        classes = self._pick_classes(settings, mistakes)
        placed = self.place_all(settings, classes, mistakes)
        values = self._validate(classes, placed, mistakes)
        config = None if mistakes else self.root.model_construct(**values)
        if config is not None:
            mistakes += [f"{_given(key, placed)}: {why}" for key, why in self.check(config)]
        if mistakes:
            raise ConfigError(mistakes)
        return config

    def classes(self, settings: Iterable[Setting] = ()) -> dict[str, type[Section]]:
        """The class of every section whose class is known."""
        return self._pick_classes(settings, [])

    def keys(self, classes: dict[str, type[Section]]) -> dict[str, FieldInfo]:
        """Every dotted key of the tree and its pydantic field."""
        keys = {name: info for name, info in self.root.model_fields.items() if not self._is_section(name)}
        for name, cls in classes.items():
            keys |= {f"{name}.{leaf}": info for leaf, info in cls.model_fields.items()}
        return keys

    def comments(self, config: Any) -> dict[str, str]:
        """Dotted key -> its one-line meaning."""
        classes = {name: type(value) for name, value in config if isinstance(value, Section)}
        meanings = {key: info.description for key, info in self.keys(classes).items() if info.description}
        return meanings | {name: cls.__doc__.strip().splitlines()[0] for name, cls in classes.items() if cls.__doc__}

    def spelled(self, key: str) -> str:
        """The key that an alias stands for; any other as it is."""
        if key in self.aliases:
            return self.aliases[key]
        beginnings = [alias for alias in self.aliases if alias.endswith(".") and key.startswith(alias)]
        longest = max(beginnings, key=len, default="")
        return self.aliases[longest] + key.removeprefix(longest) if longest else key

    def _is_section(self, name: str) -> bool:
        annotation = self.root.model_fields[name].annotation
        return name in self.pickers or (isinstance(annotation, type) and issubclass(annotation, Section))

    def _pick_classes(self, settings, mistakes):
        last = {self.spelled(s.key): s for s in settings}
        classes = {}
        for name in filter(self._is_section, self.root.model_fields):
            if name not in self.pickers:
                classes[name] = self.root.model_fields[name].annotation
                continue
            key, picker = self.pickers[name]
            try:
                classes[name] = picker(last[key].value if key in last else None)
            except ValueError as error:
                mistakes.append(f"{_given(key, last)}: {error}")
        return classes

    def place_all(self, settings, classes, mistakes):
        """Dotted key -> the last setting of it."""
        keys = self.keys(classes)
        # of a section whose class is not known, no key can be judged
        unknown = tuple(f"{name}." for name in self.pickers if name not in classes)
        placed: dict[str, Setting] = {}
        for setting in settings:
            key = self.spelled(setting.key)
            if unknown and key.startswith(unknown):
                continue
            key = self._place(key, setting, keys, mistakes)
            earlier = placed.get(key)
            # two keys of theirs may be one here, e.g. the widths of actor and critic
            agree = earlier and earlier.as_written != setting.as_written and earlier.value == setting.value
            if earlier and earlier.line and earlier.source == setting.source and not agree:
                mistakes.append(f"{_given(key, {key: setting})}: was given before, in line {earlier.line}; keep one")
            elif earlier and _contradict(earlier, setting):
                before = f"{earlier.as_written} = {value_text(earlier.value)}"
                mistakes.append(f"{_given(key, {key: setting})}: {before} was given too and is the same key; keep one")
            if key:
                placed.pop(key, None)  # so that it moves to the end
                placed[key] = setting
        return placed

    def _place(self, key, setting, keys, mistakes):
        """The dotted key a setting belongs to; None, and perhaps a mistake, where there is none."""
        if key in keys:
            return key
        homes = [k for k in keys if k.rpartition(".")[2] == key]
        if len(homes) == 1:
            return homes[0]
        owner = next((k for k in keys if key.startswith(f"{k}.")), None)
        if owner and keys[owner].annotation is dict:
            return key  # env.kwargs.gravity=1 goes into env.kwargs
        is_section = key in self.root.model_fields
        if is_section and setting.value in (None, {}):
            return None  # an empty section asks for nothing
        given = f"{setting.as_written} (from {setting.where})"
        if homes:
            mistakes.append(f"{given}: could be any of {', '.join(homes)}; write one of them")
        elif is_section:
            mistakes.append(f"{given}: is a section, not a value; its keys are {', '.join(_below(key, keys))}")
        elif owner and not any(alias.startswith(f"{owner}.") for alias in self.aliases):
            mistakes.append(f"{given}: {owner} has no keys below it; expected {accepted(keys[owner])}")
        else:
            said = self.explain(key, setting) or f"unknown key; {self._nearest(key, keys)}"
            mistakes.append(f"{given}: {said}")
        return None

    def _nearest(self, key, keys):
        """Nearest by the whole dotted key, or by its last word when the section is what was mistaken.

        A word of a key's own name is more than letters that look alike: ppo.lr is rather ppo.policy_lr than ppo.c_bar.
        """
        spellings = {key: key for key in keys} | {alias: k for alias, k in self.aliases.items() if k in keys}
        words = {k.rpartition(".")[2]: k for k in keys}
        whole = difflib.get_close_matches(key, spellings, n=1)
        last = difflib.get_close_matches(key.rpartition(".")[2], words, n=1)
        section, _, word = key.rpartition(".")
        named = [k for k in keys if k.rpartition(".")[0] == section and word in k.rpartition(".")[2].split("_")]
        if named and not difflib.get_close_matches(key, spellings, n=1, cutoff=0.9):
            best = named[0]
        else:
            best = spellings[whole[0]] if whole else words[last[0]] if last else None
        if best:
            return f"nearest: {best} ({accepted(keys[best])})"
        known = _below(key.partition(".")[0], keys) or list(self.root.model_fields)
        return f"valid here: {', '.join(known)}"

    def _validate(self, classes, placed, mistakes):
        """Every field of the root: its own values, and the sections as instances of their classes."""
        given: dict[str, dict] = {name: {} for name in ("", *classes)}
        for key, setting in placed.items():
            section, _, leaf = key.partition(".")
            insert(*((given[section], leaf) if section in classes else (given[""], key)), setting.value)
        values = {n: _validated(cls, given[n], f"{n}.", placed, mistakes) for n, cls in classes.items()}
        top = _validated(self._top(), given[""], "", placed, mistakes)
        return values | dict(top or {})

    def _top(self) -> type[Section]:
        """The root with its sections left out."""
        plain = {k: (i.annotation, i) for k, i in self.root.model_fields.items() if not self._is_section(k)}
        return pydantic.create_model("Top", __base__=Section, **plain)


def accepted(info: FieldInfo) -> str:
    """What a field takes, in words: 'a number > 0 and <= 1', 'one of: ppo, grpo'."""
    return _in_words(info.annotation, info.metadata)


def _in_words(annotation: Any, metadata: Iterable = ()) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _in_words(arg, metadata) for arg in args)
    if origin is typing.Annotated:
        return _in_words(args[0], [bound for extra in args[1:] for bound in getattr(extra, "metadata", [extra])])
    if origin is Literal:
        return f"one of: {', '.join(map(str, args))}"
    if origin in (tuple, list):
        return f"a list, each {_in_words(args[0])}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "keys with values"}
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if hasattr(bound, name)
    ]
    return " ".join([names.get(annotation, str(annotation)), " and ".join(bounds)]).rstrip()


def _takes_bool(annotation: Any) -> bool:
    return annotation not in (int, float) and not any(arg in (int, float) for arg in typing.get_args(annotation))


def _below(section: str, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.startswith(f"{section}.")]


def _given(key: str, placed: dict[str, Setting]) -> str:
    """'ppo.gamma = 2 (from run.yaml line 3)'."""
    setting = placed.get(key) or next((s for k, s in placed.items() if k.startswith(f"{key}.")), None)
    if setting is None:
        return key
    spelled = "" if setting.as_written == key else f", given as {setting.as_written}"
    return f"{key} = {value_text(setting.value)} (from {setting.where}{spelled})"


def _contradict(earlier: Setting, later: Setting) -> bool:
    """Two spellings of one key in one place; the same spelling again is how somebody changes their mind."""
    return earlier.source == later.source and earlier.as_written != later.as_written and earlier.value != later.value


def insert(values: dict, dotted: str, value: Any) -> None:
    """{"kwargs": {}}, "kwargs.gravity", 1 -> {"kwargs": {"gravity": 1}}; what was given before gives way."""
    leaf, _, rest = dotted.partition(".")
    if not rest:
        values[leaf] = value
        return
    inner = values.get(leaf)
    values[leaf] = dict(inner) if isinstance(inner, dict) else {}
    insert(values[leaf], rest, value)


def _validated(cls, values, prefix, placed, mistakes):
    try:
        return cls.model_validate(values)
    except pydantic.ValidationError as error:
        for problem in error.errors():
            leaf = str(problem["loc"][0]) if problem["loc"] else ""
            key = (prefix + leaf).removesuffix(".")
            line = f"{_given(key, placed)}: {_why(problem, cls.model_fields.get(leaf))}"
            if line not in mistakes:
                mistakes.append(line)
        return None


def _spoken(cls: type[Section], values: dict, error: pydantic.ValidationError) -> list[str]:
    """The mistakes of a section that was made in Python, without a tree around it."""
    mistakes = []
    for problem in error.errors():
        leaf = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(leaf, cls.model_fields, n=1)
            hint = f"nearest: {near[0]}" if near else f"valid here: {', '.join(cls.model_fields)}"
            mistakes.append(f"{cls.__name__}: {leaf}={values[leaf]!r} is an unknown key; {hint}")
        else:
            given = f"{leaf}={values[leaf]!r}" if leaf in values else leaf
            mistakes.append(f"{cls.__name__}: {given}: {_why(problem, cls.model_fields.get(leaf))}")
    return list(dict.fromkeys(mistakes))


def _why(problem: dict, info: FieldInfo | None) -> str:
    if problem["type"] == "value_error" or info is None:
        return problem["msg"].removeprefix("Value error, ")
    missing = "has no default and was not given; " if problem["type"] == "missing" else ""
    return f"{missing}expected {accepted(info)}"
