"""The command line: what it prints, what it refuses, its exit codes, Ctrl-C, going on, and completion."""

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
# CartPole starts in half the time the arm takes
ENDLESS = ["train", "finetune", *SIZES, "training.total_timesteps=10000000", "env.name=gym:CartPole-v1"]


(_subparsers,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
COMMANDS = _subparsers.choices


def flags_of(command: str) -> list[str]:
    return [a.option_strings[-1] for a in COMMANDS[command]._actions if a.option_strings]


def told(capsys, *words) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command in this process."""
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
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
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
def run_folder(trained, here):
    return Path(shutil.copytree(trained, here / "run"))


# ---- talking


def test_help_has_examples_and_exit_codes(capsys):
    code, out, _ = told(capsys, "--help")
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
    code, out, _ = told(capsys, "train", "--help")
    assert code == 0
    for flag in flags_of("train"):
        assert f" {flag}" in out
    # also behind an override, which must not swallow it
    assert told(capsys, "train", "finetune", "--ppo.gamma", "0.9", "--help")[:2] == (code, out)


def test_help_shows_that_the_word_after_dry_run_may_be_left_out(capsys):
    assert "[--dry-run [rollout]]" in told(capsys, "train", "--help")[1]


def test_what_all_processes_of_a_launch_would_say_is_said_once(capsys, here, monkeypatch):
    monkeypatch.setenv(FILE, str(here / "signs"))
    assert told(capsys, "train", "finetuna")[2].startswith("sparring: phase = finetuna")
    assert told(capsys, "train", "finetuna") == (2, "", "")
    assert told(capsys, "train", "imitatd")[2].startswith("sparring: phase = imitatd")
    # the launcher has gone
    monkeypatch.setenv(FILE, str(here / "gone" / "signs"))
    assert told(capsys, "train", "finetuna")[2].startswith("sparring: phase = finetuna")


def test_version(capsys):
    assert told(capsys, "--version") == (0, f"sparring {sparring.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_what_is_wrong_is_said_and_exits_with_2(capsys, here, words, said):
    code, out, err = told(capsys, *words)
    assert code == 2
    assert said in err
    assert list(here.iterdir()) == []


def test_a_file_that_is_no_checkpoint_is_named(capsys, here):
    (here / "notes.txt").write_text("hello")
    said = "sparring: 'notes.txt' has no config.yaml in its folder, which describes the model; give a run folder or "
    assert told(capsys, "eval", "notes.txt")[2].startswith(said)


def test_all_mistakes_are_shown_at_once(capsys, here):
    Path("run.yaml").write_text("seed: 1\nppo:\n  gama: 0.9\n")
    code, _, err = told(capsys, "train", "finetune", "--config", "run.yaml", "--envs", "2", "rollout.steps=0")
    assert code == 2
    assert err.splitlines() == [
        "sparring: ppo.gama (from run.yaml line 3): unknown key; nearest: ppo.gamma (a number >= 0 and <= 1)",
        "rollout.steps = 0 (from command line): expected an integer > 0",
    ]


def test_config_prints_what_loads_back(capsys, here):
    code, out, _ = told(capsys, "config", "finetune", "--ppo.gamma", "0.5", "seed=-0", "--hidden", "[8, 8]")
    assert code == 0
    assert "\n  gamma: 0.5  # discount per env step\n" in out
    Path("printed.yaml").write_text(out)
    config = load_config("printed.yaml")
    assert config == load_config({"ppo": {"gamma": 0.5}, "policy": {"hidden": [8, 8]}})
    # without PHASE too, where an override must not be taken for one
    assert told(capsys, "config", "--ppo.gamma", "0.5", "seed=-0", "--hidden", "[8, 8]")[1] == out
    assert told(capsys, "config", "--config", "printed.yaml")[1] == out


@pytest.mark.parametrize("phase", PHASES)
def test_config_prints_every_phase_with_nothing_given(capsys, here, phase):
    code, out, err = told(capsys, "config", phase)
    assert (code, err) == (0, "") and f"\nphase: {phase}  #" in f"\n{out}"
    # all else is still checked
    code, _, err = told(capsys, "config", phase, "buffer.size=7", "rollout.n_envs=8")
    assert code == 2 and "buffer.size = 7 (from command line): is less than one decision" in err


@pytest.mark.parametrize("key", ["imitate.demos", "student.teacher", "adversarial.teacher"])
def test_what_a_phase_starts_from_is_asked_for_where_it_runs(capsys, here, key):
    phase = key.partition(".")[0]
    code, _, err = told(capsys, "train", phase, "--dry-run")
    assert code == 2 and err.startswith(f"sparring: {key}: expected the ")
    code, out, _ = told(capsys, "config", phase)
    Path("printed.yaml").write_text(out)
    with pytest.raises(UserError, match=f"^{key} = .*: expected the "):
        sparring.load_config("printed.yaml")


def test_the_value_of_a_flag_is_no_override(capsys, here):
    Path("a=b").write_text("seed: 5\n")
    assert "\nseed: 5  #" in told(capsys, "config", "--config", "a=b")[1]
    assert "\nseed: 5  #" in told(capsys, "config", "--config=a=b", "finetune")[1]


def test_tasks_are_listed(capsys):
    code, out, _ = told(capsys, "tasks")
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "goal", "ranges"]
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["reach_d0", "reach_d1", "reach_d2"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error(monkeypatch, unbuffered):
    # with a buffer the first to notice would be the interpreter, at its very end
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


def test_a_module_beside_you_is_found(here):
    Path("mine.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\nclass Mine(CartPoleEnv): pass\n"
    )
    # as the installed `sparring` does it: the current folder is not on sys.path
    code = "import sys; sys.path.remove(''); from sparring.cli.main import main; main(['config', 'env.name=mine:Mine'])"
    result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "name: 'mine:Mine'" in result.stdout


# ---- dry run


def test_dry_run_shows_shapes_memory_speed_and_parity_and_writes_nothing(capsys, here):
    code, out, _ = told(capsys, "train", "finetune", "--dry-run", *SIZES)
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
    assert list(here.iterdir()) == []


# ---- run folders


def test_a_run_leaves_what_it_says(trained):
    assert {path.name for path in trained.iterdir()} >= {
        "config.yaml", "episode_metrics.jsonl", "train.log", "evaluation.json", "checkpoint-1", "checkpoint-2",
    }  # fmt: skip
    lines = [json.loads(line) for line in (trained / "episode_metrics.jsonl").read_text().splitlines()]
    assert [(line["update"], line["total_steps"]) for line in lines] == [(1, 32), (2, 48)]


def test_videos_of_an_evaluation_say_which_checkpoint_it_was_of(run_folder):
    from sparring.evaluation.of_run import _progress

    (first, _) = map(json.loads, (run_folder / "episode_metrics.jsonl").read_text().splitlines())
    found = _progress(run_folder / "checkpoint-1")
    assert (found.updates, found.env_steps, found.episodes) == (1, 32, first["episode"])
    # of a phase of one's own
    for phase in (3, {"progress": 3}, {"progress": {"games": 3}}):
        torch.save({"phase": phase}, run_folder / "checkpoint-1/training_state.pt")
        seal(run_folder / "checkpoint-1")
        assert _progress(run_folder / "checkpoint-1") == Progress(updates=1)
    (run_folder / "checkpoint-1/training_state.pt").unlink()
    assert _progress(run_folder / "checkpoint-1") == Progress(updates=1)


def test_an_evaluation_without_pictures_says_why(capsys, run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    code, out, _ = told(capsys, "eval", "run", "--episodes", "2", "--videos", "1", "evaluation.baseline=false")
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
def test_what_cannot_be_written_is_told_before_episodes_are_played(capsys, run_folder, monkeypatch, words, instead):
    # who may write everywhere cannot write over a folder
    (run_folder / "eval.json").mkdir()
    (run_folder / "eval.mp4").mkdir()
    monkeypatch.setattr("sparring.evaluation.of_run.Evaluation.run", lambda *_: pytest.fail("played"))
    code, _, err = told(capsys, "eval", "run", *words)
    assert code == 2 and instead in err


def test_another_config_in_the_same_folder_is_refused_and_nothing_is_touched(capsys, run_folder):
    before = hashes(run_folder)
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    code, _, err = told(capsys, *words, "ppo.gamma=0.5", "seed=3", "logging.console_level=ERROR")
    assert code == 2
    lines = err.splitlines()
    assert lines[:3] == [
        "sparring: 'run' holds a run with another config:",
        "  ppo.gamma: 0.97 in the folder, 0.5 now",
        "  seed: 0 in the folder, 3 now",
    ]
    assert lines[3].startswith("give another folder (--output DIR), start from scratch here (--resume never ")
    assert hashes(run_folder) == before


def test_a_run_from_before_a_setting_existed_goes_on_with_its_default(capsys, run_folder):
    for checkpoint in checkpoints(run_folder):
        file = checkpoint / "config.yaml"
        for key in ("gae_lambda", "seed", "algorithm_config"):
            file.write_text(re.sub(rf"(?m)^ *{key}: .*\n", "", file.read_text()))
        seal(checkpoint)
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    assert told(capsys, *words)[0] == 0
    code, _, err = told(capsys, *words, "ppo.gae_lambda=0.5", "seed=3")
    assert code == 2
    assert "  ppo.gae_lambda: not set in the folder, 0.5 now\n  seed: not set in the folder, 3 now\n" in err


def test_the_same_command_on_a_finished_run_evaluates_again(capsys, run_folder):
    metrics = (run_folder / "episode_metrics.jsonl").read_text()
    code, out, err = told(capsys, "train", "finetune", "--output", "run", *SHORT, "training.save_every=1")
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


def test_resume_never_moves_the_old_run_aside(capsys, run_folder, here):
    before = hashes(run_folder)
    for number in (1, 2):
        words = ["train", "finetune", "--output", "run", "--resume", "never", *SHORT, "training.iterations=1"]
        code, _, err = told(capsys, *words)
        assert code == 0 and f"moved the earlier run to run-old-{number}" in err
    assert hashes(here / "run-old-1") == before
    assert [path.name for path in checkpoints(here / "run")] == ["checkpoint-1"]


def test_resume_from_a_checkpoint_into_another_folder_and_on_by_the_same_command(capsys, run_folder, here):
    words = ["train", "finetune", "--output", "branch", "--resume", "run/checkpoint-1", *SHORT, "training.save_every=1"]
    code, _, err = told(capsys, *words)
    assert code == 0 and "resumes from run/checkpoint-1 (32 env steps)" in err
    assert [path.name for path in checkpoints(here / "branch")] == ["checkpoint-2"]
    code, _, err = told(capsys, *words)
    assert code == 0 and "resumes from branch/checkpoint-2 (48 env steps)" in err


def test_resume_from_the_newest_checkpoint_by_name_is_as_auto(capsys, run_folder):
    metrics = (run_folder / "episode_metrics.jsonl").read_text()
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1", "--resume", "run/checkpoint-2"]
    code, _, err = told(capsys, *words)
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
def test_folders_and_checkpoints_that_are_refused(capsys, run_folder, here, words):
    before = hashes(here)
    code, _, err = told(capsys, "train", "finetune", *SHORT, "training.save_every=1", *words.split())
    assert code == 2 and REFUSED[words] in err
    assert hashes(here) == before


@pytest.mark.parametrize("name", ["videos", "samples", "logs/env"])
def test_nothing_is_written_through_a_linked_folder(capsys, run_folder, here, name):
    (here / "elsewhere").mkdir()
    shutil.rmtree(run_folder / name, ignore_errors=True)
    (run_folder / name).symlink_to(here / "elsewhere")
    evaluation = ["eval", "run", "--episodes", "2", "--videos", "1", "evaluation.baseline=false"]
    train = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1", "training.iterations=3"]
    for words in (evaluation, train):
        code, _, err = told(capsys, *words)
        assert code == 2
        assert err == f"sparring: 'run/{name}' is a link that leads out of 'run'; replace it with a folder\n"
    assert list((here / "elsewhere").iterdir()) == []
    # within the folder it may lead anywhere, and the folder itself may be a link
    (run_folder / name).unlink()
    (run_folder / "inner").mkdir()
    (run_folder / name).symlink_to(run_folder / "inner")
    run_folder.rename(here / "elsewhere/run")
    run_folder.symlink_to(here / "elsewhere/run")
    (run_folder / name).unlink()
    (run_folder / name).symlink_to(here / "elsewhere/run/inner")
    assert told(capsys, *train)[0] == 0


def edited(text: bytes) -> bytes:
    return text.replace(b"gamma: 0.97", b"gamma: 0.5").replace(b"seed: 0", b"seed: 3")


BROKEN = {"edited": edited, "cut": lambda text: text[: len(text) // 2], "random": lambda text: os.urandom(len(text))}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_config_of_the_checkpoint_counts_whatever_the_folder_says(capsys, run_folder, broken):
    file = run_folder / "config.yaml"
    file.write_bytes(BROKEN[broken](file.read_bytes()))
    damaged = file.read_bytes()
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    code, _, err = told(capsys, *words, "ppo.gamma=0.5", "seed=3", "training.iterations=3")
    assert code == 2 and "  ppo.gamma: 0.97 in the folder, 0.5 now\n  seed: 0 in the folder, 3 now\n" in err
    assert file.read_bytes() == damaged
    # the same command goes on, also where there is nothing left to train, and writes it again
    code, _, err = told(capsys, *words)
    warned = [line for line in err.splitlines() if "config.yaml" in line and "run folder:" not in line]
    assert code == 0 and len(warned) == 1 and warned[0].startswith("'run': config.yaml ")
    assert warned[0].endswith("; written again from checkpoint-2")
    saved = saved_settings(run_folder)
    assert (saved["ppo.gamma"], saved["seed"], saved["output"]) == (0.97, 0, "run")


def test_a_branch_that_went_on_by_itself_is_found_by_its_first_command(capsys, run_folder, here):
    words = ["train", "finetune", "--output", "branch", *SHORT, "training.save_every=1"]
    branch = ["--resume", "run/checkpoint-1"]
    assert told(capsys, *words, *branch)[0] == 0
    assert told(capsys, *words, "training.iterations=3")[0] == 0
    code, _, err = told(capsys, *words, *branch, "training.iterations=4")
    assert code == 0 and "resumes from branch/checkpoint-3" in err


def test_a_folder_that_lost_its_config_is_judged_by_its_checkpoint(capsys, run_folder):
    (run_folder / "config.yaml").unlink()
    code, _, err = told(capsys, "train", "finetune", "--output", "run", *SHORT, "training.save_every=1", "seed=3")
    assert code == 2 and "  seed: 0 in the folder, 3 now" in err


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt"])
def test_a_damaged_checkpoint_is_refused_with_a_way_on_that_works(capsys, run_folder, here, name):
    words = ["train", "finetune", "--output", "run", *SHORT, "training.save_every=1"]
    for checkpoint in ("checkpoint-1", "checkpoint-2"):
        (run_folder / checkpoint / name).write_bytes(b"torn")
    code, _, err = told(capsys, *words)
    assert code == 2 and f"  checkpoint-2: {name} has 4 bytes, expected " in err
    assert (
        f"  checkpoint-1: {name} has 4 bytes" in err
        and "start from scratch with --resume never (it moves the run aside)" in err
    )
    # from elsewhere
    code, _, err = told(capsys, *words, "--output", "branch", "--resume", "run/checkpoint-2")
    assert code == 2 and f"'run/checkpoint-2' is damaged: {name} has 4 bytes" in err
    assert "use another checkpoint, or copy it again from an intact copy" in err
    # trust is in whom, not in files
    assert told(capsys, *words, "--trust")[0] == 2
    assert told(capsys, *words, "--resume", "never")[0] == 0
    assert (here / "run-old-1/checkpoint-1" / name).read_bytes() == b"torn"


@pytest.mark.parametrize("phase", ["finetune", "teacher"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_in_use_is_refused_before_anything_is_built(capsys, here, monkeypatch, phase, resume):
    monkeypatch.setattr("sparring.runs.run.resolve", lambda *_: pytest.fail("built"))
    with folder_lock(here / "run"):
        code, _, err = told(capsys, "train", phase, "--output", "run", "--resume", resume)
    assert code == 2 and "sparring: 'run': another process is training there; wait until it is done" in err
    assert [path.name for path in here.rglob("*")] == ["run", "writer.lock"]


def test_lines_of_a_run_that_saved_nothing_do_not_mix_with_the_next(capsys, here):
    words = ["train", "finetune", "--output", "run", *SHORT]
    folder = here / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(load_config(None, [], "finetune").to_yaml())
    (folder / "episode_metrics.jsonl").write_text('{"update": 1}\n')
    # a start that failed, or a run that saved nothing, does not keep the folder from another config
    assert told(capsys, *words)[0] == 0
    for path in checkpoints(folder):
        shutil.rmtree(path)
    assert told(capsys, *words)[0] == 0
    lines = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2]


def test_output_base_is_where_runs_go_by_default(monkeypatch, here):
    assert str(load_config().run_folder) == "outputs/finetune_rl"
    monkeypatch.setenv("OUTPUT_BASE", "elsewhere")
    assert str(load_config().run_folder) == "elsewhere/finetune_rl"
    assert str(load_config({"output": "mine"}).run_folder) == "mine"


def test_several_processes_are_given_the_words_as_they_were(monkeypatch, here):
    calls = []
    monkeypatch.setattr("sparring.processes.launch.launch", lambda *given: calls.append(given) or 7)
    monkeypatch.delenv("RANK", raising=False)
    words = ["train", "finetune", "--gpus", "2", "--ppo.gamma", "0.5", "seed=1", "rollout.watchdog_s=7"]
    assert main(words) == 7
    assert calls == [(2, words, 7.0, Path("outputs/finetune_rl"))]


# ---- Ctrl-C and progress


def interrupted(here: Path, terminal: bool = False, number: int = signal.SIGINT) -> tuple[int, str]:
    """Start the endless run, wait for progress, send the signal; its exit code and what it said."""
    read, write = pty.openpty() if terminal else os.pipe()
    words = [*ENDLESS, "--output", "run"]
    process = subprocess.Popen([*SPARRING, *words], env=ENVIRONMENT, cwd=here, stdout=write, stderr=write)
    os.close(write)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    said, sent = b"", False
    while True:
        try:
            part = os.read(read, 4096)
        except OSError:  # how a terminal says that nobody is left
            part = b""
        if not part:
            break
        said += part
        if not sent and b" left" in said:
            process.send_signal(number)
            sent = True
    os.close(read)
    code = process.wait()
    watchdog.cancel()
    return code, said.decode()


def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_goes_on(tmp_path):
    code, said = interrupted(tmp_path)
    assert code == 130 and "Traceback" not in said
    (first,) = checkpoints(tmp_path / "run")
    updates = int(first.name.removeprefix("checkpoint-"))
    assert f"stopped after {updates} updates; saved. The same command resumes it." in said
    # in a pipe: plain lines
    assert re.search(r"^  0%  32 steps  starting  \? left", said, re.M) and "\r" not in said and "\x1b" not in said
    steps = f"{16 * (1 + updates):,}"

    code, said = interrupted(tmp_path, terminal=True, number=signal.SIGTERM)
    assert code == 130 and "Traceback" not in said
    assert f"resumes from run/{first.name} ({steps} env steps)" in said
    later = checkpoints(tmp_path / "run")[-1]
    assert int(later.name.removeprefix("checkpoint-")) > updates
    # on a terminal: a view that is drawn in place and taken away, and what follows starts on its own line
    assert "finetune  run" in said and "░" in said and said.rindex("\x1b[?25h") > said.rindex("░")
    assert re.search(r"  0%  [^\r]+ left [^\r]*\r\nstopped after \d+ updates; saved\.", said)
    lines = [json.loads(line) for line in (tmp_path / "run" / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))


def test_ctrl_c_before_training_is_130_too(monkeypatch, capsys, here):
    def stop(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparring.runs.run.Run.__init__", stop)
    assert told(capsys, "train", "finetune") == (130, "", "interrupted\n")


# ---- completion


def test_the_flags_offered_are_the_flags_there_are():
    for name, parser in COMMANDS.items():
        offered = candidates(COMMANDS, [name, "-"])
        keys = [flag for flag in offered if "." in flag]
        assert set(flags_of(name)) <= set(offered)
        # where settings may be given, they are offered too
        assert bool(keys) == bool(parser.get_default("takes_overrides"))
    takes_overrides = {name for name, parser in COMMANDS.items() if parser.get_default("takes_overrides")}
    assert takes_overrides == {"train", "eval", "compare", "check", "demos", "config"}


def test_what_is_offered_besides_choices_is_for_arguments_there_are():
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
        ("check ", ["tabletop", *POLICIES, *(f"sparring/{task}" for task in TASKS)]),
        ("tasks --", ["--sheet", "--help"]),
        ("nonsense ppo", []),
    ],
)
def test_candidates(line, offered):
    assert candidates(COMMANDS, line.split(" ")) == offered


def in_bash(here: Path, line: str) -> list[str]:
    """What bash would offer after this line, with the printed script and a `sparring` on PATH."""
    stub = here / "sparring"
    stub.write_text(f'#!/bin/sh\nexec {sys.executable} -m sparring "$@"\n')
    stub.chmod(0o755)
    script = (
        'eval "$(sparring completion bash)"; compopt() { :; }; COMP_LINE="$1"; COMP_POINT=${#1}; _sparring; '
        'printf "%s\\n" "${COMPREPLY[@]}"; complete -p sparring >&2'
    )
    environment = ENVIRONMENT | {"PATH": f"{here}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", script, "bash", line], env=environment, capture_output=True, text=True)
    assert result.stderr == "complete -o default -F _sparring sparring\n"
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sparring ", [*COMMANDS, "--help", "--version"]),
        ("sparring tr", ["train"]),
        ("sparring train finetune ppo.gam", ["ppo.gamma="]),
        # bash takes '=' for the end of a word
        ("sparring train finetune ppo.lr_schedule=", ["constant", "linear", "cosine"]),
        ("sparring train finetune --config ", []),
    ],
)
def test_completion_in_bash(tmp_path, line, offered):
    assert in_bash(tmp_path, line) == offered


@pytest.mark.parametrize("shell", SCRIPTS)
def test_completion_scripts_parse(capsys, shell):
    code, out, _ = told(capsys, "completion", shell)
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
@pytest.mark.parametrize(("asked", "heaps"), [(None, 1), ("3", 3)])
def test_threads_of_a_run_share_one_heap_unless_asked_otherwise(asked, heaps):
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    environment |= {"MALLOC_ARENA_MAX": asked} if asked else {}
    done = subprocess.run([sys.executable, "-c", HEAPS], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{heaps}\n"), done.stderr
