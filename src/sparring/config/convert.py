"""`sparring config import FILE`: a config that is written as in the originals, in our words. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.config.legacy import without_meaning
from sparring.config.schema import build_config, kinds_with, reading_of, tree_of
from sparring.config.section import insert
from sparring.config.text import ConfigTextError, Setting, read_settings, to_yaml, value_text
from sparring.phases import ALIASES as PHASE_NAMES
from sparring.phases import CHAIN, PHASES, unknown_phase
from sparring.policies.configs import LoraConfig


def import_config(file: str | Path, phase: str | None = None) -> tuple[str, list[str]]:
    """A YAML file that loads as the original does, and what became of its keys, a line each.

    `phase` is what it is for, as words such as batch_size mean something else in another one; `all`: for the chain of
    teacher, student and adversarial, and for each of them. Without it, what the file says or is about.
    """
    given = read_settings(file)
    if not given:
        raise ConfigTextError(f"config file '{file}': says nothing, so there is nothing to import")
    asked = phase or next((setting.value for setting in reversed(given) if setting.key == "phase"), None)
    phase = _known(asked or _about(given))
    unwritten = [(setting, why) for setting in given if (why := without_meaning(setting))]
    kept = [setting for setting in given if setting.key != "phase" and not without_meaning(setting)]
    unwritten += _unread(kept, phase)
    homeless = {each: _homeless(kept, each) for each in _phases(phase)}
    unwritten += _reasons(homeless)
    settings = _merged({each: _placed(_without(kept, lost), each) for each, lost in homeless.items()})
    if asked and phase != "all":
        settings = {"phase": Setting("phase", phase, "command line")} | settings
    renamed = {key: s.as_written for key, s in settings.items() if s.as_written != key}
    told = [f"read as: {', '.join(f'{theirs} -> {key}' for key, theirs in renamed.items())}"] if renamed else []
    # in the order of the file; that it is to be left out has been done
    unwritten = [(s, why.removesuffix("; leave it out")) for s, why in sorted(unwritten, key=lambda each: each[0].line)]
    told += [f"{setting.key} (from {setting.where}) is a comment now: {why}" for setting, why in unwritten]
    also = f" and each of its phases: {', '.join(CHAIN)}" if phase == "all" else ""
    header = f"# From {Path(file).name}, by `sparring config import`. For `sparring train {phase}`{also}.\n"
    return header + _text(settings, renamed) + _comments(unwritten, Path(file).name), told


def _about(given: list[Setting]) -> str:
    return "all" if any(setting.key.partition(".")[0] in CHAIN for setting in given) else "finetune"


def _known(phase: Any) -> str:
    name = PHASE_NAMES.get(str(phase), phase)
    if name not in (*PHASES, "all"):
        raise ConfigTextError(f"phase = {value_text(phase)}: {unknown_phase(phase, 'all')}")
    return name


def _phases(phase: str) -> tuple[str, ...]:
    return CHAIN if phase == "all" else (phase,)


def _unread(kept: list[Setting], phase: str) -> list[tuple[Setting, str]]:
    """What asks for what is so anyway, or is for a phase that the file is not imported for."""
    reading = reading_of(_with_phase(kept, _phases(phase)[0]))
    # the chain has a phase for each of them
    others = [] if phase == "all" else reading.other_phases
    unread = [(s, "it is always so here") for s in reading.so_anyway]
    return unread + [(s, f"only {s.key.partition('.')[0]} reads it") for s in others]


def _homeless(kept: list[Setting], phase: str) -> list[tuple[Setting, str]]:
    """Settings of the originals whose place here another setting would have to make, and what they wait for."""
    settings = _with_phase(kept, phase)
    tree, ours = tree_of(settings), reading_of(settings).settings
    keys, given = tree.keys(tree.classes(ours)), {s.key: s.value for s in ours}
    found = []
    for setting in kept:
        key = tree.spelled(setting.key)
        needs = _needs(key, keys, given) if key != setting.key else None
        if needs:
            found.append((setting, f"would be {key}, which needs {needs}"))
    return found


def _without(kept: list[Setting], lost: list[tuple[Setting, str]]) -> list[Setting]:
    return [setting for setting in kept if all(setting is not other for other, _ in lost)]


def _needs(key: str, keys: Mapping, given: dict[str, Any]) -> str | None:
    """What must be given for a key of ours to be read; None: nothing more."""
    section, _, leaf = key.partition(".")
    # policy.model_settings holds keys of its own
    if f"{section}.{leaf.partition('.')[0]}" not in keys:
        return " or ".join(kinds_with(key)) or None
    if leaf not in LoraConfig.model_fields:
        return None
    if section == "world_model" and not given.get("world_model.trunk"):
        return "world_model.trunk"
    return None if leaf == "lora_r" or given.get(f"{section}.lora_r") else f"{section}.lora_r"


def _reasons(homeless: dict[str, list[tuple[Setting, str]]]) -> list[tuple[Setting, str]]:
    """Each setting once, with what it waits for; of several phases, in which."""
    found: dict[str, tuple[Setting, dict[str, list[str]]]] = {}
    for phase, waiting in homeless.items():
        for setting, why in waiting:
            found.setdefault(setting.key, (setting, {}))[1].setdefault(why, []).append(phase)
    said = "in {0} it {1}" if len(homeless) > 1 else "it {1}"
    return [
        (setting, "; ".join(said.format(" and ".join(phases), why) for why, phases in reasons.items()))
        for setting, reasons in found.values()
    ]


def _placed(kept: list[Setting], phase: str) -> dict[str, Setting]:
    """Our keys and what was given for them, all checked."""
    settings = _with_phase(kept, phase)
    build_config(settings, to_run=False)
    ours, tree = reading_of(settings).settings, tree_of(settings)
    placed = tree.place_all(ours, tree.classes(ours), [])
    return {key: setting for key, setting in placed.items() if key != "phase"}


def _with_phase(kept: list[Setting], phase: str) -> list[Setting]:
    return [*kept, Setting("phase", phase, "command line")]


def _merged(placed: dict[str, dict[str, Setting]]) -> dict[str, Setting]:
    """What all phases agree on stands alone, the rest as `<phase>.<key>`, but for keys of the phase's own section."""
    merged: dict[str, Setting] = {}
    for phase, settings in placed.items():
        for key, setting in settings.items():
            agreed = all(key in other and other[key].value == setting.value for other in placed.values())
            merged[key if agreed or key.startswith(f"{phase}.") else f"{phase}.{key}"] = setting
    return merged


def _text(settings: dict[str, Setting], renamed: dict[str, str]) -> str:
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        insert(values, key, setting.value)
    return to_yaml(values, {key: f"was {theirs}" for key, theirs in renamed.items()}) if values else ""


def _comments(unwritten: list[tuple[Setting, str]], file: str) -> str:
    lines = [f"#   {_as_given(setting)}  (line {setting.line}: {why})\n" for setting, why in unwritten]
    return "".join([f"# Not settings here; each with its line in {file}, and why:\n", *lines] if lines else [])


def _as_given(setting: Setting) -> str:
    shown = "" if setting.key.endswith("...") else f": {value_text(setting.value)}"
    return f"{value_text(setting.key)}{shown}"
