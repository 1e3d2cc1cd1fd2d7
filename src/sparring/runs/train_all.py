"""`sparring train all`: teacher, student, adversarial, each in a process of its own, each from what the last one left.

<output>/
  teacher_rl/  student_rl/  adversarial_rl/      a run folder each
  all.json                                       which of them are done, and with which settings; which start anew
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparring.config.inherit import FREE_TO_DIFFER
from sparring.config.legacy import rename
from sparring.config.schema import SCHEMA, Config, load_config
from sparring.config.text import Setting, value_text
from sparring.errors import UserError, visible
from sparring.evaluation.files import text_table
from sparring.phases import CHAIN
from sparring.processes.child import forward_signals
from sparring.processes.rows import Document, RowFile

# what each starts from: key -> phase
_STARTS_FROM: dict[str, dict[str, str]] = {"teacher": {}, "student": {"student.teacher": "teacher"}}
_STARTS_FROM["adversarial"] = {"adversarial.teacher": "teacher", "adversarial.student": "student"}
_CURVES = {"rollout/contact_share": "share of decisions in touch with an object", "episode_reward": "pay of an episode"}


def train_all(given: list[Setting], output: Path, gpus: int = 1, resume: str = "auto", trust: bool = False) -> int:
    """0, or the code of the phase that failed or was interrupted; the same call goes on there."""
    if resume not in ("auto", "never"):
        raise UserError(f"--resume {resume}: all phases go on (auto) or start anew (never); name a phase to branch off")
    shares = {phase: _settings_of(phase, given, output) for phase in CHAIN}
    # mistakes are found before hours are spent
    _refuse_own_starts(given)
    for phase, settings in shares.items():
        _refuse_own_folder(settings, _folder_of(phase, output))
        _refuse_bad_explorer(load_config(None, settings, phase, inherit=False))
    record = output / "all.json"
    done, wrong = Document(record).read() if os.path.lexists(record) and resume == "auto" else ({}, None)
    if wrong:
        print(f"'{output}': {wrong}; each phase goes on by what its own folder says", file=sys.stderr, flush=True)
    # these start anew, also in a later call, whatever lies in their folders
    anew = list(CHAIN) if resume == "never" else done.pop("anew", [])
    for number, (phase, settings) in enumerate(shares.items(), 1):
        words = [f"{setting.key}={value_text(setting.value)}" for setting in settings]
        what = f"phase {number} of {len(shares)}: {phase}"
        if phase not in anew and done.get(phase) == words and any(_folder_of(phase, output).glob("checkpoint-*")):
            print(f"{what}, done before", flush=True)
            continue
        print(what, flush=True)
        # the other phases' settings are reported there
        for line in replace(rename(given, SCHEMA, phase), other_phases=[]).notes():
            print(visible(line), file=sys.stderr, flush=True)
        how = "never" if phase in anew else "auto"
        anew = [other for other in anew if other != phase]
        _write(record, done, anew)
        flags = ["--gpus", str(gpus), "--resume", how, *(["--trust"] if trust else [])]
        code = _run(["train", phase, *flags, *words])
        if code:
            return code
        # what started from another one of these is out of date
        changed = [word for word in {*words} ^ {*done.get(phase, ())} if not word.startswith(FREE_TO_DIFFER)]
        if changed or how == "never":
            anew += [other for other in list(CHAIN)[number:] if done.pop(other, None) and other not in anew]
        done[phase] = words
        _write(record, done, anew)
    print(_summary(output))
    return 0


def _settings_of(phase: str, given: list[Setting], output: Path) -> list[Setting]:
    """What of `given` is for this phase: all but `<another phase>.<key of any section>`; and what the chain adds.

    `teacher.coloured` is a setting like any other; `teacher.training.iterations` is `training.iterations` for it alone.
    """
    added = {key: str(_folder_of(other, output)) for key, other in _STARTS_FROM[phase].items()}
    added["output"] = str(_folder_of(phase, output))
    # later ones win
    return rename(given, SCHEMA, phase).settings + [Setting(key, value, "train all") for key, value in added.items()]


def _folder_of(phase: str, output: Path) -> Path:
    return output / f"{phase}_rl"


def _refuse_own_starts(given: list[Setting]) -> None:
    added = {key for keys in _STARTS_FROM.values() for key in keys}
    aliases = rename(given, SCHEMA).schema.aliases
    for setting in given:
        if aliases.get(setting.key, setting.key) in added:
            advice = "leave it out, or name the phase to start from that one"
            raise UserError(f"{setting.key} ({setting.where}): `train all` begins with a teacher of its own; {advice}")


def _refuse_own_folder(settings: list[Setting], folder: Path) -> None:
    for setting in settings:
        if setting.key == "output" and setting.value is not None and Path(str(setting.value)) != folder:
            raise UserError(
                f"{setting.as_written} = {setting.value} (from {setting.where}): this phase of `train all` writes to "
                f"'{folder}'; leave it out, and say with --output where all of them go"
            )


def _refuse_bad_explorer(config: Config) -> None:
    """Build the explorer of a phase, to find mistakes that the phase would find hours later."""
    if config.phase == "teacher":
        return
    from sparring.envs.env import make_env
    from sparring.phases.student import with_cameras
    from sparring.policies.policy import make_policy

    env = make_env(config.env, 1)
    env.close()
    make_policy(config.policy, with_cameras(env.spec, config.student.cameras), config.rollout.action_steps)


def _write(record: Path, done: dict, anew: list[str]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    Document(record).write(done | ({"anew": anew} if anew else {}))


def _run(words: list[str]) -> int:
    """`sparring WORDS` in a process of its own; its exit code."""
    # -P: without the working directory, see __main__.py
    child = subprocess.Popen([sys.executable, "-P", "-m", "sparring", *words])
    with forward_signals([child]):
        code = child.wait()
    # killed by a signal: as a shell has it
    return code if code >= 0 else 128 - code


def _summary(output: Path) -> str:
    """The measures of the three phases, from what they wrote."""
    folders = {phase: _folder_of(phase, output) for phase in CHAIN}
    teacher, student, adversarial = (_evaluation_of(folders[phase]) for phase in CHAIN)
    rows = [("phase", "measure", "", "")]
    for camera in teacher["cameras"]:
        ratio, later = (_text(run["cameras"][camera]["changed_mse_ratio"]) for run in (teacher, adversarial))
        rows.append(("teacher", f"{camera}: squared error on changed pixels", ratio, "copying the last frame: 1"))
        rows.append(("adversarial", "  the same, after sparring", later, ""))
    if student.get("exploration"):
        touch = {who: found["contact"] for who, found in student["exploration"].items()}
        mine, noise = touch.pop("policy"), max(touch.values())
        rows.append(("student", "in touch with an object, held-out episodes", _text(mine), f"noise: {_text(noise)}"))
    for phase in ("student", "adversarial"):
        for name, what in _CURVES.items():
            if curve := _curve(folders[phase], name):
                rows.append((phase, what, _text(curve[-1]), f"at the start: {_text(curve[0])}"))
    errors = [_curve(folders["adversarial"], f"world_model/generations_error_{when}") for when in ("then", "now")]
    if errors[0]:
        then, now = (_text(curve[-1]) for curve in errors)
        what = "error on what earlier explorers found, nats a token"
        rows.append(("adversarial", what, now, f"when they were played: {then}"))
    lines = [text_table(rows)]
    for folder in folders.values():
        there = [name for name in ("samples", "videos") if (folder / name).is_dir()]
        lines += [f"to look at: {folder}{os.sep}{', '.join(there)}"] if there else []
    return "\n".join(lines)


def _evaluation_of(folder: Path) -> dict[str, Any]:
    content, wrong = Document(folder / "evaluation.json").read()
    if wrong:
        again = f"remove '{folder.parent / 'all.json'}', and the same command evaluates its phases again"
        raise UserError(f"'{folder}': {wrong}; {again}")
    return content


def _curve(folder: Path, name: str) -> list[float]:
    rows = RowFile(folder / "episode_metrics.jsonl").read()
    return [row[name] for row in rows if row.get(name) is not None]


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
