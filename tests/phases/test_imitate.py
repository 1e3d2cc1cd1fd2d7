"""Imitation: sampled chunks, losses, bit-identical resume, refused datasets and settings."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from sparring.api import load_policy
from sparring.cli.main import main
from sparring.config import schema
from sparring.contract import EnvSpec
from sparring.data.batches import BatchBuilder
from sparring.data.chunks import ActionChunks
from sparring.data.demonstrations import Demonstrations
from sparring.demos.plan import Plan
from sparring.demos.record import record
from sparring.envs.configs import TabletopConfig
from sparring.envs.env import make_env
from sparring.errors import UserError
from sparring.phases.configs import ImitateConfig
from sparring.phases.demonstrations import _open as open_dataset
from sparring.phases.imitate import _shifted as shifted
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig, FlowConfig
from sparring.policies.flow.policy import FlowPolicy
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

# the env of these settings, not the recorded one
load_config = partial(schema.load_config, inherit=False)

ENV = {"task": "push_d0", "object_state": "privileged", "control_mode": "delta_ee_pos", "threads": 1}
WITH_IMAGES = ENV | {"cameras": ["head"], "image_size": 36}
LENGTH = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`state`: four short episodes; `seen`: two with images; `lift`: two of another task."""
    base = tmp_path_factory.mktemp("demos")
    for name, env, episodes in (("state", ENV, 4), ("seen", WITH_IMAGES, 2), ("lift", ENV | {"task": "lift_d0"}, 2)):
        plan = Plan(TabletopConfig(**env), max_episode_steps=LENGTH, keep_failures=True)
        record(plan, episodes, base / name, quiet=True)
    return base


@pytest.fixture(scope="module")
def spec():
    env = make_env(TabletopConfig(**ENV), 1)
    env.close()
    return env.spec


def sampled(chunks, count=64, seed=0):
    return chunks.sample(count, torch.Generator().manual_seed(seed))


def settings(folder, output, env=ENV, **more):
    imitate = {"demos": str(folder), "batch_size": 8, "steps_per_update": 3} | more.pop("imitate", {})
    common = {
        "phase": "imitate",
        "output": str(output),
        "env": env,
        "imitate": imitate,
        "training": {"save_every": 1, "keep_checkpoints": 10, "iterations": 4},
        "policy": {"channels": [4, 4], "image_features": 8, "hidden": [16]},
        "logging": {"console_level": "ERROR"},
    }
    return common | more


# ---- chunks


def test_chunks_contain_the_following_actions_up_to_the_end_of_the_episode(folder, spec):
    demos = Demonstrations(folder / "state")
    batch = sampled(ActionChunks([demos], 5, spec))
    actions, states = demos.numbers("action"), demos.numbers("observation.state")
    assert batch["action"].shape == (64, 5, 4) and batch["valid"].shape == (64, 5)
    seen = set()
    for row in range(64):
        step = int(np.flatnonzero((states == batch["observation", "state"][row].numpy()).all(1))[0])
        left = LENGTH - step % LENGTH
        seen.add(step)
        np.testing.assert_array_equal(batch["valid"][row], np.arange(5) < left)
        np.testing.assert_array_equal(batch["action"][row, :left], actions[step : step + min(left, 5)])
        np.testing.assert_array_equal(
            batch["action"][row, left:], np.repeat(actions[[step + left - 1]], max(5 - left, 0), 0)
        )
    assert len(seen) > 20


def test_episodes_limits_sampling_to_the_first_episodes(folder, spec):
    chunks = ActionChunks([Demonstrations(folder / "state")], 2, spec, episodes=1)
    assert len(chunks) == LENGTH and chunks.episodes == 1
    first = Demonstrations(folder / "state").numbers("action")[:LENGTH]
    np.testing.assert_allclose(chunks.statistics()["action"]["max"], first.max(0))
    assert {tuple(a.tolist()) for a in sampled(chunks)["action"][:, 0]} <= {tuple(a.tolist()) for a in first}


def test_images_belong_to_their_step(folder):
    env = make_env(TabletopConfig(**WITH_IMAGES), 1)
    env.close()
    demos = Demonstrations(folder / "seen", cameras=["head"], image_size=36, cache=True)
    chunks = ActionChunks([demos, demos], 1, env.spec)
    assert len(chunks) == 4 * LENGTH
    batch = sampled(chunks, 32)
    images, states = demos.image_cache("head"), demos.numbers("observation.state")
    for row in range(32):
        step = int(np.flatnonzero((states == batch["observation", "state"][row].numpy()).all(1))[0])
        np.testing.assert_array_equal(batch["observation", "image", "head"][row], images[step])


def test_images_are_scaled_to_the_size_of_each_camera(tmp_path):
    config = TabletopConfig(**WITH_IMAGES | {"cameras": ["head", "wrist"]})
    record(Plan(config, max_episode_steps=LENGTH, keep_failures=True), 1, tmp_path / "two", quiet=True)
    env = make_env(config, 1)
    env.close()
    shapes = {"image/head": (3, 36, 48), "image/wrist": (3, 24, 20)}
    spec = replace(env.spec, observation=env.spec.observation | {k: (s, "uint8") for k, s in shapes.items()})
    demos = open_dataset(tmp_path / "two", config, spec, ImitateConfig(), ["head", "wrist"], cache=True)
    images = sampled(ActionChunks([demos], 1, spec), 5)["observation", "image"]
    assert {f"image/{camera}": tuple(images[camera].shape[1:]) for camera in ("head", "wrist")} == shapes


def test_images_that_the_policy_does_not_read_are_not_decoded(folder, tmp_path, monkeypatch):
    monkeypatch.delattr(Demonstrations, "image_cache")
    policy = {"use_images": False, "hidden": [16]}
    config = load_config(settings(folder / "seen", tmp_path / "run", WITH_IMAGES, policy=policy))
    run = Run(config, folder=False, quiet=True)
    assert run.phase.learns_from.endswith("from state")
    assert run.phase.step(0.0)["loss"] > 0


@pytest.mark.parametrize("padding", [0, 60])
def test_privileged_object_poses_are_appended_to_the_state(folder, tmp_path, padding):
    """Compared with the same episodes recorded with env.object_state=state."""
    config = TabletopConfig(**ENV | {"object_state": "state"})
    record(Plan(config, max_episode_steps=LENGTH, keep_failures=True), 4, tmp_path / "whole", quiet=True)
    whole = Demonstrations(tmp_path / "whole")
    config = config.model_copy(update={"pad_state": padding})
    env = make_env(config, 1)
    env.close()
    demos = open_dataset(folder / "state", config, env.spec, ImitateConfig(), [], cache=True)
    np.testing.assert_array_equal(demos.numbers("observation.state"), whole.numbers("observation.state"))
    assert demos.state_dim == 51 and set(demos.episode(0)["observation"].keys()) == {"state", "task"}
    found, right = (each.statistics["observation/state"] for each in (demos, whole))
    np.testing.assert_allclose(found["mean"], right["mean"], rtol=1e-5, atol=1e-6)
    batch = sampled(ActionChunks([demos], 1, env.spec))
    assert batch["observation"].keys() == {"state", "task"}
    np.testing.assert_array_equal(
        batch["observation", "state"][:, :51], whole.numbers("observation.state")[batch["step"]]
    )


def test_instructions_are_matched_by_text(folder):
    env = make_env(TabletopConfig(**ENV | {"task": ("lift_d0", "push_d0")}), 2)
    env.close()
    demos = Demonstrations(folder / "state")
    tasks = sampled(ActionChunks([demos], 1, env.spec))["observation", "task"]
    assert {env.spec.instructions[i] for i in tasks.tolist()} == set(demos.instructions)
    assert {env.spec.task_names[i] for i in tasks.tolist()} == {"push_d0"}


def test_unknown_instruction_is_refused(folder, spec):
    demos = Demonstrations(folder / "lift")
    with pytest.raises(UserError, match=f"demonstrates .*'{demos.instructions[0]}'.* env.task"):
        ActionChunks([demos], 1, spec)


def test_vectors_are_padded_like_the_env(folder):
    env = make_env(TabletopConfig(**ENV | {"pad_state": 40, "pad_action": 9}), 1)
    env.close()
    chunks = ActionChunks([Demonstrations(folder / "state")], 2, env.spec)
    batch = sampled(chunks)
    assert batch["observation", "state"].shape == (64, 40) and not batch["observation", "state"][:, 30:].any()
    assert batch["action"].shape == (64, 2, 9) and not batch["action"][..., 4:].any()
    assert chunks.statistics()["action"]["mean"].shape == (4,)


def test_shifted_images_move_by_whole_pixels_within_bounds():
    images = torch.arange(10 * 12).view(1, 1, 10, 12).repeat(40, 3, 1, 1)
    moved = shifted(images, 2, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    # the centre pixel gives the shift: 12 per row, 1 per column
    by = (moved[:, 0, 5, 6] - images[0, 0, 5, 6]).tolist()
    assert len(set(by)) > 10 and set(by) <= {12 * row + column for row in range(-2, 3) for column in range(-2, 3)}
    for row, offset in enumerate(by):
        inner = moved[row, 1, 2:8, 2:10]
        assert torch.equal(inner, images[0, 1, 2:8, 2:10] + offset)


# ---- losses

SMALL_SPEC = EnvSpec({"state": ((2,), "float32")}, action_dim=3, action_padding=1)


def fitted(policy, target, steps=400, valid=None):
    """The actions after training on the states [1, 0] and [0, 1] with `target [2, C, A]`."""
    batch = TensorDict(
        {
            "observation": {"state": torch.eye(2)},
            "action": target,
            "valid": torch.ones(target.shape[:2], dtype=torch.bool) if valid is None else valid,
        },
        [2],
    )
    optimizer = torch.optim.Adam(policy.parameters(), 0.02)
    for _ in range(steps):
        loss, _ = policy.imitation_loss(batch, torch.Generator())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return policy.act(TensorDict({"observation": {"state": torch.eye(2)}}, [2]))["action"]


@pytest.mark.parametrize("distribution", ["gaussian", "squashed", "gsde"])
def test_mode_converges_to_the_demonstrated_action(distribution):
    torch.manual_seed(0)
    policy = ActorCritic(ActorCriticConfig(distribution=distribution, hidden=(32,)), SMALL_SPEC, 2)
    target = torch.tensor([[[0.5, -0.3, 9.0], [0.2, 0.1, 9.0]], [[-0.4, 0.6, 9.0], [1.0, -1.0, 9.0]]])
    action = fitted(policy, target)
    assert (action[..., :2] - target[..., :2]).abs().max() < 0.03
    assert not action[..., 2].any()


def test_std_converges_to_that_of_the_errors_or_its_floor():
    torch.manual_seed(0)
    policy = ActorCritic(ActorCriticConfig(hidden=(32,)), EnvSpec({"state": ((2,), "float32")}, 2), 1)
    # equal states; targets 0.2 on either side of the mean in the first entry, constant in the second
    policy.encoder.normalizer.scale.zero_()
    fitted(policy, torch.tensor([[[0.3, 0.5]], [[-0.1, 0.5]]]))
    assert policy.head.log_std.exp().tolist() == pytest.approx([0.2, 0.05], abs=0.01)


def test_actions_after_the_episode_are_ignored():
    torch.manual_seed(0)
    policy = ActorCritic(ActorCriticConfig(hidden=(32,)), SMALL_SPEC, 2)
    target = torch.full((2, 2, 3), 0.5)
    target[:, 1] = 77.0
    action = fitted(policy, target, steps=150, valid=torch.tensor([[True, False], [True, False]]))
    assert (action[:, 0, :2] - 0.5).abs().max() < 0.05 and action[:, 1].abs().max() < 1


def test_discrete_policy_learns_the_demonstrated_choice():
    torch.manual_seed(0)
    policy = ActorCritic(ActorCriticConfig(hidden=(16,)), EnvSpec({"state": ((2,), "float32")}, 1, 4), 1)
    assert fitted(policy, torch.tensor([[[3.0]], [[1.0]]]), steps=100).flatten().tolist() == [3.0, 1.0]


def test_normalised_actions_are_rescaled():
    torch.manual_seed(0)
    policy = ActorCritic(ActorCriticConfig(normalize_actions=True, hidden=(32,)), SMALL_SPEC, 1)
    statistics = {"action": {"min": np.array([0.0, -0.02]), "max": np.array([0.04, 0.1])}}
    policy.fit_normalizers(statistics, "mean_std", "min_max")
    assert policy.action_normalizer(torch.tensor([0.04, -0.02])).tolist() == pytest.approx([1, -1])
    target = torch.tensor([[[0.01, -0.02, 0.0]], [[0.04, 0.05, 0.0]]])
    assert (fitted(policy, target) - target).abs().max() < 1e-3


@pytest.mark.parametrize("kind", [ActorCritic, FlowPolicy])
def test_states_and_actions_have_separate_scaling_modes(kind):
    config = (ActorCriticConfig if kind is ActorCritic else FlowConfig)(normalize_actions=True)
    policy = kind(config, EnvSpec({"state": ((1,), "float32")}, 1), 1)
    one = {name: np.array([value]) for name, value in {"mean": 1.0, "std": 2.0, "min": 2.0, "max": 10.0}.items()}
    policy.fit_normalizers({"observation/state": one, "action": one}, "min_max", "mean_std")
    action = policy.action_normalizer if kind is ActorCritic else policy.actions
    # min_max: 6 -> 0, 10 -> 1; mean_std: 1 -> 0, 3 -> 1
    assert policy.encoder.normalizer(torch.tensor([6.0, 10.0])[:, None]).flatten().tolist() == [0, 1]
    assert action(torch.tensor([1.0, 3.0])[:, None]).flatten().tolist() == [0, 1]


@pytest.mark.parametrize("distribution", ["squashed", "discrete"])
def test_normalised_actions_are_refused_for_other_distributions(distribution):
    spec = EnvSpec({"state": ((2,), "float32")}, 1, 4 if distribution == "discrete" else 0)
    with pytest.raises(UserError, match="policy.normalize_actions=true scales"):
        ActorCritic(ActorCriticConfig(normalize_actions=True, distribution=distribution), spec, 1)


# ---- the phase


def run_to_the_end(config) -> Run:
    run = Run(config)
    assert run.run()
    run.phase.env.close()
    return run


@pytest.mark.parametrize("variant", ["plain", "averaged, images"])
def test_resumed_run_is_bit_identical(folder, tmp_path, variant):
    more = {} if variant == "plain" else {"imitate": {"ema": 0.9, "image_augmentation": 2}, "env": WITH_IMAGES}
    demos = folder / ("state" if variant == "plain" else "seen")
    straight = run_to_the_end(load_config(settings(demos, tmp_path / "straight", **more)))
    config = load_config(settings(demos, tmp_path / "stopped", **more))
    stopped = Run(config)
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    resumed = run_to_the_end(config)
    for models in ("model", "policy"):
        one, other = getattr(straight.phase, models).state_dict(), getattr(resumed.phase, models).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)
    saved = load_policy(tmp_path / "stopped").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in resumed.phase.model.state_dict().items())
    if variant != "plain":
        assert not torch.equal(resumed.phase.model.head.linear.weight, resumed.phase.policy.head.linear.weight)


def test_loss_falls_and_the_critic_does_not_change(folder, tmp_path):
    config = load_config(
        settings(
            folder / "state",
            tmp_path / "run",
            imitate={"steps_per_update": 80, "weight_decay": 0.1, "state_normalization": "min_max"},
        )
    )
    run = Run(config)
    critic = {name: value.clone() for name, value in run.phase.policy.critic.named_parameters()}
    losses = [run.phase.step(run.fraction)["error_loss"] for _ in range(4)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(value, critic[name]) for name, value in run.phase.policy.critic.named_parameters())
    assert run.fraction == 1 and run.phase.progress.env_steps == 0
    state = run.phase.policy.encoder.normalizer
    assert state.fitted and run.phase.policy.critic.privileged.fitted
    values = torch.from_numpy(Demonstrations(folder / "state").numbers("observation.state"))
    # scaled by the range (min_max)
    scaled = state(values)
    assert scaled.abs().max() == pytest.approx(1, abs=1e-3) and (scaled.amax(0) + scaled.amin(0)).abs().max() < 1e-3


def recorded(folder, tmp_path, **more):
    """A phase, and a list that gets (training mode, batch) of each gradient step."""
    phase = Run(load_config(settings(folder, tmp_path, **more)), folder=False, quiet=True).phase
    seen, loss = [], phase.policy.imitation_loss
    phase.policy.imitation_loss = lambda batch, generator: (
        seen.append((phase.policy.training, batch.clone())) or loss(batch, generator)
    )
    return phase, seen


def test_dropout_is_active_during_updates_only(folder, tmp_path):
    phase, seen = recorded(folder / "state", tmp_path)
    phase.step(0.0)
    phase.step(0.5)
    assert [training for training, _ in seen] == [True] * 6
    assert not any(module.training for module in phase.model.modules())


@pytest.mark.parametrize(("schedule", "left"), [("linear", 0.75), ("cosine", 0.8536), ("constant", 1.0)])
def test_learning_rate_follows_its_schedule(folder, tmp_path, schedule, left):
    phase, _ = recorded(folder / "state", tmp_path, imitate={"lr_schedule": schedule, "learning_rate": 0.01})
    assert phase.step(0.0)["lr"] == 0.01
    assert phase.step(0.25)["lr"] == pytest.approx(0.01 * left, rel=1e-4)
    assert phase.optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(0.01 * left, rel=1e-4)


@pytest.mark.parametrize("pixels", [0, 2])
def test_image_augmentation_shifts_images_only(folder, tmp_path, pixels):
    phase, seen = recorded(folder / "seen", tmp_path, env=WITH_IMAGES, imitate={"image_augmentation": pixels})
    phase.step(0.0)
    plain = BatchBuilder(phase.chunks, 8, phase.seed * 1009, "cpu")
    for (_, batch), sampled in zip(seen, plain, strict=False):
        same = (batch["observation", "image", "head"] == sampled["observation", "image", "head"]).flatten(1).all(1)
        assert same.sum() <= 4 if pixels else same.all()
        assert torch.equal(batch["observation", "state"], sampled["observation", "state"])
        assert torch.equal(batch["action"], sampled["action"])


def test_ema_of_few_steps_has_a_lower_decay(folder, tmp_path):
    phase, _ = recorded(
        folder / "state", tmp_path, imitate={"ema": 0.999, "steps_per_update": 1, "learning_rate": 0.01}
    )
    average = phase.policy.head.linear.weight.detach().clone()
    for step in (1, 2, 3):
        phase.step(0.0)
        now = phase.policy.head.linear.weight.detach()
        decay = step / (step + 10)
        average = decay * average + (1 - decay) * now
        torch.testing.assert_close(phase.model.head.linear.weight, average)
    # it differs from the weights
    assert (average - now).abs().max() > 1e-4


@pytest.mark.parametrize("ema", [None, 0.9])
def test_pretrained_normalisers_are_fitted_once_to_demonstrations(folder, tmp_path, ema):
    scaled = {"hidden": [16], "normalize_actions": True}
    rollouts = {"output": str(tmp_path / "rl"), "env": ENV, "policy": scaled, "rollout": {"n_envs": 2, "steps": 8}}
    run_to_the_end(load_config(rollouts | {"training": {"iterations": 1}, "logging": {"console_level": "ERROR"}}))

    def imitated(demos, name, pretrained):
        more = {"policy": scaled, "imitate": {"ema": ema}, "pretrained": str(tmp_path / pretrained)}
        return run_to_the_end(load_config(settings(folder / demos, tmp_path / name, **more)))

    phase, demos = imitated("state", "first", "rl").phase, Demonstrations(folder / "state")
    for policy in (phase.policy, phase.model):
        state, action, privileged = policy.encoder.normalizer, policy.action_normalizer, policy.critic.privileged
        assert state.fitted and action.fitted and privileged.fitted
        torch.testing.assert_close(state.shift, torch.from_numpy(demos.numbers("observation.state")).mean(0))
        # entries of the hand; those of the fingers are constant
        steps = action(torch.from_numpy(demos.numbers("action")))[:, :3]
        torch.testing.assert_close(steps.amax(0), torch.ones(3), rtol=0, atol=1e-3)
    # fitted normalisers are kept with other demonstrations
    again = imitated("seen", "second", "first").phase.policy
    assert torch.equal(again.encoder.normalizer.shift, phase.model.encoder.normalizer.shift)
    assert torch.equal(again.action_normalizer.scale, phase.model.action_normalizer.scale)


@pytest.mark.parametrize(("demos", "seconds", "long"), [("state", 0.25, "50 s"), ("seen", 3.0, "10 min")])
def test_observations_and_expected_duration_are_logged_once(folder, tmp_path, monkeypatch, demos, seconds, long):
    """Four updates of 50 gradient steps of `seconds` each; the first step takes 100 s."""
    more = {"env": WITH_IMAGES if demos == "seen" else ENV, "imitate": {"steps_per_update": 50}}
    phase, seen = recorded(folder / demos, tmp_path, **more)
    loss, now, logs = phase.policy.imitation_loss, [1.0], []

    def slow(*arguments):
        now[0] += seconds if seen else 100.0
        return loss(*arguments)

    phase.policy.imitation_loss = slow
    monkeypatch.setattr("sparring.phases.imitate.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("sparring.phases.imitate.log.info", lambda text, *more: logs.append((len(seen), text % more)))
    for update in range(2):
        phase.step(update / 4)
    shown = "images (1 camera, 36 px) and state" if demos == "seen" else "state"
    assert phase.learns_from.endswith(f"of {folder / demos}, from {shown}")
    # logged once, after one second of gradient steps
    after = 2 if demos == "seen" else 5
    message = [f"imitating from {shown}: about {long} for 4 updates on this machine"]
    how = "instead of images" if demos == "seen" else "in addition to the robot's state"
    message.append(f"to imitate from the poses of objects {how}: env.object_state=state env.cameras=[]")
    assert logs == [(after, text) for text in message]


def test_default_limit_is_20_updates(folder, tmp_path):
    config = load_config(settings(folder / "state", tmp_path, training={}))
    run = Run(config, folder=False, quiet=True)
    run.phase.progress.updates = 19
    assert run.fraction == 0.95


def imitate_on_this_rank(demos, folder):
    """Run by each of two processes."""
    torch.set_num_threads(1)
    run = Run(load_config(settings(demos, f"{folder}/run", device="cpu", imitate={"ema": 0.9})))
    batch = next(iter(run.phase.batches))["action"]
    run.run()
    saved = {"weights": run.phase.policy.state_dict(), "average": run.phase.model.state_dict(), "batch": batch}
    torch.save(saved, f"{folder}/rank{run.distributed.rank}.pt")


@pytest.mark.usefixtures("forked")
def test_two_processes_sample_separately_and_have_equal_weights(folder, tmp_path):
    code = (
        "import sys; from accelerate import debug_launcher; from test_imitate import imitate_on_this_rank;"
        "debug_launcher(imitate_on_this_rank, tuple(sys.argv[1:]), num_processes=2)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "doubles"), *sys.path])}
    command = [sys.executable, "-c", code, str(folder / "state"), str(tmp_path)]
    subprocess.run(command, env=environment, check=True)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    for which in ("weights", "average"):
        for name, tensor in first[which].items():
            assert torch.equal(tensor, second[which][name]), (which, name)
    assert not torch.equal(first["batch"], second["batch"])


# ---- with a memory

NATIVE = {"name": "native_vla", "image_size": 32, "patch_size": 16, "vision_layers": 1, "layers": 1, "memory_size": 7}


def test_batches_contain_the_memory_before_each_step(folder, tmp_path):
    """Decisions every 3 steps; the memory is recomputed step by step through episodes of 7 steps."""
    more = {"env": WITH_IMAGES, "policy": NATIVE, "rollout": {"action_steps": 3}}
    phase, seen = recorded(folder / "seen", tmp_path, **more)
    phase.step(0.0)
    for _, batch in seen:
        for row, step in enumerate(batch["step"].tolist()):
            start, t = step - step % LENGTH, step % LENGTH
            decided = sorted({0, *range(t - 3, 0, -3)}) if t else []
            memory = torch.zeros(1, 7)
            for earlier in decided:
                number = torch.tensor([start + earlier])
                td = TensorDict({"observation": phase.chunks.observation(number)}, [1])
                memory = phase.policy.remember(td.set(("memory", "policy"), memory))
            torch.testing.assert_close(batch["memory", "policy"][row], memory[0])
            assert memory[0, 0].item() == pytest.approx(len(decided) / (len(decided) + 1))
    assert seen[0][1]["memory", "policy"].abs().max() > 0.1


def test_resumed_run_with_a_memory_is_bit_identical(folder, tmp_path):
    more = {"policy": NATIVE, "rollout": {"action_steps": 3}}
    straight = run_to_the_end(load_config(settings(folder / "state", tmp_path / "straight", **more)))
    config = load_config(settings(folder / "state", tmp_path / "stopped", **more))
    stopped = Run(config)
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    resumed = run_to_the_end(config)
    one, other = straight.phase.model.state_dict(), resumed.phase.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- what is refused, before anything is written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["env.cameras=[head]"], "cameras: expected head, found none; use env.cameras=[]"),
        (["env.control_mode=delta_ee"], "found 4; it was recorded with env.control_mode=delta_ee_pos\ncontrol mode:"),
        (["env.control_mode=qpos"], "expected qpos, found delta_ee_pos; it was recorded with env.control_mode="),
        (
            ["env.task=stack_d0"],
            "observation.privileged: expected 36 entries, found 21; it was recorded with env.task=[",
        ),
        (
            ["env.task=stack_d0", "env.object_state=state"],
            "observation.state: expected 66, found 51; it was recorded with env.task=[push_d0]",
        ),
        (["env.task=lift_d0"], "the instructions of the env are"),
        (["imitate.demos=nowhere"], "nowhere"),
        (["imitate.demos=[]"], "expected the folder(s) of demonstrations"),
        (
            ["training.total_timesteps=5"],
            "imitate has no env steps; set training.iterations instead, and training.total_timesteps=null",
        ),
        (["env.task=lift_d7"], "lift_d7"),
    ],
)
def test_settings_that_do_not_match_the_dataset_are_refused(folder, tmp_path, capsys, change, message):
    out = tmp_path / "run"
    words = ["train", "imitate", f"imitate.demos={folder / 'state'}", "env.threads=1", "--output", str(out), *change]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("recorded", "asked", "message"),
    [
        ("hidden", "state", "observation.state: expected 51, found 30; it was recorded with env.object_state=hidden"),
        ("state", "hidden", "observation.state: expected 30, found 51; it was recorded with env.object_state=state"),
        ("hidden", "privileged", "expected 21 entries, found none; it was recorded with env.object_state=hidden"),
    ],
)
def test_other_object_state_than_recorded_is_refused_with_its_setting(tmp_path, recorded, asked, message):
    plan = Plan(TabletopConfig(**ENV | {"object_state": recorded}), max_episode_steps=2, keep_failures=True)
    record(plan, 1, tmp_path / "demos", quiet=True)
    config = load_config(settings(tmp_path / "demos", tmp_path / "run", env=ENV | {"object_state": asked}))
    with pytest.raises(UserError, match=message):
        Run(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recorded", "asked", "has_settings", "message"),
    [
        ("hidden", "state", True, "env.object_state: expected state, found hidden"),
        ("privileged", "state", True, None),
        ("state", "hidden", True, "env.object_state: expected hidden, found state\nentries of observation.state"),
        ("state", "hidden", False, "entries of observation.state: expected 30 or fewer, found 51"),
        ("privileged", "hidden", True, None),
    ],
)
def test_padded_state_with_other_contents_is_refused(tmp_path, recorded, asked, has_settings, message):
    demos = tmp_path / "demos"
    plan = Plan(TabletopConfig(**ENV | {"object_state": recorded}), max_episode_steps=2, keep_failures=True)
    record(plan, 1, demos, quiet=True)
    if not has_settings:
        # a dataset from elsewhere lacks the recording settings
        file = demos / "meta" / "sparring.json"
        extras = json.loads(file.read_text())
        extras["env"] = {key: extras["env"][key] for key in ("name", "task")}
        file.write_text(json.dumps(extras))
        (demos / "manifest.json").unlink()
    config = load_config(settings(demos, tmp_path / "run", env=ENV | {"object_state": asked, "pad_state": 80}))
    if message is None:
        run_to_the_end(config)
        return
    with pytest.raises(UserError, match=f"\n{message}"):
        Run(config)
    assert not (tmp_path / "run").exists()


def test_policy_without_imitation_loss_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.delattr(ActorCritic, "imitation_loss")
    with pytest.raises(UserError, match="ActorCritic .*imitation_loss"):
        Run(load_config(settings(folder / "state", tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_state_policy_imitates_a_dataset_with_images_and_is_fine_tuned(folder, tmp_path, capsys):
    out, tuned = tmp_path / "run", tmp_path / "tuned"
    short = ["training.iterations=1", "rollout.n_envs=2", "rollout.render_episodes=0", "evaluation.episodes=2"]
    words = ["train", "imitate", f"imitate.demos={folder / 'seen'}", "env.object_state=state", "env.cameras=[]", *short]
    assert main([*words, "env.threads=1", "imitate.steps_per_update=2", "--output", str(out)]) == 0
    err = capsys.readouterr().err
    assert "2 demonstrations (14 steps)" in err and ", from state; seed" in err and "images" not in err
    spec = json.loads((checkpoints(out)[-1] / "spec.json").read_text())["observation"]
    assert spec.keys() == {"state", "task"} and spec["state"][0] == [51]
    words = ["train", "finetune", f"pretrained={out}", *short, "rollout.steps=8", "ppo.mini_batch_size=8"]
    assert main([*words, "env.threads=1", "--output", str(tuned)]) == 0
    assert "starts from the weights of" in capsys.readouterr().err


def test_env_settings_are_inherited_from_the_demonstrations(folder, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["train", "imitate", f"imitate.demos={folder / 'state'}", "env.threads=1", "--output", str(out)]
    words += ["training.iterations=2", "imitate.steps_per_update=2", "--batch_size", "4", "evaluation.episodes=2"]
    assert main([*words, "rollout.n_envs=2", "rollout.render_episodes=0"]) == 0
    err = capsys.readouterr().err
    assert f"from imitate.demos={folder / 'state'}: env.task=[push_d0] env.object_state=privileged" in err
    assert "learns from 4 demonstrations (28 steps)" in err and "2 updates" in err
    config = load_config(checkpoints(out)[-1] / "config.yaml")
    assert config.env.control_mode == "delta_ee_pos" and config.imitate.batch_size == 4
    assert set(json.loads((out / "evaluation.json").read_text())["scores"]) == {"policy", "random"}
    assert len((out / "episode_metrics.jsonl").read_text().splitlines()) == 2
