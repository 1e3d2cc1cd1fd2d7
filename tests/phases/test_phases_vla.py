"""VLAs with LoRA in the phases: a teacher with a VLA trunk, VLAs as explorers of student and adversarial."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_pi0
import torch
from doubles_native import make_model
from doubles_vla import OneCamera
from safetensors.torch import save_file

from sparring.api import load_policy, load_world_model
from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.text import parse_overrides
from sparring.errors import UserError
from sparring.policies.native.checkpoint import save_model
from sparring.runs.checkpoint import load_training_state, read_weights
from sparring.runs.run import Run

pytestmark = pytest.mark.usefixtures("forked")
TESTS = Path(__file__).parents[1] / "doubles"
SHORT = ["device=cpu", "env.threads=1", "threads=1", "logging.console_level=ERROR", "evaluation.episodes=2"]
SHORT += ["evaluation.baseline=false", "rollout.n_envs=2", "rollout.steps=4", "rollout.max_episode_steps=8"]
SHORT += ["rollout.render_episodes=0", "training.bptt_length=2", "training.save_every=1"]
TEACHER = ["env.image_size=32", "rollout.action_steps=2", "teacher.gradient_steps=4", "teacher.batch_size=2"]
TEACHER += ["world_model.tokenizer_steps=2", "world_model.channels=8", "world_model.width=16", "world_model.members=2"]
LORA = ["world_model.lora_r=2", "world_model.lora_dropout=0.5"]
PPO = ["ppo.mini_batch_size=4", "ppo.ppo_epochs=1"]
SPARRING = ["adversarial.wm_updates_per_iter=2", "adversarial.batch_size=2", "adversarial.burn_in=1"]
SPARRING += ["adversarial.warmup_steps=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of VLAs, and a run of a teacher with the native VLA as trunk."""
    folder = tmp_path_factory.mktemp("vlas")
    save_model(make_model(max_state_dim=64), folder / "native")
    tiny_pi0.write(folder / "pi0", states=64, actions=16)
    trained(config_of("teacher", folder / "teacher_rl", folder, "training.iterations=2"))
    return folder


def config_of(phase, output, folder, *overrides):
    words = [f"phase={phase}", f"output={output}", *SHORT]
    if phase == "teacher":
        words += [*TEACHER, *LORA, f"world_model.trunk={folder}/native"]
    else:
        words += [f"{phase}.teacher={folder}/teacher_rl", *PPO, "training.iterations=2"]
    return load_config(None, parse_overrides([*words, *overrides]))


def student_config(output, folder, kind, *overrides):
    paths = {"native_vla": "native", "pi0": "pi0", "vla": "one_camera.safetensors"}
    words = [f"policy.name={kind}", "policy.lora_r=2", f"policy.model_path={folder}/{paths[kind]}"]
    if kind == "vla":
        if not (folder / paths[kind]).exists():
            # sizes of the actions and states of the teacher's env
            save_file(OneCamera(*_sizes(folder)).state_dict(), folder / paths[kind])
        words += ["policy.model_class=doubles_vla:OneCamera", "policy.critic_parts=[value_head]"]
    return config_of("student", output, folder, *words, *overrides)


def _sizes(folder) -> tuple[int, int]:
    spec = json.loads((folder / "teacher_rl/checkpoint-2/spec.json").read_text())
    return 2 * spec["action_dim"], spec["observation"]["state"][0][0]


def trained(config) -> Run:
    run = Run(config, quiet=True)
    assert run.run()
    (run.phase if hasattr(run.phase, "close") else run.phase.env).close()
    return run


def weights(module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def changed(module, before) -> set[str]:
    return {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}


def test_teacher_with_a_vla_trunk_is_loaded(folder):
    model = load_world_model(folder / "teacher_rl")
    assert model.ready
    base, saved = model.trunk.block.base, read_weights(folder / "native/model.safetensors")
    assert torch.equal(base.trunk[1].gate_up.base_layer.weight, saved["trunk.1.gate_up.weight"])
    assert base.trunk[1].gate_up.lora_B.default.weight.abs().max() > 0
    assert main(["eval", str(folder / "teacher_rl"), "--world-model", "--episodes", "2"]) == 0


def test_resumed_teacher_is_bit_identical(folder, tmp_path):
    options = (folder, "training.iterations=3")
    straight = trained(config_of("teacher", tmp_path / "straight", *options))
    stopped = Run(config_of("teacher", tmp_path / "stopped", *options), quiet=True)
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    stopped.phase.close()
    again = trained(config_of("teacher", tmp_path / "stopped", *options))
    assert again.phase.progress.updates == 3
    assert changed(again.phase.model, weights(straight.phase.model)) == set()


def test_missing_trunk_folder_is_reported(folder, tmp_path):
    (folder / "native").rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(UserError, match="world_model.trunk=.*native: neither .*no such folder"):
            load_world_model(folder / "teacher_rl")
    finally:
        (tmp_path / "elsewhere").rename(folder / "native")


@pytest.mark.parametrize("kind", ["native_vla", "pi0", "vla"])
def test_student_with_a_vla_trains_adapters_and_heads_only(folder, tmp_path, kind):
    run = Run(student_config(tmp_path / "run", folder, kind), quiet=True)
    phase, judge = run.phase, run.phase.rewards.world_model
    assert [key for key in phase.policy.in_keys if "image" in key] == [("observation", "image", "wrist")]
    assert phase.rewards.unseen == ("head",)
    before, judged_before = weights(phase.policy), weights(judge)
    assert run.run()
    moved = changed(phase.policy, before)
    adapters = {name for name in before if ".lora_" in name}
    heads = {name for name in before if name.startswith("critic.") or ".value_head." in name}
    assert moved & adapters and moved & heads and moved <= adapters | heads
    assert changed(judge, judged_before) == set()
    assert changed(load_world_model(folder / "teacher_rl"), judged_before) == set()
    policy = load_policy(tmp_path / "run")
    assert changed(policy, weights(phase.policy)) == set()
    assert run.evaluate().episodes == 2
    phase.env.close()


def test_resumed_student_with_a_vla_is_bit_identical(folder, tmp_path):
    options = (folder, "native_vla", "training.iterations=3")
    straight = trained(student_config(tmp_path / "straight", *options))
    stopped = Run(student_config(tmp_path / "stopped", *options), quiet=True)
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    again = trained(student_config(tmp_path / "stopped", *options))
    assert changed(again.phase.policy, weights(straight.phase.policy)) == set()


def test_adversarial_with_two_vlas(folder, tmp_path):
    trained(student_config(tmp_path / "student_rl", folder, "native_vla"))
    given = [folder, f"adversarial.student={tmp_path}/student_rl", *SPARRING, "training.iterations=3"]
    run = Run(config_of("adversarial", tmp_path / "run", *given), quiet=True)
    phase, before = run.phase, weights(run.phase.model)
    assert run.config.policy.lora_r == 2 and run.config.world_model.trunk == f"{folder}/native"
    first, second = phase.step(0.0), phase.step(0.3)
    assert 0 < first["reference_kl"] < 1 and second["reference_kl"] > 0
    moved = changed(phase.model, before)
    frozen = {name for name in before if ".base_layer." in name} | {"world_model.trunk.block.base.trunk_norm.weight"}
    assert moved.isdisjoint(frozen)
    assert {name.partition(".")[0] for name in moved if ".lora_" in name} == {"world_model", "policy"}
    # the KL reference copies trainable tensors only, in memory and on disk
    policy, reference = phase.explorer.policy, phase.explorer.algorithm.scorer.reference
    assert reference.model.trunk[0].qkv.base_layer.weight is policy.model.trunk[0].qkv.base_layer.weight
    assert changed(reference, {n.removeprefix("policy."): w for n, w in before.items()}) == set()
    run.save()
    kept = load_training_state(tmp_path / "run/checkpoint-2")["phase"]["explorer"]["algorithm"]["reference"]
    assert any(".lora_B." in name for name in kept) and not any("base_layer" in name for name in kept)
    third = phase.step(0.6)
    phase.close()
    # the update after the checkpoint is repeated bit-identically
    again = Run(config_of("adversarial", tmp_path / "run", *given), quiet=True)
    assert again.phase.step(0.6)["reference_kl"] == third["reference_kl"] > 0
    assert changed(again.phase.model, weights(phase.model)) == set()
    again.phase.close()


def test_teacher_with_another_setting_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="world_model.lora_r was 2 and is 4"):
        Run(config_of("student", tmp_path, folder, "policy.channels=[4,4]", "world_model.lora_r=4"), quiet=True)


@pytest.mark.timeout(300)
def test_complete_chain_with_vlas(folder, tmp_path):
    words = [*SHORT, *TEACHER, *LORA, *PPO, *SPARRING, "training.iterations=2", f"world_model.trunk={folder}/native"]
    words += ["policy.name=native_vla", "policy.lora_r=2", f"policy.model_path={folder}/native"]
    command = [sys.executable, "-m", "sparring", "train", "all", "--output", str(tmp_path), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the same after this phase" in done.stdout
    both = load_world_model(tmp_path / "adversarial_rl"), load_policy(tmp_path / "adversarial_rl")
    saved = read_weights(folder / "native/model.safetensors")["trunk.0.out.weight"]
    for layer in (both[0].trunk.block.base.trunk[0].out, both[1].model.trunk[0].out):
        assert torch.equal(layer.base_layer.weight, saved) and layer.lora_B.default.weight.abs().max() > 0
