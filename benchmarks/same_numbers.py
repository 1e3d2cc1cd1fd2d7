"""Do two versions of the code produce bit-identical numbers at a fixed seed?

    python benchmarks/same_numbers.py main HEAD
    python benchmarks/same_numbers.py main . --keep /tmp/same --only teacher    # uncommitted changes included
    python benchmarks/same_numbers.py main . --allow 'finetune-grpo:train/reference_kl' --allow 'teacher:world_model/*'

OLD and NEW are revisions or folders of checkouts. Both make each of the short runs below, one after the other, on one
CPU thread. All lines of metrics, the evaluations and every weight tensor of the last checkpoint are compared; only
columns that measure time are left out. `--allow run:column` permits an intended change (globs; the column of all
tensors is `weights`). The exit status is 1 if anything else differs.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import report

REPOSITORY = Path(__file__).parents[1]
METRICS, EVALUATIONS = "episode_metrics.jsonl", "evaluations.jsonl"
TIMED = {
    "timestamp",
    "perf/steps_per_second",
    "perf/collect_seconds",
    "perf/simulate_seconds",
    "perf/infer_seconds",
    "perf/update_seconds",
    "perf/world_model_seconds",
    "perf/handover_seconds",
    "perf/actor_wait_seconds",
    "perf/learner_wait_seconds",
    "perf/actor_idle",
    "perf/learner_idle",
}

COMMON = "device=cpu threads=1 seed=3 evaluation.episodes=2 training.log_every=1 training.iterations=3"
COMMON += " rollout.render_episodes=0"
ARM = "env.threads=1"
STEPS = "rollout.n_envs=3 rollout.steps=12 rollout.max_episode_steps=10"
PPO = "ppo.mini_batch_size=16 ppo.ppo_epochs=2"
CAMERA = "env.cameras=[head] env.image_size=40"
INPUTS = "env.object_state=privileged env.points=16 policy.point_channels=[8,8] policy.point_features=8"
INPUTS += " policy.language_features=4"
CNN = "policy.channels=[4,4] policy.image_features=8"
WORKERS = "env.vectorize=process env.workers=2"
SCHEDULES = "ppo.lr_schedule=cosine ppo.warmup_updates=2 ppo.clip_schedule=linear ppo.normalize_value=true"
GRPO = "algorithm=grpo grpo.mini_batch_size=16 grpo.epochs=2 grpo.kl_coef=0.1"
GROUPS = "rollout.n_envs=4 rollout.n_episodes_per_batch=8 rollout.group_size=2 rollout.max_episode_steps=5"
FLOW = "policy.name=flow policy.method=flow_noise policy.width=16 policy.heads=2 policy.layers=1"
FLOW += " policy.sampling_steps=2 rollout.action_steps=3"
VLA = "policy.name=native_vla policy.image_size=32 policy.patch_size=16 policy.vision_layers=1 policy.layers=1"
VLA += " policy.memory_size=7 rollout.action_steps=3"
IMITATE = "imitate.batch_size=16 imitate.steps_per_update=5 imitate.image_augmentation=2"
WORLD = "rollout.n_envs=2 rollout.steps=6 rollout.max_episode_steps=24 training.bptt_length=2"
TOKENS = "env.image_size=32 rollout.action_steps=2 world_model.channels=8 world_model.width=16 world_model.layers=1"
TOKENS += " world_model.heads=2 world_model.members=2 world_model.memory_channels=4 world_model.tokenizer_steps=4"
TEACHER = "teacher.gradient_steps=4 teacher.batch_size=2 teacher.burn_in=1"
REWARDS = "rewards.prediction_error=0.5 rewards.rnd=0.5"
PHASE_3 = "adversarial.wm_updates_per_iter=3 adversarial.batch_size=2 adversarial.burn_in=1 adversarial.warmup_steps=3"
PHASE_3 += " adversarial.generation_every=2 adversarial.held_out=0.5"

# {runs} is the folder of this side's runs; a run follows those that it starts from
RUNS = {
    "finetune-state": f"train finetune {ARM} {STEPS} {PPO}",
    "finetune-cameras": f"train finetune {ARM} {STEPS} {PPO} {CAMERA} {INPUTS} {CNN}",
    "finetune-grpo": f"train finetune {ARM} {GRPO} {GROUPS}",
    "finetune-flow": f"train finetune {ARM} {STEPS} {PPO} {FLOW}",
    "finetune-vla": f"train finetune {ARM} {STEPS} {PPO} {CAMERA} {VLA}",
    "finetune-lora": f"train finetune {ARM} {STEPS} {PPO} {CAMERA} {VLA} policy.lora_r=2 buffer.type=vla",
    "finetune-async": f"train finetune {ARM} {STEPS} {PPO} rollout.mode=async rollout.staleness=0",
    "finetune-cartpole": f"train finetune env.name=gym:CartPole-v1 {WORKERS} {STEPS} {PPO} {SCHEDULES}",
    "demos": "demos lift_d0 --episodes 3 --noise 0.1 --seed 3 --cameras head --image-size 40",
    "imitate": f"train imitate {ARM} imitate.demos={{runs}}/demos {IMITATE} {CNN}",
    "teacher": f"train teacher {ARM} {WORLD} {TOKENS} {TEACHER}",
    "finetune-imagined": f"train finetune {ARM} rollout.imagined={{runs}}/teacher {WORLD} {PPO} {CNN}",
    "student": f"train student {ARM} student.teacher={{runs}}/teacher {WORLD} {PPO} {CNN} {REWARDS}",
    "adversarial": f"train adversarial {ARM} adversarial.teacher={{runs}}/teacher adversarial.student={{runs}}/student"
    f" {WORLD} {PPO} {REWARDS} {PHASE_3}",
}
STARTS_FROM = {
    "imitate": ["demos"],
    "finetune-imagined": ["teacher"],
    "student": ["teacher"],
    "adversarial": ["teacher", "student"],
}


@dataclass
class Comparison:
    run: str
    rows: int = 0
    columns: set[str] = field(default_factory=set)
    tensors: int = 0
    # column (or "weights") -> its first difference
    differences: dict[str, str] = field(default_factory=dict)
    allowed: list[str] = field(default_factory=list)


def main() -> int:
    arguments = parse_arguments()
    names = with_sources(arguments.only or list(RUNS))
    with tempfile.TemporaryDirectory(prefix="same_numbers_") as scratch:
        sides = {}
        for side, given in (("OLD", arguments.old), ("NEW", arguments.new)):
            commit = commit_of(given)
            print(f"{side}: {given} ({commit or 'uncommitted'})", file=sys.stderr)
            # stored runs of NEW would be compared with themselves if OLD is the same commit
            kept = storage_folder(arguments.keep, commit) if side == "OLD" else None
            sides[side] = make_runs(given, names, kept or Path(scratch) / side, Path(scratch) / f"{side}-checkout")
        compared = [compare(name, sides["OLD"], sides["NEW"], arguments.allow) for name in names if name != "demos"]
    rows = [("run", "rows", "columns", "tensors", "result")]
    rows += [(c.run, c.rows, len(c.columns), c.tensors, verdict(c)) for c in compared]
    print(report.table(rows))
    if arguments.json:
        about = {"old": commit_of(arguments.old), "new": commit_of(arguments.new)} | report.metadata()
        runs = {c.run: vars(c) | {"columns": sorted(c.columns)} for c in compared}
        report.write_json(arguments.json, {"about": about, "runs": runs})
    return int(any(c.differences for c in compared))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="revision, or folder of a checkout")
    parser.add_argument("new", metavar="NEW", help="the other revision or folder")
    chosen = [name for name in RUNS if name != "demos"]
    parser.add_argument("--only", action="append", choices=chosen, metavar="RUN", help=f"one of {', '.join(chosen)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="store the runs of OLD here, and reuse them")
    parser.add_argument("--allow", action="append", default=[], metavar="RUN:COLUMN", help="an intended change")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison here")
    return parser.parse_args()


def with_sources(chosen: list[str]) -> list[str]:
    needed = {source for name in chosen for source in STARTS_FROM.get(name, [])}
    return [name for name in RUNS if name in needed.union(chosen)]


# ---- make the runs


def commit_of(given: str) -> str | None:
    """None: a folder with uncommitted code."""
    if not is_checkout(given):
        found = git("rev-parse", "--verify", f"{given}^{{commit}}")
        return found or sys.exit(f"'{given}' is neither a revision nor a folder with src/sparring")
    head, changed = git("rev-parse", "HEAD", at=given), git("status", "--porcelain", "--", "src", at=given)
    return None if changed else head


def is_checkout(given: str) -> bool:
    return (Path(given) / "src" / "sparring").is_dir()


def git(*arguments: str, at: str | Path = REPOSITORY) -> str | None:
    """The output of git; None if it fails."""
    done = subprocess.run(["git", "-C", str(at), *arguments], capture_output=True, text=True)
    return None if done.returncode else done.stdout.strip()


def storage_folder(keep: Path | None, commit: str | None) -> Path | None:
    """The folder for runs of this commit, with these settings and libraries; None: runs are not stored."""
    if keep is None or commit is None:
        return None
    conditions = [RUNS, COMMON, platform.python_version(), *map(version, ("torch", "numpy", "mujoco", "numba"))]
    return keep / f"{commit[:12]}-{hashlib.sha256(repr(conditions).encode()).hexdigest()[:8]}"


def make_runs(given: str, names: list[str], folder: Path, checkout: Path) -> Path:
    """Make the missing runs of this side; return their folder."""
    missing = [name for name in names if not (folder / name / "done").is_file()]
    if not missing:
        return folder
    if is_checkout(given):
        return make_missing(Path(given).resolve(), missing, folder)
    if git("worktree", "add", "--detach", str(checkout), given) is None:
        sys.exit(f"could not check out {given} into {checkout}")
    try:
        return make_missing(checkout, missing, folder)
    finally:
        git("worktree", "remove", "--force", str(checkout))


def make_missing(checkout: Path, names: list[str], folder: Path) -> Path:
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    source = checkout / "src"
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-c", "import sparring; print(sparring.__file__)"]
    imported = subprocess.run(python, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout
    if not Path(imported.strip()).is_relative_to(source):
        sys.exit(f"{source} should be run, but Python imports {imported.strip()}")
    begin = time.monotonic()
    for name in names:
        output = folder / name
        shutil.rmtree(output, ignore_errors=True)
        words = RUNS[name].format(runs=folder).split()
        words += COMMON.split() if words[0] == "train" else []
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "sparring", *words, "--output", str(output)],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"  {name}: {time.monotonic() - started:.1f} s, exit status {done.returncode}", file=sys.stderr)
        output.mkdir(exist_ok=True)
        if done.returncode:
            (output / "failed").write_text(done.stdout)
            print(done.stdout, file=sys.stderr)
        else:
            (output / "done").touch()
    print(f"  in all {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return folder


# ---- compare them


def compare(name: str, old: Path, new: Path, allow: list[str]) -> Comparison:
    found = Comparison(name)
    for side, folder in (("OLD", old / name), ("NEW", new / name)):
        if not (folder / "done").is_file():
            found.differences["run"] = f"failed on {side}"
            return found
    for file in (METRICS, EVALUATIONS):
        compare_lines(found, file, *(lines_of(folder / name / file) for folder in (old, new)))
    compare_weights(found, *(last_checkpoint(folder / name) for folder in (old, new)))
    found.allowed = [c for c in found.differences if any(fnmatch.fnmatch(f"{name}:{c}", glob) for glob in allow)]
    found.differences = {c: text for c, text in found.differences.items() if c not in found.allowed}
    return found


def lines_of(path: Path) -> list[dict[str, str]]:
    """Values as JSON text, which distinguishes 0.0 from -0.0 and 1 from 1.0."""
    text = path.read_text() if path.is_file() else ""
    rows = map(json.loads, text.splitlines())
    return [{key: json.dumps(value) for key, value in row.items() if key not in TIMED} for row in rows]


def compare_lines(found: Comparison, file: str, old: list[dict], new: list[dict]) -> None:
    if len(old) != len(new) or not old:
        found.differences[file] = f"{len(old)} and {len(new)} lines"
    for number, (before, after) in enumerate(zip(old, new, strict=False), 1):
        for column in sorted(before.keys() | after.keys()):
            found.columns.add(column)
            one, other = before.get(column, "absent"), after.get(column, "absent")
            if one != other:
                found.differences.setdefault(column, f"{file}:{number}: {one} and {other}")
        found.rows += 1


def last_checkpoint(run: Path) -> Path:
    return max(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.partition("-")[2]))


def compare_weights(found: Comparison, old: Path, new: Path) -> None:
    before, after = (tensors_in(folder / "model.safetensors") for folder in (old, new))
    names = sorted(before.keys() | after.keys())
    found.tensors = len(names)
    differing = [name for name in names if before.get(name) != after.get(name)]
    if differing:
        first = differing[0]
        where = " only on NEW" if first not in before else " only on OLD" if first not in after else ""
        found.differences["weights"] = f"{len(differing)} tensors, first {first}{where}"
    elif old.name != new.name:
        found.differences["weights"] = f"{old.name} and {new.name}"


def tensors_in(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes by name: a safetensors file is the length of a JSON header, the header, and the bytes."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    data = content[begin:]
    return {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def verdict(found: Comparison) -> str:
    permitted = f" ({len(found.allowed)} allowed differ, first {found.allowed[0]})" if found.allowed else ""
    if not found.differences:
        return "equal" + permitted
    column, text = next(iter(found.differences.items()))
    return f"{len(found.differences)} differ, first {column}: {text}{permitted}"


if __name__ == "__main__":
    sys.exit(main())
