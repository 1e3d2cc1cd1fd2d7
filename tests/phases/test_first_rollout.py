"""Normalisers are fitted to a rollout before the first update, and only where nothing fitted them yet."""

import copy

import pytest
import torch
from doubles import LinearPolicy
from small_runs import SMALL, config_in

from sparring.algorithms.scoring import Decisions, Parity, ParityError
from sparring.runs.run import Run


def watched(run: Run) -> list[float]:
    """How many observations the normaliser has seen when each update begins."""
    update, seen = run.phase.algorithm.update, []

    def look_and_update(rollout, fraction):
        seen.append(float(run.phase.policy.encoder.normalizer.count))
        return update(rollout, fraction)

    run.phase.algorithm.update = look_and_update
    return seen


def small(tmp_path, **policy) -> Run:
    return Run(config_in(tmp_path, policy=SMALL["policy"] | policy), quiet=True)


def test_the_first_update_learns_with_fitted_normalisers_and_the_steps_count(tmp_path):
    run = small(tmp_path)
    seen = watched(run)
    decisions = run.config.rollout.steps * run.config.rollout.n_envs
    run.phase.step(0.0)
    assert seen == [decisions] and run.phase.progress.env_steps == 2 * decisions
    run.phase.step(0.1)
    # statistics go on after each update, without another rollout
    assert seen == [decisions, 2 * decisions] and run.phase.progress.env_steps == 3 * decisions
    algorithm, collector = run.phase.algorithm, run.phase.collector
    assert (algorithm.updates, algorithm.version, collector.version) == (2, 3, 3)
    run.phase.env.close()


@pytest.mark.parametrize(
    "rollout",
    [{"mode": "async", "staleness": 0}, {"mode": "async"}, {"groups": 2}, {"n_episodes_per_batch": 4}],
    ids=["async in turns", "async", "groups", "whole episodes"],
)
def test_so_it_is_however_rollouts_are_collected(tmp_path, rollout):
    run = Run(config_in(tmp_path, rollout=SMALL["rollout"] | rollout), quiet=True)
    seen = watched(run)
    run.phase.step(0.0)
    (fitted,), once = seen, run.phase.progress.env_steps / 2
    # by episodes the two rollouts differ in length
    assert fitted > 8 and (fitted == once or "n_episodes_per_batch" in rollout and run.phase.progress.episodes == 8)
    assert (run.phase.algorithm.updates, run.phase.algorithm.version) == (1, 2)
    run.phase.env.close()


def test_the_gate_judges_what_the_collecting_process_measured_of_the_first_rollout(tmp_path):
    run = Run(config_in(tmp_path, rollout=SMALL["rollout"] | {"mode": "async"}), quiet=True)
    collector, collect = run.phase.collector, run.phase.collector.collect

    def collect_wrongly(buffer):
        collect(buffer)
        collector.parity = Parity(drift=1.0)

    collector.collect = collect_wrongly
    with pytest.raises(ParityError, match="drift 1 >"):
        run.phase.step(0.0)
    assert run.phase.algorithm.version == 0
    run.phase.env.close()


def test_stale_values_of_the_first_update_are_raised_with_the_critic(tmp_path):
    """V-trace reads both the values that were stored and those of the present critic."""
    run = Run(config_in(tmp_path, ppo=SMALL["ppo"] | {"normalize_value": True, "correction": "vtrace"}), quiet=True)
    algorithm, buffer, judged = run.phase.algorithm, run.phase.buffer, []
    estimate = algorithm._with_advantages

    def collected_by_the_first_weights():
        buffer.set("version", torch.zeros_like(buffer.rollout()["version"]))
        return {}

    def look(rollout):
        judged.append((rollout["value"].mean().item(), rollout["proximal_value"].mean().item(), algorithm.level))
        return estimate(rollout)

    algorithm.expect_stale()
    run.phase.add_rewards, algorithm._with_advantages = collected_by_the_first_weights, look
    run.phase.step(0.0)
    ((stored, proximal, level),) = judged
    assert level > 1 and abs(stored - level) < 0.5 and abs(proximal - level) < 0.5
    run.phase.env.close()


def test_an_algorithm_that_learned_before_takes_fresh_decisions_for_fresh(tmp_path):
    run = small(tmp_path)
    run.phase.step(0.0)
    again = type(run.phase).of(run.config, run.phase.env, run.phase.policy, run.phase.algorithm, run.phase.distributed)
    assert "staleness_max" not in again.step(0.0) and again.collector.version == run.phase.algorithm.version == 3
    run.phase.env.close()


def test_fresh_decisions_are_not_taken_for_stale_ones(tmp_path):
    run = small(tmp_path)
    for _ in range(2):
        metrics = run.phase.step(0.0)
        assert "staleness_max" not in metrics
        assert run.phase.buffer.rollout()["version"].unique().tolist() == [run.phase.algorithm.version - 1]
    run.phase.env.close()


def test_nothing_is_fitted_where_nothing_is_normalised(tmp_path):
    run = small(tmp_path, normalize_observations=False)
    run.phase.step(0.0)
    assert run.phase.algorithm.warmups == 0
    assert run.phase.progress.env_steps == run.config.rollout.steps * run.config.rollout.n_envs
    run.phase.env.close()


def test_statistics_that_were_loaded_are_kept(tmp_path):
    first = small(tmp_path / "first")
    first.phase.step(0.0)
    first.save()
    first.phase.env.close()
    again = Run(config_in(tmp_path / "again", pretrained=str(tmp_path / "first")), quiet=True)
    seen = watched(again)
    loaded = float(first.phase.policy.encoder.normalizer.count)
    again.phase.step(0.0)
    assert seen == [loaded] and again.phase.algorithm.warmups == 0
    again.phase.env.close()


def test_a_resumed_run_does_not_fit_anew(tmp_path):
    first = small(tmp_path)
    first.phase.step(0.0)
    first.save()
    steps = first.phase.progress.env_steps
    first.phase.env.close()
    resumed = small(tmp_path)
    assert resumed.phase.algorithm.version == resumed.phase.collector.version == 2
    resumed.phase.step(0.5)
    assert resumed.phase.progress.env_steps - steps == resumed.config.rollout.steps * resumed.config.rollout.n_envs
    resumed.phase.env.close()


def test_a_run_of_before_goes_on_without_one(tmp_path):
    run = small(tmp_path)
    run.phase.step(0.0)
    state = run.phase.algorithm.state_dict()
    del state["warmups"]
    run.phase.algorithm.load_state_dict(state)
    assert run.phase.algorithm.version == 1 and not run.phase.policy.needs_statistics
    run.phase.env.close()


def test_the_statistics_move_less_after_the_first_update_than_without_it(tmp_path):
    run = small(tmp_path)
    phase = run.phase
    bare = copy.deepcopy(phase.policy)
    phase.collect()
    root = phase.buffer.rollout().flatten(0, 1).clone()
    phase.algorithm.warm_up(phase.buffer.rollout())
    phase.collect()

    def moved(policy) -> float:
        """How far the values of the first rollout move when statistics take in the second one, in their own spread."""
        with torch.no_grad():
            before = policy.value(root)
            Decisions(phase.buffer.rollout().flatten(0, 1)).update_normalizers(policy, phase.distributed)
            return float((policy.value(root) - before).abs().mean() / before.std())

    assert moved(phase.policy) < 0.6 * moved(bare)
    phase.env.close()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_both_algorithms_count_it(tmp_path, algorithm):
    more = {"algorithm": algorithm}
    if algorithm == "grpo":
        rollout = {"n_envs": 2, "n_episodes_per_batch": 2, "group_size": 2, "max_episode_steps": 5}
        more |= {"ppo": {}, "rollout": rollout, "grpo": {"mini_batch_size": 8, "epochs": 1}}
    run = Run(config_in(tmp_path, **more), quiet=True)
    run.phase.step(0.0)
    saved = run.phase.algorithm.state_dict()
    assert (saved["updates"], saved["warmups"]) == (1, 1)
    run.phase.env.close()


def test_a_policy_without_normalisers_wants_no_statistics():
    assert LinearPolicy().needs_statistics is False
