"""`sparring config import FILE`: converts a config of the original projects to the keys of this one. Torch-free."""

from pathlib import Path

from sparring.config.legacy import ALWAYS, rename
from sparring.config.schema import SCHEMA, kinds_with, load_config
from sparring.config.text import Setting, read_settings, to_yaml, value_text
from sparring.config.trust import refuse_code
from sparring.errors import UserError
from sparring.phases import ALIASES, CHAIN, PHASES, unknown_phase
from sparring.policies.configs import LoraConfig

Comment = tuple[Setting, str]  # a setting, and why it becomes a comment


def import_config(file: str | Path, phase: str | None = None) -> tuple[str, list[str]]:
    """The text of an equivalent YAML file, and notes on converted keys, one per line. `phase`: the phase to convert for
    (`all`: teacher, student and adversarial); None: the phase in the file."""
    given = read_settings(file)
    if not given:
        raise UserError(f"config file '{file}' is empty; expected the settings to import")
    # model_class is not imported here: no model is built
    refuse_code(None, str(file), [setting for setting in given if not setting.key.endswith("model_class")])
    requested = phase or next((setting.value for setting in reversed(given) if setting.key == "phase"), None)
    names_a_phase = any(setting.key.partition(".")[0] in CHAIN for setting in given)
    phase = requested or ("all" if names_a_phase else "finetune")
    phase = ALIASES.get(str(phase), phase)
    if phase not in (*PHASES, "all"):
        raise UserError(f"phase = {value_text(phase)}: {unknown_phase(phase, 'all')}")

    phases = CHAIN if phase == "all" else (phase,)
    renamed = rename([setting for setting in given if setting.key != "phase"], SCHEMA, phases[0])
    comments = [*renamed.refused, *((setting, ALWAYS) for setting in renamed.fixed)]
    refused = [setting for setting, _ in renamed.refused]
    kept = [setting for setting in given if setting.key != "phase" and setting not in refused]
    if phase != "all":
        comments += [(s, f"used only by {s.key.partition('.')[0]}") for s in renamed.other_phases]
    unmet = {each: _unmet(kept, each) for each in phases}
    comments += _reasons(unmet)
    settings = _merged({each: _placed(kept, unmet[each], each) for each in phases})
    if requested and phase != "all":
        settings = {"phase": Setting("phase", phase, "command line")} | settings

    names = {key: s.written for key, s in settings.items() if s.written and s.written != key}
    notes = [f"read as: {', '.join(f'{theirs} -> {key}' for key, theirs in names.items())}"] if names else []
    on_rewards = [note for each in phases for note in rename(kept, SCHEMA, each).notes_on_rewards()]
    notes += on_rewards
    # in the order of the file; "remove it" is done by this conversion
    comments = [(s, why.removesuffix("; remove it")) for s, why in comments]
    comments.sort(key=lambda each: each[0].line or 0)
    notes += [f"{setting.key} (from {setting.where}) is now a comment: {why}" for setting, why in comments]
    also = f" and each of its phases: {', '.join(CHAIN)}" if phase == "all" else ""
    text = f"# From {Path(file).name}, by `sparring config import`. For `sparring train {phase}`{also}.\n"
    values = SCHEMA.nested(settings)
    text += "".join(f"# {note}.\n" for note in on_rewards)
    text += to_yaml(values, {key: f"was {theirs}" for key, theirs in names.items()}) if values else ""
    text += f"# Not converted (with the line in {Path(file).name}, and the reason):\n" if comments else ""
    for setting, why in comments:
        value = "" if setting.key.endswith("...") else f": {value_text(setting.value)}"
        text += f"#   {value_text(setting.key)}{value}  (line {setting.line}: {why})\n"
    return text, notes


def _unmet(kept: list[Setting], phase: str) -> list[Comment]:
    """The settings whose key needs another setting that is not given, and that setting."""
    renamed = rename(kept, SCHEMA, phase)
    schema, given = renamed.schema, {s.key: s.value for s in renamed.settings}
    keys = schema.keys(schema.classes(renamed.settings))
    found = []
    for setting in kept:
        key = schema.spelled(setting.key)
        section, _, leaf = key.partition(".")
        if f"{section}.{leaf.partition('.')[0]}" not in keys:
            needs = " or ".join(kinds_with(key))
        elif leaf in LoraConfig.model_fields and section == "world_model" and not given.get("world_model.trunk"):
            needs = "world_model.trunk"
        elif leaf in LoraConfig.model_fields and leaf != "lora_r" and not given.get(f"{section}.lora_r"):
            needs = f"{section}.lora_r"
        else:
            needs = ""
        if needs and key != setting.key:
            found.append((setting, f"would be {key}, which needs {needs}"))
    return found


def _reasons(unmet: dict[str, list[Comment]]) -> list[Comment]:
    found: dict[str, tuple[Setting, dict[str, list[str]]]] = {}
    for phase, comments in unmet.items():
        for setting, why in comments:
            found.setdefault(setting.key, (setting, {}))[1].setdefault(why, []).append(phase)
    template = "in {0} it {1}" if len(unmet) > 1 else "it {1}"
    return [
        (setting, "; ".join(template.format(" and ".join(phases), why) for why, phases in reasons.items()))
        for setting, reasons in found.values()
    ]


def _placed(kept: list[Setting], unmet: list[Comment], phase: str) -> dict[str, Setting]:
    dropped = [id(setting) for setting, _ in unmet]
    kept = [setting for setting in kept if id(setting) not in dropped]
    load_config(None, kept, phase, inherit=False, to_run=False)
    renamed = rename(kept, SCHEMA, phase)
    return renamed.schema.place(renamed.settings, renamed.schema.classes(renamed.settings), [])


def _merged(placed: dict[str, dict[str, Setting]]) -> dict[str, Setting]:
    """Keys with equal values in all phases as `<key>`, the others as `<phase>.<key>`."""
    merged: dict[str, Setting] = {}
    for phase, settings in placed.items():
        for key, setting in settings.items():
            agreed = all(key in other and other[key].value == setting.value for other in placed.values())
            merged[key if agreed or key.startswith(f"{phase}.") else f"{phase}.{key}"] = setting
    return merged
