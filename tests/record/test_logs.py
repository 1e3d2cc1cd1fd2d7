"""Logs and status.json: who says what where, how a run ended, and what a child's last words were."""

import logging
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from small_runs import SMALL, config_in, status_in
from torch import nn

from sparring.config.schema import load_config
from sparring.errors import UserError
from sparring.normalize import Normalizer, RunningNormalizer
from sparring.phases.configs import LoggingConfig
from sparring.phases.phase import Progress
from sparring.processes.child import _Output
from sparring.record.log import PARTS, RunLog
from sparring.runs.folder import Status
from sparring.runs.run import Run

# ---- who says what where


def written(folder) -> dict[str, list[str]]:
    """Part -> its lines, without their times; '' is the main log."""
    found = {part: list((folder / "logs" / part).glob(f"{part or 'rl_training'}_*.log")) for part in ("", *PARTS)}
    # a table has lines without a time
    begins = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (.*)$", re.M)
    return {part: begins.findall(path.read_text()) for part, (path,) in found.items()}


def test_each_part_has_a_file_and_the_main_one_is_for_people(tmp_path, capsys):
    log = RunLog(LoggingConfig())
    logging.getLogger("sparring").info("before there is a folder")
    logging.getLogger("sparring.env").debug("robots")
    log.open_files(tmp_path)
    logging.getLogger("sparring.training").debug("numbers")
    logging.getLogger("sparring.env").warning("a robot fell \x1b[2Jover")
    logging.getLogger("sparring.data.buffer").debug("details")
    assert written(tmp_path) == {
        "": ["INFO before there is a folder", "WARNING a robot fell \\x1b[2Jover", "DEBUG details"],
        "env": ["DEBUG robots", "WARNING a robot fell \\x1b[2Jover"],
        "normalizer": [],
        "training": ["DEBUG numbers"],
    }
    assert capsys.readouterr().err == "before there is a folder\na robot fell \\x1b[2Jover\n"
    # the newest, also for those who look there
    log.link()
    assert (tmp_path / "train.log").is_symlink()
    assert (tmp_path / "train.log").read_text() == next(tmp_path.glob("logs/rl_training_*.log")).read_text()


def test_levels_and_no_files(tmp_path, capsys):
    RunLog(LoggingConfig(console_level="WARNING", file_level="INFO")).open_files(tmp_path)
    logger = logging.getLogger("sparring")
    assert not logger.isEnabledFor(logging.DEBUG) and logger.isEnabledFor(logging.INFO)
    logger.info("something")
    assert written(tmp_path)[""] == ["INFO something"] and capsys.readouterr().err == ""
    RunLog(LoggingConfig(enable_file_logging=False)).open_files(tmp_path / "other")
    assert not (tmp_path / "other").exists() and not logger.isEnabledFor(logging.DEBUG)


def test_a_full_disk_is_told_once_by_each_file_of_the_log(tmp_path, capsys):
    log = RunLog(LoggingConfig(console_level="ERROR"))
    log.open_files(tmp_path)
    files = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    for handler in files:
        handler.setStream(open("/dev/full", "w")).close()  # noqa: SIM115
    for _ in range(3):
        logging.getLogger("sparring").warning("something")
    name = next(tmp_path.glob("logs/rl_training_*.log"))
    # nothing else is shown: not where in the code it was to be written
    assert capsys.readouterr().err == f"cannot write '{name}' (No space left on device); messages may be missing\n"
    # the next run of this process takes over
    RunLog(LoggingConfig())
    assert not set(files) & set(logging.getLogger("sparring").handlers)


@pytest.mark.parametrize(
    ("how", "shown"),
    [({"rank": 1}, "[process 1] careful\n[process 1] wrong\n"), ({"quiet": True}, "wrong\n")],
)
def test_others_than_the_main_process_only_warn(capsys, how, shown):
    RunLog(LoggingConfig(console_level="DEBUG"), **how)
    logger = logging.getLogger("sparring")
    for say, words in ((logger.info, "hello"), (logger.warning, "careful"), (logger.error, "wrong")):
        say(words)
    assert capsys.readouterr().err == shown


def test_a_run_fills_them_all(tmp_path):
    run = Run(config_in(tmp_path))
    run.announce()
    assert run.run()
    run.evaluate()
    logs = written(tmp_path)
    assert logs[""][0].startswith("INFO sparring ") and f"torch {torch.__version__}" in logs[""][0]
    parameters = sum(weight.numel() for weight in run.phase.model.parameters())
    assert f"; {parameters:,} trainable parameters, 0 frozen" in logs[""][0]
    assert any(line.startswith(f"INFO run folder: {tmp_path} (its config.yaml") for line in logs[""])
    assert logs["env"][0] == "DEBUG made robots 0 to 1 of 2: gym:CartPole-v1"
    assert "DEBUG resets 2 robots to episode 0 of seed 0, train" in logs["env"]
    assert [line.split(":")[0] for line in logs["training"]] == ["DEBUG update 1", "DEBUG update 2"]
    assert " policy_loss " in logs["training"][0] and " steps_per_second " in logs["training"][0]
    assert logs["normalizer"][1].startswith("DEBUG update 2: encoder.normalizer: 4 numbers, shifted by ")
    # two updates, and the rollout before them
    assert logs["normalizer"][1].endswith(", by 96 observations")


def test_what_a_normalizer_says_of_itself():
    normalizer = Normalizer(2)
    normalizer.shift.copy_(torch.tensor([-1.0, 2.0]))
    normalizer.scale.copy_(torch.tensor([0.5, 8.0]))
    assert normalizer.describe() == "2 numbers, shifted by -1 to 2, scaled by 0.5 to 8"
    running = RunningNormalizer(1)
    running.update(torch.tensor([[1.0], [5.0]]))
    assert running.describe() == "1 numbers, shifted by 3 to 3, scaled by 0.5 to 0.5, by 2 observations"


# ---- children


def child(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], **_Output.streams())


def test_what_a_child_says_is_logged_and_not_shown(tmp_path, capfd):
    RunLog(LoggingConfig()).open_files(tmp_path)
    words = _Output(child("import sys; print('loud'); print('louder', file=sys.stderr)"), "worker 3")
    assert sorted(words.last_output().splitlines()[1:]) == ["  loud", "  louder"]
    assert sorted(written(tmp_path)["env"]) == ["DEBUG worker 3: loud", "DEBUG worker 3: louder"]
    assert capfd.readouterr() == ("", "")


def test_on_a_debug_console_it_is_shown(capfd):
    RunLog(LoggingConfig(console_level="DEBUG"))
    _Output(child("print('loud')"), "worker 3").last_output()
    assert capfd.readouterr().err == "worker 3: loud\n"


def test_where_nothing_keeps_it_a_child_says_it_where_its_parent_does(capfd):
    process = child("print('loud')")
    words = _Output(process, "worker 3")
    process.wait()
    assert words.last_output() == "" and capfd.readouterr().out == "loud\n"


def test_only_the_last_words_are_told(tmp_path):
    RunLog(LoggingConfig(), quiet=True)
    words = _Output(child("for i in range(100): print(i)\nprint('x' * 5000, end='')"), "worker 3")
    told = words.last_output().splitlines()
    assert told[0] == "; its last output:" and len(told) == 21
    # a line that does not end is cut
    assert [len(line) for line in told[-3:]] == [2 + 2000, 2 + 2000, 2 + 1000] and told[1] == "  83"


# ---- status.json


def test_a_run_to_its_end(tmp_path):
    run = Run(config_in(tmp_path))
    assert run.run()
    told = status_in(tmp_path)
    assert (told["state"], told["why"], told["pid"], told["phase"]) == ("finished", None, os.getpid(), "finetune")
    assert told["task"] == "gym:CartPole-v1" and told["best"] is told["last"] is None
    progress = run.phase.progress
    assert told["progress"] == {"updates": 2, "env_steps": 96, "episodes": progress.episodes, "fraction": 1.0}
    assert told["started"] <= told["ended"] <= told["updated"] <= time.time()
    assert told["system"]["trainable"] == sum(weight.numel() for weight in run.phase.model.parameters())
    assert told["system"]["torch"] == torch.__version__ and told["system"]["gpu"] is None
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("error", "state", "said"),
    [
        (UserError("no such thing\nsecond line"), "crashed", "no such thing"),
        (ZeroDivisionError("division by zero"), "crashed", "ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_a_run_that_does_not_get_there(tmp_path, monkeypatch, error, state, said):
    run = Run(config_in(tmp_path))
    step = run.phase.step

    def fail(fraction):
        if run.phase.progress.updates:
            assert status_in(tmp_path)["state"] == "running"
            raise error
        return step(fraction)

    monkeypatch.setattr(run.phase, "step", fail)
    with pytest.raises(type(error)):
        run.run()
    told = status_in(tmp_path)
    assert (told["state"], told["why"], told["progress"]["updates"]) == (state, said, 1)
    assert told["ended"] is not None
    # where to look for what the console showed
    main = next(tmp_path.glob("logs/rl_training_*.log")).read_text()
    assert "ended by an exception" in main and "Traceback" in main and said.split(": ")[-1] in main


def test_stopped_by_a_signal_it_was_interrupted(tmp_path, monkeypatch):
    run = Run(config_in(tmp_path))
    step = run.phase.step
    monkeypatch.setattr(run.phase, "step", lambda fraction: signal.raise_signal(signal.SIGTERM) or step(fraction))
    assert not run.run()
    told = status_in(tmp_path)
    ended = "interrupted", "stopped by a signal; saved", 0.5
    assert (told["state"], told["why"], told["progress"]["fraction"]) == ended


def test_best_and_last_success(tmp_path):
    def line(update, rate):
        numbers = {"success_rate": rate, "success_low": 0.1, "success_high": 0.9, "episodes": 10, "reward": 1.0}
        return {"update": update} | {f"eval/{name}": value for name, value in numbers.items()}

    status = Status(tmp_path, "finetune", "reach_d0", {})
    status.evaluated([line(1, 0.2), line(2, 0.6), line(3, 0.4), line(4, None)])
    told = status_in(tmp_path)
    assert told["best"] == {"success_rate": 0.6, "low": 0.1, "high": 0.9, "episodes": 10, "update": 2}
    assert told["last"] == {"success_rate": 0.4, "low": 0.1, "high": 0.9, "episodes": 10, "update": 3}
    # of a world model there is no success
    status.evaluated([{"update": 5, "eval/accuracy": 0.5}])
    assert status_in(tmp_path)["best"] is status_in(tmp_path)["last"] is None


def test_progress_is_written_twice_a_second_at_most(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("sparring.runs.folder.time.monotonic", lambda: clock[0])
    status = Status(tmp_path, "finetune", "reach_d0", {})
    seen = []
    for now in (100.0, 100.4, 100.5, 100.9, 101.0):
        clock[0] = now
        status.progress(Progress(updates=int(10 * now)), 0.5)
        seen.append(status_in(tmp_path)["progress"]["updates"])
    assert seen == [1000, 1000, 1005, 1005, 1010]


def test_progress_does_not_wait_for_the_next_line_of_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.folder._SECONDS", 0.0)
    seen = []
    run = Run(load_config(SMALL | {"output": str(tmp_path), "training": {"iterations": 4, "log_every": 4}}))
    step = run.phase.step

    def step_and_look(fraction):
        seen.append((status_in(tmp_path)["progress"]["updates"], (tmp_path / "episode_metrics.jsonl").exists()))
        return step(fraction)

    run.phase.step = step_and_look
    assert run.run()
    assert seen == [(0, False), (1, False), (2, False), (3, False)]


def test_without_a_folder_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Run(load_config(SMALL), folder=False).run()
    assert list(tmp_path.iterdir()) == []


def test_what_learns_is_counted_and_what_is_frozen(tmp_path):
    from sparring.runs.folder import _system

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).requires_grad_(False))
    system = _system(torch.device("cpu"), model)
    assert (system["trainable"], system["frozen"]) == (9, 4)


def test_an_exception_in_a_line():
    for error, why in ((RuntimeError(), "RuntimeError"), (UserError("a\nb"), "a")):
        status = Status(None, "finetune", "reach_d0", {})
        status.fail(Progress(), 0.5, error)
        assert status.ended == ("crashed", why)
