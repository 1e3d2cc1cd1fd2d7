"""Logs and status.json: files and levels of messages, the end of a run, output of child processes."""

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

# ---- log files


def written(folder) -> dict[str, list[str]]:
    """Part -> its lines, without their times; '' is the main log."""
    found = {part: list((folder / "logs" / part).glob(f"{part or 'rl_training'}_*.log")) for part in ("", *PARTS)}
    # tables have lines without a time
    begins = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (.*)$", re.M)
    return {part: begins.findall(path.read_text()) for part, (path,) in found.items()}


def test_each_part_has_a_log_file_besides_the_main_log(tmp_path, capsys):
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
    # train.log links to the newest log
    log.link()
    assert (tmp_path / "train.log").is_symlink()
    assert (tmp_path / "train.log").read_text() == next(tmp_path.glob("logs/rl_training_*.log")).read_text()


def test_log_levels_and_disabled_files(tmp_path, capsys):
    RunLog(LoggingConfig(console_level="WARNING", file_level="INFO")).open_files(tmp_path)
    logger = logging.getLogger("sparring")
    assert not logger.isEnabledFor(logging.DEBUG) and logger.isEnabledFor(logging.INFO)
    logger.info("something")
    assert written(tmp_path)[""] == ["INFO something"] and capsys.readouterr().err == ""
    RunLog(LoggingConfig(enable_file_logging=False)).open_files(tmp_path / "other")
    assert not (tmp_path / "other").exists() and not logger.isEnabledFor(logging.DEBUG)


def test_full_disk_is_reported_once(tmp_path, capsys):
    log = RunLog(LoggingConfig(console_level="ERROR"))
    log.open_files(tmp_path)
    files = [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]
    for handler in files:
        handler.setStream(open("/dev/full", "w")).close()  # noqa: SIM115
    for _ in range(3):
        logging.getLogger("sparring").warning("something")
    name = next(tmp_path.glob("logs/rl_training_*.log"))
    # no traceback of the logging module
    assert capsys.readouterr().err == f"cannot write '{name}' (No space left on device); messages may be missing\n"
    # the next run of this process takes over
    RunLog(LoggingConfig())
    assert not set(files) & set(logging.getLogger("sparring").handlers)


@pytest.mark.parametrize(
    ("how", "shown"),
    [({"rank": 1}, "[process 1] careful\n[process 1] wrong\n"), ({"quiet": True}, "wrong\n")],
)
def test_other_ranks_print_warnings_only(capsys, how, shown):
    RunLog(LoggingConfig(console_level="DEBUG"), **how)
    logger = logging.getLogger("sparring")
    for log_call, text in ((logger.info, "hello"), (logger.warning, "careful"), (logger.error, "wrong")):
        log_call(text)
    assert capsys.readouterr().err == shown


def test_run_writes_all_log_files(tmp_path):
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
    # two updates, and the rollout that fits normalisers
    assert logs["normalizer"][1].endswith(", by 96 observations")


def test_description_of_a_normalizer():
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


def test_output_of_a_child_is_logged_but_not_printed(tmp_path, capfd):
    RunLog(LoggingConfig()).open_files(tmp_path)
    output = _Output(child("import sys; print('loud'); print('louder', file=sys.stderr)"), "worker 3")
    assert sorted(output.last_output().splitlines()[1:]) == ["  loud", "  louder"]
    assert sorted(written(tmp_path)["env"]) == ["DEBUG worker 3: loud", "DEBUG worker 3: louder"]
    assert capfd.readouterr() == ("", "")


def test_output_of_a_child_is_printed_on_a_debug_console(capfd):
    RunLog(LoggingConfig(console_level="DEBUG"))
    _Output(child("print('loud')"), "worker 3").last_output()
    assert capfd.readouterr().err == "worker 3: loud\n"


def test_without_a_log_a_child_inherits_stdout(capfd):
    process = child("print('loud')")
    output = _Output(process, "worker 3")
    process.wait()
    assert output.last_output() == "" and capfd.readouterr().out == "loud\n"


def test_only_the_last_output_of_a_child_is_reported(tmp_path):
    RunLog(LoggingConfig(), quiet=True)
    output = _Output(child("for i in range(100): print(i)\nprint('x' * 5000, end='')"), "worker 3")
    data = output.last_output().splitlines()
    assert data[0] == "; its last output:" and len(data) == 21
    # a line without end is split
    assert [len(line) for line in data[-3:]] == [2 + 2000, 2 + 2000, 2 + 1000] and data[1] == "  83"


# ---- status.json


def test_status_of_a_finished_run(tmp_path):
    run = Run(config_in(tmp_path))
    assert run.run()
    data = status_in(tmp_path)
    assert (data["state"], data["why"], data["pid"], data["phase"]) == ("finished", None, os.getpid(), "finetune")
    assert data["task"] == "gym:CartPole-v1" and data["best"] is data["last"] is None
    progress = run.phase.progress
    assert data["progress"] == {"updates": 2, "env_steps": 96, "episodes": progress.episodes, "fraction": 1.0}
    assert data["started"] <= data["ended"] <= data["updated"] <= time.time()
    assert data["system"]["trainable"] == sum(weight.numel() for weight in run.phase.model.parameters())
    assert data["system"]["torch"] == torch.__version__ and data["system"]["gpu"] is None
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (UserError("no such thing\nsecond line"), "crashed", "no such thing"),
        (ZeroDivisionError("division by zero"), "crashed", "ZeroDivisionError: division by zero"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_status_of_a_failed_run(tmp_path, monkeypatch, error, state, reason):
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
    data = status_in(tmp_path)
    assert (data["state"], data["why"], data["progress"]["updates"]) == (state, reason, 1)
    assert data["ended"] is not None
    # the log has the traceback
    main = next(tmp_path.glob("logs/rl_training_*.log")).read_text()
    assert "ended by an exception" in main and "Traceback" in main and reason.split(": ")[-1] in main


def test_status_of_a_run_stopped_by_a_signal(tmp_path, monkeypatch):
    run = Run(config_in(tmp_path))
    step = run.phase.step
    monkeypatch.setattr(run.phase, "step", lambda fraction: signal.raise_signal(signal.SIGTERM) or step(fraction))
    assert not run.run()
    data = status_in(tmp_path)
    ended = "interrupted", "stopped by a signal; saved", 0.5
    assert (data["state"], data["why"], data["progress"]["fraction"]) == ended


def test_status_has_best_and_last_success(tmp_path):
    def line(update, rate):
        numbers = {"success_rate": rate, "success_low": 0.1, "success_high": 0.9, "episodes": 10, "reward": 1.0}
        return {"update": update} | {f"eval/{name}": value for name, value in numbers.items()}

    status = Status(tmp_path, "finetune", "reach_d0", {})
    status.evaluated([line(1, 0.2), line(2, 0.6), line(3, 0.4), line(4, None)])
    data = status_in(tmp_path)
    assert data["best"] == {"success_rate": 0.6, "low": 0.1, "high": 0.9, "episodes": 10, "update": 2}
    assert data["last"] == {"success_rate": 0.4, "low": 0.1, "high": 0.9, "episodes": 10, "update": 3}
    # a world model has no success rate
    status.evaluated([{"update": 5, "eval/accuracy": 0.5}])
    assert status_in(tmp_path)["best"] is status_in(tmp_path)["last"] is None


def test_progress_is_written_at_most_twice_a_second(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("sparring.runs.folder.time.monotonic", lambda: clock[0])
    status = Status(tmp_path, "finetune", "reach_d0", {})
    seen = []
    for now in (100.0, 100.4, 100.5, 100.9, 101.0):
        clock[0] = now
        status.progress(Progress(updates=int(10 * now)), 0.5)
        seen.append(status_in(tmp_path)["progress"]["updates"])
    assert seen == [1000, 1000, 1005, 1005, 1010]


def test_progress_is_written_before_the_next_line_of_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.folder._SECONDS", 0.0)
    seen = []
    run = Run(load_config(SMALL | {"output": str(tmp_path), "training": {"iterations": 4, "log_every": 4}}))
    step = run.phase.step

    def step_and_record(fraction):
        seen.append((status_in(tmp_path)["progress"]["updates"], (tmp_path / "episode_metrics.jsonl").exists()))
        return step(fraction)

    run.phase.step = step_and_record
    assert run.run()
    assert seen == [(0, False), (1, False), (2, False), (3, False)]


def test_run_without_a_folder_writes_no_status(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Run(load_config(SMALL), folder=False).run()
    assert list(tmp_path.iterdir()) == []


def test_trainable_and_frozen_parameters_are_counted(tmp_path):
    from sparring.runs.folder import _system

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).requires_grad_(False))
    system = _system(torch.device("cpu"), model)
    assert (system["trainable"], system["frozen"]) == (9, 4)


def test_status_reason_is_one_line():
    for error, why in ((RuntimeError(), "RuntimeError"), (UserError("a\nb"), "a")):
        status = Status(None, "finetune", "reach_d0", {})
        status.fail(Progress(), 0.5, error)
        assert status.ended == ("crashed", why)
