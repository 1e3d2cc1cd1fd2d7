"""The adversarial phase: order and data of updates, held-out episodes, bit-identical resume."""

import copy
import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from metric_names import unexplained

from sparring.api import load_policy, load_world_model
from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.config.text import parse_overrides
from sparring.data.episodes import EpisodeStore
from sparring.errors import UserError
from sparring.phases.adversarial import Adversarial
from sparring.phases.replay import Generations
from sparring.phases.teacher import Teacher
from sparring.rewards.reward_model import RewardModel
from sparring.runs.run import Run
from sparring.runs.summary import _next_commands as next_commands

SHORT = ["device=cpu", "env.threads=1", "logging.console_level=ERROR", "evaluation.episodes=2", "rollout.n_envs=2"]
SHORT += ["rollout.steps=4", "rollout.max_episode_steps=8", "rollout.render_episodes=0", "training.bptt_length=2"]
TEACHER = ["env.image_size=32", "world_model.name=doubles_world_model:CopyingWorldModel", "rollout.action_steps=2"]
TEACHER += ["teacher.gradient_steps=2", "teacher.batch_size=2", "training.iterations=2"]
EXPLORER = ["policy.hidden=[8]", "policy.channels=[4,4]", "policy.image_features=8"]
SMALL = ["ppo.mini_batch_size=4", "ppo.ppo_epochs=1", "rewards.disagreement=0", "rewards.prediction_error=1"]
SPARRING = ["adversarial.wm_updates_per_iter=3", "adversarial.batch_size=2", "adversarial.burn_in=1"]
SPARRING += ["adversarial.warmup_steps=3", "adversarial.generation_every=2", "adversarial.held_out=0.5"]


def config_of(phase, output, *overrides):
    settings = parse_overrides([f"phase={phase}", f"output={output}", *SHORT, *overrides])
    return load_config(None, settings)


def trained(config) -> Run:
    run = Run(config, quiet=True)
    assert run.run()
    return closed(run)


def closed(run: Run) -> Run:
    (run.phase if isinstance(run.phase, Adversarial | Teacher) else run.phase.env).close()
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with finished runs of teacher and student."""
    folder = tmp_path_factory.mktemp("runs")
    trained(config_of("teacher", folder / "teacher_rl", *TEACHER))
    student = ["training.iterations=1", f"student.teacher={folder}/teacher_rl", *EXPLORER, *SMALL]
    trained(config_of("student", folder / "student_rl", *student))
    return folder


def adversarial_config(runs, output, *overrides):
    given = [f"adversarial.teacher={runs}/teacher_rl", f"adversarial.student={runs}/student_rl", *SMALL, *SPARRING]
    return config_of("adversarial", output, *given, *overrides)


def run_of(runs, output, *overrides) -> Run:
    return Run(adversarial_config(runs, output, *overrides), quiet=True)


def weights_of(phase) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in phase.model.state_dict().items()}


def test_run_starts_with_weights_and_settings_of_teacher_and_student(runs, tmp_path):
    run = run_of(runs, tmp_path)
    config, phase = run.config, run.phase
    assert config.env.image_size == 32 and config.policy.hidden == (8,) and config.rollout.action_steps == 2
    student = load_policy(runs / "student_rl").state_dict()
    assert all(torch.equal(weight, student[name]) for name, weight in phase.explorer.policy.state_dict().items())
    teacher = load_world_model(runs / "teacher_rl")
    assert torch.equal(phase.world_model.brighter, teacher.brighter)
    # the world model of the rewards is the one that learns
    assert phase.explorer.rewards.world_model is phase.model["world_model"]
    assert phase.explorer.policy is phase.model["policy"]
    assert phase.explorer.policy.in_keys == [("observation", "image", "wrist"), ("observation", "state")]
    closed(run)


def test_world_model_warms_up_before_both_learn(runs, tmp_path):
    run = run_of(runs, tmp_path)
    phase, before = run.phase, weights_of(run.phase)
    first = phase.step(0.0)
    after = weights_of(phase)
    assert phase.learner.gradient_steps == 3 and phase.world_model.calls["loss"] == 3
    assert "approx_kl" not in first and first["wm_loss"] > 0
    assert not torch.equal(before["world_model.brighter"], after["world_model.brighter"])
    policy = [name for name in before if name.startswith("policy.")]
    assert all(torch.equal(before[name], after[name]) for name in policy)
    second = phase.step(0.1)
    assert second["gradient_steps"] == 2 and {"loss", "wm_loss", "lr", "wm_lr"} <= second.keys()
    assert any(not torch.equal(after[name], weight) for name, weight in weights_of(phase).items() if name in policy)
    assert phase.progress.updates == 2 and phase.progress.env_steps == 2 * 2 * 4 * 2
    closed(run)


def test_rollout_that_fits_normalisers_is_recorded(runs, tmp_path):
    given = [f"adversarial.teacher={runs}/teacher_rl", *SMALL, *SPARRING, *EXPLORER, "adversarial.warmup_steps=0"]
    run = Run(config_of("adversarial", tmp_path, *given, "adversarial.held_out=0"), quiet=True)
    run.phase.step(0.0)
    # an episode is 8 steps, a rollout 4 decisions of 2 steps
    assert run.phase.explorer.algorithm.warmups == 1 and run.phase.progress.env_steps == 2 * 2 * 8
    assert len(run.phase.replay.store) == run.phase.progress.episodes == 4
    closed(run)


def test_explorer_updates_per_iter(runs, tmp_path):
    given = [
        "adversarial.explorer_updates_per_iter=3",
        "adversarial.warmup_steps=0",
        "adversarial.wm_updates_per_iter=1",
    ]
    run = run_of(runs, tmp_path, *given)
    run.phase.step(0.0)
    assert run.phase.explorer.algorithm.updates == 3 and run.phase.learner.gradient_steps == 1
    assert run.phase.progress.updates == 1 and run.phase.progress.env_steps == 3 * 4 * 2 * 2
    closed(run)


def test_learning_rates_are_separate(runs, tmp_path):
    run = run_of(runs, tmp_path, "adversarial.learning_rate=0.5", "ppo.policy_lr=0.25", "adversarial.warmup_steps=0")
    metrics = run.phase.step(0.0)
    assert metrics["lr"] == 0.25
    # its learning rate rises over 50 steps; the metric is a mean over 3
    assert metrics["wm_lr"] == pytest.approx(0.5 * (1 + 2 + 3) / 3 / 50)
    closed(run)


def test_kl_coef_limits_the_distance_to_the_students_policy(runs, tmp_path):
    moved = {}
    for kl_coef in (0.0, 50.0):
        given = ["adversarial.warmup_steps=0", "ppo.ppo_epochs=8", "ppo.policy_lr=0.01", "ppo.target_kl=null"]
        run = run_of(runs, tmp_path / str(kl_coef), f"adversarial.kl_coef={kl_coef}", *given)
        student = copy.deepcopy(run.phase.explorer.policy.state_dict())
        metrics = run.phase.step(0.0)
        assert ("reference_kl" in metrics) == (kl_coef > 0)
        policy = run.phase.explorer.policy.state_dict()
        moved[kl_coef] = sum(float((policy[n] - student[n]).norm()) for n in student if policy[n].is_floating_point())
        if kl_coef:
            reference = run.phase.explorer.algorithm.scorer.reference.state_dict()
            assert all(torch.equal(reference[name], weight) for name, weight in student.items())
            assert metrics["reference_kl"] > 0
        closed(run)
    assert moved[50.0] < moved[0.0]


def test_new_explorer_without_student_has_no_reference(runs, tmp_path):
    given = [f"adversarial.teacher={runs}/teacher_rl", *SMALL, *SPARRING, *EXPLORER, "adversarial.warmup_steps=0"]
    run = Run(config_of("adversarial", tmp_path, *given), quiet=True)
    assert "reference_kl" not in run.phase.step(0.0)
    closed(run)


def test_episodes_are_stored_with_env_rewards_and_a_held_out_share(runs, tmp_path):
    given = ["adversarial.held_out=0.25", "env.task=reach_d0", "env.reward=dense", "adversarial.replay_random=0"]
    run = run_of(runs, tmp_path, *given)
    phase = run.phase
    for _ in range(4):
        phase.step(0.0)
    # 2 robots, 4 updates of one episode each: every fourth is set aside
    kept = len(phase.replay.store), [len(EpisodeStore(tmp_path / "generations" / k, read_only=True)) for k in "01"]
    assert kept == (6, [1, 1])
    episode = phase.replay.store.episode(0)
    assert len(episode) == 4 and bool(episode["is_first"][0])
    # the env has a reward per step; the intrinsic reward comes at the end of a decision
    assert bool((episode["next", "reward"] != 0).all())
    # the double's error: |first action entry| + share of changed images
    wrong = episode["judged", "error"] - episode["action"][:, 0, 0].abs()
    assert bool(((wrong > -1e-6) & (wrong < 1 + 1e-6)).all())
    assert phase.replay.store.info(0)["source"] == "explorer"
    closed(run)


def test_windows_are_sampled_from_three_sources_by_weight(runs, tmp_path):
    weights = ["adversarial.replay_random=1", "adversarial.replay_past=0", "adversarial.replay_newest=3"]
    run = run_of(runs, tmp_path, *weights, "adversarial.batch_size=64")
    for _ in range(2):
        run.phase.step(0.0)
    batch = next(run.phase.replay.batches)
    counts = torch.bincount(batch["source"][:, 0], minlength=3)
    # in this order: past, newest, random
    assert counts[0] == 0 and 32 <= counts[1] <= 60 and counts.sum() == 64
    assert ("judged", "error") not in batch.keys(True)
    closed(run)


def test_newest_windows_come_from_the_newest_episodes(runs, tmp_path):
    run = run_of(runs, tmp_path, "adversarial.replay_random=0", "adversarial.replay_past=0", "adversarial.held_out=0")
    for _ in range(3):
        run.phase.step(0.0)
    newest = [run.phase.replay.store.episode(i)["action"].clone() for i in (4, 5)]
    actions = next(run.phase.replay.batches)
    actions = actions["action"][actions["mask"]]
    for action in actions:
        assert any(bool((of == action).flatten(1).all(1).any()) for of in newest)
    closed(run)


def test_metrics_compare_past_and_present_errors_of_generations(runs, tmp_path):
    run = run_of(runs, tmp_path)
    phase = run.phase
    assert "generations_error_now" not in phase.step(0.0)
    metrics = phase.step(0.0)
    (store,) = phase.replay.generations.earlier()
    then, now = Generations.errors(phase.world_model, store)
    assert metrics["generations_error_then"] == pytest.approx(then)
    assert metrics["generations_error_now"] == pytest.approx(now)
    judged = [store.episode(i)["judged", "error"] for i in range(len(store))]
    assert then == pytest.approx(float(torch.cat(judged).mean()), rel=1e-6)
    # the double's error is |action| + share of wrong images; the first part does not change
    actions = torch.cat([store.episode(i)["action"][:, 0, 0].abs() for i in range(len(store))])
    assert now >= float(actions.mean()) - 1e-6
    closed(run)


def test_resume_removes_later_generations(tmp_path, runs):
    source = EpisodeStore(runs / "teacher_rl/episodes", read_only=True)
    episode = source.episode(0)
    train = EpisodeStore(tmp_path / "train")
    generations = Generations(train, tmp_path / "generations", 1 / 3)
    for _ in range(4):
        generations.append(episode)
    assert (len(train), len(generations.store)) == (3, 1)
    state = generations.state_dict()
    generations.begin(1)
    for _ in range(3):
        generations.append(episode)
    assert (len(train), len(generations.store)) == (5, 1)
    generations.load_state_dict(state)
    assert generations.played == 4 and [f.name for f in (tmp_path / "generations").iterdir()] == ["0"]
    generations.close()
    train.close()


def lines(folder) -> list[dict]:
    # a process checks its first rollout completely, later ones by one minibatch, so parities differ after a resume
    timed = ("timestamp", "row", "crc", "perf/steps_per_second", "train/parity", "train/parity_ratio")
    rows = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in timed and not k.endswith("_seconds")} for row in rows]


def test_resumed_run_is_bit_identical(runs, tmp_path):
    options = ["training.iterations=5", "training.save_every=3", "training.log_every=1", "rewards.learning_progress=1"]
    # episodes that span rollouts
    options += ["rollout.max_episode_steps=14"]
    straight = trained(adversarial_config(runs, tmp_path / "straight", *options))
    first = run_of(runs, tmp_path / "stopped", *options)
    for _ in range(3):
        first.phase.step(first.fraction)
    first.save()
    # updates after the last checkpoint are discarded
    first.phase.step(first.fraction)
    closed(first)
    second = run_of(runs, tmp_path / "stopped", *options)
    assert second.phase.progress.updates == 3
    assert second.run()
    closed(second)
    ours, theirs = second.phase.model.state_dict(), straight.phase.model.state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")[3:]
    assert not unexplained(name for line in lines(tmp_path / "straight") for name in line)
    played = 0
    for name in ("episodes", "generations/0", "generations/1", "generations/2"):
        ours, theirs = (EpisodeStore(tmp_path / of / name, read_only=True) for of in ("stopped", "straight"))
        assert len(ours) == len(theirs)
        played += len(ours)
        for i in range(len(ours)):
            assert np.array_equal(ours.episode(i)["action"], theirs.episode(i)["action"])
    # 20 decisions of 2 robots, in episodes of 7
    assert played == 4


def test_failed_update_is_not_saved(runs, tmp_path):
    run = run_of(runs, tmp_path, "adversarial.explorer_updates_per_iter=2", "adversarial.warmup_steps=0")
    collect, turns = run.phase.explorer.collector.collect, []

    def collect_or_fail(buffer):
        turns.append(len(turns))
        if turns[-1] in (2, 6):
            raise ZeroDivisionError("the gripper fell off")
        return collect(buffer)

    run.phase.explorer.collector.collect = collect_or_fail
    # the first rollout of the second update, the second one of the next
    for learning in (False, True):
        with pytest.raises(ZeroDivisionError):
            run.run()
        assert run.phase.learning == learning
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    closed(run)


def test_world_model_and_policy_are_loaded_and_evaluated(runs, tmp_path, capsys):
    run = run_of(runs, tmp_path / "run", "training.iterations=1")
    assert run.run()
    assert run.evaluate().figures["cameras"].keys() == {"head", "wrist"}
    closed(run)
    assert torch.equal(load_world_model(tmp_path / "run").brighter, run.phase.world_model.brighter)
    loaded, policy = load_policy(tmp_path / "run").state_dict(), run.phase.explorer.policy.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in policy.items())
    assert main(["eval", str(tmp_path / "run"), "--episodes", "2", "evaluation.baseline=false"]) == 0
    recommended = [shlex.split(command)[1:] for command in next_commands(run.config)]
    assert [words[-1] for words in recommended[1:]] == ["--exploration", "--world-model"]
    for words in recommended[1:]:
        assert main([*words, "--episodes", "2"]) == 0


def test_original_command_line_is_accepted(runs, tmp_path):
    words = ["train", "phase3", "--teacher_checkpoint", str(runs / "teacher_rl/checkpoint-2"), "--batch_size", "2"]
    words += ["--student_checkpoint", str(runs / "student_rl"), "--output", str(tmp_path / "run")]
    assert main([*words, *SHORT, *SMALL, *SPARRING[:1], "training.iterations=1"]) == 0
    assert "reward/prediction_error" in lines(tmp_path / "run")[-1]
    assert sorted((tmp_path / "run/samples").glob("*_pred_vs_gt.png"))


def test_dry_run_writes_nothing(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "adv", "--teacher_path", str(runs / "teacher_rl"), "--dry-run", *SHORT, *SMALL, *SPARRING]
    assert main([*words, *EXPLORER]) == 0
    assert "loss: " in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("phase", ["student", "adversarial"])
def test_dry_run_of_the_rollout_uses_env_rewards(runs, tmp_path, capsys, monkeypatch, phase):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RewardModel, "write_rewards", lambda *_: pytest.fail("nothing is learned from this rollout"))
    words = ["train", phase, "--teacher_path", str(runs / "teacher_rl"), "--dry-run", "rollout", *SHORT, *SMALL]
    assert main([*words, *EXPLORER]) == 0
    assert "one rollout, nothing written" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["adversarial.teacher=null"], "adversarial.teacher.*`sparring train teacher`"),
        ([f"adversarial.replay_{name}=0" for name in ("random", "past", "newest")], "all replay weights are 0"),
    ],
)
def test_invalid_settings_are_refused(runs, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        adversarial_config(runs, tmp_path, *given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("world_model.brighter=2", "adversarial.teacher=.*world_model.brighter was 0.0 and is 2.0"),
        ("policy.hidden=[9]", "adversarial.student=.*policy.hidden was .* and is"),
    ],
)
def test_incompatible_checkpoints_are_refused(runs, tmp_path, given, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        run_of(runs, tmp_path, given)


def test_swapped_teacher_and_student_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match="made by `sparring train student`"):
        run_of(runs, tmp_path, f"adversarial.teacher={runs}/student_rl")
    with pytest.raises(UserError, match="made by `sparring train teacher`"):
        run_of(runs, tmp_path, f"adversarial.student={runs}/teacher_rl", *EXPLORER)


def test_teacher_without_episodes_folder_is_refused_if_replayed(runs, tmp_path):
    copied = shutil.copytree(runs / "teacher_rl/checkpoint-2", tmp_path / "elsewhere/checkpoint-2")
    with pytest.raises(UserError, match="no folder 'episodes'"):
        run_of(runs, tmp_path / "run", f"adversarial.teacher={copied}")
    closed(run_of(runs, tmp_path / "run", f"adversarial.teacher={copied}", "adversarial.replay_random=0"))


def test_episodes_of_another_task_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match="(?s)adversarial.teacher=.*its episodes are of other tasks: .*, here "):
        run_of(runs, tmp_path, "env.task=push_d0")
    # without replay of random episodes they are not used
    assert run_of(runs, tmp_path, "env.task=push_d0", "adversarial.replay_random=0").phase.random is None


def test_teacher_with_empty_store_is_refused(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "runs")
    for path in (tmp_path / "runs/teacher_rl/episodes").glob("segment-*"):
        path.unlink()
    with pytest.raises(UserError, match="no episodes in .*episodes'; train the world model again"):
        run_of(tmp_path / "runs", tmp_path / "run")
