"""`sparring train all`: trains teacher, student and adversarial, each in its own process from the runs before it.

<output>/
  teacher_rl/  student_rl/  adversarial_rl/      the run folders
  all.json                                       finished phases with their settings; phases to start from scratch
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

# phase -> the settings that name the runs it starts from: key -> phase
_STARTS_FROM: dict[str, dict[str, str]] = {"teacher": {}, "student": {"student.teacher": "teacher"}}
_STARTS_FROM["adversarial"] = {"adversarial.teacher": "teacher", "adversarial.student": "student"}
_CURVES = {"rollout/contact_share": "share of decisions that touch an object", "episode_reward": "reward per episode"}


def train_all(given: list[Setting], output: Path, gpus: int = 1, resume: str = "auto", trust: bool = False) -> int:
    """Train all phases. Returns 0 or the exit code of the phase that failed or was interrupted.

    The same call resumes in that phase."""
    if resume not in ("auto", "never"):
        advice = "give auto (resume) or never (start from scratch), or name a phase to branch off"
        raise UserError(f"--resume {resume}: not possible with `train all`; {advice}")
    settings_by_phase = {phase: _settings_of(phase, given, output) for phase in CHAIN}
    # check the settings of all phases before the first one trains for hours
    _refuse_start_settings(given)
    for phase, settings in settings_by_phase.items():
        _refuse_other_output(settings, _folder_of(phase, output))
        _refuse_bad_explorer(load_config(None, settings, phase, inherit=False))
    record = output / "all.json"
    done, wrong = Document(record).read() if os.path.lexists(record) and resume == "auto" else ({}, None)
    if wrong:
        print(f"'{output}': {wrong}; each phase resumes from its own folder", file=sys.stderr, flush=True)
    # phases to start from scratch even if their folders hold checkpoints; saved for later calls
    restarts = list(CHAIN) if resume == "never" else done.pop("anew", [])
    for number, (phase, settings) in enumerate(settings_by_phase.items(), 1):
        overrides = [f"{setting.key}={value_text(setting.value)}" for setting in settings]
        title = f"phase {number} of {len(settings_by_phase)}: {phase}"
        has_checkpoint = any(_folder_of(phase, output).glob("checkpoint-*"))
        if phase not in restarts and done.get(phase) == overrides and has_checkpoint:
            print(f"{title}, done before", flush=True)
            continue
        print(title, flush=True)
        # settings for other phases are reported with those phases
        for line in replace(rename(given, SCHEMA, phase), other_phases=[]).notes():
            print(visible(line), file=sys.stderr, flush=True)
        mode = "never" if phase in restarts else "auto"
        restarts = [other for other in restarts if other != phase]
        _write(record, done, restarts)
        flags = ["--gpus", str(gpus), "--resume", mode, *(["--trust"] if trust else [])]
        code = _run(["train", phase, *flags, *overrides])
        if code:
            return code
        # later phases that started from an earlier version of this one are out of date
        changed = [text for text in {*overrides} ^ {*done.get(phase, ())} if not text.startswith(FREE_TO_DIFFER)]
        if changed or mode == "never":
            restarts += [other for other in list(CHAIN)[number:] if done.pop(other, None) and other not in restarts]
        done[phase] = overrides
        _write(record, done, restarts)
    print(_summary(output))
    return 0


def _settings_of(phase: str, given: list[Setting], output: Path) -> list[Setting]:
    """The settings of `given` for this phase, without `<another phase>.<section>.<key>`, and those that the chain adds.

    `teacher.coloured` is an ordinary setting; `teacher.training.iterations` sets `training.iterations` for it alone."""
    added = {key: str(_folder_of(other, output)) for key, other in _STARTS_FROM[phase].items()}
    added["output"] = str(_folder_of(phase, output))
    # later settings override earlier ones
    return rename(given, SCHEMA, phase).settings + [Setting(key, value, "train all") for key, value in added.items()]


def _folder_of(phase: str, output: Path) -> Path:
    return output / f"{phase}_rl"


def _refuse_start_settings(given: list[Setting]) -> None:
    added = {key for keys in _STARTS_FROM.values() for key in keys}
    aliases = rename(given, SCHEMA).schema.aliases
    for setting in given:
        if aliases.get(setting.key, setting.key) in added:
            advice = "leave it out, or train a single phase to start from that run"
            raise UserError(f"{setting.key} ({setting.where}): `train all` trains its own teacher; {advice}")


def _refuse_other_output(settings: list[Setting], folder: Path) -> None:
    for setting in settings:
        if setting.key == "output" and setting.value is not None and Path(str(setting.value)) != folder:
            raise UserError(
                f"{setting.as_written} = {setting.value} (from {setting.where}): this phase of `train all` writes to "
                f"'{folder}'; leave it out, and give --output for the folder of all phases"
            )


def _refuse_bad_explorer(config: Config) -> None:
    """Build the explorer of a phase now, to raise errors that the phase would raise hours later."""
    if config.phase == "teacher":
        return
    from sparring.envs.env import make_env
    from sparring.phases.student import with_cameras
    from sparring.policies.policy import make_policy

    env = make_env(config.env, 1)
    env.close()
    make_policy(config.policy, with_cameras(env.spec, config.student.cameras), config.rollout.action_steps)


def _write(record: Path, done: dict, restarts: list[str]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    Document(record).write(done | ({"anew": restarts} if restarts else {}))


def _run(arguments: list[str]) -> int:
    """Run `sparring ARGUMENTS` in a process of its own; returns its exit code."""
    # -P: does not import from the working directory, see __main__.py
    child = subprocess.Popen([sys.executable, "-P", "-m", "sparring", *arguments])
    with forward_signals([child]):
        code = child.wait()
    # killed by a signal: the exit code that a shell reports
    return code if code >= 0 else 128 - code


def _summary(output: Path) -> str:
    """The results of the three phases as a table, read from their run folders."""
    folders = {phase: _folder_of(phase, output) for phase in CHAIN}
    teacher, student, adversarial = (_evaluation_of(folders[phase]) for phase in CHAIN)
    rows = [("phase", "measure", "", "")]
    for camera in teacher["cameras"]:
        ratio, later = (_text(run["cameras"][camera]["changed_mse_ratio"]) for run in (teacher, adversarial))
        rows.append(("teacher", f"{camera}: squared error on changed pixels", ratio, "copying the last frame: 1"))
        rows.append(("adversarial", "  the same after this phase", later, ""))
    if student.get("exploration"):
        contact = {who: found["contact"] for who, found in student["exploration"].items()}
        policy, noise = contact.pop("policy"), max(contact.values())
        what = "share of decisions that touch an object, held-out episodes"
        rows.append(("student", what, _text(policy), f"random actions: {_text(noise)}"))
    for phase in ("student", "adversarial"):
        for name, what in _CURVES.items():
            if curve := _curve(folders[phase], name):
                rows.append((phase, what, _text(curve[-1]), f"at the start: {_text(curve[0])}"))
    errors = [_curve(folders["adversarial"], f"world_model/generations_error_{when}") for when in ("then", "now")]
    if errors[0]:
        then, now = (_text(curve[-1]) for curve in errors)
        what = "error on episodes of earlier explorers, nats per token"
        rows.append(("adversarial", what, now, f"when they were collected: {then}"))
    lines = [text_table(rows)]
    for folder in folders.values():
        media = [name for name in ("samples", "videos") if (folder / name).is_dir()]
        lines += [f"images and videos: {folder}{os.sep}{', '.join(media)}"] if media else []
    return "\n".join(lines)


def _evaluation_of(folder: Path) -> dict[str, Any]:
    content, wrong = Document(folder / "evaluation.json").read()
    if wrong:
        advice = f"remove '{folder.parent / 'all.json'}' and run the same command to evaluate its phases again"
        raise UserError(f"'{folder}': {wrong}; {advice}")
    return content


def _curve(folder: Path, name: str) -> list[float]:
    rows = RowFile(folder / "episode_metrics.jsonl").read()
    return [row[name] for row in rows if row.get(name) is not None]


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
