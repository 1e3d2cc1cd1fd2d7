"""After `kill -9` at random instants of every phase and mode, does the same command resume and reach the same end?

A trial kills a command up to --per-trial times, some time after its start or during a save: its process group, or (one
kill in four) only its main process, after which no process may remain. Then it runs to its end, which is compared with
a reference run without kills: weights of the last checkpoint, bit-identical; rows of metrics and evaluations, except
times; for demonstrations, every file. With staleness 1 the end depends on process timing: there every row must exist
once. Verdicts: `as undisturbed`; bad: `differs`.

Commands are forked from a process that has already imported torch (tests/doubles/preloaded.py).
"""

import argparse
import fcntl
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
import preloaded  # noqa: E402

# a run that takes longer hangs; a process that remains longer is an orphan
HANG_S, LEFT_S = 300.0, 20.0
# times, and the parity: a process checks its first rollout completely, later ones in part
NOT_COMPARED = re.compile(r"^perf/|timestamp|seconds|per_second|^time|^crc$|/parity(_ratio)?$")
ROWS = ("episode_metrics.jsonl", "evaluations.jsonl")

QUICK = ["device=cpu", "threads=1", "rollout.render_episodes=0", "evaluation.episodes=2", "evaluation.baseline=false"]
ROBOTS = [*QUICK, "env.threads=1", "rollout.max_episode_steps=20", "env.cameras=[]", "env.object_state=state"]
FINETUNE = ["train", "finetune", *ROBOTS, "training.save_every=2", "rollout.n_envs=4", "rollout.steps=16"]
FINETUNE += ["evaluation.every=5"]
PPO = [*FINETUNE, "ppo.mini_batch_size=32", "ppo.ppo_epochs=2"]
SPARRING = [
    *QUICK,
    "env.threads=1",
    "env.image_size=32",
    "rollout.n_envs=2",
    "rollout.steps=4",
    "training.save_every=1",
]
SPARRING += ["rollout.max_episode_steps=8", "rollout.action_steps=2", "training.bptt_length=2", "policy.hidden=[8]"]
SPARRING += ["policy.channels=[4,4]", "policy.image_features=8", "ppo.mini_batch_size=4", "ppo.ppo_epochs=1"]
SPARRING += ["world_model.tokenizer_steps=4", "world_model.channels=8", "world_model.width=16", "world_model.members=2"]
SPARRING += ["world_model.memory_channels=8", "teacher.gradient_steps=2", "teacher.batch_size=2"]
SPARRING += ["adversarial.wm_updates_per_iter=2", "adversarial.batch_size=2", "adversarial.burn_in=1"]
SPARRING += ["adversarial.warmup_steps=0"]
TAUGHT = [*SPARRING, "training.iterations=6", "--teacher_checkpoint", "{base}/teacher"]


@dataclass(frozen=True)
class Case:
    """A command without --output; {base} is the folder of its demonstrations and teacher."""

    words: list[str]
    # the end must be bit-identical to the reference
    equal: bool = True


CASES = {
    "sync": Case([*PPO, "policy.hidden=[16,16]", "training.iterations=24"]),
    "workers": Case(
        ["train", "finetune", *QUICK, "env.name=gym:CartPole-v1", "env.vectorize=process", "env.workers=2"]
        + ["training.iterations=20", "training.save_every=2", "policy.hidden=[16,16]", "rollout.n_envs=4"]
        + ["rollout.steps=16", "ppo.mini_batch_size=32", "ppo.ppo_epochs=2"]
    ),
    "async0": Case(
        [*PPO, "policy.hidden=[16,16]", "training.iterations=24", "rollout.mode=async", "rollout.staleness=0"]
    ),
    "async1": Case(
        [*PPO, "policy.hidden=[16,16]", "training.iterations=24", "rollout.mode=async", "rollout.staleness=1"],
        equal=False,
    ),
    "grpo": Case(
        [
            *FINETUNE,
            "policy.hidden=[16,16]",
            "training.iterations=16",
            "algorithm=grpo",
            "rollout.n_episodes_per_batch=8",
        ]
        + ["rollout.group_size=2", "grpo.mini_batch_size=16"]
    ),
    "flow": Case([*PPO, "training.iterations=12", "policy.name=flow"]),
    "imitate": Case(
        ["train", "imitate", *ROBOTS, "imitate.demos={base}/demos", "imitate.batch_size=16", "training.save_every=2"]
        + ["imitate.steps_per_update=5", "training.iterations=30", "policy.hidden=[16,16]"]
    ),
    "teacher": Case(["train", "teacher", *SPARRING, "training.iterations=6"]),
    "student": Case(["train", "student", *TAUGHT]),
    "adversarial": Case(["train", "adversarial", *TAUGHT]),
    "all": Case(["train", "all", *SPARRING, "training.iterations=2"]),
    "demos": Case(["demos", "reach_d0", "--episodes", "24", "--image-size", "32"]),
    # checkpoints of 430 MB, which take seconds to save
    "wide": Case(
        ["train", "finetune", *QUICK, "env.name=gym:CartPole-v1", "policy.hidden=[3000,3000,3000]"]
        + ["training.iterations=4", "training.save_every=1", "rollout.n_envs=4", "rollout.steps=8"]
        + ["ppo.mini_batch_size=32", "ppo.ppo_epochs=1"]
    ),
}
BAD = ("differs",)
# inputs of the commands
BASE = {
    "demos": ["demos", "reach_d0", "--episodes", "4", "--image-size", "16"],
    "teacher": ["train", "teacher", *SPARRING, "training.iterations=4"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=208, help="total, divided among the cases (default: 208)")
    parser.add_argument("--per-trial", type=int, default=8, help="maximum number of kills of a trial (default: 8)")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    preloaded.Popen.server = preloaded.Popen.server if hasattr(preloaded.Popen, "server") else preloaded.start_server()
    rng, base, share, kills = random.Random(f"{args.seed} {name}"), work / "base", -(-args.kills // len(args.only)), 0
    for needed, words in BASE.items():
        if f"{{base}}/{needed}" in " ".join(CASES[name].words) and not (base / needed).exists():
            _run_to_end(words, base / needed, work / f"{needed}.log")
    reference = run_reference(name, base, work)
    i = 0
    while kills < share:
        found = kill_run(CASES[name], work / f"{name}-{i}", reference, base, rng, min(args.per_trial, share - kills))
        kills, i = kills + found["kills"], i + 1
        yield found | {"verdict": "as undisturbed" if is_fine(found) else "differs"}


def summary(trials: list[dict]) -> dict:
    found = Counter[str]()
    for trial in trials:
        found.update({key: value for key, value in trial.items() if isinstance(value, int)})
        found.update({f"kills, {how}": number for how, number in trial["how"].items()})
    return dict(found)


def is_fine(found: dict) -> bool:
    bad = ("lost", "twice", "changed", "damaged", "tracebacks", "orphans", "leftovers")
    return bool(found["finished"] and found["equal"]) and not any(found[key] for key in bad)


def _start(words: list[str], output: Path, log: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "sparring", *words, "--output", str(output)]
    with log.open("a") as opened:
        return preloaded.Popen(command, stdout=opened, stderr=opened, stdin=subprocess.DEVNULL, start_new_session=True)


def _run_to_end(words: list[str], output: Path, log: Path) -> float:
    began = time.monotonic()
    process = _start(words, output, log)
    # a process that hangs is killed
    _wait(process, output, "nowhere", 0, random.Random(0))
    if code := process.returncode:
        raise SystemExit(f"sparring {' '.join(words)}: {code}\n{log.read_text()[-3000:]}")
    return time.monotonic() - began


def _words(case: Case, base: Path) -> list[str]:
    return [word.replace("{base}", str(base)) for word in case.words]


def run_reference(name: str, base: Path, work: Path) -> tuple[Path, float]:
    """Make a run without kills; return (folder, seconds)."""
    folder = work / f"{name}-reference"
    return folder, _run_to_end(_words(CASES[name], base), folder, folder.with_suffix(".log"))


def kill_run(
    case: Case,
    output: Path,
    reference: tuple[Path, float],
    base: Path,
    rng: random.Random,
    kills: int,
    ways: tuple[str, ...] = ("anywhere", "saving"),
) -> dict:
    """Kill a command at most `kills` times, let it end, and count the differences from the reference."""
    log = output.with_suffix(".log")
    result = {"kills": 0, "resumes": 0, "finished": 0, "equal": 0, "lost": 0, "twice": 0, "changed": 0, "damaged": 0}
    result |= {"orphans": 0, "tracebacks": 0, "leftovers": 0, "how": {}, "why": []}
    shared = set(os.listdir("/dev/shm"))
    while True:
        process = _start(_words(case, base), output, log)
        result["resumes"] += bool(result["kills"])
        how = rng.choice(ways) if result["kills"] < kills else "nowhere"
        _wait(process, output, how, reference[1], rng)
        if (code := process.poll()) is not None:
            break
        # it may have ended by itself
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL) if rng.random() < 0.25 else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result["kills"] += 1
        result["how"][how] = result["how"].get(how, 0) + 1
        result["orphans"] += _left(process.pid)
        if damaged := [str(path) for path in _checkpoints(output) if not _is_intact(path)]:
            result["damaged"] += len(damaged)
            result["why"] += damaged
    result["orphans"] += _left(process.pid)
    text = log.read_text(errors="replace")
    result["tracebacks"] = text.count("Traceback (most recent call last)")
    result["finished"] = int(code == 0)
    if code:
        return result | {"why": [*result["why"], f"exit code {code}: {text.strip()[-300:]}"]}
    left = [str(path.relative_to(output)) for path in output.rglob("*") if "partial" in path.name]
    left += left_in_shared_memory(shared)
    result["leftovers"] = len(left)
    result["why"] += left
    if (reference[0] / "meta").is_dir():
        differ = _differing_files(reference[0], output)
        return result | {"equal": int(not differ), "why": [*result["why"], *differ][:8]}
    return _compare(reference[0], output, case.equal, result)


def _wait(process: subprocess.Popen, output: Path, how: str, duration: float, rng: random.Random) -> None:
    """Wait until the instant of a kill, or the end of the process."""
    if how == "nowhere":
        with suppress(subprocess.TimeoutExpired):
            process.wait(HANG_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return
    deadline = time.monotonic() + (rng.uniform(0.05, 0.6 * duration) if how == "anywhere" else HANG_S)
    skipped, seen = rng.randrange(2) if how == "saving" else 0, False
    while process.poll() is None and time.monotonic() < deadline:
        now = how == "saving" and _is_saving(output)
        if now and not seen:
            if not skipped:
                # hits saves that take milliseconds and saves that take seconds
                time.sleep(rng.choice([0.005, 0.05, 1.5]) * rng.random())
                return
            skipped -= 1
        seen = now
        time.sleep(0.0005)


def _is_saving(output: Path) -> bool:
    # folders may disappear during the search
    with suppress(OSError):
        return any(output.glob(".partial-*")) or any(output.glob("*/*partial-*")) or any(output.glob("recording/*"))
    return False


def _left(session: int) -> int:
    """The number of its processes that still exist some seconds later; they are killed."""
    end = time.monotonic() + LEFT_S
    while (found := list(_session_processes(session))) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def _session_processes(session: int) -> Iterator[int]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                yield int(pid)


def left_in_shared_memory(before: set[str]) -> list[str]:
    """New unused files in /dev/shm. Waits, because the next start of another killed run removes its files."""
    end = time.monotonic() + LEFT_S
    while (found := sorted(filter(_is_unused, set(os.listdir("/dev/shm")) - before))) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _is_unused(name: str) -> bool:
    """Whether no process holds the lock of the file; users of shared memory hold it."""
    with suppress(OSError), open(f"/dev/shm/{name}") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return "sparring" in name
    return False


def _checkpoints(folder: Path) -> list[Path]:
    return [*folder.glob("checkpoint-*"), *folder.glob("*/checkpoint-*")]


def _is_intact(checkpoint: Path) -> bool:
    """Check the checkpoint against its manifest, without the library."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        return all(_matches(checkpoint / name, entry) for name, entry in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _matches(file: Path, entry: dict) -> bool:
    if "sha256" in entry:
        return _digest(file) == entry["sha256"]
    return f"{zlib.crc32(file.read_bytes()):08x}" == entry["crc32"]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _compare(reference: Path, output: Path, equal: bool, result: dict) -> dict:
    """Compare weights and rows with the reference; for `train all`, of each run."""
    runs = [path.parent.relative_to(reference) for path in reference.glob("**/status.json")]
    same = True
    for run in runs:
        x, y = reference / run, output / run
        ends = [weights(folder) for folder in (x, y)]
        same &= ends[0] == ends[1] or (not equal and ends[0][0] == ends[1][0])
        result["why"] += [] if ends[0] == ends[1] or not equal else [f"{run}: {ends[1][0]}: other weights"]
        for name in ROWS:
            expected, found = rows(x / name), rows(y / name)
            kept = {row["update"]: row for row in found}
            result["twice"] += len(found) - len(kept)
            result["lost"] += len(lost := [row["update"] for row in expected if row["update"] not in kept])
            changed = [r["update"] for r in expected if equal and r["update"] in kept and r != kept[r["update"]]]
            result["changed"] += len(changed)
            result["why"] += [f"{run}/{name}: {lost=} {changed=}"] if lost or changed else []
    return result | {"equal": int(same), "why": result["why"][:8]}


def weights(folder: Path) -> tuple[str, str]:
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return newest.name, _digest(newest / "model.safetensors")


def rows(file: Path) -> list[dict]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [{key: value for key, value in json.loads(line).items() if not NOT_COMPARED.search(key)} for line in lines]


def _differing_files(reference: Path, output: Path) -> list[str]:
    found = [
        {str(path.relative_to(folder)): _digest(path) for path in folder.rglob("*") if path.is_file()}
        for folder in (reference, output)
    ]
    return sorted(name for name in found[0].keys() | found[1].keys() if found[0].get(name) != found[1].get(name))
