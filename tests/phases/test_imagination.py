"""Fine-tuning in a world model's imagination: predicted transitions, evaluation in the real env, resume."""

import pytest
import torch
from doubles_world_model import CopyingWorldModel

from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.config.text import parse_overrides
from sparring.errors import UserError
from sparring.runs.run import Run
from sparring.world_models.imagined_env import ImaginedEnv

SHORT = ["device=cpu", "env.threads=1", "logging.console_level=ERROR", "evaluation.episodes=2", "rollout.n_envs=2"]
SHORT += ["rollout.steps=4", "rollout.render_episodes=0", "evaluation.baseline=false"]
TEACHER = ["env.image_size=32", "world_model.name=doubles_world_model:CopyingWorldModel", "rollout.action_steps=2"]
TEACHER += ["env.task=reach_d0", "teacher.gradient_steps=1", "teacher.batch_size=2", "training.iterations=1"]
TEACHER += ["rollout.max_episode_steps=8"]
POLICY = ["policy.hidden=[8]", "policy.channels=[4,4]", "policy.image_features=8", "batch_size=4"]
POLICY += ["n_epochs=1"]


def config_of(phase, output, *overrides):
    settings = parse_overrides([f"phase={phase}", f"output={output}", *SHORT, *overrides])
    return load_config(None, settings)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "teacher_rl"
    run = Run(config_of("teacher", folder, *TEACHER), quiet=True)
    assert run.run()
    run.phase.close()
    return folder


def run_of(teacher, output, *overrides) -> Run:
    return Run(config_of("finetune", output, f"rollout.imagined={teacher}", *POLICY, *overrides), quiet=True)


def test_rollouts_are_predictions_of_the_model(teacher, tmp_path, monkeypatch):
    # a reward that the env never gives
    def predict(self, td, without=(), truly=CopyingWorldModel.predict):
        return truly(self, td).set("reward", torch.full((len(td),), 7.0))

    monkeypatch.setattr(CopyingWorldModel, "predict", predict)
    run = run_of(teacher, tmp_path, "rollout.imagined_decisions=3")
    phase = run.phase
    assert isinstance(phase.env, ImaginedEnv) and run.config.env.task == ("reach_d0",)
    metrics = phase.step(0.0)
    model = phase.env.backend.model
    # 4 decisions to fit the normalisers and 4 of the update
    assert model.calls["predict"] == 8 and model.calls["loss"] == 0
    rollout = phase.buffer.rollout()
    # 3 decisions with reward 7, two episodes of each of 2 robots
    assert metrics["episode_reward"] == 21 and phase.progress.episodes == 4
    assert bool((rollout["next", "reward"] == 3.5).all())
    # the double copies the image, slightly brighter: within an episode frames are nearly equal
    shown = rollout["observation", "image", "head"].float()
    assert torch.allclose(shown[0], shown[1], atol=1.5) and not torch.allclose(shown[0], shown[3], atol=1.5)
    assert "in a world model's imagination" in phase.learns_from


def test_evaluation_uses_the_real_env(teacher, tmp_path):
    run = run_of(teacher, tmp_path, "training.iterations=1")
    model = run.phase.env.backend.model
    assert run.run()
    before = model.calls["predict"]
    evaluation = run.evaluate()
    assert model.calls["predict"] == before and evaluation.episodes == 2
    score = evaluation.scores["policy"]["reach_d0"]
    # the limit of the task, not of imagination
    assert score.steps > 16 * 2 or score.success.rate > 0


def test_resumed_run_is_bit_identical(teacher, tmp_path):
    options = ["training.iterations=4", "rollout.imagined_decisions=3"]
    straight = run_of(teacher, tmp_path / "straight", *options)
    assert straight.run()
    first = run_of(teacher, tmp_path / "stopped", *options)
    for _ in range(2):
        first.phase.step(first.fraction)
    first.save()
    second = run_of(teacher, tmp_path / "stopped", *options)
    assert second.phase.progress.updates == 2
    assert second.run()
    ours, theirs = second.phase.policy.state_dict(), straight.phase.policy.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_robots_of_a_group_start_equally(teacher, tmp_path):
    grpo = ["algorithm=grpo", "rollout.n_episodes_per_batch=4", "rollout.group_size=2", "rollout.imagined_decisions=3"]
    phase = run_of(teacher, tmp_path, *grpo).phase
    assert phase.buffer.steps == 2 * 3
    phase.step(0.0)
    first = phase.buffer.rollout()["observation", "image", "wrist"][0]
    assert torch.equal(first[0], first[1])


def test_only_finetune_accepts_imagination(teacher, tmp_path):
    with pytest.raises(ConfigError, match="rollout.imagined.*student acts in the env"):
        config_of("student", tmp_path, f"rollout.imagined={teacher}", f"student.teacher={teacher}")


def test_incompatible_world_model_is_refused(teacher, tmp_path):
    with pytest.raises(UserError, match="(?s)rollout.imagined=.*rollout.action_steps was 2 and is 3"):
        run_of(teacher, tmp_path, "rollout.action_steps=3")
