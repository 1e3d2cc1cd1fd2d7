"""The student phase: observations of explorer and world model, intrinsic rewards, compatible teachers."""

import json

import pytest
import torch
from doubles_judge import JudgingWorldModel
from tensordict import TensorDict

from sparring.api import load_policy
from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.config.text import parse_overrides
from sparring.envs.env import make_env
from sparring.errors import UserError
from sparring.phases.replay import NewestEpisode
from sparring.runs.checkpoint import save_checkpoint
from sparring.runs.run import Run
from sparring.world_models.world_model import make_world_model

SMALL = ["env.image_size=32", "env.threads=1", "world_model.name=doubles_judge:JudgingWorldModel", "device=cpu"]
BRIEF = [
    "rollout.n_envs=2",
    "rollout.steps=6",
    "rollout.max_episode_steps=16",
    "policy.hidden=[8]",
    "evaluation.episodes=2",
]
BRIEF += ["policy.channels=[4,4]", "policy.image_features=8", "ppo.mini_batch_size=6", "rollout.render_episodes=0"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run folder like that of `sparring train teacher`; its world model has a weight of 0.5."""
    folder = tmp_path_factory.mktemp("runs") / "teacher_rl"
    config = load_config(None, parse_overrides([*SMALL, "rollout.action_steps=3", "env.action_scale=2"]), "teacher")
    env = make_env(config.env, 1)
    model = make_world_model(config.world_model, env.spec, 3)
    with torch.no_grad():
        model.weight.fill_(0.5)
    save_checkpoint(folder, 7, model, {}, config.to_yaml(), env.spec)
    env.close()
    return folder


def student_config(teacher, output, *overrides):
    settings = [f"student.teacher={teacher}", f"output={output}", "env.threads=1", "device=cpu", *BRIEF, *overrides]
    settings = parse_overrides(settings + ["phase=student"])
    return load_config(None, settings)


def run_of(teacher, output, *overrides) -> Run:
    return Run(student_config(teacher, output, *overrides), quiet=True)


def test_settings_of_the_teacher_are_inherited(teacher, tmp_path):
    config = student_config(teacher, tmp_path)
    assert config.env.image_size == 32 and config.env.cameras == ("head", "wrist")
    assert config.env.action_scale == 2 and config.rollout.action_steps == 3
    assert config.world_model.name == "doubles_judge:JudgingWorldModel"


def test_another_kind_of_policy_does_not_get_actor_critic_defaults(teacher, tmp_path):
    assert student_config(teacher, tmp_path).policy.distribution == "gsde"
    flow = ["policy.name=flow", *(word for word in BRIEF if not word.startswith("policy."))]
    settings = parse_overrides([f"student.teacher={teacher}", "phase=student", *flow])
    assert load_config(None, settings).policy.name == "flow"


def test_rollout_that_fits_normalisers_gets_rewards(teacher, tmp_path):
    """Otherwise the world model's memory would start in the middle of an episode."""
    phase = run_of(teacher, tmp_path, "rollout.steps=4").phase
    rewards, first = phase.rewards, []
    enter = rewards.memory.enter
    rewards.memory.enter = lambda td: first.append(td["is_first"].all()) or enter(td)
    phase.step(0.0)
    # two rollouts of 4 decisions of 2 robots, in time order; an episode has 6 decisions
    assert phase.algorithm.warmups == 1 and float(rewards.normalizer.count) == 16
    assert [bool(begins) for begins in first] == [True, *[False] * 5, True, False]
    phase.step(0.1)
    assert len(first) == 12
    phase.env.close()


def test_explorer_reads_the_wrist_camera_and_world_model_reads_both(teacher, tmp_path):
    phase = run_of(teacher, tmp_path).phase
    assert phase.policy.in_keys == [("observation", "image", "wrist"), ("observation", "state")]
    model = phase.rewards.world_model
    assert isinstance(model, JudgingWorldModel) and model.cameras == ("head", "wrist")
    assert phase.rewards.unseen == ("head",)
    root = phase.env.reset(0)
    acted = phase.policy.act(root.clone())["action"]
    root["observation", "image", "head"].random_(0, 255)
    assert torch.equal(phase.policy.act(root.clone())["action"], acted)
    root["observation", "image", "wrist"].random_(0, 255)
    assert not torch.equal(phase.policy.act(root)["action"], acted)


def test_world_model_keeps_the_teachers_weights(teacher, tmp_path):
    phase = run_of(teacher, tmp_path).phase
    model = phase.rewards.world_model
    assert model.weight.item() == 0.5 and not model.weight.requires_grad and not model.training
    before = {name: weight.clone() for name, weight in phase.policy.state_dict().items()}
    phase.step(0.0)
    assert model.weight.item() == 0.5
    after = phase.policy.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert [name for name in phase.model.state_dict() if name == "weight"] == []


def test_update_reports_rewards_and_contact(teacher, tmp_path):
    phase = run_of(teacher, tmp_path, "rewards.prediction_error=0.5").phase
    metrics = phase.step(0.0)
    for name in ("memory_divergence", "disagreement", "prediction_error"):
        assert {f"reward/{name}", f"reward/{name}_normalized"} <= metrics.keys()
    # the double's disagreement is three times its error
    assert metrics["reward/disagreement"] == pytest.approx(3 * metrics["reward/prediction_error"], rel=1e-5)
    assert 0 <= metrics["contact_share"] <= 1
    # task explore has no reward; normalised intrinsic rewards vary even in the first rollout
    assert phase.buffer.rollout()["next", "reward"].std() > 0.1
    assert phase.step(0.0)["episode_reward"] != 0
    assert "with rewards memory_divergence, prediction_error, disagreement" in phase.learns_from


def test_predictions_of_the_newest_complete_episode_are_recorded(teacher, tmp_path):
    # an episode of 16 steps has 6 decisions, a rollout 2; the first update has two rollouts
    folder, options = (
        tmp_path / "run",
        ("rollout.steps=2", "ppo.mini_batch_size=2", "rollout.render_episodes=1", "training.iterations=4"),
    )
    run = run_of(teacher, folder, *options, "logging.video_share=1")
    phase = run.phase
    assert phase.newest_prediction() is None
    phase.step(0.0)
    assert phase.newest_prediction() is None, "the first episode has not ended"
    phase.step(0.0)
    shown = phase.newest_prediction()
    assert set(shown.true) == {"head", "wrist"} and shown.rate == phase.env.spec.control_hz / 3
    for camera, true in shown.true.items():
        assert true.shape == (6, 32, 32, 3)
        # each prediction starts from the true frame before it
        assert (shown.predicted[camera][1:, ..., 1:] == true[:-1, ..., 1:]).all()
        # with the memory of this episode only
        assert shown.predicted[camera][:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
    # rewards of the env: explore has none
    assert not shown.rewards.any()
    assert run.run()
    run.recorder.close()
    samples = [json.loads(line) for line in (folder / "videos/index.jsonl").read_text().splitlines()]
    (last,) = [line for line in samples if line["kind"] == "prediction" and line["update"] == 4]
    assert (folder / last["file"]).is_file() and (folder / last["strip"]).name.endswith("_pred_vs_gt.png")
    assert list((folder / "samples").glob("*_pred_vs_gt.png"))


def test_newest_episode_is_assembled_from_rollouts():
    def rollout(*steps):
        """Numbers of decisions; 0 begins an episode, a negative one ends it."""
        numbers = torch.tensor(steps)
        done = {"terminated": numbers < 0, "truncated": torch.zeros(len(steps), dtype=torch.bool)}
        td = {"action": numbers.abs(), "is_first": numbers == 0, "next": TensorDict(done, [len(steps)])}
        return TensorDict(td, [len(steps)])

    newest, found = NewestEpisode(), []
    # the end of an unknown episode; one over three rollouts; two in one; one unfinished
    for steps in [(7, -8, 0), (1, 2), (-3, 0), (-1, 0, -2, 0), (0, 1), (-4,)]:
        newest.add(rollout(*steps))
        found.append(newest.complete["action"].tolist() if newest.complete is not None else None)
    assert found == [None, None, [0, 1, 2, 3], [0, 2], [0, 2], [0, 1, 4]]


def test_resumed_run_is_bit_identical(teacher, tmp_path):
    options = ("training.iterations=3", "training.save_every=2", "rewards.rnd=0.1")
    straight = run_of(teacher, tmp_path / "straight", *options)
    assert straight.run()
    first = run_of(teacher, tmp_path / "stopped", *options)
    for _ in range(2):
        first.phase.step(first.fraction)
    first.save()
    second = run_of(teacher, tmp_path / "stopped", *options)
    assert second.phase.progress.updates == 2
    assert second.run()
    for name, weight in straight.phase.policy.state_dict().items():
        assert torch.equal(weight, second.phase.policy.state_dict()[name]), name


def test_saved_student_is_loaded_and_evaluated(teacher, tmp_path):
    run = run_of(teacher, tmp_path / "run", "training.iterations=1")
    assert run.run()
    policy = load_policy(tmp_path / "run")
    assert policy.in_keys == run.phase.policy.in_keys
    assert run.evaluate().episodes == 2
    assert main(["eval", str(tmp_path / "run"), "--episodes", "2"]) == 0


@pytest.mark.parametrize("flag", ["--teacher_checkpoint", "--teacher_path"])
def test_original_command_line_is_accepted(teacher, tmp_path, flag, capsys):
    words = ["train", "phase2", flag, str(teacher / "checkpoint-7"), "--output", str(tmp_path / "run"), "device=cpu"]
    assert main([*words, *BRIEF, "env.threads=1", "training.iterations=1", "evaluation.baseline=false"]) == 0
    lines = (tmp_path / "run/episode_metrics.jsonl").read_text().splitlines()
    assert "reward/disagreement" in json.loads(lines[-1])
    assert "world_model.name=doubles_judge:JudgingWorldModel" in capsys.readouterr().err


def test_rewards_original_is_a_preset(teacher, tmp_path):
    rewards = student_config(teacher, tmp_path, "rewards=original").rewards
    assert (rewards.memory_divergence, rewards.prediction_error, rewards.disagreement) == (1.0, 1.0, 0.0)
    assert rewards.divergence == "original"
    changed = student_config(teacher, tmp_path, "rewards=original", "rewards.rnd=0.5").rewards
    assert changed.rnd == 0.5 and changed.prediction_error == 1.0
    with pytest.raises(ConfigError, match="rewards.name = new .*one of: default, original"):
        student_config(teacher, tmp_path, "rewards=new")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rewards.learning_progress=1"], "rewards.learning_progress = 1 .*frozen in this phase"),
        (["rewards.disagreement=0", "rewards.memory_divergence=0"], "have weight 0"),
    ],
)
def test_unusable_reward_weights_are_config_errors(teacher, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        student_config(teacher, tmp_path, *given)


def test_missing_teacher_setting_is_refused_with_the_command():
    with pytest.raises(ConfigError) as error:
        load_config(None, phase="student")
    assert len(error.value.problems) == 1
    assert "student.teacher" in str(error.value) and "sparring train teacher" in str(error.value)


def test_missing_teacher_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere' does not exist"):
        student_config(tmp_path / "nowhere", tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("world_model.weight=2", "world_model.weight was 1.0 and is 2.0"),
        ("rollout.action_steps=4", "rollout.action_steps was 3 and is 4"),
        ("env.control_mode=delta_ee_pos", "env.control_mode was delta_qpos and is delta_ee_pos"),
        ("env.image_size=64", r"observation/image/head was \[3, 32, 32\] uint8 and is \[3, 64, 64\] uint8"),
    ],
)
def test_incompatible_teacher_is_refused(teacher, tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        run_of(teacher, tmp_path, given)


def test_observations_for_measures_may_differ(teacher, tmp_path):
    assert run_of(teacher, tmp_path, "env.segmentation=true").phase.env.spec.observation["segmentation/head"]


def test_run_of_student_is_refused_as_teacher(teacher, tmp_path):
    assert run_of(teacher, tmp_path / "run", "training.iterations=1").run()
    with pytest.raises(UserError, match="made by `sparring train student`"):
        run_of(tmp_path / "run", tmp_path / "other")


def test_run_of_finetune_is_refused_as_teacher(tmp_path, capsys):
    small = ["env.name=gym:CartPole-v1", "rollout.steps=8", "rollout.render_episodes=0", "evaluation.episodes=2"]
    run = ["--output", str(tmp_path / "run"), "training.iterations=1", "device=cpu", "logging.console_level=ERROR"]
    assert main(["train", "finetune", *run, *small]) == 0
    assert main(["train", "student", "--teacher_path", str(tmp_path / "run"), "--output", str(tmp_path / "other")]) == 2
    assert "made by `sparring train finetune`" in capsys.readouterr().err


def test_unknown_camera_is_refused(teacher, tmp_path):
    with pytest.raises(UserError, match=r"student.cameras=\['left_wrist'\], but the env has head, wrist"):
        run_of(teacher, tmp_path, "student.cameras=left_wrist")


def test_teacher_with_untrained_predictor_is_refused(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.world_models.world_model.WorldModel.ready", False)
    with pytest.raises(UserError, match="tokenizer .* not trained yet"):
        run_of(teacher, tmp_path)
