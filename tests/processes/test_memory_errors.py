"""Out of memory: for every stage and policy, the error names a setting and a value."""

from types import SimpleNamespace

import doubles_vla
import pytest
import tiny_pi0
import torch
from doubles_native import Instructed, make_native
from parity_cases import RandomEnv
from pi0_cases import Cameras, make
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.algorithms.grpo import GRPO
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import Decisions
from sparring.cli.main import main
from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import OutOfMemory, UserError
from sparring.phases.configs import ImitateConfig
from sparring.phases.imitate import Imitate
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig, LoraConfig, PI0PolicyConfig
from sparring.policies.native.hopper.graphs import ActingGraphs
from sparring.policies.policy import make_policy
from sparring.processes.distributed import Distributed
from sparring.processes.memory import explain_oom

CUDA = (
    "CUDA out of memory. Tried to allocate 300.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 100.00 MiB"
    " is free. Of the allocated memory 104.00 MiB is allocated by PyTorch, and 1.00 MiB is reserved"
)
CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes. Error code 12"
ROBOTS = 4


def run_out(*_, **__):
    raise torch.OutOfMemoryError(CUDA)


class RunsOut(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    backward = staticmethod(run_out)


class FailingPolicy(ActorCritic):
    """Raises in the stage that `failing` names."""

    failing = ""

    def __init__(self, config: ActorCriticConfig, spec, chunk: int):
        super().__init__(config, spec, chunk)
        if self.failing == "make":
            run_out()

    def _apply(self, *arguments, **named):
        return run_out() if self.failing == "move" else super()._apply(*arguments, **named)

    def act(self, td):
        return run_out() if self.failing == "act" else super().act(td)

    def value(self, td):
        return run_out() if self.failing == "value" else super().value(td)

    def evaluate(self, td):
        if self.failing == "evaluate":
            run_out()
        scored = super().evaluate(td)
        if self.failing == "backward" and torch.is_grad_enabled():
            scored["log_prob"] = RunsOut.apply(scored["log_prob"])
        return scored

    def imitation_loss(self, td, generator):
        loss, numbers = super().imitation_loss(td, generator)
        return (RunsOut.apply(loss) if self.failing == "backward" else loss), numbers

    def __deepcopy__(self, memo):
        run_out()


@pytest.fixture
def policy():
    return made()


def made(failing="", **config):
    torch.manual_seed(0)
    kind = type("Failing", (FailingPolicy,), {"failing": failing})
    return kind(ActorCriticConfig(**config), RandomEnv(1).spec, 1)


def error_of(function, *arguments) -> str:
    with pytest.raises(OutOfMemory) as caught:
        function(*arguments)
    assert caught.value.exit_code == 1
    return str(caught.value)


def collected(policy, steps=8):
    buffer = RolloutBuffer(steps)
    Collector(Env(RandomEnv(ROBOTS)), policy, seed=0).collect(buffer)
    return buffer.get(flatten=False)


# ---- the message


def test_suggested_value_follows_from_free_memory():
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    model.config = LoraConfig()
    with pytest.raises(OutOfMemory) as caught, explain_oom("acting", model, 64, "rollout.n_envs"):
        run_out()
    # 100 MiB of activations and 100 free, of the at least 100 + 300 MiB that 64 rows need
    assert str(caught.value) == (
        "out of memory while acting: 300 MiB more were requested and 100 MiB were free; the weights take 4 MiB. "
        "Set rollout.n_envs=32 or less (64 decisions at once were too many); or policy.lora_r=8 or policy.frozen, "
        "up to 12 MiB less for learning"
    )


def test_large_request_lowers_the_suggested_value():
    message = CUDA.replace("300.00 MiB", "1.46 GiB")
    with pytest.raises(OutOfMemory, match="Set rollout.n_envs=8 or less"), explain_oom("", None, 64, "rollout.n_envs"):
        raise torch.OutOfMemoryError(message)


@pytest.mark.parametrize(
    ("settings", "frozen", "hint"),
    [
        (
            {"precision": "fp32"},
            False,
            "policy.precision=bf16 (RL then needs parity_tolerance=0.05), about half of",
        ),
        (
            {"precision": "fp32", "dtype": "fp32", "lora_r": 4},
            True,
            "policy.precision=bf16 policy.dtype=bf16 (RL",
        ),
        ({"precision": "bf16", "dtype": "fp32", "lora_r": 4}, True, "policy.dtype=bf16 (RL then needs parity_"),
        (
            {"precision": "fp32", "lora_r": 4},
            True,
            "half of the memory of decisions and 2 MiB less of frozen weights",
        ),
        ({"precision": "bf16", "dtype": "bf16", "lora_r": 0}, False, "policy.lora_r=8 or policy.frozen, up to 12 MiB"),
    ],
)
def test_other_suggestions_follow_from_the_policy_settings(settings, frozen, hint):
    model = nn.Linear(1024, 1024, bias=False).requires_grad_(not frozen)
    model.config = SimpleNamespace(**settings)
    with pytest.raises(OutOfMemory) as caught, explain_oom("acting", model, 2, "rollout.n_envs"):
        run_out()
    ways = str(caught.value).split("Set ")[1].split("; or ")
    assert len(ways) == 2 and ways[0].startswith("rollout.n_envs=1 or less") and hint in ways[1]


def test_without_a_setting_a_smaller_model_is_suggested():
    with pytest.raises(OutOfMemory, match="Use a smaller model, or a machine with more memory"), explain_oom("making"):
        raise MemoryError
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(precision="bf16", dtype="bf16", lora_r=4)
    with pytest.raises(OutOfMemory, match="Use a smaller model"), explain_oom("acting", model, 1, "rollout.n_envs"):
        run_out()


def test_errors_of_the_cpu_allocator_are_recognised():
    with pytest.raises(OutOfMemory) as caught, explain_oom("acting", None, 64, "rollout.n_envs"):
        torch.empty(10**15)
    assert str(caught.value).startswith("out of memory while acting: 3638 TiB more were requested and ")
    assert "iB were free. Set rollout.n_envs=32 or less" in str(caught.value)
    for message in (CPU.replace("can't allocate memory", "not enough memory"), "CUDA error: out of memory"):
        with pytest.raises(OutOfMemory), explain_oom("acting"):
            raise RuntimeError(message)


def test_other_errors_are_not_changed():
    for error in (RuntimeError("another"), ValueError(CUDA), UserError("mine"), OutOfMemory("explained already")):
        with pytest.raises(type(error)) as caught, explain_oom("acting"):
            raise error
        assert caught.value is error


def test_error_is_found_in_the_exception_context():
    """Like during the capture of a CUDA graph, which then cannot be ended."""
    with pytest.raises(OutOfMemory, match="300 MiB more were requested and 100 MiB were free"), explain_oom("acting"):
        try:
            run_out()
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


# ---- stages, for any policy


def test_creating_and_moving_a_policy(monkeypatch):
    config = ActorCriticConfig(name="test_memory_errors:FailingPolicy")
    for failing, hint in (
        ("make", f"making the policy ({config.name}): "),
        ("move", "moving the policy to cpu"),
    ):
        monkeypatch.setattr(FailingPolicy, "failing", failing)
        assert f"out of memory while {hint}" in error_of(make_policy, config, RandomEnv(1).spec, 1)


@pytest.mark.parametrize("failing", ["act", "value"])
def test_acting(failing):
    text = error_of(collected, made(failing))
    assert text.startswith("out of memory while acting: 300 MiB more were requested and 100 MiB were free; the weights")
    assert "Set rollout.n_envs=2 or less (4 decisions at once were too many); or policy.precision=bf16 (RL" in text


def test_acting_in_an_evaluation():
    collector = Collector(Env(RandomEnv(ROBOTS)), made("act"), seed=0, greedy=True)
    assert "Set rollout.n_envs=2 or less" in error_of(collector.decide)


def test_scoring_and_backward_pass(policy):
    rollout = collected(policy)
    type(policy).failing = "evaluate"
    text = error_of(PPO(PPOConfig(), policy).update, rollout)
    assert "while scoring: " in text and "Set ppo.micro_batch_size=16 or less (32 decisions at once" in text
    assert "Set grpo.micro_batch_size=2 or less (5" in error_of(
        GRPO(GRPOConfig(micro_batch_size=5), policy).scorer.parity, Decisions(rollout.flatten(0, 1))
    )
    type(policy).failing = "backward"
    text = error_of(PPO(PPOConfig(mini_batch_size=16, micro_batch_size=8), policy).update, rollout)
    assert "while computing gradients: " in text and "Set ppo.micro_batch_size=4 or less (8 decisions" in text


def test_optimiser_and_reference_policy(policy, monkeypatch):
    rollout = collected(policy)
    ppo = PPO(PPOConfig(), policy)
    monkeypatch.setattr(ppo.step.optimizer, "step", run_out)
    assert "out of memory while applying a gradient step: " in error_of(ppo.update, rollout)
    text = error_of(PPO(PPOConfig(kl_coef=0.1), policy).update, rollout)
    assert "out of memory while copying the policy for ppo.kl_coef=0.1: " in text
    monkeypatch.setattr("sparring.algorithms.gradient_step._FlatParameters", run_out)
    assert "out of memory while allocating gradients: " in error_of(PPO, PPOConfig(), policy)


class Dataset:
    """Demonstrations to sample batches from."""

    def __len__(self):
        return 100

    def sample(self, count, generator):
        observation = TensorDict({"state": torch.zeros(count, 5)}, [count])
        td = {"observation": observation, "action": torch.zeros(count, 1, 3), "valid": torch.ones(count, 1).bool()}
        return TensorDict(td, [count])


def test_imitation():
    def imitating(policy, **settings):
        config = ImitateConfig(batch_size=6, steps_per_update=1, **settings)
        phase = Imitate(config, Env(RandomEnv(1)), policy, Dataset(), Distributed("cpu"), 0)
        phase._begin = lambda: None
        return phase

    text = error_of(imitating(made("backward"), ema=None).step, 0.0)
    assert "out of memory while imitating: " in text and "Set imitate.batch_size=3 or less (6 decisions" in text
    text = error_of(lambda: imitating(made(), ema=0.9))
    assert "out of memory while allocating gradients and imitate.ema: " in text


def test_command_line_prints_no_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FailingPolicy, "failing", "act")
    words = ["train", "finetune", "policy.name=test_memory_errors:FailingPolicy", "env.name=gym:CartPole-v1"]
    words += ["rollout.n_envs=2", "rollout.steps=8", "training.iterations=1", "--output", str(tmp_path / "run")]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "out of memory while acting: " in error and "rollout.n_envs=1" in error and "Traceback" not in error


# ---- pretrained models


@pytest.mark.parametrize("model", ["Samples", "Flows"])
def test_vla_models(monkeypatch, model):
    policy = make_policy(doubles_vla.config(model), doubles_vla.RandomCameraEnv(1).spec, 1)
    monkeypatch.setattr(policy.model, "encode" if model == "Flows" else "sample", run_out)
    collector = Collector(Env(doubles_vla.RandomCameraEnv(ROBOTS)), policy, seed=0)
    text = error_of(collector.collect, RolloutBuffer(2))
    assert "Set rollout.n_envs=2 or less" in text and "policy.lora_r=8 or policy.frozen" in text
    # out of memory while the interface is probed
    if model == "Flows":
        monkeypatch.setattr(doubles_vla.Flows, "denoise", run_out)
        assert "making the policy (vla)" in error_of(
            make_policy, doubles_vla.config("Flows"), doubles_vla.RandomCameraEnv(1).spec, 1
        )


def test_loading_and_acting_of_pi0(tmp_path, monkeypatch):
    import transformers

    checkpoint = tiny_pi0.write(tmp_path)
    policy = make(checkpoint, lora_r=2)
    monkeypatch.setattr(policy.model.model.vlm, "forward", run_out)
    text = error_of(Collector(Env(Cameras(ROBOTS)), policy, seed=0, chunk=3).collect, RolloutBuffer(2))
    assert "Set rollout.n_envs=2 or less" in text and "policy.precision=bf16 policy.dtype=bf16 (RL" in text
    monkeypatch.setattr(transformers.PI0ForConditionalGeneration, "from_pretrained", run_out)
    text = error_of(make_policy, PI0PolicyConfig(model_path=str(checkpoint)), Cameras(1).spec, 3)
    assert text.startswith("out of memory while making the policy (pi0): 300 MiB more were requested and 100 MiB")


def test_capture_of_graphs_of_a_native_vla():
    """Capture runs out of memory, and ending the capture fails therefore."""

    def record(function, tensors):
        try:
            run_out()
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    policy = make_native()
    fast = ActingGraphs(policy.model, policy.sampling_steps, half=False, compiled=False, record=record)
    policy._acting_graphs = lambda robots: fast
    collector = Collector(Env(Instructed(ROBOTS)), policy, seed=0, chunk=4)
    text = error_of(collector.collect, RolloutBuffer(2))
    assert "out of memory while acting: 300 MiB more were requested" in text and "Set rollout.n_envs=2 or less" in text
