"""`sparring check` prints ok or FAIL with the reason for each check, and exits with 1 after a failure."""

import importlib.metadata
import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from sparring.cli.main import main
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig

SMALL = ["rollout.n_envs=2", "rollout.steps=8", "env.name=gym:CartPole-v1"]


class Good(gymnasium.Env):
    """Random observations from the seed; 5 steps per episode."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    length = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, self.count >= self.length, False, {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class NotANumber(Good):
    def observe(self):
        return np.full(3, np.nan if self.count == 2 else 0.0, np.float32)


class WrongShape(Good):
    def observe(self):
        return np.zeros(4, np.float32)


class ShrinksLater(Good):
    """Returns [1] instead of [3], which numpy would broadcast."""

    def observe(self):
        return np.zeros(1 if self.count else 3, np.float32)


class NeverEnds(Good):
    length = 10**9


class NotDeterministic(Good):
    def observe(self):
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32)


class RandomReward(Good):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(np.random.default_rng().uniform()), *rest


class Raises(Good):
    def step(self, action):
        raise ZeroDivisionError("the gripper fell off")


class TakesText(Good):
    action_space = spaces.Text(3)


class CannotRender(Good):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        raise KeyError("camera")


class Renders(CannotRender):
    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


class RaisesInInit(Good):
    def __init__(self):
        raise FileNotFoundError("no robot.xml here")


class RedrawsNoise(ActorCritic):
    """Renders new noise when it scores a decision."""

    def __init__(self, config: ActorCriticConfig, spec, chunk: int):
        super().__init__(config, spec, chunk)

    def evaluate(self, td):
        scored = super().evaluate(td)
        noise = torch.randn_like(scored["trace", "mean"])
        scored["trace", "mean"] = scored["trace", "mean"] + noise
        return scored


class ForgetsLogProb(RedrawsNoise):
    def complete(self, td):
        return super().complete(td).exclude("log_prob")


class ForgetsTrace(RedrawsNoise):
    def complete(self, td):
        return super().complete(td).exclude(("trace", "z2"))


class NeverRandom(RedrawsNoise):
    def __init__(self, config: ActorCriticConfig, spec, chunk: int):
        super().__init__(config, spec, chunk)
        self.noise_size = 0


class NotFinished(RedrawsNoise):
    def evaluate(self, td):
        raise NotImplementedError


def lines_of(capsys) -> dict[str, tuple[str, str]]:
    """Check -> (ok or FAIL, its text)."""
    found = [re.fullmatch(r"(ok  |FAIL)  ([^:]+): (.*)", line) for line in capsys.readouterr().out.splitlines()]
    assert all(found)
    return {match[2]: (match[1].strip(), match[3]) for match in found}


def failures(lines):
    return {what: seen for what, (verdict, seen) in lines.items() if verdict == "FAIL"}


def test_good_env_passes(capsys):
    assert main(["check", "test_check:Good"]) == 0
    lines = lines_of(capsys)
    assert failures(lines) == {}
    assert lines["observation/state"] == ("ok", "[3] float32")
    assert lines["action"] == ("ok", "2 dims, continuous in [-1, 1]")
    # 4 robots, 1001 decisions, 5 steps an episode
    assert lines["episodes end"] == ("ok", "800 ended in 1001 decisions of 4 robots")
    assert lines["determinism"] == ("ok", "the same seed gives the same trajectories")
    assert lines["saved state"] == ("ok", "none; a resume starts new episodes")
    assert lines["speed"][1].endswith(" env steps/s with 4 robots and random actions")


@pytest.mark.parametrize("name", ["gym:CartPole-v1", "sparring/reach_d1"])
def test_built_in_and_gymnasium_envs_pass(capsys, name):
    assert main(["check", name, "rollout.max_episode_steps=20"]) == 0
    lines = lines_of(capsys)
    assert failures(lines) == {} and lines["saved state"] == ("ok", "can be restored; runs resume exactly")
    if name.startswith("sparring/"):
        assert lines["env"] == ("ok", "tabletop: reach_d1")
        assert lines["episodes end"] == ("ok", "4 ended in 21 decisions of 4 robots")
    else:
        assert lines["action"] == ("ok", "1 dims, one of 2")


@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("NotANumber", "contract", "the observation of env 0 (test_check:NotANumber) holds NaN or inf: [nan nan nan]"),
        ("WrongShape", "contract", "has shape (4,) but its observation_space has shape (3,)"),
        ("ShrinksLater", "contract", "has shape (1,) but its observation_space has shape (3,)"),
        ("NeverEnds", "episodes end", "0 ended in 1001 decisions of 4 robots; have it return terminated or truncated"),
        ("NotDeterministic", "determinism", "the same seed gave another result in decision 1; draw all randomness"),
        ("RandomReward", "determinism", "the same seed gave another result in decision 1; draw all randomness"),
        ("Raises", "contract", "ZeroDivisionError: the gripper fell off ("),
        ("TakesText", "contract", "of test_check:TakesText is not supported; expected a Box, Discrete, MultiDiscrete"),
        ("RaisesInInit", "contract", "FileNotFoundError: no robot.xml here ("),
    ],
)
def test_broken_env_fails_one_check(capsys, name, what, message):
    assert main(["check", f"test_check:{name}"]) == 1
    wrong = failures(lines_of(capsys))
    assert list(wrong) == [what] and message in wrong[what]


def test_image_is_saved_and_a_failing_render_is_no_failure(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPUT_BASE", str(tmp_path))
    main(["check", "test_check:Renders", "rollout.max_episode_steps=10"])
    assert lines_of(capsys)["images"] == ("ok", str(tmp_path / "check" / "test_check_Renders.png"))
    # rendering is optional
    assert main(["check", "test_check:CannotRender", "rollout.max_episode_steps=10"]) == 0
    assert "render() of test_check:CannotRender failed: KeyError: 'camera'" in lines_of(capsys)["images"][1]


def test_env_that_never_ends_passes_with_a_time_limit(capsys):
    assert main(["check", "test_check:NeverEnds", "rollout.max_episode_steps=10"]) == 0
    assert lines_of(capsys)["episodes end"] == ("ok", "4 ended in 11 decisions of 4 robots")


def test_exception_is_reported_with_file_and_line(capsys):
    main(["check", "test_check:Raises"])
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "gripper fell off" in text)
    assert failures(lines_of(capsys))["contract"].endswith(f"test_check.py line {line})")


def test_good_policy_passes(capsys):
    assert main(["check", "actor_critic", *SMALL]) == 0
    lines = lines_of(capsys)
    # actor and critic 4-64-64, heads to 2 logits and 1 value
    parameters = 2 * (4 * 64 + 64 + 64 * 64 + 64) + (64 * 2 + 2) + (64 + 1)
    assert lines["policy"] == ("ok", f"actor_critic: {parameters:,} parameters")
    assert lines["act and evaluate"][0] == "ok" and lines["act and evaluate"][1].endswith("(limit 0.0001)")
    assert lines["update"][0] == "ok"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RedrawsNoise", "the parity gate refuses to train: drift "),
        ("ForgetsLogProb", "policy.complete: did not write 'log_prob'"),
        ("ForgetsTrace", "policy.complete: did not write 'trace/z2'"),
        ("NotFinished", "NotImplementedError ("),
    ],
)
def test_broken_policy_fails_the_scoring_check(capsys, name, message):
    assert main(["check", f"test_check:{name}", *SMALL]) == 1
    wrong = failures(lines_of(capsys))
    assert list(wrong) == ["act and evaluate"] and wrong["act and evaluate"].startswith(message)


def test_policy_without_its_required_settings_fails(capsys):
    for name, setting in (("vla", "policy.model_class=package.module:Class"), ("pi0", "policy.model_path=FOLDER")):
        assert main(["check", name, *SMALL]) == 1
        lines = lines_of(capsys)
        assert list(lines) == ["policy"] and lines["policy"][0] == "FAIL"
        assert f"'{name}' needs {setting.split('=')[0]}; write: sparring check {name} {setting}" in lines["policy"][1]
    assert main(["check", "vla", "policy.model_class=doubles_vla:Valueless", *SMALL]) == 1
    wrong = failures(lines_of(capsys))
    assert list(wrong) == ["policy"] and "does not have the interface of a VLA model" in wrong["policy"]


def test_native_vla_without_model_path_is_reported_as_untrained(capsys):
    assert main(["check", "native_vla", "env.cameras=[head]", "rollout.n_envs=2", "rollout.steps=4"]) == 0
    lines = lines_of(capsys)
    assert lines["policy"][1].startswith("native_vla: ") and lines["policy"][1].endswith(
        " parameters, random weights (no policy.model_path)"
    )


def test_unknown_name_is_a_user_error(capsys):
    assert main(["check", "tabletap"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparring: env.name = tabletap (from command line): unknown env 'tabletap'; nearest: ")
    assert main(["check", "lift_d0"]) == 2
    assert "'lift_d0' is a task, not an env; write: sparring check sparring/lift_d0" in capsys.readouterr().err
    assert main(["check", "sparring/reach_x"]) == 2
    assert "is not a tabletop task" in capsys.readouterr().err


def test_two_different_tasks_are_refused(capsys):
    for word in ("env.task=stack_d0", "task_name=stack_d0", "task=stack_d0"):
        assert main(["check", "sparring/lift_d0", word]) == 2
        assert f"'sparring/lift_d0' and {word} name different tasks; keep one" in capsys.readouterr().err
    assert main(["check", "sparring/reach_d0", "env.task=[reach_d0]", "rollout.max_episode_steps=3"]) == 0


def test_installation_is_checked(capsys):
    assert main(["check", "rollout.max_episode_steps=5"]) == 0
    lines = lines_of(capsys)
    assert failures(lines) == {}
    assert {"python", "torch", "tensordict", "mujoco", "torchvision", "GPUs", "video encoder", "env"} <= lines.keys()
    assert lines["torch"] == ("ok", importlib.metadata.version("torch"))


def test_broken_torchvision_is_reported(tmp_path, monkeypatch):
    from sparring.evaluation.check import _torchvision

    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    assert _torchvision() == (
        "torchvision",
        False,
        "installed but broken (RuntimeError: operator torchvision::nms does not exist); pip uninstall torchvision",
    )


@pytest.mark.parametrize("module", ["torchvision", "torch"])
def test_probes_do_not_import_from_the_working_directory(tmp_path, monkeypatch, module):
    from sparring.evaluation import check

    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    # as if torchvision were installed
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: True)
    name, _, _ = check._torchvision()
    assert name == "torchvision" and not (tmp_path / "ran").exists()
