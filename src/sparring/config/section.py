"""Config sections, and the schema that they form. All problems of a config are reported together, one line each: the
key, its source, the nearest valid key and the accepted values. No section is named here."""

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from sparring.config.text import Setting, shortened, value_text
from sparring.errors import UserError

if typing.TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(pydantic.BaseModel)


class _SectionType(ModelMetaclass):
    """Makes `SomeConfig(key=value)` raise ConfigError instead of pydantic's error, as loading a config does."""

    def __call__(cls, *args, **values):
        try:
            return super().__call__(*args, **values)
        except pydantic.ValidationError as error:
            problems = [_section_problem(cls, values, problem) for problem in error.errors()]
            raise ConfigError(list(dict.fromkeys(problems))) from None


class Section(pydantic.BaseModel, metaclass=_SectionType):
    """A part of the config: frozen, typed and bounded; unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _check_limits(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse huge values, and booleans for numbers: the flag `--ppo_epochs` without a value does not mean 1."""
        field = cls.model_fields[str(info.field_name)]
        annotation = field.annotation
        has_own_bound = any(hasattr(limit, name) for limit in field.metadata for name in ("le", "lt"))
        is_whole = annotation in _WHOLE and not has_own_bound
        if why := _above_limit(value, _MOST if is_whole else math.inf):
            raise PydanticCustomError("bounds", "{why}", {"why": why})
        if isinstance(value, bool) and any(kind in (annotation, *typing.get_args(annotation)) for kind in (int, float)):
            raise PydanticCustomError("bool", "true or false is not a value of this field")
        return value


# limits of the entries of a list and of the characters of a text (a path or the name of a class)
_ENTRIES, _CHARACTERS = 1000, 10_000
# upper bounds from here on only protect memory and time; the error states this
_VAST = 10_000
_PROBLEMS = 50  # reported at most: finding the nearest keys takes time
# types of whole numbers, and their limit if they have no bound of their own
_WHOLE, _MOST = (int, int | None), 10**9


def _above_limit(value: Any, most: float) -> str | None:
    if isinstance(value, (int, float)) and value > most:
        return f"expected at most {most:,}: larger values exceed any memory or time"
    if isinstance(value, (list, tuple)) and len(value) > _ENTRIES:
        return f"has {len(value):,} entries; expected at most {_ENTRIES:,}: checking more would take too long"
    if isinstance(value, str) and len(value) > _CHARACTERS:
        return f"has {len(value):,} characters; expected at most {_CHARACTERS:,}: no path or name is that long"
    texts = (text for text in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(text, str))
    if any("\0" in text or not text.isascii() and re.search("[\ud800-\udfff]", text) for text in texts):
        return "contains a NUL character or half a surrogate pair; expected printable text"
    return None


class ConfigError(UserError):
    """All problems of a config, one per line."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


# abbreviation -> names of keys that it may mean
_SHORT_FOR = {"lr": ("policy_lr", "learning_rate")}
Classes = dict[str, type[Section]]  # section -> its class
Check = Callable[[Any], Iterable[tuple[str, str]]]


@dataclass(frozen=True)
class Schema:
    """The shape of a config: a root class whose fields are values or sections of values."""

    root: type[Section]
    # section -> the key that selects its class, and a function from its value to the class; raises ValueError
    pickers: dict[str, tuple[str, Callable[[Any], type[Section]]]] = field(default_factory=dict)
    # other spellings of a dotted key, or of a prefix of keys (with a dot at the end)
    aliases: dict[str, str] = field(default_factory=dict)
    # explains an unknown setting, given its key after aliases; None: the nearest key is reported instead
    explain: Callable[[str, Setting], str | None] = lambda key, setting: None

    def build(self, settings: list[Setting], check: Check = lambda config: ()) -> Any:
        """The config for these settings, later ones overriding earlier ones; raises ConfigError with all problems."""
        problems: list[str] = []
        classes = self.classes(settings, problems)
        placed = self.place(settings, classes, problems)
        config = self._validate(classes, placed, problems)
        if not problems:
            problems += [f"{_given(key, placed)}: {why}" for key, why in check(config)]
        if problems:
            raise ConfigError(problems)
        return config

    def classes(self, settings: Iterable[Setting] = (), problems: list[str] | None = None) -> dict[str, type[Section]]:
        last = {self.spelled(s.key): s for s in settings}
        classes: dict[str, Any] = {}
        for name in filter(self.is_section, self.root.model_fields):
            if name not in self.pickers:
                classes[name] = self.root.model_fields[name].annotation
                continue
            key, picker = self.pickers[name]
            try:
                classes[name] = picker(last[key].value if key in last else None)
            except ValueError as error:
                if problems is not None:
                    problems.append(f"{_given(key, last)}: {error}")
        return classes

    def keys(self, classes: Classes) -> dict[str, FieldInfo]:
        keys = {name: info for name, info in self.root.model_fields.items() if not self.is_section(name)}
        for name, cls in classes.items():
            keys |= {f"{name}.{leaf}": info for leaf, info in cls.model_fields.items()}
        return keys

    def spelled(self, key: str) -> str:
        if key in self.aliases:
            return self.aliases[key]
        beginnings = [alias for alias in self.aliases if alias.endswith(".") and key.startswith(alias)]
        longest = max(beginnings, key=len, default="")
        return self.aliases[longest] + key.removeprefix(longest) if longest else key

    def place(self, settings: Iterable[Setting], classes: Classes, problems: list[str]) -> dict[str, Setting]:
        keys = self.keys(classes)
        unknown = tuple(f"{name}." for name in self.pickers if name not in classes)
        placed: dict[str, Setting] = {}
        for setting in settings:
            key = self.spelled(setting.key)
            if unknown and key.startswith(unknown):
                continue
            home, problem = self._place(key, setting, keys)
            if problem:
                problems.append(f"{shortened(setting.as_written)} (from {setting.where}): {problem}")
            if len(problems) == _PROBLEMS:
                problems.append(f"these are the first {_PROBLEMS} problems; fix them to see the others")
                break
            if home is None:
                continue
            earlier = placed.pop(home, None)
            placed[home] = setting
            if earlier is None or earlier.source != setting.source:
                continue
            respelled, same = earlier.as_written != setting.as_written, earlier.value == setting.value
            # two keys of the originals may be one key here, e.g. the widths of actor and critic
            if earlier.line and not (respelled and same):
                problems.append(f"{_given(home, placed)}: is also given in line {earlier.line}; keep one")
            elif respelled and not same:
                before = f"{earlier.as_written} = {value_text(earlier.value)}"
                problems.append(f"{_given(home, placed)}: {before} is the same key and also given; keep one")
        return placed

    @staticmethod
    def nested(placed: dict[str, Setting], keys: dict[str, FieldInfo] | None = None) -> dict[str, Any]:
        """`keys`: the schema's. Entries of a dict[str, ...] are not nested, as their names may have dots."""
        flat = [key for key, info in (keys or {}).items() if typing.get_origin(info.annotation) is dict]
        values: dict[str, Any] = {}
        for key, setting in placed.items():
            owner = next((name for name in flat if key.startswith(f"{name}.")), None)
            entry = [key.removeprefix(f"{owner}.")] if owner else []
            _insert(values, [*(owner or key).split("."), *entry], setting.value)
        return values

    def is_section(self, name: str) -> bool:
        annotation = self.root.model_fields[name].annotation
        return name in self.pickers or (isinstance(annotation, type) and issubclass(annotation, Section))

    def _place(self, key: str, setting: Setting, keys: dict[str, FieldInfo]) -> tuple[str | None, str | None]:
        """The dotted key of a setting, or its problem; (None, None) for an empty section."""
        homes = [key] if key in keys else [k for k in keys if k.rpartition(".")[2] == key]
        if len(homes) == 1:
            return homes[0], None
        owner = next((k for k in keys if key.startswith(f"{k}.")), None)
        if owner and dict in (keys[owner].annotation, typing.get_origin(keys[owner].annotation)):
            return key, None  # env.kwargs.gravity=1 goes into env.kwargs
        if key in self.root.model_fields and setting.value in (None, {}):
            return None, None
        if homes:
            return None, f"is ambiguous: {', '.join(homes)}; write one of them"
        if key in self.root.model_fields:
            return None, f"is a section, not a value; its keys are {', '.join(_below(key, keys))}"
        if owner and not any(alias.startswith(f"{owner}.") for alias in self.aliases):
            return None, f"{owner} has no subkeys; expected {accepted(keys[owner])}"
        return None, self.explain(key, setting) or f"unknown key; {self._nearest(key, keys)}"

    def _nearest(self, key: str, keys: dict[str, FieldInfo]) -> str:
        spellings = {key: key for key in keys} | {alias: k for alias, k in self.aliases.items() if k in keys}
        leaves = {k.rpartition(".")[2]: k for k in keys}
        section, _, leaf = key.rpartition(".")
        meant = [k for k in keys if k.rpartition(".")[2] in _SHORT_FOR.get(leaf, ())]
        # the key of the section, else the key for which `learning_rate` without a section stands in this phase
        usual = [k for k in meant if k in map(self.spelled, _SHORT_FOR.get(leaf, ()))]
        if meant := [k for k in meant if k.rpartition(".")[0] == section] or usual or meant:
            return f"nearest: {', '.join(f'{k} ({accepted(keys[k])})' for k in meant)}"
        similar = difflib.get_close_matches(key, spellings, n=1)
        last = difflib.get_close_matches(leaf, leaves, n=1)
        # prefer a whole word of a key's name to similar letters: ppo.lr is ppo.policy_lr rather than ppo.c_bar
        named = [k for k in keys if k.rpartition(".")[0] == section and leaf in k.rpartition(".")[2].split("_")]
        if named and not difflib.get_close_matches(key, spellings, n=1, cutoff=0.9):
            best: str | None = named[0]
        else:
            best = spellings[similar[0]] if similar else leaves[last[0]] if last else None
        if best:
            return f"nearest: {best} ({accepted(keys[best])})"
        return f"valid here: {', '.join(_below(key.partition('.')[0], keys) or self.root.model_fields)}"

    def _validate(self, classes: Classes, placed: dict[str, Setting], problems: list[str]) -> Any:
        """Validate the sections, then the root; returns None after appending to `problems` if the root is invalid."""
        values = self.nested(placed, self.keys(classes))
        for name, cls in (*classes.items(), ("", self.root)):
            try:
                if not name:
                    return self.root.model_validate(values)
                values[name] = cls.model_validate(values.get(name, {}))
            except pydantic.ValidationError as error:
                # equal problems of several entries of a list are one problem
                for problem in {(p["loc"][:1], p["type"], p["msg"]): p for p in error.errors()}.values():
                    leaf = str(problem["loc"][0]) if problem["loc"] else ""
                    if not name and self.is_section(leaf):
                        continue  # missing because it is invalid itself, which is already reported
                    why = _why(problem, cls.model_fields.get(leaf))
                    line = f"{_given('.'.join(filter(None, (name, leaf))), placed)}: {why}"
                    problems += [line] if line not in problems else []
                values.pop(name, None)
        return None


def accepted(info: FieldInfo) -> str:
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, metadata: Iterable = ()) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else _describe(arg, metadata) for arg in args)
    if origin is typing.Annotated:
        return _describe(args[0], [bound for extra in args[1:] for bound in getattr(extra, "metadata", [extra])])
    if origin is Literal:
        return f"one of: {', '.join(map(str, args))}"
    if origin in (tuple, list):
        return f"a list, each {_describe(args[0])}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "keys with values"}
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [(name, getattr(m, name)) for m in metadata for name in signs if hasattr(m, name)]
    bounds = [f"{signs[name]} {bound}" for name, bound in found if not (name == "le" and bound >= _VAST)]
    return " ".join([names.get(annotation, str(annotation)), " and ".join(bounds)]).rstrip()


def _insert(values: dict, path: list[str], value: Any) -> None:
    """{"kwargs": {}}, ["kwargs", "gravity"], 1 -> {"kwargs": {"gravity": 1}}; overwrites earlier values."""
    leaf, *rest = path
    if rest:
        inner = values.get(leaf)
        values[leaf] = dict(inner) if isinstance(inner, dict) else {}
        _insert(values[leaf], rest, value)
    else:
        values[leaf] = value


def _below(section: str, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.startswith(f"{section}.")]


def _given(key: str, placed: dict[str, Setting]) -> str:
    """'ppo.gamma = 2 (from run.yaml line 3)'."""
    setting = placed.get(key) or next((s for k, s in placed.items() if k.startswith(f"{key}.")), None)
    if setting is None:
        return key
    spelled = "" if setting.as_written == key else f", given as {setting.as_written}"
    return f"{key} = {shortened(value_text(setting.value))} (from {setting.where}{spelled})"


def _section_problem(cls: Any, values: dict, problem: Any) -> str:
    leaf = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(leaf, cls.model_fields, n=1)
        hint = f"nearest: {near[0]}" if near else f"valid here: {', '.join(cls.model_fields)}"
        return f"{cls.__name__}: {leaf}={values[leaf]!r} is an unknown key; {hint}"
    given = f"{leaf}={values[leaf]!r}" if leaf in values else leaf
    return f"{cls.__name__}: {given}: {_why(problem, cls.model_fields.get(leaf))}"


def _why(problem: Any, info: FieldInfo | None) -> str:
    if problem["type"] in ("value_error", "bounds") or info is None:
        return problem["msg"].removeprefix("Value error, ")
    missing = "has no default and was not given; " if problem["type"] == "missing" else ""
    is_vast = problem["type"] == "less_than_equal" and problem["ctx"]["le"] >= _VAST
    more = f", at most {problem['ctx']['le']:,}: larger values exceed any memory or time" if is_vast else ""
    return f"{missing}expected {accepted(info)}{more}"
