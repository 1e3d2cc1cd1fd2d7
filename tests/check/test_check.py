"""`sparring check`: its targets, its lines, its exit code, and the checks of the installation."""

import importlib.metadata
import os
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sparring.check import command, env, processes
from sparring.check.findings import Finding, report
from sparring.cli.main import main
from sparring.errors import UserError


class Good(gymnasium.Env):
    """Random observations from the seed; 5 steps per episode."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    max_episode_steps = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(action[0]), False, False, {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class Raises(Good):
    def step(self, action):
        raise ZeroDivisionError("the gripper fell off")


class TakesText(Good):
    action_space = spaces.Text(3)


class RaisesInInit(Good):
    def __init__(self):
        raise FileNotFoundError("no robot.xml here")


class CannotRender(Good):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        raise KeyError("camera")


def lines_of(capsys) -> dict[str, tuple[str, str]]:
    """Check -> (severity, its text)."""
    found = [
        re.fullmatch(r"(ok|note|warn|error) +([^:]+): (.*)", line) for line in capsys.readouterr().out.splitlines()
    ]
    return {match[2]: (match[1], match[3]) for match in found if match}


def errors(lines):
    return {what: text for what, (severity, text) in lines.items() if severity == "error"}


def test_lines_of_an_env(capsys, tmp_path, monkeypatch):
    # as slow as the machine may be, no deadline ends a part
    monkeypatch.setattr(env, "_SECONDS", 60.0)
    monkeypatch.setattr(processes, "_PART_S", 60.0)
    assert main(["check", "test_check:Good", f"--output={tmp_path}"]) == 0
    lines = lines_of(capsys)
    assert lines["observation/state"] == ("ok", "[3] float32")
    assert lines["action"] == ("ok", "2 dims, continuous in [-1, 1]")
    # 4 robots, 200 decisions, 5 steps an episode
    ended = "160 ended in 200 decisions of 4 robots, after 5 steps: 0 terminated, 160 truncated"
    assert lines["episodes end"] == ("ok", ended)
    assert lines["saved state"] == ("ok", "none; a resume starts new episodes")
    # three float32; 16 robots, 128 decisions and the observation after them
    size = "12 bytes an observation, 24.8 kB in a rollout of 16 robots; no growth in 400 decisions"
    assert lines["memory"] == ("ok", size)
    assert lines["success"][0] == "note" and lines["speed"][1].endswith(" ms")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "ZeroDivisionError: the gripper fell off ("),
        ("TakesText", "of test_check:TakesText is not supported; expected a Box, Discrete, MultiDiscrete"),
        ("RaisesInInit", "FileNotFoundError: no robot.xml here ("),
    ],
)
def test_errors_of_an_env_are_findings(capsys, name, message):
    assert main(["check", f"test_check:{name}"]) == 1
    wrong = errors(lines_of(capsys))
    assert list(wrong) == ["contract"] and message in wrong["contract"]


def test_exception_is_reported_with_file_and_line(capsys):
    main(["check", "test_check:Raises"])
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "gripper fell off" in text)
    assert errors(lines_of(capsys))["contract"].endswith(f"test_check.py line {line})")


def test_a_failing_render_is_no_error(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPUT_BASE", str(tmp_path))
    # rendering is optional
    assert main(["check", "test_check:CannotRender"]) == 0
    assert "render() of test_check:CannotRender failed: KeyError: 'camera'" in lines_of(capsys)["contact sheet"][1]
    assert main(["check", "reach_d0", "rollout.max_episode_steps=5"]) == 0
    assert lines_of(capsys)["contact sheet"][1].startswith(str(tmp_path / "check" / "reach_d0.png"))


def test_lines_and_exit_code_of_findings(capsys):
    findings = [
        Finding("a", "good"),
        Finding("b", "odd", "note", "look"),
        Finding("c", "bad\x1b[2J", "warn", "mend it"),
    ]
    assert report(findings) == 0
    shown = "ok    a: good\nnote  b: odd\n      fix: look\nwarn  c: bad\\x1b[2J\n      fix: mend it\n"
    assert capsys.readouterr().out == f"{shown}no errors, 1 warning, 1 note in 0.0 s\n"
    assert report([Finding("d", "wrong", "error", "mend it"), Finding("e", "wrong", "error", "mend it")]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 errors, no warnings, no notes in 0.0 s"
    # the last part of our own errors is the fix
    assert Finding.of_error("x", UserError("given 3; expected 4; write 4"), "-") == Finding(
        "x", "given 3; expected 4", "error", "write 4"
    )
    assert Finding.of_error("x", UserError("no"), "mend it") == Finding("x", "no", "error", "mend it")
    assert Finding.of_error("x", KeyError("k; l"), "mend it") == Finding("x", "KeyError: 'k; l'", "error", "mend it")


def test_unknown_name_is_a_user_error(capsys):
    assert main(["check", "tabletap"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparring: env.name = tabletap (from command line): unknown env 'tabletap'; nearest: ")
    assert main(["check", "sparring/reach_x"]) == 2
    assert "is not a tabletop task" in capsys.readouterr().err


class NoEnv(Good):
    """Its factory returns nothing."""

    def __new__(cls):
        return None


def test_a_factory_without_an_env_is_our_error(capsys):
    assert main(["check", "test_check:NoEnv"]) == 1
    found = "env.name=test_check:NoEnv created a NoneType, expected a gymnasium.Env"
    assert errors(lines_of(capsys)) == {"contract": found}


def test_what_is_no_target_is_refused_with_the_command_for_it(capsys, tmp_path):
    for name in ("some.yaml", "some.ckpt", "run/config.yaml", "data/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    refusals = {
        ("some.yaml",): "no dataset, but a config; write: sparring train --config ",
        ("some.ckpt",): "no dataset, but a file of weights; sparring check POLICY",
        ("run",): "no dataset, but a run or a checkpoint; write: sparring eval ",
        ("data", "--output=x"): "--output x: a dataset has no contact sheet; leave it out",
    }
    for (name, *words), message in refusals.items():
        assert main(["check", str(tmp_path / name), *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["check", "actor_critic", "--output=x"]) == 2
    assert "--output x: a policy has no contact sheet; leave it out" in capsys.readouterr().err


def test_the_environment_is_restored(tmp_path):
    main(["check", "test_check:Good", f"--output={tmp_path}"])
    assert "SPARRING_CHECK" not in os.environ


def test_two_different_tasks_are_refused(capsys, tmp_path):
    for word in ("env.task=stack_d0", "task_name=stack_d0", "task=stack_d0"):
        for name in ("lift_d0", "sparring/lift_d0"):
            assert main(["check", name, word]) == 2
            assert f"'{name}' and {word} name different tasks; keep one" in capsys.readouterr().err
    words = ["env.task=[reach_d0]", "rollout.max_episode_steps=3", f"--output={tmp_path}"]
    assert main(["check", "sparring/reach_d0", *words]) == 0


def test_installation_is_checked(capsys, tmp_path):
    assert main(["check", "rollout.max_episode_steps=5", f"--output={tmp_path}"]) == 0
    lines = lines_of(capsys)
    assert errors(lines) == {}
    assert {"python", "torch", "tensordict", "mujoco", "torchvision", "GPUs", "video encoder", "env"} <= lines.keys()
    assert lines["torch"] == ("ok", importlib.metadata.version("torch"))


def test_broken_torchvision_is_reported(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    why = "installed but broken (RuntimeError: operator torchvision::nms does not exist)"
    assert command._torchvision() == Finding("torchvision", why, "error", "pip uninstall torchvision")


@pytest.mark.parametrize("module", ["torchvision", "torch"])
def test_probes_do_not_import_from_the_working_directory(tmp_path, monkeypatch, module):
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    # as if torchvision were installed
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: True)
    assert command._torchvision().what == "torchvision" and not (tmp_path / "ran").exists()
