"""`sparring train all`: teacher, student, adversarial, each in a process of its own, each from what the last one left.

<output>/
  teacher_rl/  student_rl/  adversarial_rl/      a run folder each
  all.json                                       which of them are done, and with which settings; which start anew
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from sparring.config_text import Setting, value_text
from sparring.errors import UserError
from sparring.phases import CHAIN
from sparring.tree import Config, load_config

# what each starts from: key -> phase
STARTS_FROM = {
    "teacher": {},
    "student": {"student.teacher": "teacher"},
    "adversarial": {"adversarial.teacher": "teacher", "adversarial.student": "student"},
}


def train_all(given: list[Setting], output: Path, gpus: int = 1, resume: str = "auto") -> int:
    """0, or the code of the phase that failed or was interrupted; the same call goes on there."""
    if resume not in ("auto", "never"):
        raise UserError(f"--resume {resume}: all phases go on (auto) or start anew (never); name a phase to branch off")
    shares = {phase: settings_of(phase, given, output) for phase in CHAIN}
    # mistakes are told before hours are spent
    for phase, settings in shares.items():
        load_config(None, settings, phase)
    record = output / "all.json"
    done = json.loads(record.read_text()) if record.is_file() and resume == "auto" else {}
    # these start anew, also in a later call, whatever lies in their folders
    anew = list(CHAIN) if resume == "never" else done.pop("anew", [])
    for number, (phase, settings) in enumerate(shares.items(), 1):
        words = [f"{setting.key}={value_text(setting.value)}" for setting in settings]
        what = f"phase {number} of {len(shares)}: {phase}"
        if phase not in anew and done.get(phase) == words and any(folder_of(phase, output).glob("checkpoint-*")):
            print(f"{what}, done before", flush=True)
            continue
        print(what, flush=True)
        how = "never" if phase in anew else "auto"
        anew = [other for other in anew if other != phase]
        _write(record, done, anew)
        code = _run(["train", phase, "--gpus", str(gpus), "--resume", how, *words])
        if code:
            return code
        # what started from another one of these is out of date
        anew += [other for other in list(CHAIN)[number:] if done.pop(other, None) and other not in anew]
        done[phase] = words
        _write(record, done, anew)
    print(summary(output))
    return 0


def _write(record: Path, done: dict, anew: list[str]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(done | ({"anew": anew} if anew else {}), indent=2) + "\n")
    partial.replace(record)


def settings_of(phase: str, given: list[Setting], output: Path) -> list[Setting]:
    """What of `given` is for this phase: all but `<another phase>.<key of any section>`; and what the chain adds.

    `teacher.coloured` is a setting like any other; `teacher.training.iterations` is `training.iterations` for it alone.
    """
    common, own = [], []
    for setting in given:
        owner, _, key = setting.key.partition(".")
        if owner not in CHAIN or key.partition(".")[0] in Config.model_fields[owner].annotation.model_fields:
            common.append(setting)
        elif owner == phase:
            own.append(Setting(key, setting.value, f"{setting.where}, for {phase}"))
    added = {key: str(folder_of(other, output)) for key, other in STARTS_FROM[phase].items()}
    added["output"] = str(folder_of(phase, output))
    # later ones win
    return common + own + [Setting(key, value, "train all") for key, value in added.items()]


def folder_of(phase: str, output: Path) -> Path:
    return output / f"{phase}_rl"


def _run(words: list[str]) -> int:
    """`sparring WORDS` in a process of its own; its exit code."""
    child = subprocess.Popen([sys.executable, "-m", "sparring", *words])
    # a terminal tells the child of Ctrl-C itself; `kill` tells only us. It saves and leaves on its own
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        code = child.wait()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    # killed by a signal: as a shell tells it
    return code if code >= 0 else 128 - code


def summary(output: Path) -> str:
    """The measures of the three phases, from what they wrote."""
    rows = [("phase", "measure", "", "")]
    before, after = (_evaluation(folder_of(phase, output)) for phase in ("teacher", "adversarial"))
    for camera, found in before["cameras"].items():
        ratio, later = found["changed_mse_ratio"], after["cameras"][camera]["changed_mse_ratio"]
        rows.append(
            ("teacher", f"{camera}: squared error on changed pixels", _text(ratio), "copying the last frame: 1")
        )
        rows.append(("adversarial", "  the same, after sparring", _text(later), ""))
    explored = _evaluation(folder_of("student", output)).get("exploration")
    if explored:
        touch = {who: found["contact"] for who, found in explored.items()}
        mine, noise = touch.pop("policy"), max(touch.values())
        rows.append(("student", "in touch with an object, held-out episodes", _text(mine), f"noise: {_text(noise)}"))
    for phase, names in (("student", _EXPLORING), ("adversarial", _EXPLORING)):
        for name, words in names.items():
            rows += _rise(phase, words, _curve(folder_of(phase, output), name))
    then, now = (_curve(folder_of("adversarial", output), f"generations_error_{when}") for when in ("then", "now"))
    if then:
        told = f"when they were played: {_text(then[-1])}"
        rows.append(("adversarial", "error on what earlier explorers found, nats a token", _text(now[-1]), told))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    looks = [f"to look at: {folder_of(phase, output)}{os.sep}samples, videos" for phase in CHAIN]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *looks])


_EXPLORING = {"contact_share": "share of decisions in touch with an object", "episode_reward": "pay of an episode"}


def _rise(phase: str, words: str, curve: list[float]) -> list[tuple[str, str, str, str]]:
    return [(phase, words, _text(curve[-1]), f"at the start: {_text(curve[0])}")] if curve else []


def _curve(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "episode_metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if line.get(name) is not None]


def _evaluation(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def _text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
