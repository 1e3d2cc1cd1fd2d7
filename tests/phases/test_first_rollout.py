"""A first rollout fits unfitted normalisers before the first update."""

import copy

import pytest
import torch
from doubles import LinearPolicy
from small_runs import SMALL, config_in

from sparring.algorithms.scoring import Decisions, Parity, ParityError
from sparring.runs.run import Run


def record_counts(run: Run) -> list[float]:
    """A list that gets the count of the normaliser at the start of each update."""
    update, counts = run.phase.algorithm.update, []

    def record_and_update(rollout, fraction):
        counts.append(float(run.phase.policy.encoder.normalizer.count))
        return update(rollout, fraction)

    run.phase.algorithm.update = record_and_update
    return counts


def small(tmp_path, **policy) -> Run:
    return Run(config_in(tmp_path, policy=SMALL["policy"] | policy), quiet=True)


def test_first_update_uses_fitted_normalisers_and_counts_their_steps(tmp_path):
    run = small(tmp_path)
    counts = record_counts(run)
    decisions = run.config.rollout.steps * run.config.rollout.n_envs
    run.phase.step(0.0)
    assert counts == [decisions] and run.phase.progress.env_steps == 2 * decisions
    run.phase.step(0.1)
    # later updates extend the statistics without another rollout
    assert counts == [decisions, 2 * decisions] and run.phase.progress.env_steps == 3 * decisions
    algorithm, collector = run.phase.algorithm, run.phase.collector
    assert (algorithm.updates, algorithm.version, collector.version) == (2, 3, 3)
    run.phase.env.close()


@pytest.mark.parametrize(
    "rollout",
    [{"mode": "async", "staleness": 0}, {"mode": "async"}, {"groups": 2}, {"n_episodes_per_batch": 4}],
    ids=["async in turns", "async", "groups", "whole episodes"],
)
def test_normalisers_are_fitted_first_in_every_rollout_mode(tmp_path, rollout):
    run = Run(config_in(tmp_path, rollout=SMALL["rollout"] | rollout), quiet=True)
    counts = record_counts(run)
    run.phase.step(0.0)
    (fitted,), once = counts, run.phase.progress.env_steps / 2
    # rollouts of complete episodes differ in length
    assert fitted > 8 and (fitted == once or "n_episodes_per_batch" in rollout and run.phase.progress.episodes == 8)
    assert (run.phase.algorithm.updates, run.phase.algorithm.version) == (1, 2)
    run.phase.env.close()


def test_parity_of_the_first_rollout_is_checked(tmp_path):
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


def test_stale_values_of_the_first_update_get_the_level_of_the_critic(tmp_path):
    """V-trace uses both the stored values and those of the current critic."""
    run = Run(config_in(tmp_path, ppo=SMALL["ppo"] | {"normalize_value": True, "correction": "vtrace"}), quiet=True)
    algorithm, buffer, judged = run.phase.algorithm, run.phase.buffer, []
    estimate = algorithm._with_advantages

    def collected_by_the_first_weights():
        buffer.set("version", torch.zeros_like(buffer.rollout()["version"]))
        return {}

    def record_values(rollout):
        judged.append((rollout["value"].mean().item(), rollout["proximal_value"].mean().item(), algorithm.level))
        return estimate(rollout)

    algorithm.expect_stale()
    run.phase.add_rewards, algorithm._with_advantages = collected_by_the_first_weights, record_values
    run.phase.step(0.0)
    ((stored, proximal, level),) = judged
    assert level > 1 and abs(stored - level) < 0.5 and abs(proximal - level) < 0.5
    run.phase.env.close()


def test_reused_algorithm_treats_new_decisions_as_on_policy(tmp_path):
    run = small(tmp_path)
    run.phase.step(0.0)
    again = type(run.phase).of(run.config, run.phase.env, run.phase.policy, run.phase.algorithm, run.phase.distributed)
    assert "staleness_max" not in again.step(0.0) and again.collector.version == run.phase.algorithm.version == 3
    run.phase.env.close()


def test_on_policy_decisions_are_not_treated_as_stale(tmp_path):
    run = small(tmp_path)
    for _ in range(2):
        metrics = run.phase.step(0.0)
        assert "staleness_max" not in metrics
        assert run.phase.buffer.rollout()["version"].unique().tolist() == [run.phase.algorithm.version - 1]
    run.phase.env.close()


def test_no_first_rollout_without_normalisers(tmp_path):
    run = small(tmp_path, normalize_observations=False)
    run.phase.step(0.0)
    assert run.phase.algorithm.warmups == 0
    assert run.phase.progress.env_steps == run.config.rollout.steps * run.config.rollout.n_envs
    run.phase.env.close()


def test_loaded_statistics_are_kept(tmp_path):
    first = small(tmp_path / "first")
    first.phase.step(0.0)
    first.save()
    first.phase.env.close()
    again = Run(config_in(tmp_path / "again", pretrained=str(tmp_path / "first")), quiet=True)
    counts = record_counts(again)
    loaded = float(first.phase.policy.encoder.normalizer.count)
    again.phase.step(0.0)
    assert counts == [loaded] and again.phase.algorithm.warmups == 0
    again.phase.env.close()


def test_resumed_run_does_not_fit_again(tmp_path):
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


def test_state_without_warmups_is_loaded(tmp_path):
    run = small(tmp_path)
    run.phase.step(0.0)
    state = run.phase.algorithm.state_dict()
    del state["warmups"]
    run.phase.algorithm.load_state_dict(state)
    assert run.phase.algorithm.version == 1 and not run.phase.policy.needs_statistics
    run.phase.env.close()


def test_fitting_reduces_the_change_of_values_by_later_statistics(tmp_path):
    run = small(tmp_path)
    phase = run.phase
    bare = copy.deepcopy(phase.policy)
    phase.collect()
    root = phase.buffer.rollout().flatten(0, 1).clone()
    phase.algorithm.warm_up(phase.buffer.rollout())
    phase.collect()

    def value_change(policy) -> float:
        """Change of the values of the first rollout when the second one updates the statistics, per their spread."""
        with torch.no_grad():
            before = policy.value(root)
            Decisions(phase.buffer.rollout().flatten(0, 1)).update_normalizers(policy, phase.distributed)
            return float((policy.value(root) - before).abs().mean() / before.std())

    assert value_change(phase.policy) < 0.6 * value_change(bare)
    phase.env.close()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_both_algorithms_count_the_first_rollout(tmp_path, algorithm):
    more = {"algorithm": algorithm}
    if algorithm == "grpo":
        rollout = {"n_envs": 2, "n_episodes_per_batch": 2, "group_size": 2, "max_episode_steps": 5}
        more |= {"ppo": {}, "rollout": rollout, "grpo": {"mini_batch_size": 8, "epochs": 1}}
    run = Run(config_in(tmp_path, **more), quiet=True)
    run.phase.step(0.0)
    saved = run.phase.algorithm.state_dict()
    assert (saved["updates"], saved["warmups"]) == (1, 1)
    run.phase.env.close()


def test_policy_without_normalisers_needs_no_statistics():
    assert LinearPolicy().needs_statistics is False
