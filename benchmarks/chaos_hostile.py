"""Does a command execute code from another user's folder? Do commands need --trust for one's own folders?

- `settings`: runs whose configs name code in every way of tests/config/test_trust.py: signed by their author, without
  manifests, changed after this user signed them, below `train all`; also if only the config of the run names it
- `folders`: pickles in place of weights and states, YAML tags, links, and manifests of other folders, of other keys and
  of odd content
- `datasets`: the same for demonstrations
- `places`: commands started inside such a folder, which contains a module of every name in Python and its packages,
  and files that libraries search for; in new processes (the other cases fork this one, which has imported everything)
- `own`: folders of this user, with their own code, workers, processes and phases, moved and copied

Each folder is read by `--each` commands, in turn, of all that read such a folder. Executed code leaves a mark: verdict
`executed`. Code that --trust permits must run with it (else `not executed with --trust`), or the check would prove
nothing. No command may require --trust for one's own folder (`own refused`) or fail on it (`own failed`).
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import chaos_corruption as corruption
import hostile_ways as ways
from hostile_ways import CARTPOLE, PPO, SHORT, Bait, Place

CASES = ("settings", "folders", "datasets", "places", "own")
BAD = ("executed", "not executed with --trust", "own refused", "own failed", "traceback", "hang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--each", type=int, default=3, metavar="N", help="commands that read each folder, in turn")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    place = make_place(work)
    of_others = {"settings": ways.settings_baits, "folders": ways.folder_baits, "datasets": ways.dataset_baits}
    if name in of_others:
        yield from bait_trials(place, of_others[name], args.each)
    else:
        yield from place_trials(place) if name == "places" else own_trials(place)


def summary(trials: list[dict]) -> dict:
    of_others = [trial for trial in trials if not trial.get("trusted")]
    codes = Counter("hang" if trial["code"] is None else str(trial["code"]) for trial in of_others)
    return {"folders": len({trial["folder"] for trial in of_others}), "exit_codes": dict(codes)}


@cache
def make_place(work: Path) -> Place:
    corruption.preload()
    place = Place(work / "hostile")
    place.make_folders()
    return place


def command(argv: list[str], here: Path, seconds: float = corruption.HANG_S) -> tuple[int | None, str]:
    """Run a command in a fork; return its exit code and output."""
    acts = {"watch": watch_once, "load_policy": load, "load_world_model": load}
    before = os.getcwd()
    os.chdir(here)
    try:
        return corruption.fork(argv, seconds, acts.get(argv[0]))
    finally:
        os.chdir(before)


def watch_once(argv: list[str]) -> int:
    """`sparring watch`, until a page and its data were read."""
    from sparring.report.page import open_server

    server = open_server([Path(argv[1])], 6391)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for page in ("", "data.json"):
        address = f"http://127.0.0.1:{server.server_address[1]}/{page}"
        print(len(urllib.request.urlopen(address, timeout=30).read()))
    server.server_close()
    return 0


def load(argv: list[str]) -> int:
    from sparring import api
    from sparring.errors import UserError

    try:
        getattr(api, argv[0])(argv[1])
    except UserError as error:
        print(error)
        return 2
    return 0


def judged(code: int | None, text: str, executed: bool = False, trusted: bool = False) -> dict:
    if executed and not trusted:
        verdict = "executed"
    elif code is None:
        verdict = "hang"
    elif "Traceback (most recent" in text:
        verdict = "traceback"
    elif trusted:
        verdict = "executed with --trust" if executed else "not executed with --trust"
    else:
        verdict = {0: "read", 2: "refused"}.get(code, "ended with an error")
    return {"verdict": verdict, "code": code, "output": text.strip()[-300:]}


def run_trial(place: Place, bait: Bait, argv: list[str], trusted: bool = False) -> dict:
    for path in (place.bait, place.out):
        shutil.rmtree(path, ignore_errors=True)
    place.mark.unlink(missing_ok=True)
    bait.make()
    if place.mark.exists():
        raise SystemExit(f"{bait.name}: making the folder executed its code")
    code, text = command(argv, place.here)
    shown = {"folder": bait.name, "command": place.short(argv)} | ({"trusted": True} if trusted else {})
    return shown | judged(code, text, place.mark.exists(), trusted)


def bait_trials(place: Place, make_baits: Callable[[Place], Iterator[Bait]], each: int) -> Iterator[dict]:
    """For each folder, run the next `each` of the commands that read it, in turn."""
    turns = Counter[int]()
    for bait in make_baits(place):
        many = len(bait.commands)
        begins = turns[many] % many
        turns[many] += each
        for argv in (bait.commands * 2)[begins : begins + min(each, many)]:
            yield run_trial(place, bait, argv)
        if bait.trusted:
            yield run_trial(place, bait, bait.trusted, trusted=True)


def place_trials(place: Place) -> Iterator[dict]:
    """Commands in a folder with modules and files that Python, its packages and their settings might load."""
    all_names = {
        *sys.stdlib_module_names,
        *packages_distributions(),
        "sparring",
        "sitecustomize",
        "usercustomize",
        "conftest",
    }
    # `python -m sparring` itself would import sparring.py and a few other modules from there (docs/security.md)
    packages = {*packages_distributions(), "argparse", "json", "conftest"} - {"sparring"}
    script = place.work / "bin" / "sparring"
    script.parent.mkdir()
    script.write_text("from sparring.cli.main import main\nraise SystemExit(main())\n")
    few = [*CARTPOLE, "--output", "new"]
    commands = [["eval", "."], ["compare", ".", str(place.run), "--episodes", "6"], ["report", "."], ["runs", "."]]
    commands += [["train", "finetune", *few, "pretrained=.", "env.vectorize=process", "env.workers=2"]]
    commands += [["train", "finetune", *few, "rollout.mode=async"], ["train", "finetune", *few, "--gpus", "2"]]
    commands += [["check"], ["config", "finetune", "pretrained=."], ["demos", "show", str(place.demos)]]
    ways_to_start = {"sparring": ([str(script)], all_names)}
    ways_to_start["python -P -m sparring"] = (["-P", "-m", "sparring"], all_names)
    ways_to_start["python -m sparring"] = (["-m", "sparring"], packages)
    for how, (words, modules) in ways_to_start.items():
        for argv in commands if how == "sparring" else commands[:6:5]:
            for path in (place.bait, place.mark):
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
            shutil.copytree(place.run, place.bait)
            litter(place, sorted(modules))
            code, text = run_process([sys.executable, *words, *argv], place.bait)
            names = place.mark.read_text() if place.mark.exists() else ""
            shown = {"folder": "modules of all names", "command": f"{how}: {place.short(argv)}"}
            yield shown | judged(code, names + text, bool(names))


def run_process(words: list[str], here: Path) -> tuple[int | None, str]:
    try:
        done = subprocess.run(words, cwd=here, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def litter(place: Place, names: list[str]) -> None:
    leaves = f"import pathlib; pathlib.Path({str(place.mark)!r}).open('a').write(__name__ + ' ')\n"
    for name in names:
        file = place.bait / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(leaves)
    (place.bait / "evil_plugin.py").write_text(leaves)
    entries = "[gymnasium.envs]\n__root__ = evil_plugin:register\n[console_scripts]\nsparring = evil_plugin:main\n"
    entries += "[pydantic]\nx = evil_plugin:plugin\n[torch.backends]\nx = evil_plugin:load\n"
    info = place.bait / "evil-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(entries)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (place.bait / "evil.pth").write_text("import evil_plugin\n")
    numba = "cache_dir: numba\ncache_locator_classes: evil_plugin.Locator\n"
    (place.bait / ".numba_config.yaml").write_text(numba)
    (place.bait / "matplotlibrc").write_text("backend: module://evil_plugin\n")
    (place.bait / ".git").mkdir()
    (place.bait / ".git" / "config").write_text(
        f"[core]\nfsmonitor = touch {place.mark}\nsshCommand = touch {place.mark}\n"
    )
    (place.bait / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    for name in ("ffmpeg", "git", "nvidia-smi"):
        (place.bait / name).write_text(f"#!/bin/sh\ntouch {place.mark}\n")
        (place.bait / name).chmod(0o755)


MINE = """
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass

def term(td):
    return td["is_first"].float()
"""


def own_trials(place: Place) -> Iterator[dict]:
    """Folders of this user: no command may require --trust."""
    here = place.work / "project"
    here.mkdir()
    (here / "mine.py").write_text(MINE)
    cartpole = [*SHORT, *PPO, "env.name=mine:Mine", "rewards.mine:term=1.0"]
    start = ["train", "finetune"]
    commands = [[*start, *cartpole, "--output", "a"], [*start, *cartpole, "--output", "a", "training.iterations=2"]]
    commands += [["eval", "a"], ["eval", "a/checkpoint-2"], ["compare", "a", "a/checkpoint-1", "--episodes", "6"]]
    commands += [[*start, *SHORT, *PPO, "pretrained=a", "--output", "b"], ["config", "finetune", "pretrained=b"]]
    commands += [[*start, *cartpole, "--output", "a", "training.iterations=3", "--resume", "a/checkpoint-2"]]
    for name, more in {"workers": ["env.vectorize=process", "env.workers=2"], "async": ["rollout.mode=async"]}.items():
        commands += [[*start, *cartpole[:-1], *more, "--output", name], ["eval", name]]
    commands += [[*start, *cartpole, "--gpus", "2", "--output", "two"], ["eval", "two"]]
    commands += [[*start, *SHORT, *PPO, "pretrained=two", "--gpus", "2", "--output", "more"], ["eval", "more"]]
    commands += [["move", "a", "elsewhere"], ["eval", "elsewhere"], ["move", "elsewhere/checkpoint-3", "sent"]]
    commands += [["eval", "sent"], ["load_policy", "sent"], [*start, *SHORT, *PPO, "pretrained=sent", "--output", "c"]]
    imitate = ["train", "imitate", *corruption.IMITATE]
    commands += [[*corruption.DEMOS, "--output", "demos"], [*imitate, "imitate.demos=demos", "--output", "taught"]]
    commands += [
        ["demos", "show", "demos"],
        [*imitate, "imitate.demos=demos", "pretrained=taught", "--output", "again"],
    ]
    commands += [["train", "finetune", *SHORT, "ppo.mini_batch_size=8", "pretrained=taught", "--dry-run"]]
    from small_runs import SHORT as PHASES

    commands += [["train", "all", *PHASES, "--output", "phases"], ["eval", "phases/student_rl"]]
    commands += [["eval", "phases/teacher_rl", "--world-model"], ["eval", "phases/adversarial_rl", "--exploration"]]
    commands += [["train", "adversarial", *PHASES, "adversarial.teacher=phases/teacher_rl", "--output", "more_phases"]]
    commands += [["load_world_model", "phases/teacher_rl"], ["report", "."], ["runs", "."], ["runs", "--verify", "."]]
    for argv in commands:
        if argv[0] == "move":
            shutil.move(here / argv[1], here / argv[2])
            continue
        code, text = command(argv, here, seconds=600)
        found = judged(code, text)
        if found["verdict"] in ("refused", "ended with an error"):
            found["verdict"] = "own refused" if "trust" in text.lower() else "own failed"
        yield {"folder": "own", "command": place.short(argv)} | found
