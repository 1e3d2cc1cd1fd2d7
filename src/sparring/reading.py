"""Reads settings that are written in the words of the originals, or for one phase alone, as ours. Torch-free.

A setting is renamed, asks for what is so anyway, is for another phase, or is refused with a reason: none is dropped
without a word.
"""

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from sparring.config import Tree
from sparring.config_text import Setting, value_text
from sparring.originals import ALIASES, BESIDES, LISTED, SO_ANYWAY, VALUES, WITHOUT_MEANING
from sparring.phases import CHAIN


@dataclass(frozen=True)
class Reading:
    """Settings in our words, and what became of the others."""

    settings: list[Setting] = field(default_factory=list)
    # theirs -> ours
    renamed: dict[str, str] = field(default_factory=dict)
    # what they ask for is so, whatever anybody says
    so_anyway: list[Setting] = field(default_factory=list)
    other_phases: list[Setting] = field(default_factory=list)

    def told(self) -> list[str]:
        """A line for each kind of setting that did not arrive as it was given."""
        lines = {
            "read as": [f"{theirs} -> {ours}" for theirs, ours in self.renamed.items()],
            "so here anyway": [f"{s.key}={value_text(s.value)}" for s in self.so_anyway],
            "for other phases, not read in this one": [s.key for s in self.other_phases],
        }
        return [f"{what}: {', '.join(words)}" for what, words in lines.items() if words]


def read_as_ours(settings: list[Setting], tree: Tree, phase: str) -> Reading:
    """`<phase>.<key of any section>` is for that phase alone, and wins over what the same file says for all of them."""
    reading = Reading()
    keys = tree.keys(tree.classes())
    for _, group in groupby(settings, lambda setting: setting.source):
        common, own, flags = [], [], {}
        for setting in group:
            if setting.key not in tree.root.model_fields and _asks_for_nothing(setting):
                continue
            if _is_so_anyway(setting):
                reading.so_anyway.append(setting)
                continue
            owner, key = _owner(setting.key, tree, keys)
            if owner not in (None, phase):
                reading.other_phases.append(setting)
                continue
            if _is_flag(setting):
                key = LISTED[setting.key][0]
                # the list stands where its first word does
                common += [] if key in flags else [replace(setting, key=key)]
                flags.setdefault(key, []).append(setting)
            else:
                ours = replace(setting, key=key, value=_value(key, setting.value), written=setting.as_written)
                (own if owner else common).append(_for_alone(ours, phase) if owner else ours)
            if key != setting.key:
                reading.renamed[setting.key] = key
            if phase == "finetune" and (more := _besides(setting)):
                # first: what is said of it itself wins
                common.insert(0, more)
                reading.renamed[f"{setting.key}={setting.value}"] = f"{more.key}={more.value}"
        common = [_list_of(flags[s.key], s) if s.key in flags and s.written is None else s for s in common]
        reading.settings.extend(common + own)
    return reading


def why_not(key: str, value: Any) -> str | None:
    """Why a key of the originals means nothing here, and what to do; None of any other key."""
    if key.endswith("..."):
        return "stands for settings that are not shown; leave it out, or write them"
    reason = _reason(key)
    example = None if reason else _first_below(key)
    return f"expected keys with values below it, e.g. {example}, not {value_text(value)}" if example else reason


def without_meaning(setting: Setting) -> str | None:
    """Why a setting of the originals has no place here, where it asks for what cannot be had; else None."""
    if setting.key.endswith("..."):
        return why_not(setting.key, setting.value)
    has_place = setting.key in ALIASES or setting.key in LISTED or _is_so_anyway(setting)
    return None if has_place else _reason(setting.key)


def _owner(key: str, tree: Tree, keys: dict) -> tuple[str | None, str]:
    """The one phase that a key is for, None: all of them; and our name of it."""
    if _reason(key) and key not in ALIASES:
        return None, key
    ours = tree.spelled(key)
    owner, _, rest = ours.partition(".")
    first = rest.partition(".")[0]
    if owner not in CHAIN or not rest or first in tree.root.model_fields[owner].annotation.model_fields:
        return None, ours
    rest = tree.spelled(rest)
    is_known = first in tree.root.model_fields or rest in keys or any(k.endswith(f".{rest}") for k in keys)
    return (owner, rest) if is_known else (None, ours)


def _for_alone(setting: Setting, phase: str) -> Setting:
    # another source: it may say again what is said for all phases
    return replace(setting, source=f"{setting.where}, for {phase}", line=None)


def _is_flag(setting: Setting) -> bool:
    return setting.key in LISTED and isinstance(setting.value, bool)


def _list_of(flags: list[Setting], place: Setting) -> Setting:
    words = [LISTED[flag.key][1] for flag in flags if flag.value]
    return replace(place, value=words, written=", ".join(flag.key for flag in flags))


def _besides(setting: Setting) -> Setting | None:
    values = BESIDES.get(setting.key, {})
    if not isinstance(setting.value, str) or setting.value not in values:
        return None
    key, value = values[setting.value]
    # another source: the same file may say otherwise
    written = f"{setting.as_written}={setting.value}"
    return replace(setting, key=key, value=value, source=setting.where, line=None, written=written)


def _value(key: str, value: Any) -> Any:
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def _is_so_anyway(setting: Setting) -> bool:
    # 1 == True
    return setting.key in SO_ANYWAY and repr(SO_ANYWAY[setting.key]) in (repr(setting.value), _whole(setting.value))


def _whole(value: Any) -> str:
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else ""


def _asks_for_nothing(setting: Setting) -> bool:
    return setting.value in (None, {}) and _first_below(setting.key) is not None


def _first_below(key: str) -> str | None:
    """A key of the originals that `key` is a section of."""
    known = (*ALIASES, *LISTED, *WITHOUT_MEANING)
    return None if key in known else next((k for k in known if k.startswith(f"{key}.") and not k.endswith(".")), None)


def _reason(key: str) -> str | None:
    beginnings = [k for k in WITHOUT_MEANING if k.endswith(".") and key.startswith(k)]
    return WITHOUT_MEANING.get(key) or (WITHOUT_MEANING[max(beginnings, key=len)] if beginnings else None)
