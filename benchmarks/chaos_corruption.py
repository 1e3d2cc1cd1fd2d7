"""If files written by Sparring are damaged, do the commands that read them notice?

Makes a tiny dataset (demos), a stopped recording (recording), a finetune run (run) and the stored episodes of a teacher
(store), both runs stopped half way. Each trial copies a folder, damages one file (corruption_ways.py) and runs a
command that reads it in a fork of this process. Verdicts: `refused` (exit status and a one-line error), `same` (the
result of the undamaged folder), `warned` (another result, and a warning); bad ones: `silent` (another result without a
warning), `traceback`, `hang`, `died`. The result of a command is its weights and rows of metrics, its scores, its
output, or the bytes of its dataset, without times.
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from corruption_ways import Way, ways

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "doubles"))
from forks import fork  # noqa: E402

HANG_S = 60
BAD = ("silent", "traceback", "hang", "died")
_WORDS = "warning|damaged|cannot|missing|dropped|again|left out|skipped|not read|not in|lost|gone"
WARNS = re.compile(f"{_WORDS}|altered|checksum|ignored|bytes, expected|not a regular", re.I)
# times in rows of metrics, and in printed text
TIMED = re.compile(r"perf/|timestamp|second|time|crc")
CLOCK = re.compile(r"\d+(\.\d+)?( ?(s|ms|min|h|steps/s|/s|MB|GB|KB|B|kB|%))?\b|\d\d:\d\d(:\d\d)?|-{3,}")

SHORT = ["device=cpu", "env.threads=1", "rollout.n_envs=2", "rollout.render_episodes=0", "evaluation.episodes=2"]
FINETUNE = [*SHORT, "rollout.steps=8", "rollout.max_episode_steps=6", "training.save_every=2", "policy.hidden=[8,8]"]
FINETUNE += ["ppo.mini_batch_size=8", "ppo.ppo_epochs=1", "evaluation.baseline=false"]
TEACHER = [*SHORT, "rollout.steps=6", "rollout.max_episode_steps=3", "training.save_every=2", "training.bptt_length=2"]
TEACHER += ["env.image_size=32", "teacher.gradient_steps=2", "teacher.batch_size=2", "world_model.tokenizer_steps=2"]
TEACHER += [f"world_model.{name}" for name in ("channels=4", "width=8", "heads=1", "members=2", "memory_channels=2")]
IMITATE = [*SHORT, "rollout.max_episode_steps=2", "imitate.steps_per_update=2", "imitate.batch_size=4"]
IMITATE += ["training.iterations=1", "policy.hidden=[4]", "policy.channels=[4]", "evaluation.baseline=false"]
DEMOS = ["demos", "reach_d0", "--episodes", "3", "--image-size", "16", "env.threads=1"]


@dataclass(frozen=True)
class Subject:
    """A kind of folder, and the commands that read its files."""

    good: Path
    # path of a file below the folder -> names of commands that read it
    readers: Callable[[str], list[str]]
    # name -> (arguments, function that turns the output into the result)
    commands: dict[str, tuple[list[str], Callable[[str], object]]]


def preload() -> None:
    """Import everything, so that a fork takes tenths of a second."""
    import torch

    import sparring.api  # noqa: F401
    import sparring.cli.main
    import sparring.data.demonstrations
    import sparring.demos.record
    import sparring.envs.tabletop.backend
    import sparring.evaluation.of_run
    import sparring.phases.finetune
    import sparring.phases.imitate
    import sparring.phases.teacher
    import sparring.runs.run  # noqa: F401

    torch.set_num_threads(1)


def weights(folder: Path) -> str:
    """Digest of the weights of the newest checkpoint, with names and types."""
    from safetensors.numpy import load_file

    newest = max(folder.glob("checkpoint-*/model.safetensors"), key=lambda f: int(f.parent.name.split("-")[1]))
    loaded = sorted(load_file(newest).items())
    digest = hashlib.sha256(b"".join(k.encode() + str(v.dtype).encode() + v.tobytes() for k, v in loaded))
    return f"{newest.parent.name} {digest.hexdigest()}"


def rows(folder: Path) -> list[dict]:
    """Readable rows of metrics: a damaged line that a resumed run keeps is left out, as in reports."""
    found = []
    for line in (folder / "episode_metrics.jsonl").read_bytes().splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            found += [{k: v for k, v in row.items() if not TIMED.search(k)}] if isinstance(row, dict) else []
    return found


def digests(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".json"]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def run_or_exit(argv: list[str]) -> None:
    code, text = fork(argv, 600)
    if code:
        raise SystemExit(f"sparring {' '.join(argv)}: {code}\n{text}")


def subject_demos(work: Path, victim: Path) -> Subject:
    """A dataset, and the cache of frames that an earlier imitation decoded."""
    good, out = work / "demos", work / "imitated"
    imitate = ["train", "imitate", "--output", str(out), *IMITATE]
    run_or_exit([*DEMOS, "--output", str(good / "set")])
    run_or_exit([*imitate, f"imitate.demos={good}/set"])
    commands = {
        "imitate": ([*imitate, f"imitate.demos={victim}/set"], lambda _: (weights(out), rows(out))),
        "show": (["demos", "show", str(victim / "set"), "--sheet", str(work / "sheet.png")], printed),
        "again": ([*DEMOS, "--output", str(victim / "set")], printed),
    }

    def readers(file: str) -> list[str]:
        # a finished dataset is not recorded again, so its videos are not read
        return ["imitate"] if "cache" in file else ["imitate", "show", *(["again"] if "videos" not in file else [])]

    return Subject(good, readers, commands)


def printed(text: str) -> object:
    return [line for line in text.splitlines() if not WARNS.search(line)]


def subject_recording(work: Path, victim: Path) -> Subject:
    from sparring.demos import record

    good, original = work / "recording", record.assemble

    def stop(*_):
        raise KeyboardInterrupt

    record.assemble = stop
    fork([*DEMOS, "--output", str(good)], 600)
    record.assemble = original
    return Subject(
        good, lambda _: ["record"], {"record": ([*DEMOS, "--output", str(victim)], lambda _: digests(victim))}
    )


def make_half_run(work: Path, phase: str, settings: list[str]) -> Path:
    """Make a run of four updates; return a copy without the second half."""
    complete, half = work / f"{phase}-whole", work / f"{phase}-half"
    run_or_exit(["train", phase, "--output", str(complete), "training.iterations=4", *settings])
    shutil.copytree(complete, half)
    shutil.rmtree(half / "checkpoint-4")
    return half


def subject_store(work: Path, victim: Path) -> Subject:
    good = make_half_run(work, "teacher", TEACHER)
    # store the episodes again, in several segments
    from sparring.data.episodes import EpisodeStore

    kept = EpisodeStore(good / "episodes", read_only=True)
    parts = EpisodeStore(work / "parts", segment_bytes=3 * kept.bytes() // len(kept))
    for i in range(len(kept)):
        parts.append(kept.episode(i), **kept.info(i))
    parts.close()
    shutil.rmtree(good / "episodes")
    (work / "parts").rename(good / "episodes")
    resume = ["train", "teacher", "--output", str(victim), "training.iterations=4", *TEACHER]
    readers: Callable[[str], list[str]] = lambda file: ["resume"] if file.startswith("episodes/") else []  # noqa: E731
    return Subject(good, readers, {"resume": (resume, lambda _: (weights(victim), rows(victim)))})


def subject_run(work: Path, victim: Path) -> Subject:
    good, scores = make_half_run(work, "finetune", FINETUNE), work / "scores.json"

    def scored(_: str) -> object:
        found = json.loads(scores.read_text())
        scores.unlink()
        return found.get("scores"), found.get("episodes")

    resume = ["train", "finetune", "--output", str(victim), "training.iterations=4", *FINETUNE]
    page = work / "report.html"
    commands = {
        "resume": (resume, lambda _: (weights(victim), rows(victim))),
        "eval": (["eval", str(victim), "--json", str(scores)], scored),
        "compare": (["compare", str(victim), str(work / "finetune-whole"), "--episodes", "6"], printed),
        "report": (["report", str(victim), "--output", str(page)], lambda _: page.read_text()),
        "runs": (["runs", str(victim)], printed),
        "prune": (["prune", str(victim), "--dry-run"], printed),
    }

    def readers(file: str) -> list[str]:
        if file.startswith("logs/") or file == "writer.lock":
            return []
        if file.startswith("checkpoint-"):
            return ["resume", "eval", "compare"]
        return ["resume", "report", "runs", *(["prune"] if file == "evaluations.jsonl" else [])]

    return Subject(good, readers, commands)


CASES = {"demos": subject_demos, "recording": subject_recording, "store": subject_store, "run": subject_run}


def verdict(code: int | None, text: str, result: object, expected: object) -> str:
    if code is None:
        return "hang"
    if "Traceback (most recent call last)" in text:
        return "traceback"
    if code:
        return "died" if code < 0 else "refused"
    if result == expected:
        return "same"
    return "warned" if WARNS.search(text) else "silent"


def outcome(take: Callable[[str], object], text: str) -> object:
    """The result of a command, without times in texts; None if it wrote nothing."""
    try:
        result = take(text)
    except (OSError, ValueError):
        return None
    if isinstance(result, str):
        result = result.splitlines()
    return [" ".join(CLOCK.sub("#", line).split()) for line in result] if isinstance(result, list) else result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=1000, help="damaged folders, divided among the cases")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    """One trial per damaged folder and command; --count damages are drawn from all."""
    preload()
    rng, work = random.Random(f"{args.seed} {name}"), work / name
    work.mkdir()
    victim = work / "victim"
    subject = CASES[name](work, victim)

    def fresh() -> None:
        for path in (victim, work / "imitated"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(subject.good, victim, symlinks=True)

    expected = {}
    for command, (argv, take) in subject.commands.items():
        seen = []
        for _ in range(2):
            fresh()
            code, text = fork(argv, HANG_S)
            seen.append((code, outcome(take, text)))
        if seen[0] != seen[1] or seen[0][0]:
            print(f"{name} {command}: undamaged runs differ or fail ({code}): only the exit status counts", flush=True)
            seen[0] = (0, None)
        expected[command] = seen[0][1]
    files = [str(path.relative_to(subject.good)) for path in sorted(subject.good.rglob("*")) if path.is_file()]
    ways_of_all = [(file, way) for file in files if subject.readers(file) for way in ways(file, rng)]
    chosen = rng.sample(ways_of_all, min(len(ways_of_all), max(1, round(args.count / len(args.only)))))
    planned = [(file, way, command) for file, way in chosen for command in subject.readers(file)]
    for file, way, command in planned:
        fresh()
        if not apply_damage(way, victim, work):
            continue
        argv, take = subject.commands[command]
        code, text = fork(argv, HANG_S)
        result = outcome(take, text) if code == 0 and expected[command] is not None else expected[command]
        found = verdict(code, text, result, expected[command])
        more = {"output": text.strip()[-600:]} if found in BAD else {}
        yield {"file": file, "way": way.name, "command": command, "verdict": found, "of": len(planned)} | more


def summary(trials: list[dict]) -> dict:
    return {"folders": len({(trial["file"], trial["way"]) for trial in trials})}


def apply_damage(way: Way, victim: Path, work: Path) -> bool:
    """Damage the copy; False if this damage does not apply to the file."""
    try:
        way.damage(victim, work)
    except (KeyError, IndexError, StopIteration, FileNotFoundError):
        return False
    return True
