"""`pretrained`: inherited settings and weights, refused combinations, no overwritten files."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file

import sparring
from sparring.cli.main import main
from sparring.config.inherit import inherited_settings
from sparring.config.legacy import rename
from sparring.config.schema import SCHEMA, load_config
from sparring.config.text import Setting
from sparring.envs.env import make_env
from sparring.evaluation.play import evaluate
from sparring.policies.policy import make_policy
from sparring.runs.checkpoint import CheckpointError, checkpoints, read_weights
from sparring.runs.fits import load_pretrained
from sparring.runs.run import Run

SMALL = ["rollout.n_envs=2", "rollout.steps=8", "ppo.mini_batch_size=16", "ppo.ppo_epochs=1", "env.threads=1"]
SHORT = ["training.iterations=1", "evaluation.episodes=2", "rollout.render_episodes=0", "evaluation.baseline=false"]
TRAINED = {
    "env": {"task": "push_d0", "control_mode": "delta_ee_pos", "object_state": "privileged", "reward": "dense"},
    "rollout": {"n_envs": 2, "steps": 4, "action_steps": 3},
    "policy": {"hidden": [24], "init_std": 0.3},
    "training": {"iterations": 1},
    "logging": {"console_level": "ERROR"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run folder with settings that differ from the defaults."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    config = load_config(TRAINED | {"output": str(folder)} | {"env": TRAINED["env"] | {"threads": 1}})
    run = Run(config)
    run.run()
    run.phase.env.close()
    return folder


FLOW = {
    "env": {"task": "reach_d0", "threads": 1},
    "rollout": {"n_envs": 2, "steps": 4, "action_steps": 2},
    "policy": {"name": "flow", "width": 16, "heads": 2, "layers": 1, "hidden": [8], "sampling_steps": 2},
    "training": {"iterations": 1},
    "logging": {"console_level": "ERROR"},
}


@pytest.fixture(scope="module", params=["flow_sde", "denoising_mdp"])
def trained_flow(request, tmp_path_factory):
    """A flow policy without a noise net, as after imitation."""
    folder = tmp_path_factory.mktemp("runs") / request.param
    mdp = {"denoising_steps": 1} if request.param == "denoising_mdp" else {}
    run = Run(load_config(FLOW | {"output": str(folder), "policy": FLOW["policy"] | {"method": request.param} | mdp}))
    run.run()
    run.phase.env.close()
    return folder


def printed_config(capsys, *words) -> dict:
    assert main(["config", "finetune", *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_settings_of_policy_and_env_are_inherited(trained, capsys):
    config = printed_config(capsys, f"pretrained={trained}")
    assert config["policy"]["hidden"] == [24] and config["policy"]["init_std"] == 0.3
    assert config["rollout"]["action_steps"] == 3 and config["rollout"]["n_envs"] == 16
    assert config["env"]["control_mode"] == "delta_ee_pos" and config["env"]["task"] == ["push_d0"]
    assert config["env"]["threads"] == 0


def test_given_settings_override_inherited_ones(trained, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {init_std: 0.2}\nenv: {task: push_d1}\n")
    config = printed_config(capsys, f"pretrained_policy_path={trained}", "--config", str(file), "env.task=push_d2")
    assert config["policy"]["init_std"] == 0.2 and config["env"]["task"] == ["push_d2"]
    assert config["policy"]["hidden"] == [24]


GROUPS = ["algorithm=grpo", "rollout.n_episodes_per_batch=16", "rollout.group_size=2"]


def test_fine_tuning_has_careful_defaults(trained, capsys):
    plain = printed_config(capsys)
    assert (plain["ppo"]["policy_lr"], plain["ppo"]["target_kl"]) == (1e-3, None)
    assert main(["config", "finetune", f"pretrained={trained}"]) == 0
    printed = capsys.readouterr()
    careful = {"policy_lr": 1e-4, "critic_lr": 1e-3, "critic_warmup_updates": 3, "target_kl": 0.05}
    config = yaml.safe_load(printed.out)
    assert config["ppo"] == plain["ppo"] | careful and config["grpo"] == plain["grpo"]
    (line,) = [line for line in printed.err.splitlines() if line.startswith(f"from pretrained={trained}: ")]
    assert {f"ppo.{key}={value}" for key, value in careful.items()} <= set(line.split())
    # with the algorithm in use
    config = printed_config(capsys, f"pretrained={trained}", *GROUPS)
    assert config["grpo"] == plain["grpo"] | {"policy_lr": 1e-4, "target_kl": 0.05} and config["ppo"] == plain["ppo"]


def test_given_settings_override_careful_defaults(trained, capsys):
    words = ["learning_rate=3e-5", "--critic_lr", "2e-3", "ppo.target_kl=null", "--critic_warmup_updates", "0"]
    assert main(["config", "finetune", f"pretrained={trained}", *words]) == 0
    printed = capsys.readouterr()
    ppo = yaml.safe_load(printed.out)["ppo"]
    keys = ("policy_lr", "critic_lr", "target_kl", "critic_warmup_updates")
    assert [ppo[key] for key in keys] == [3e-5, 2e-3, None, 0]
    renamed, inherited = printed.err.splitlines()
    assert renamed == "read as: learning_rate -> ppo.policy_lr" and "ppo." not in inherited


def inherited(given):
    renamed = rename(given, SCHEMA)
    return inherited_settings(renamed.phase, renamed.settings)


@pytest.mark.parametrize("phase", ["imitate", "student", "adversarial", "teacher"])
def test_only_finetune_has_careful_defaults(trained, phase):
    given = [Setting("phase", phase, "test"), Setting("pretrained", str(trained), "test")]
    assert not [s.key for s in inherited(given) if s.key.startswith(("ppo.", "grpo."))]


def test_user_algorithm_gets_no_careful_defaults(trained):
    given = [Setting("algorithm.name", "my.module:Mine", "test"), Setting("pretrained", str(trained), "test")]
    assert {s.key.partition(".")[0] for s in inherited(given)} == {"env", "policy", "rollout"}


def test_another_kind_of_policy_inherits_no_policy_settings(trained):
    given = [Setting("pretrained", str(trained), "test"), Setting("policy.name", "my.module:Mine", "test")]
    keys = [setting.key for setting in inherited(given)]
    assert "env.control_mode" in keys and not any(key.startswith("policy.") for key in keys)


def test_documented_command_starts_from_the_weights(trained, tmp_path, capsys):
    out = tmp_path / "run"
    words = [
        "train",
        "finetune",
        "task_name=push_d1",
        "ppo.clip_ratio=0.1",
        f"pretrained={trained}",
        "env.reward=sparse",
    ]
    assert main([*words, *SMALL, *SHORT, "ppo.policy_lr=1e-9", "--output", str(out)]) == 0
    err = capsys.readouterr().err
    assert f"from pretrained={trained}: " in err and "env.control_mode=delta_ee_pos" in err
    before, after = (read_weights(checkpoints(run)[-1] / "model.safetensors") for run in (trained, out))
    assert f"all {len(before)} tensors" in err
    assert torch.allclose(before["head.linear.weight"], after["head.linear.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["env.control_mode=qpos"], "env.control_mode was delta_ee_pos and is qpos"),
        (["env.control_mode=delta_qpos"], "action_dim was 4 and is 7"),
        (["env.cameras=[head]"], "observation/image/head was absent and is [3, 64, 64] uint8"),
        (["env.object_state=state"], "observation/privileged was [21] float32 and is absent"),
        (["policy.hidden=[16]"], "does not fit this model"),
        (["rollout.action_steps=2"], "of another shape: head.linear.weight"),
        (["task_name=stak_d0"], "stak_d0"),
        (["pretrained=nowhere"], "'nowhere' does not exist"),
    ],
)
def test_incompatible_settings_are_refused_before_writing(trained, tmp_path, capsys, change, message):
    out = tmp_path / "run"
    assert main(["train", "finetune", f"pretrained={trained}", *SMALL, "--output", str(out), *change]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_padded_state_with_other_contents_is_refused(tmp_path, capsys):
    common = ["train", "finetune", "env.task=push_d0", "env.pad_state=80", *SMALL, *SHORT]
    blind, out = tmp_path / "blind", tmp_path / "run"
    assert main([*common, "env.object_state=hidden", "--output", str(blind)]) == 0
    capsys.readouterr()
    assert main([*common, f"pretrained={blind}", "env.object_state=state", "--output", str(out)]) == 2
    assert "another env; leave out these settings" in (err := capsys.readouterr().err)
    assert "env.object_state was hidden and is state" in err and not out.exists()


def test_refusal_keeps_an_earlier_run(trained, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.yaml").write_text("seed: 1\n")
    (out / "episode_metrics.jsonl").write_text("{}\n")
    words = [f"pretrained={trained}", "env.control_mode=qpos", "--output", str(out), "--resume", "never"]
    assert main(["train", "finetune", *SMALL, *words]) == 2
    assert (out / "config.yaml").read_text() == "seed: 1\n" and (out / "episode_metrics.jsonl").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_damaged_file_is_refused(tmp_path, capsys):
    file = tmp_path / "weights.pt"
    file.write_bytes(b"no weights")
    assert main(["train", "finetune", f"pretrained={file}", *SMALL, "--output", str(tmp_path / "run")]) == 2
    assert f"'{file}' cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- flow policies


def test_new_noise_net_is_reported(trained_flow, tmp_path, capsys):
    out, words = tmp_path / "run", ["train", "finetune", f"pretrained={trained_flow}", "policy.method=flow_noise"]
    assert main([*words, *SMALL, *SHORT, "ppo.policy_lr=1e-9", "--output", str(out)]) == 0
    before, after = (read_weights(checkpoints(run)[-1] / "model.safetensors") for run in (trained_flow, out))
    new = [key for key in after if key not in before]
    assert new and all(key.startswith("kernel.net.") for key in new)
    line = f"starts from the weights of {trained_flow}: all {len(before)} tensors; new: kernel.net.0."
    assert line in capsys.readouterr().err
    assert torch.allclose(before["velocity.position"], after["velocity.position"], atol=1e-6)
    # the reverse is refused
    words = ["train", "finetune", f"pretrained={out}", "policy.method=flow_sde", *SMALL]
    assert main([*words, "--output", str(tmp_path / "back")]) == 2
    assert "4 unexpected: kernel.net.0" in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_inherited_policy_name_is_printed_if_it_is_not_the_default(trained, trained_flow, capsys):
    for run, printed in ((trained_flow, True), (trained, False)):
        assert main(["config", "finetune", f"pretrained={run}"]) == 0
        line = capsys.readouterr().err
        assert line.startswith(f"from pretrained={run}: ") and ("policy.name=flow" in line) is printed
        assert "env.name" not in line


def test_other_missing_tensors_are_refused(trained_flow, tmp_path):
    weights = read_weights(checkpoints(trained_flow)[-1] / "model.safetensors")
    config = load_config(FLOW | {"policy": FLOW["policy"] | {"method": "flow_noise"}})
    env = make_env(config.env, 2)
    policy = make_policy(config.policy, env.spec, 2)
    half = weights | {"kernel.net.0.bias": policy.state_dict()["kernel.net.0.bias"]}
    less = {key: value for key, value in weights.items() if key != "velocity.position"}
    for given, message in ((half, "3 missing: kernel.net.0.weight"), (less, "1 missing: velocity.position")):
        save_file(given, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_pretrained(policy, tmp_path, env)
    env.close()


def test_run_resumes_without_its_pretrained_folder(trained_flow, tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "run"
    shutil.copytree(trained_flow, source)
    words = ["train", "finetune", f"pretrained={source}", *SMALL, *SHORT, "env.reward=sparse", "--output", str(out)]
    assert main(words) == 0
    shutil.rmtree(source)
    capsys.readouterr()
    assert main(words) == 0
    err = capsys.readouterr().err
    assert "already trained to the end" in err and f"resumes from {out / 'checkpoint-1'}" in err
    # other settings than those of the first start are refused
    assert main([word for word in words if word != "env.reward=sparse"]) == 2
    assert "env.reward: sparse in the folder, dense now" in capsys.readouterr().err
    # a new run cannot start from a missing folder
    for flags in (["--resume", "never"], ["--output", str(tmp_path / "other")]):
        assert main([*words, *flags]) == 2
        assert f"'{source}' does not exist" in capsys.readouterr().err


def test_python_and_command_line_inherit_equally(trained, capsys):
    given = {"pretrained": str(trained), "policy": {"init_std": 0.2}}
    words = [f"pretrained={trained}", "policy.init_std=0.2"]
    assert sparring.load_config(given).dump() == printed_config(capsys, *words)


# ---- demonstrations


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"env": {"name": "tab', "Unterminated string"),
        ("", "Expecting value"),
        ("[]", "env.name or env.task is missing"),
        ('{"env": {"name": "tabletop"}}', "env.name or env.task is missing"),
        ('{"noise": 0.1}', "env.name or env.task is missing"),
    ],
)
def test_damaged_description_of_demonstrations_is_refused(tmp_path, capsys, text, message):
    file = tmp_path / "demos/meta/sparring.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    words = ["train", "imitate", f"imitate.demos={tmp_path / 'demos'}", "--output", str(tmp_path / "run")]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"sparring: '{file}' cannot be read (") and message in err
    assert "copy the dataset again, or delete this file and set env.*" in err
    assert not (tmp_path / "run").exists()


# ---- dry runs


def test_dry_run_of_the_rollout_makes_no_update(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sparring.algorithms.ppo.PPO.update", lambda *_: pytest.fail("updated"))
    assert main(["train", "finetune", "--dry-run", "rollout", *SMALL, "rollout.max_episode_steps=4"]) == 0
    out = capsys.readouterr().out
    assert "one rollout, nothing written" in out and "episodes: 4 ended, mean reward" in out and "next/reward" in out
    assert not list(tmp_path.iterdir())


def test_dry_run_does_not_consume_the_phase(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", "finetune", *SMALL]) == 0
    assert "\nparity: " in capsys.readouterr().out


def test_dry_run_of_the_rollout_is_refused_in_imitate(capsys):
    assert main(["train", "imitate", "imitate.demos=x", "--dry-run", "rollout"]) == 2
    assert "there are no rollouts in imitate" in capsys.readouterr().err


# ---- evaluation


def test_reports_sampled_adds_sampled_scores(tmp_path):
    config = load_config(TRAINED | {"env": TRAINED["env"] | {"threads": 1}})
    env = make_env(config.env, 2, 6)
    policy = make_policy(config.policy, env.spec, 3)
    assert set(evaluate(policy, env, 2, chunk=3, baseline=False).scores) == {"policy"}
    policy.reports_sampled = True
    evaluation = evaluate(policy, env, 2, chunk=3)
    assert list(evaluation.scores) == ["policy", "policy, sampled", "random"]
    greedy, sampled = (evaluation.scores[who]["push_d0"] for who in ("policy", "policy, sampled"))
    assert greedy.reward != sampled.reward
    assert "policy, sampled  push_d0" in evaluation.table()
    saved = json.loads(evaluation.write(tmp_path / "evaluation.json").read_text())
    assert saved["scores"]["policy, sampled"]["push_d0"]["success"]["episodes"] == 2
    # greedy=False gives sampled results only
    assert set(evaluate(policy, env, 2, chunk=3, greedy=False, baseline=False).scores) == {"policy"}
    env.close()
