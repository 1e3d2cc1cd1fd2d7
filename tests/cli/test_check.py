"""`sparring check`: what is fit says ok, what is not says what is wrong and exits with 1."""

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
    """Walks at random, 5 steps an episode, all from its seed."""

    observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    length = 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), 1.0, self.count >= self.length, False, {}

    def look(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class NotANumber(Good):
    def look(self):
        return np.full(3, np.nan if self.count == 2 else 0.0, np.float32)


class WrongShape(Good):
    def look(self):
        return np.zeros(4, np.float32)


class ShrinksLater(Good):
    """numpy would spread the one number over all three."""

    def look(self):
        return np.zeros(1 if self.count else 3, np.float32)


class NeverEnds(Good):
    length = 10**9


class NotDeterministic(Good):
    def look(self):
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32)


class PaysAtRandom(Good):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(np.random.default_rng().uniform()), *rest


class Raises(Good):
    def step(self, action):
        raise ZeroDivisionError("the gripper fell off")


class TakesText(Good):
    action_space = spaces.Text(3)


class CannotDraw(Good):
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        raise KeyError("camera")


class Draws(CannotDraw):
    def render(self):
        return np.zeros((8, 8, 3), np.uint8)


class CannotBeMade(Good):
    def __init__(self):
        raise FileNotFoundError("no robot.xml here")


class RedrawsNoise(ActorCritic):
    """Scores another sample than the one it took."""

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
    """what -> (ok or FAIL, what was seen)."""
    found = [re.fullmatch(r"(ok  |FAIL)  ([^:]+): (.*)", line) for line in capsys.readouterr().out.splitlines()]
    assert all(found)
    return {match[2]: (match[1].strip(), match[3]) for match in found}


def failures(lines):
    return {what: seen for what, (verdict, seen) in lines.items() if verdict == "FAIL"}


def test_a_good_env(capsys):
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
def test_built_in_and_gymnasium_envs(capsys, name):
    assert main(["check", name, "rollout.max_episode_steps=20"]) == 0
    lines = lines_of(capsys)
    assert failures(lines) == {} and lines["saved state"] == ("ok", "can be restored; runs resume exactly")
    if name.startswith("sparring/"):
        assert lines["env"] == ("ok", "tabletop: reach_d1")
        assert lines["episodes end"] == ("ok", "4 ended in 21 decisions of 4 robots")
    else:
        assert lines["action"] == ("ok", "1 dims, one of 2")


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("NotANumber", "contract", "the observation of env 0 (test_check:NotANumber) holds NaN or inf: [nan nan nan]"),
        ("WrongShape", "contract", "has shape (4,) but its observation_space has shape (3,)"),
        ("ShrinksLater", "contract", "has shape (1,) but its observation_space has shape (3,)"),
        ("NeverEnds", "episodes end", "0 ended in 1001 decisions of 4 robots; have it return terminated or truncated"),
        ("NotDeterministic", "determinism", "the same seed gave another result in decision 1; draw all randomness"),
        ("PaysAtRandom", "determinism", "the same seed gave another result in decision 1; draw all randomness"),
        ("Raises", "contract", "ZeroDivisionError: the gripper fell off ("),
        ("TakesText", "contract", "of test_check:TakesText is not supported; expected a Box or a Discrete"),
        ("CannotBeMade", "contract", "FileNotFoundError: no robot.xml here ("),
    ],
)
def test_a_broken_env(capsys, name, what, said):
    assert main(["check", f"test_check:{name}"]) == 1
    wrong = failures(lines_of(capsys))
    assert list(wrong) == [what] and said in wrong[what]


def test_pictures_are_recorded(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OUTPUT_BASE", str(tmp_path))
    main(["check", "test_check:Draws", "rollout.max_episode_steps=10"])
    assert lines_of(capsys)["images"] == ("ok", str(tmp_path / "check" / "test_check_Draws.png"))
    # nothing stops a run that cannot draw
    assert main(["check", "test_check:CannotDraw", "rollout.max_episode_steps=10"]) == 0
    assert "render() of test_check:CannotDraw failed: KeyError: 'camera'" in lines_of(capsys)["images"][1]


def test_a_time_limit_mends_an_env_that_never_ends(capsys):
    assert main(["check", "test_check:NeverEnds", "rollout.max_episode_steps=10"]) == 0
    assert lines_of(capsys)["episodes end"] == ("ok", "4 ended in 11 decisions of 4 robots")


def test_what_was_raised_is_said_with_its_place(capsys):
    main(["check", "test_check:Raises"])
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "gripper fell off" in text)
    assert failures(lines_of(capsys))["contract"].endswith(f"test_check.py line {line})")


def test_a_good_policy(capsys):
    assert main(["check", "actor_critic", *SMALL]) == 0
    lines = lines_of(capsys)
    # actor and critic 4-64-64, heads to 2 logits and 1 value
    parameters = 2 * (4 * 64 + 64 + 64 * 64 + 64) + (64 * 2 + 2) + (64 + 1)
    assert lines["policy"] == ("ok", f"actor_critic: {parameters:,} parameters")
    assert lines["act and evaluate"][0] == "ok" and lines["act and evaluate"][1].endswith("(limit 0.0001)")
    assert lines["update"][0] == "ok"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("RedrawsNoise", "the parity gate refuses to train: drift "),
        ("ForgetsLogProb", "policy.complete: did not write 'log_prob'"),
        ("ForgetsTrace", "policy.complete: did not write 'trace/z2'"),
        ("NotFinished", "NotImplementedError ("),
    ],
)
def test_a_broken_policy(capsys, name, said):
    assert main(["check", f"test_check:{name}", *SMALL]) == 1
    wrong = failures(lines_of(capsys))
    assert list(wrong) == ["act and evaluate"] and wrong["act and evaluate"].startswith(said)


def test_policies_that_a_name_does_not_make(capsys):
    for name, setting in (("vla", "policy.model_class=package.module:Class"), ("pi0", "policy.model_path=FOLDER")):
        assert main(["check", name, *SMALL]) == 1
        lines = lines_of(capsys)
        assert list(lines) == ["policy"] and lines["policy"][0] == "FAIL"
        assert f"'{name}' needs {setting.split('=')[0]}; write: sparring check {name} {setting}" in lines["policy"][1]
    assert main(["check", "vla", "policy.model_class=doubles_vla:Valueless", *SMALL]) == 1
    wrong = failures(lines_of(capsys))
    assert list(wrong) == ["policy"] and "does not have the interface of a VLA model" in wrong["policy"]


def test_a_native_vla_has_fresh_weights_if_no_others_are_given(capsys):
    assert main(["check", "native_vla", "env.cameras=[head]", "rollout.n_envs=2", "rollout.steps=4"]) == 0
    lines = lines_of(capsys)
    assert lines["policy"][1].startswith("native_vla: ") and lines["policy"][1].endswith(
        " parameters, random weights (no policy.model_path)"
    )


def test_an_unknown_name_is_a_mistake_of_the_person(capsys):
    assert main(["check", "tabletap"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparring: env.name = tabletap (from command line): unknown env 'tabletap'; nearest: ")
    assert main(["check", "lift_d0"]) == 2
    assert "'lift_d0' is a task, not an env; write: sparring check sparring/lift_d0" in capsys.readouterr().err
    assert main(["check", "sparring/reach_x"]) == 2
    assert "is not a tabletop task" in capsys.readouterr().err


def test_a_task_given_twice_is_refused_unless_both_agree(capsys):
    for word in ("env.task=stack_d0", "task_name=stack_d0", "task=stack_d0"):
        assert main(["check", "sparring/lift_d0", word]) == 2
        assert f"'sparring/lift_d0' and {word} name different tasks; keep one" in capsys.readouterr().err
    assert main(["check", "sparring/reach_d0", "env.task=[reach_d0]", "rollout.max_episode_steps=3"]) == 0


def test_the_installation(capsys):
    assert main(["check", "rollout.max_episode_steps=5"]) == 0
    lines = lines_of(capsys)
    assert failures(lines) == {}
    assert {"python", "torch", "tensordict", "mujoco", "torchvision", "GPUs", "video encoder", "env"} <= lines.keys()
    assert lines["torch"] == ("ok", importlib.metadata.version("torch"))


def test_a_broken_torchvision_is_told(tmp_path, monkeypatch):
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
def test_probes_import_nothing_from_the_working_directory(tmp_path, monkeypatch, module):
    from sparring.evaluation import check

    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    # as if torchvision were installed
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: True)
    name, _, _ = check._torchvision()
    assert name == "torchvision" and not (tmp_path / "ran").exists()
