"""The command line: output, errors, exit codes, Ctrl-C, resume and completion."""

import argparse
import hashlib
import json
import os
import platform
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from small_runs import seal

import sparring
from sparring.cli.config import SCRIPTS, candidates
from sparring.cli.main import build_parser, main
from sparring.config.schema import load_config
from sparring.config.text import saved_settings
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError
from sparring.phases import PHASES
from sparring.phases.phase import Progress
from sparring.policies import POLICIES
from sparring.processes.heartbeat import FILE
from sparring.runs.checkpoint import checkpoints
from sparring.runs.folder import folder_lock

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SPARRING = [sys.executable, "-m", "sparring"]
SIZES = ["--envs", "2", "rollout.steps=8", "threads=1", "device=cpu"]
SHORT = [
    *SIZES,
    "training.iterations=2",
    "evaluation.episodes=2",
    "rollout.render_episodes=0",
    "env.name=gym:CartPole-v1",
]
# CartPole starts in half the time of the tabletop env
ENDLESS = ["train", "finetune", *SIZES, "training.total_timesteps=10000000", "env.name=gym:CartPole-v1"]


(_subparsers,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
COMMANDS = _subparsers.choices


def flags_of(command: str) -> list[str]:
    return [a.option_strings[-1] for a in COMMANDS[command]._actions if a.option_strings]


def run_cli(capsys, *words) -> tuple[int, str, str]:
    """Run a command in this process; its exit code, stdout and stderr."""
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def hashes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_BASE", raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of two updates, with a checkpoint after each. Tests copy it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "finetune", "--output", str(folder), *SHORT, "training.save_every=1"]) == 0
    return folder


@pytest.fixture
def run_folder(trained, workdir):
    return Path(shutil.copytree(trained, workdir / "run"))


# ---- help and errors


def test_help_has_examples_and_exit_codes(capsys):
    code, out, _ = run_cli(capsys, "--help")
    assert code == 0
    assert "  sparring train finetune --dry-run " in out
    assert (
        "exit codes: 0 success; 1 failure; 2 invalid input, explained in a one-line error; 130 interrupted; others:\n"
        "docs/commands.md. The first Ctrl-C saves a checkpoint after the current update, the second exits at once"
        in out
    )
    for command in COMMANDS:
        assert re.search(rf"^    {command}\b", out, re.M)


def test_help_of_a_command(capsys):
    code, out, _ = run_cli(capsys, "train", "--help")
    assert code == 0
    for flag in flags_of("train"):
        assert f" {flag}" in out
    # also after an override, which must not consume it
    assert run_cli(capsys, "train", "finetune", "--ppo.gamma", "0.9", "--help")[:2] == (code, out)


def test_help_shows_the_argument_of_dry_run_as_optional(capsys):
    assert "[--dry-run [rollout]]" in run_cli(capsys, "train", "--help")[1]


def test_one_process_of_a_launch_prints_the_error(capsys, workdir, monkeypatch):
    monkeypatch.setenv(FILE, str(workdir / "signs"))
    assert run_cli(capsys, "train", "finetuna")[2].startswith("sparring: phase = finetuna")
    assert run_cli(capsys, "train", "finetuna") == (2, "", "")
    assert run_cli(capsys, "train", "imitatd")[2].startswith("sparring: phase = imitatd")
    # after the launcher has ended
    monkeypatch.setenv(FILE, str(workdir / "gone" / "signs"))
    assert run_cli(capsys, "train", "finetuna")[2].startswith("sparring: phase = finetuna")


def test_version(capsys):
    assert run_cli(capsys, "--version") == (0, f"sparring {sparring.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "the following arguments are required: PHASE"),
        (["train", "finetune", "extra"], "unrecognized arguments: extra; `sparring train --help` lists the "),
        (["train", "finetune", "--gpus", "0"], "argument --gpus: expected a whole number >= 1, got '0'"),
        (["train", "finetune", "--gpus", "-1"], "argument --gpus: "),
        (["train", "finetune", "--envs", "x"], "argument --envs: expected a whole number >= 1, got 'x'"),
        (["train", "finetune", "--envs"], "argument --envs: expected one argument"),
        (["eval", "x", "--videos", "many"], "argument --videos: expected a whole number >= 0, got 'many'"),
        (["eval", "x", "--seed", "y"], "argument --seed: expected a whole number >= 0, got 'y'"),
        (["train", "finetune", "rollout.mode", "async"], "ones. Write settings as rollout.mode=async"),
        (["train", "finetune", "a.yaml", "b.yaml"], "`sparring train --help` lists the accepted ones\n"),
        (["tasks", "ppo.gamma", "1"], "`sparring tasks --help` lists the accepted ones\n"),
        (["tasks", "ppo.gamma=1"], "unrecognized arguments: ppo.gamma=1"),
        (["completion", "csh"], "argument shell: invalid choice: 'csh'"),
        (["train", "finetune", "--ppo.gama", "1"], "ppo.gama (from command line): unknown key; nearest: ppo.gamma"),
        (["train", "finetune", "--verbose"], "sparring: verbose (from command line): unknown key; "),
        (["train", "wmm"], "sparring: phase = wmm (from command line): unknown phase; expected one of: finetune"),
        (["config", "phase4"], "phase = phase4 (from command line): unknown phase; expected one of: "),
        (["config", "all"], "sparring: phase = all (from command line): unknown phase; expected one of: "),
        (["train", "finetuna"], "adversarial, all; did you mean finetune?"),
        (["train", "al"], "adversarial, all; did you mean all?"),
        (["train", "finetune", "--config", "no.yaml"], "sparring: config file 'no.yaml' cannot be read (No such file"),
        (["eval", "nowhere"], "sparring: 'nowhere' does not exist; give a run folder or a checkpoint folder"),
        (["train", "finetune", "pretrained=nowhere", "--dry-run", "--envs", "1"], "sparring: 'nowhere' does not exist"),
        (["train", "finetune", "device=cuda:99"], "sparring: device=cuda:99: this process sees "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_invalid_arguments_exit_with_2_and_a_reason(capsys, workdir, words, message):
    code, out, err = run_cli(capsys, *words)
    assert code == 2
    assert message in err
    assert list(workdir.iterdir()) == []


def test_file_that_is_no_checkpoint_is_refused(capsys, workdir):
    (workdir / "notes.txt").write_text("hello")
    message = "sparring: 'notes.txt' has no config.yaml in its folder, which describes the model; give a run folder or "
    assert run_cli(capsys, "eval", "notes.txt")[2].startswith(message)


def test_all_errors_of_a_config_are_reported_together(capsys, workdir):
    Path("run.yaml").write_text("seed: 1\nppo:\n  gama: 0.9\n")
    code, _, err = run_cli(capsys, "train", "finetune", "--config", "run.yaml", "--envs", "2", "rollout.steps=0")
    assert code == 2
    assert err.splitlines() == [
        "sparring: ppo.gama (from run.yaml line 3): unknown key; nearest: ppo.gamma (a number >= 0 and <= 1)",
        "rollout.steps = 0 (from command line): expected an integer > 0",
    ]


def test_printed_config_loads_to_the_same_config(capsys, workdir):
    code, out, _ = run_cli(capsys, "config", "finetune", "--ppo.gamma", "0.5", "seed=-0", "--hidden", "[8, 8]")
    assert code == 0
    assert "\n  gamma: 0.5  # discount per env step\n" in out
    Path("printed.yaml").write_text(out)
    config = load_config("printed.yaml")
    assert config == load_config({"ppo": {"gamma": 0.5}, "policy": {"hidden": [8, 8]}})
    # without PHASE too, where an override must not be taken for one
    assert run_cli(capsys, "config", "--ppo.gamma", "0.5", "seed=-0", "--hidden", "[8, 8]")[1] == out
    assert run_cli(capsys, "config", "--config", "printed.yaml")[1] == out


@pytest.mark.parametrize("phase", PHASES)
def test_config_prints_every_phase_without_its_required_settings(capsys, workdir, phase):
    code, out, err = run_cli(capsys, "config", phase)
    assert (code, err) == (0, "") and f"\nphase: {phase}  #" in f"\n{out}"
    # other settings are still checked
    code, _, err = run_cli(capsys, "config", phase, "buffer.size=7", "rollout.n_envs=8")
    assert code == 2 and "buffer.size = 7 (from command line): is less than one decision" in err


@pytest.mark.parametrize("key", ["imitate.demos", "student.teacher", "adversarial.teacher"])
def test_required_settings_of_a_phase_are_checked_when_it_runs(capsys, workdir, key):
    phase = key.partition(".")[0]
    code, _, err = run_cli(capsys, "train", phase, "--dry-run")
    assert code == 2 and err.startswith(f"sparring: {key}: expected the ")
    code, out, _ = run_cli(capsys, "config", phase)
    Path("printed.yaml").write_text(out)
    with pytest.raises(UserError, match=f"^{key} = .*: expected the "):
        sparring.load_config("printed.yaml")


def test_value_of_a_flag_is_no_override(capsys, workdir):
    Path("a=b").write_text("seed: 5\n")
    assert "\nseed: 5  #" in run_cli(capsys, "config", "--config", "a=b")[1]
    assert "\nseed: 5  #" in run_cli(capsys, "config", "--config=a=b", "finetune")[1]


def test_tasks_are_listed(capsys):
    code, out, _ = run_cli(capsys, "tasks")
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "goal", "ranges"]
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["reach_d0", "reach_d1", "reach_d2"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_is_no_error(monkeypatch, unbuffered):
    # with a buffer, the interpreter would raise the error at its exit
    monkeypatch.setitem(ENVIRONMENT, "PYTHONUNBUFFERED", unbuffered)
    for command in ("config finetune", "--help"):
        script = f"set -o pipefail; {sys.executable} -m sparring {command} | head -1"
        result = subprocess.run(["bash", "-c", script], env=ENVIRONMENT, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "" and len(result.stdout.splitlines()) == 1
    # closed before the first byte
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([*SPARRING, "config"], env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (0, "")


def test_modules_of_the_current_folder_are_importable(workdir):
    Path("mine.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Mine(CartPoleEnv): pass\n"
    )
    # like the installed `sparring`: the current folder is not on sys.path
    code = "import sys; sys.path.remove(''); from sparring.cli.main import main; main(['config', 'env.name=mine:Mine'])"
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "name: 'mine:Mine'" in result.stdout


# ---- dry run


def test_dry_run_shows_shapes_memory_speed_and_parity_and_writes_nothing(capsys, workdir):
    code, out, _ = run_cli(capsys, "train", "finetune", "--dry-run", *SIZES)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "dry run of 'finetune' on cpu: one rollout, one update, nothing written"
    shapes = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    assert re.sub(" +", " ", shapes["observation/state"]) == "[8, 2, 36] float32"
    assert re.sub(" +", " ", shapes["action"]) == "[8, 2, 1, 7] float32"
    assert re.sub(" +", " ", shapes["next/reward"]) == "[8, 2, 1] float32"
    assert any(re.match(r"memory: 13,583 parameters, [\d.]+ MiB of rollout, \d+ MiB peak$", line) for line in lines)
    assert any(
        re.match(r"speed: [\d,]+ env steps/s collecting, [\d.]+ s for the update of 16 steps", line) for line in lines
    )
    (parity,) = [line for line in lines if line.startswith("parity: ")]
    assert 0 <= float(parity.removeprefix("parity: ")) < 1e-4
    assert list(workdir.iterdir()) == []


# ---- run folders


def test_run_folder_has_the_documented_files(trained):
    assert {path.name for path in trained.iterdir()} >= {
        "config.yaml", "episode_metrics.jsonl", "train.log", "evaluation.json", "checkpoint-1", "checkpoint-2",
    }  # fmt: skip
    lines = [json.loads(line) for line in (trained / "episode_metrics.jsonl").read_text().splitlines()]
    assert [(line["update"], line["total_steps"]) for line in lines] == [(1, 32), (2, 48)]


def test_progress_of_a_checkpoint_is_read_for_its_videos(run_folder):
    from sparring.evaluation.of_run import _progress

    (first, _) = map(json.loads, (run_folder / "episode_metrics.jsonl").read_text().splitlines())
    found = _progress(run_folder / "checkpoint-1")
    assert (found.updates, found.env_steps, found.episodes) == (1, 32, first["episode"])
    # a user's phase may save anything
    for phase in (3, {"progress": 3}, {"progress": {"games": 3}}):
        torch.save({"phase": phase}, run_folder / "checkpoint-1/training_state.pt")
        seal(run_folder / "checkpoint-1")
        assert _progress(run_folder / "checkpoint-1") == Progress(updates=1)
    (run_folder / "checkpoint-1/training_state.pt").unlink()
    assert _progress(run_folder / "checkpoint-1") == Progress(updates=1)


def test_evaluation_without_video_prints_the_reason(capsys, run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    code, out, _ = run_cli(capsys, "eval", "run", "--episodes", "2", "--videos", "1", "evaluation.baseline=false")
    assert code == 0 and "numbers: run/eval.json" in out
    assert re.search(r"^no video: pygame is not installed, run `pip install", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ([], "'run/eval.json': cannot write there (Is a directory); give --json FILE"),
        (["--json", "x.json", "--videos", "1"], "'run/eval.mp4': cannot write there (Is a directory); leave out"),
        (["--json", "no/x.json"], "'no/x.json': cannot write there (No such file or directory); give --json FILE in"),
    ],
)  # fmt: skip
def test_unwritable_output_is_refused_before_the_evaluation(capsys, run_folder, monkeypatch, words, instead):
    # even root cannot write over a folder
    (run_folder / "eval.json").mkdir()
    (run_folder / "eval.mp4").mkdir()
    monkeypatch.setattr("sparring.evaluation.of_run.Evaluation.run", lambda *_: pytest.fail("played"))
    code, _, err = run_cli(capsys, "eval", "run", *words)
    assert code == 2 and instead in err


def test_another_config_in_the_same_folder_is_refused_without_changes(capsys, run_folder):
    before = hashes(run_folder)
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    code, _, err = run_cli(capsys, *words, "ppo.gamma=0.5", "seed=3", "logging.console_level=ERROR")
    assert code == 2
    lines = err.splitlines()
    assert lines[:3] == [
        "sparring: 'run' holds a run with another config:",
        "  ppo.gamma: 0.97 in the folder, 0.5 now",
        "  seed: 0 in the folder, 3 now",
    ]
    assert lines[3].startswith("give another folder (--output DIR), start from scratch here (--resume never ")
    assert hashes(run_folder) == before


def test_run_without_a_newer_setting_resumes_with_its_default(capsys, run_folder):
    for checkpoint in checkpoints(run_folder):
        file = checkpoint / "config.yaml"
        for key in ("gae_lambda", "seed", "algorithm_config"):
            file.write_text(re.sub(rf"(?m)^ *{key}: .*\n", "", file.read_text()))
        seal(checkpoint)
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    assert run_cli(capsys, *words)[0] == 0
    code, _, err = run_cli(capsys, *words, "ppo.gae_lambda=0.5", "seed=3")
    assert code == 2
    assert "  ppo.gae_lambda: not set in the folder, 0.5 now\n  seed: not set in the folder, 3 now\n" in err


def test_the_same_command_on_a_finished_run_evaluates_again(capsys, run_folder):
    metrics = (run_folder / "episode_metrics.jsonl").read_text()
    code, out, err = run_cli(capsys, "train", "finetune", "--output", "run", *SHORT, "training.save_every=1")
    assert code == 0
    lines = out.splitlines()
    assert re.fullmatch("finetune is done: 48 env steps, (. episodes, )?2 updates", lines[1])
    assert re.fullmatch(r"  reward \d+\.\d\d; random actions \d+\.\d\d", lines[2])
    assert lines[3:5] == ["  saved: run/checkpoint-2; metrics, videos and logs are in run", "next:"]
    assert [line.split("  #")[0].strip() for line in lines[5:]] == [
        "sparring report run",
        "sparring eval run --videos 4",
        "sparring train finetune pretrained=./run --output run-2",
    ]
    assert "resumes from run/checkpoint-2 (48 env steps)" in err
    assert "already trained to the end (48 env steps)" in err
    assert (run_folder / "episode_metrics.jsonl").read_text() == metrics


def test_resume_never_moves_the_old_run_aside(capsys, run_folder, workdir):
    before = hashes(run_folder)
    for number in (1, 2):
        words = ["train", "finetune", "--output", "run", "--resume", "never", *SHORT, "training.iterations=1"]
        code, _, err = run_cli(capsys, *words)
        assert code == 0 and f"moved the earlier run to run-old-{number}" in err
    assert hashes(workdir / "run-old-1") == before
    assert [path.name for path in checkpoints(workdir / "run")] == ["checkpoint-1"]


def test_resume_into_another_folder_continues_with_the_same_command(capsys, run_folder, workdir):
    words = ["train", "finetune", "--output", "branch", "--resume", "run/checkpoint-1", *SHORT, "training.save_every=1"]
    code, _, err = run_cli(capsys, *words)
    assert code == 0 and "resumes from run/checkpoint-1 (32 env steps)" in err
    assert [path.name for path in checkpoints(workdir / "branch")] == ["checkpoint-2"]
    code, _, err = run_cli(capsys, *words)
    assert code == 0 and "resumes from branch/checkpoint-2 (48 env steps)" in err


def test_resume_from_the_newest_checkpoint_by_name_equals_auto(capsys, run_folder):
    metrics = (run_folder / "episode_metrics.jsonl").read_text()
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1", "--resume", "run/checkpoint-2"]
    code, _, err = run_cli(capsys, *words)
    assert code == 0 and "resumes from run/checkpoint-2" in err
    assert (run_folder / "episode_metrics.jsonl").read_text() == metrics


REFUSED = {
    "--output run --resume run/checkpoint-1": (
        "'run' also holds checkpoint-2; to branch off from 'run/checkpoint-1', give a new folder with --output DIR"
    ),
    "--output new --resume run/checkpoint-9": (
        "'run/checkpoint-9' does not exist; give a run folder or a checkpoint folder"
    ),
    "--output new --resume .": ("'.' is not a run folder but contains some; give run"),
    "--output new --resume run/checkpoint-1 ppo.gamma=0.5": "'run/checkpoint-1' holds a run with another config:",
    "--output run/config.yaml": "output = 'run/config.yaml': is a file; give a folder",
    "--output run/config.yaml/below": "output = 'run/config.yaml/below': cannot write there (Not a directory)",
}


@pytest.mark.parametrize("words", REFUSED)
def test_invalid_folders_and_checkpoints_are_refused_without_changes(capsys, run_folder, workdir, words):
    before = hashes(workdir)
    code, _, err = run_cli(capsys, "train", "finetune", *SHORT, "training.save_every=1", *words.split())
    assert code == 2 and REFUSED[words] in err
    assert hashes(workdir) == before


@pytest.mark.parametrize("name", ["videos", "samples", "logs/env"])
def test_nothing_is_written_through_a_linked_folder(capsys, run_folder, workdir, name):
    (workdir / "elsewhere").mkdir()
    shutil.rmtree(run_folder / name, ignore_errors=True)
    (run_folder / name).symlink_to(workdir / "elsewhere")
    evaluation = ["eval", "run", "--episodes", "2", "--videos", "1", "evaluation.baseline=false"]
    train = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1", "training.iterations=3"]
    for words in (evaluation, train):
        code, _, err = run_cli(capsys, *words)
        assert code == 2
        assert err == f"sparring: 'run/{name}' is a link that leads out of 'run'; replace it with a folder\n"
    assert list((workdir / "elsewhere").iterdir()) == []
    # a link may lead to another place in the folder, and the folder itself may be a link
    (run_folder / name).unlink()
    (run_folder / "inner").mkdir()
    (run_folder / name).symlink_to(run_folder / "inner")
    run_folder.rename(workdir / "elsewhere/run")
    run_folder.symlink_to(workdir / "elsewhere/run")
    (run_folder / name).unlink()
    (run_folder / name).symlink_to(workdir / "elsewhere/run/inner")
    assert run_cli(capsys, *train)[0] == 0


def edited(text: bytes) -> bytes:
    return text.replace(b"gamma: 0.97", b"gamma: 0.5").replace(b"seed: 0", b"seed: 3")


BROKEN = {"edited": edited, "cut": lambda text: text[: len(text) // 2], "random": lambda text: os.urandom(len(text))}


@pytest.mark.parametrize("broken", BROKEN)
def test_config_of_the_checkpoint_wins_over_that_of_the_folder(capsys, run_folder, broken):
    file = run_folder / "config.yaml"
    file.write_bytes(BROKEN[broken](file.read_bytes()))
    damaged = file.read_bytes()
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    code, _, err = run_cli(capsys, *words, "ppo.gamma=0.5", "seed=3", "training.iterations=3")
    assert code == 2 and "  ppo.gamma: 0.97 in the folder, 0.5 now\n  seed: 0 in the folder, 3 now\n" in err
    assert file.read_bytes() == damaged
    # the same command resumes, even if nothing is left to train, and writes the file again
    code, _, err = run_cli(capsys, *words)
    warned = [line for line in err.splitlines() if "config.yaml" in line and "run folder:" not in line]
    assert code == 0 and len(warned) == 1 and warned[0].startswith("'run': config.yaml ")
    assert warned[0].endswith("; written again from checkpoint-2")
    saved = saved_settings(run_folder)
    assert (saved["ppo.gamma"], saved["seed"], saved["output"]) == (0.97, 0, "run")


def test_command_of_a_branch_resumes_from_its_newest_checkpoint(capsys, run_folder, workdir):
    words = ["train", "finetune", "--output", "branch", *SHORT, "training.save_every=1"]
    branch = ["--resume", "run/checkpoint-1"]
    assert run_cli(capsys, *words, *branch)[0] == 0
    assert run_cli(capsys, *words, "training.iterations=3")[0] == 0
    code, _, err = run_cli(capsys, *words, *branch, "training.iterations=4")
    assert code == 0 and "resumes from branch/checkpoint-3" in err


def test_folder_without_config_is_compared_by_its_checkpoint(capsys, run_folder):
    (run_folder / "config.yaml").unlink()
    code, _, err = run_cli(capsys, "train", "finetune", "--output", "run", *SHORT, "training.save_every=1", "seed=3")
    assert code == 2 and "  seed: 0 in the folder, 3 now" in err


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt"])
def test_damaged_checkpoint_is_refused_and_the_suggested_command_works(capsys, run_folder, workdir, name):
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    for checkpoint in ("checkpoint-1", "checkpoint-2"):
        (run_folder / checkpoint / name).write_bytes(b"torn")
    code, _, err = run_cli(capsys, *words)
    assert code == 2 and f"  checkpoint-2: {name} has 4 bytes, expected " in err
    assert (
        f"  checkpoint-1: {name} has 4 bytes" in err
        and "start from scratch with --resume never (it moves the run aside)" in err
    )
    # from another folder
    code, _, err = run_cli(capsys, *words, "--output", "branch", "--resume", "run/checkpoint-2")
    assert code == 2 and f"'run/checkpoint-2' is damaged: {name} has 4 bytes" in err
    assert "use another checkpoint, or copy it again from an intact copy" in err
    # --trust does not accept damage
    assert run_cli(capsys, *words, "--trust")[0] == 2
    assert run_cli(capsys, *words, "--resume", "never")[0] == 0
    assert (workdir / "run-old-1/checkpoint-1" / name).read_bytes() == b"torn"


@pytest.mark.parametrize("phase", ["finetune", "teacher"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_folder_in_use_is_refused_before_the_run_is_built(capsys, workdir, monkeypatch, phase, resume):
    monkeypatch.setattr("sparring.runs.run.resolve", lambda *_: pytest.fail("built"))
    with folder_lock(workdir / "run"):
        code, _, err = run_cli(capsys, "train", phase, "--output", "run", "--resume", resume)
    assert code == 2 and "sparring: 'run': another process is training there; wait until it is done" in err
    assert [path.name for path in workdir.rglob("*")] == ["run", "writer.lock"]


def test_metrics_of_a_run_without_checkpoint_are_removed(capsys, workdir):
    words = ["train", "finetune", "--output", "run", *SHORT]
    folder = workdir / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(load_config(None, [], "finetune").to_yaml())
    (folder / "episode_metrics.jsonl").write_text('{"update": 1}\n')
    # a run without a checkpoint does not prevent another config in its folder
    assert run_cli(capsys, *words)[0] == 0
    for path in checkpoints(folder):
        shutil.rmtree(path)
    assert run_cli(capsys, *words)[0] == 0
    lines = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]


def test_output_base_is_the_default_parent_of_run_folders(monkeypatch, workdir):
    assert str(load_config().run_folder) == "outputs/finetune_rl"
    monkeypatch.setenv("OUTPUT_BASE", "elsewhere")
    assert str(load_config().run_folder) == "elsewhere/finetune_rl"
    assert str(load_config({"output": "mine"}).run_folder) == "mine"


def test_launch_passes_the_arguments_unchanged(monkeypatch, workdir):
    calls = []
    monkeypatch.setattr("sparring.processes.launch.launch", lambda *given: calls.append(given) or 7)
    monkeypatch.delenv("RANK", raising=False)
    words = ["train", "finetune", "--gpus", "2", "--ppo.gamma", "0.5", "seed=1", "rollout.watchdog_s=7"]
    assert main(words) == 7
    assert calls == [(2, words, 7.0, Path("outputs/finetune_rl"))]


# ---- Ctrl-C and progress


def interrupted(workdir: Path, terminal: bool = False, number: int = signal.SIGINT) -> tuple[int, str]:
    """Start the endless run, wait for progress, send the signal; its exit code and output."""
    read, write = pty.openpty() if terminal else os.pipe()
    words = [*ENDLESS, "--output", "run"]
    process = subprocess.Popen([*SPARRING, *words], env=ENVIRONMENT, cwd=workdir, stdout=write, stderr=write)
    os.close(write)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    out, sent = b"", False
    while True:
        try:
            part = os.read(read, 4096)
        except OSError:  # a terminal whose other end is closed
            part = b""
        if not part:
            break
        out += part
        if not sent and b" left" in out:
            process.send_signal(number)
            sent = True
    os.close(read)
    code = process.wait()
    watchdog.cancel()
    return code, out.decode()


def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path):
    code, out = interrupted(tmp_path)
    assert code == 130 and "Traceback" not in out
    (first,) = checkpoints(tmp_path / "run")
    updates = int(first.name.removeprefix("checkpoint-"))
    assert f"stopped after {updates} updates; saved. The same command resumes it." in out
    # a pipe gets plain lines
    assert re.search(r"^  0%  32 steps  starting  \? left", out, re.M) and "\r" not in out and "\x1b" not in out
    steps = f"{16 * (1 + updates):,}"

    code, out = interrupted(tmp_path, terminal=True, number=signal.SIGTERM)
    assert code == 130 and "Traceback" not in out
    assert f"resumes from run/{first.name} ({steps} env steps)" in out
    later = checkpoints(tmp_path / "run")[-1]
    assert int(later.name.removeprefix("checkpoint-")) > updates
    # a terminal gets a view that is redrawn in place and removed; later output starts on a new line
    assert "finetune  run" in out and "░" in out and out.rindex("\x1b[?25h") > out.rindex("░")
    assert re.search(r"  0%  [^\r]+ left [^\r]*\r\nstopped after \d+ updates; saved\.", out)
    lines = [json.loads(line) for line in (tmp_path / "run" / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))


def test_ctrl_c_before_training_exits_with_130(monkeypatch, capsys, workdir):
    def stop(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparring.runs.run.Run.__init__", stop)
    assert run_cli(capsys, "train", "finetune") == (130, "", "interrupted\n")


# ---- completion


def test_completion_offers_all_flags():
    for name, parser in COMMANDS.items():
        offered = candidates(COMMANDS, [name, "-"])
        keys = [flag for flag in offered if "." in flag]
        assert set(flags_of(name)) <= set(offered)
        # commands that take settings offer them
        assert bool(keys) == bool(parser.get_default("takes_overrides"))
    takes_overrides = {name for name, parser in COMMANDS.items() if parser.get_default("takes_overrides")}
    assert takes_overrides == {"train", "eval", "compare", "check", "demos", "config"}


def test_completion_values_belong_to_existing_arguments():
    for parser in COMMANDS.values():
        assert set(parser.get_default("offered") or {}) <= {action.dest for action in parser._actions}
    assert candidates(COMMANDS, ["demos", "lift_d0", "--control-mode", "q"]) == ["qpos"]
    assert candidates(COMMANDS, ["demos", "lift_d0", "--pixel-format", ""]) == ["yuv420p", "yuv444p"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("", [*COMMANDS, "--help", "--version"]),
        ("t", ["train", "tasks"]),
        ("train ", ["finetune", "imitate", "teacher", "student", "adversarial", "all"]),
        ("config f", ["finetune"]),
        ("config i", ["imitate", "import"]),
        ("config import ", []),
        ("config import f.yaml a", ["adversarial", "all"]),
        ("config import f.yaml --o", ["--output"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("train finetune ppo.cl", ["ppo.clip_ratio=", "ppo.clip_schedule="]),
        ("train finetune --ppo.cl", ["--ppo.clip_ratio", "--ppo.clip_schedule"]),
        ("train finetune --d", ["--dry-run", "--device"]),
        ("train finetune ppo.lr_schedule=", [f"ppo.lr_schedule={v}" for v in ("constant", "linear", "cosine")]),
        ("train finetune --ppo.lr_schedule=l", ["--ppo.lr_schedule=linear"]),
        ("train finetune --ppo.lr_schedule ", ["constant", "linear", "cosine"]),
        ("train finetune evaluation.baseline=", ["evaluation.baseline=true", "evaluation.baseline=false"]),
        ("train finetune task_name=reach_d", ["task_name=reach_d0", "task_name=reach_d1", "task_name=reach_d2"]),
        ("train finetune algorithm=", ["algorithm=ppo", "algorithm=grpo"]),
        ("train finetune --resume ", ["auto", "never"]),
        ("train finetune --config ", []),
        ("train finetune --output run env.v", ["env.video_renderer="]),
        ("train finetune env.name=gym:CartPole-v1 env.v", ["env.vectorize="]),
        ("train finetune env.name=tabletap ppo.gam", ["ppo.gamma="]),
        ("train finetune x=[1 ppo.gam", ["ppo.gamma="]),
        ("eval ", []),
        ("eval run --sto", ["--stochastic"]),
        ("check ", ["tabletop", *POLICIES, *TASKS]),
        ("tasks --", ["--sheet", "--help"]),
        ("nonsense ppo", []),
    ],
)
def test_candidates(line, offered):
    assert candidates(COMMANDS, line.split(" ")) == offered


def in_bash(workdir: Path, line: str) -> list[str]:
    """Bash's completions of a line, with the printed script and a `sparring` on PATH."""
    stub = workdir / "sparring"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -m sparring "$@"\n')
    stub.chmod(0o755)
    script = (
        'eval "$(sparring completion bash)"; compopt() { :; }; COMP_LINE="$1"; COMP_POINT=${#1}; _sparring; '
        'printf "%s\\n" "${COMPREPLY[@]}"; complete -p sparring >&2'
    )
    environment = ENVIRONMENT | {"PATH": f"{workdir}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script, "bash", line], env=environment, capture_output=True, text=True)
    assert result.stderr == "complete -o default -F _sparring sparring\n"
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sparring ", [*COMMANDS, "--help", "--version"]),
        ("sparring tr", ["train"]),
        ("sparring train finetune ppo.gam", ["ppo.gamma="]),
        # for bash, '=' ends a word
        ("sparring train finetune ppo.lr_schedule=", ["constant", "linear", "cosine"]),
        ("sparring train finetune --config ", []),
    ],
)
def test_completion_in_bash(tmp_path, line, offered):
    assert in_bash(tmp_path, line) == offered


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_scripts_parse(capsys, shell):
    code, out, _ = run_cli(capsys, "completion", shell)
    assert (code, out) == (0, SCRIPTS[shell])
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


HEAPS = """
import ctypes, threading
import sparring.cli.train as train

def wait(*_):
    gate = threading.Barrier(4)
    def work():
        gate.wait()
        blocks = [bytearray(2000) for _ in range(1000)]
        gate.wait()
    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    libc, text, size = ctypes.CDLL(None), ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    file = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(text.value.count(b"<heap nr"))
    raise SystemExit

train.config_of = wait
from sparring.cli.main import main
main(["train", "finetune"])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no arenas")
@pytest.mark.parametrize(("setting", "heaps"), [(None, 1), ("3", 3)])
def test_threads_of_a_run_share_one_heap_by_default(setting, heaps):
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    environment |= {"MALLOC_ARENA_MAX": setting} if setting else {}
    done = subprocess.run([sys.executable, "-c", HEAPS], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{heaps}\n"), done.stderr
