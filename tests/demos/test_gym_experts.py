"""Experts of gymnasium envs: recorded with `sparring demos`, read as demonstrations, imitated."""

import numpy as np
import pytest
import torch

from sparring.config.text import Setting
from sparring.contract import text_of
from sparring.data.chunks import ActionChunks
from sparring.data.demonstrations import Demonstrations
from sparring.demos.plan import Plan
from sparring.demos.record import record
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym_batch import SerialBackend
from sparring.errors import UserError
from sparring.processes.manifest import read_manifest

NAME = "gym_doubles:Follows"


def plan(noise=0.2, name=NAME, **settings) -> Plan:
    overrides = [Setting(f"env.{key}", value, "test") for key, value in settings.items()]
    return Plan.of([name], None, overrides, noise, False, "yuv444p")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("demos") / "follows"
    record(plan(), 7, path, quiet=True)
    return path


def checksums(path):
    return {name: each["sha256"] for name, each in read_manifest(path)["files"].items()}


def test_recorded_actions_replay_the_episodes(dataset):
    demos = Demonstrations(dataset)
    extras = demos.dataset.extras
    assert len(demos) == 7 and demos.fps == 10 and demos.recorded_shapes == {"eye": (8, 16)}
    assert set(demos.instructions) == {"go to the left", "go to the right"}
    backend = SerialBackend(GymConfig(name=NAME), 1)
    for episode, number in enumerate(extras["episode_numbers"]):
        seeds = EpisodeSeeds(0, first_env=number, total_envs=1)
        assert seeds(0, 0) == extras["episode_seeds"][episode]
        shown, td = backend.reset(seeds), demos.episode(episode)
        assert text_of(shown["instruction"][0]) == demos.instruction(episode)
        for t in range(len(td)):
            assert np.array_equal(td["observation", "state"][t], shown["state"][0])
            difference = td["observation", "image", "eye"][t].float() - torch.from_numpy(shown["image/eye"][0]).float()
            assert difference.abs().max() <= 3
            step = backend.step(td["action"][t].numpy()[None])
            shown = step.observation
        assert step.success[0] and step.ended.tolist() == [0]


def test_actions_are_in_units_of_the_action_space_and_noisy(dataset, tmp_path):
    record(plan(noise=0.0), 7, tmp_path / "calm", quiet=True)
    calm, noisy = Demonstrations(tmp_path / "calm"), Demonstrations(dataset)
    state, action = calm.numbers("observation.state"), calm.numbers("action")
    # the env's actions of -2 to 2 are recorded as -1 to 1
    assert np.allclose(action, np.clip(5 * (state[:, 2:] - state[:, :2]), -1, 1), atol=1e-5)
    firsts = [demos.numbers("action")[demos.starts[:-1]] for demos in (calm, noisy)]
    inside = np.abs(firsts[1]) < 1
    assert 0.05 < (firsts[1] - firsts[0])[inside].std() < 0.4


def test_worker_processes_record_the_same_bytes(dataset, tmp_path):
    record(plan(), 7, tmp_path / "again", workers=2, quiet=True)
    again, before = checksums(tmp_path / "again"), checksums(dataset)
    assert again == before


def test_chunks_hold_the_instruction_of_each_step_as_bytes(dataset):
    demos = Demonstrations(dataset, cache=True)
    spec = SerialBackend(GymConfig(name=NAME), 1).spec
    chunks = ActionChunks([demos, demos], 3, spec)
    batch = chunks.sample(64, torch.Generator().manual_seed(0))
    assert "task" not in set(batch["observation"].keys()) and batch["observation", "image", "eye"].shape == (
        64,
        3,
        8,
        16,
    )
    for row, step in zip(batch["observation", "instruction"], batch["step"].tolist(), strict=True):
        episode = int(np.searchsorted(demos.starts, step % demos.steps, side="right")) - 1
        assert text_of(row.numpy()) == demos.instruction(episode)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gym:Pendulum-v1", {}, r"Pendulum-v1 has no scripted expert; it needs .* expert_action\(\)"),
        ("gym_doubles:Counter", {}, "has no scripted expert"),
        (NAME, {"roles": {"text": "ignore", "eye": "points"}}, "expected .P, 3 or 6."),
    ],
)
def test_envs_without_an_expert_are_refused(tmp_path, name, settings, message):
    with pytest.raises(UserError, match=message):
        record(plan(name=name, **settings), 1, tmp_path / "none", quiet=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("name", ["follows_in_wrappers", "follows_in_own_action_wrapper"])
def test_an_expert_inside_wrappers_is_recorded_like_the_env_itself(dataset, tmp_path, name):
    record(plan(name=f"gym_doubles:{name}"), 7, tmp_path / "wrapped", quiet=True)
    wrapped, bare = Demonstrations(tmp_path / "wrapped"), Demonstrations(dataset)
    assert np.array_equal(wrapped.numbers("action"), bare.numbers("action"))
    assert np.array_equal(wrapped.numbers("observation.state"), bare.numbers("observation.state"))


def test_an_expert_inside_an_action_wrapper_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"RescaleAction changes the actions of the expert inside it; add a method"):
        record(plan(name="gym_doubles:follows_rescaled"), 1, tmp_path / "none", quiet=True)


def test_several_envs_are_refused():
    with pytest.raises(UserError, match="only built-in tasks can be recorded together"):
        Plan.of([NAME, "reach_d0"], None, [], 0.0, False, "yuv444p")
