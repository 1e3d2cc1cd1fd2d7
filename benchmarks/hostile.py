"""Does anything in somebody else's folder run code? And is one asked about folders of one's own?

    python benchmarks/hostile.py [--only settings folders datasets places own] [--each 3] [--minutes 60]

- `settings`: runs whose configs name code in every way of tests/config/test_trust.py, as their author sealed them,
  without manifests, changed after this user signed them, below `train all`; also where that of the run alone names it
- `folders`: pickles in place of weights and states, YAML tags, links, and manifests of other folders, of other keys and
  of odd content
- `datasets`: the same of demonstrations
- `places`: commands given inside such a folder, which holds a module of every name that Python and its packages have,
  and files that libraries look for; in new processes, the others in forks of this one, which has all imported
- `own`: what this user made, by code of their own, in workers, processes and phases, moved and copied

Each folder is read by `--each` commands, in turn, of all that read such a folder. Code that runs leaves a mark. What
may run with --trust is seen to do so, else nothing would be shown here; what is named can be imported. Results:
results/hostile.json; exit status 1 where anything ran, or own folders asked.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import corruption
import hostile_ways as ways
import report
from hostile_ways import CARTPOLE, PPO, SHORT, Bait, Place

RESULTS = report.RESULTS / "hostile.json"
GENERATED = {"settings": ways.of_settings, "folders": ways.of_folders, "datasets": ways.of_datasets}
PARTS = (*GENERATED, "places", "own")


def command(argv: list[str], here: Path, seconds: float = corruption.HANG_S) -> tuple[int | None, str]:
    """Exit code and output, in a fork."""
    acts = {"watch": watched, "load_policy": loaded, "load_world_model": loaded}
    before = os.getcwd()
    os.chdir(here)
    try:
        return corruption.fork(argv, seconds, acts.get(argv[0]))
    finally:
        os.chdir(before)


def watched(argv: list[str]) -> int:
    """`sparring watch`, until a page and its numbers were read."""
    from sparring.report.page import open_server

    server = open_server([Path(argv[1])], 6391)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for page in ("", "data.json"):
        address = f"http://127.0.0.1:{server.server_address[1]}/{page}"
        print(len(urllib.request.urlopen(address, timeout=30).read()))
    server.server_close()
    return 0


def loaded(argv: list[str]) -> int:
    from sparring import api
    from sparring.errors import UserError

    try:
        getattr(api, argv[0])(argv[1])
    except UserError as error:
        print(error)
        return 2
    return 0


def tried(place: Place, bait: Bait, argv: list[str]) -> dict:
    for path in (place.bait, place.out):
        shutil.rmtree(path, ignore_errors=True)
    place.mark.unlink(missing_ok=True)
    bait.make()
    if place.mark.exists():
        raise SystemExit(f"{bait.name}: making it ran it")
    code, text = command(argv, place.here)
    found = {"executed": place.mark.exists(), "code": code, "traceback": "Traceback (most recent" in text}
    return found | {"asked": "--trust" in text or "trust=True" in text, "said": text.strip()[-300:]}


def of_strangers(place: Place, part: str, each: int, end: float) -> Iterator[dict]:
    """A row for each folder and command: of all that read it the next `each`, in turn."""
    turns = Counter[int]()
    for bait in GENERATED[part](place):
        many = len(bait.commands)
        begins = turns[many] % many
        turns[many] += each
        for argv in (bait.commands * 2)[begins : begins + min(each, many)]:
            if time.monotonic() > end:
                return
            yield {"part": part, "folder": bait.name, "command": place.short(argv)} | tried(place, bait, argv)
        if bait.trusted:
            found = tried(place, bait, bait.trusted)
            yield {"part": part, "folder": bait.name, "command": place.short(bait.trusted), "trusted": True} | found


def of_places(place: Place) -> Iterator[dict]:
    """Commands in a folder that holds what Python, its packages and their settings might be looked for as."""
    names = {
        *sys.stdlib_module_names,
        *packages_distributions(),
        "sparring",
        "sitecustomize",
        "usercustomize",
        "conftest",
    }
    # `python -m sparring` itself would take a sparring.py, and a few modules of its own, from there (docs/security.md)
    packages = {*packages_distributions(), "argparse", "json", "conftest"} - {"sparring"}
    script = place.work / "bin" / "sparring"
    script.parent.mkdir()
    script.write_text("from sparring.cli.main import main\nraise SystemExit(main())\n")
    few = [*CARTPOLE, "--output", "new"]
    commands = [["eval", "."], ["compare", ".", str(place.run), "--episodes", "6"], ["report", "."], ["runs", "."]]
    commands += [["train", "finetune", *few, "pretrained=.", "env.vectorize=process", "env.workers=2"]]
    commands += [["train", "finetune", *few, "rollout.mode=async"], ["train", "finetune", *few, "--gpus", "2"]]
    commands += [["check"], ["config", "finetune", "pretrained=."], ["demos", "show", str(place.demos)]]
    ways_to_start = {"sparring": ([str(script)], names), "python -P -m sparring": (["-P", "-m", "sparring"], names)}
    ways_to_start["python -m sparring"] = (["-m", "sparring"], packages)
    for how, (words, modules) in ways_to_start.items():
        for argv in commands if how == "sparring" else commands[:6:5]:
            for path in (place.bait, place.mark):
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
            shutil.copytree(place.run, place.bait)
            litter(place, sorted(modules))
            done = subprocess.run([sys.executable, *words, *argv], cwd=place.bait, capture_output=True, text=True)
            text = done.stdout + done.stderr
            found = {"executed": place.mark.exists(), "code": done.returncode, "traceback": "Traceback" in text}
            said = (place.mark.read_text() if place.mark.exists() else "") + text.strip()[-300:]
            command = f"{how}: {place.short(argv)}"
            yield (
                {"part": "places", "folder": "modules of all names", "command": command, "asked": False}
                | found
                | {"said": said}
            )


def litter(place: Place, names: list[str]) -> None:
    leaves = f"import pathlib; pathlib.Path({str(place.mark)!r}).open('a').write(__name__ + ' ')\n"
    for name in names:
        (place.bait / f"{name}.py").write_text(leaves)
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


def of_own(place: Place) -> Iterator[dict]:
    """What this user made: nothing of it asks."""
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
        found = {"asked": "trust" in text.lower(), "code": code, "traceback": "Traceback" in text}
        yield (
            {"part": "own", "folder": "own", "command": place.short(argv), "executed": False}
            | found
            | {"said": text.strip()[-300:]}
        )


def judged(rows: list[dict]) -> dict:
    strangers = [row for row in rows if row["part"] != "own" and not row.get("trusted")]
    trusted, own = [row for row in rows if row.get("trusted")], [row for row in rows if row["part"] == "own"]
    codes = Counter("hang" if row["code"] is None else row["code"] for row in strangers)
    return {
        "folders": len({(row["part"], row["folder"]) for row in strangers}),
        "commands": len(strangers),
        "executed": sum(row["executed"] for row in strangers),
        "exit_codes": {str(code): number for code, number in codes.items()},
        "tracebacks": sum(row["traceback"] for row in rows),
        "with_trust": {"commands": len(trusted), "executed": sum(row["executed"] for row in trusted)},
        "own": {
            "commands": len(own),
            "asked": sum(row["asked"] for row in own),
            "failed": sum(row["code"] != 0 for row in own),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--each", type=int, default=3, metavar="N", help="commands that read each folder, in turn")
    parser.add_argument("--minutes", type=float, default=60, help="of each part; stop by then, wherever it is")
    args = parser.parse_args()
    about = report.metadata()
    kept: list[dict] = []
    with tempfile.TemporaryDirectory() as work:
        # the key of whoever runs this signs nothing here
        os.environ["XDG_CONFIG_HOME"] = f"{work}/me"
        os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"] = "", "1"
        place = Place(Path(work).resolve())
        corruption.preload()
        place.made()
        for part in args.only:
            began = time.monotonic()
            end = began + 60 * args.minutes
            rows = {"places": of_places, "own": of_own}[part](place) if part not in GENERATED else None
            found = []
            for row in rows or of_strangers(place, part, args.each, end):
                is_odd = (
                    row["asked"] or row["code"] != 0 if part == "own" else row["executed"] != bool(row.get("trusted"))
                )
                if is_odd or row["traceback"] or row["code"] is None:
                    print({**row, "odd": True}, flush=True)
                else:
                    row.pop("said")
                found.append(row)
            kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []
            kept = [row for row in kept if row["part"] != part] + found
            total = {"all": judged(kept)} | {name: judged([r for r in kept if r["part"] == name]) for name in PARTS}
            report.write_json(RESULTS, {"about": about, "total": total, "rows": kept})
            print(part, judged(found), f"{time.monotonic() - began:.0f} s", flush=True)
    found = judged(kept)
    raise SystemExit(bool(found["executed"] or found["own"]["asked"]))


if __name__ == "__main__":
    main()
