"""A gradient step on NaN or infinity is not taken: the state stays unchanged and the error names the cause."""

import gc
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.gradient_step import GradientStep
from sparring.errors import Diverged
from sparring.processes.distributed import Distributed


class Learner:
    """Learns two weights from batches of numbers; the loss is `weight` times the numbers, plus the sum of `other`."""

    def __init__(self, lr: float = 0.1, skips: int = 0, **settings):
        self.weight, self.other = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0, 2.0]))
        groups = [{"params": [self.weight, self.other], "lr": lr}]
        self.step = GradientStep(groups, Distributed("cpu"), 1.0, f"ppo.policy_lr={lr:g}", **settings)
        self.step.skips = skips

    def learn(self, *numbers: float) -> None:
        """Take a gradient step on one minibatch."""
        batch = TensorDict({"number": torch.tensor(numbers)}, [len(numbers)])
        self.step(batch, (self.weight * batch["number"]).sum() + self.other.sum())

    @property
    def state(self) -> list:
        moments = [value.clone() for state in self.step.optimizer.state.values() for value in state.values()]
        return [self.weight.detach().clone(), self.other.detach().clone(), *moments]


def assert_equal(first: list, second: list) -> None:
    assert len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_step_on_nan_is_not_taken_and_the_error_has_its_batch():
    learner = Learner()
    learner.learn(1.0, 2.0), learner.learn(3.0)
    before = learner.state
    with pytest.raises(
        Diverged, match=r"the loss is nan in gradient step 3 .*not taken.*lower ppo.policy_lr=0.1"
    ) as caught:
        learner.learn(1.0, math.nan)
    assert_equal(learner.state, before)
    assert caught.value.batch["number"][0] == 1 and caught.value.batch["number"][1].isnan()
    details = caught.value.about
    assert details["gradient_step"] == 3 and math.isnan(details["loss"]) and details["learning_rate"] == 0.1
    # the error names the cause: the batch itself
    assert "check the training data: number is not finite; or lower ppo.policy_lr=0.1" in str(caught.value)


def test_no_minibatch_is_kept_after_an_update():
    learner = Learner()
    batch = TensorDict({"number": torch.ones(3)}, [3])
    learner.step(batch, (learner.weight * batch["number"]).sum())
    assert learner.step.end_update() == 0
    reference = weakref.ref(batch)
    del batch
    gc.collect()
    assert reference() is None


def test_a_gradient_that_is_not_finite_stops_training():
    learner = Learner()
    batch = TensorDict({"number": torch.zeros(1)}, [1])
    with pytest.raises(Diverged, match="the norm of the gradient is (nan|inf) in gradient step 1") as caught:
        # the gradient of the root at 0 is not finite
        learner.step(batch, (learner.weight * batch["number"]).sqrt().sum())
    assert "look at" not in str(caught.value)


def test_an_infinite_loss_without_a_gradient_stops_training():
    learner = Learner()
    batch = TensorDict({"number": torch.zeros(1)}, [1])
    with pytest.raises(Diverged, match="the loss is inf in gradient step 1"):
        learner.step(batch, learner.weight.sum() + math.inf)
    assert learner.weight.item() == 1.0


def test_one_infinite_micro_batch_stops_training():
    learner = Learner()
    batch = TensorDict({"number": torch.tensor([1.0, 2.0, math.inf, 3.0])}, [4])
    learner.step.backward(batch, lambda part: ((learner.weight * part["number"]).mean(), None), 2)
    with pytest.raises(Diverged) as caught:
        learner.step.apply()
    assert len(caught.value.batch) == 4 and learner.weight.item() == 1.0


def test_up_to_the_limit_skipped_steps_change_nothing():
    plain, skipping = Learner(), Learner(skips=2)
    for number in (1.0, 2.0, 3.0):
        plain.learn(number)
    for number in (1.0, math.nan, 2.0, math.inf, 3.0):
        skipping.learn(number)
    assert_equal(skipping.state, plain.state)
    assert plain.step.end_update() == 0 and skipping.step.end_update() == 2
    # the limit is per update
    skipping.learn(math.nan), skipping.learn(math.nan)
    with pytest.raises(Diverged, match="gradient step 3 of this update"):
        skipping.learn(math.nan)


def test_weights_that_overflow_are_detected_at_the_end_of_an_update():
    learner = Learner(lr=1e30)
    learner.learn(1.0)
    assert learner.step.end_update() == 0
    learner.step.set_lr(3e38)
    learner.learn(1.0)
    with pytest.raises(
        Diverged, match=r"weights are NaN or infinite after gradient step 1 .* lower ppo.policy_lr=1e\+30"
    ):
        learner.step.end_update()


def test_finite_steps_equal_those_of_torch():
    """Compared with torch's own Adam."""
    learner, weight = Learner(), torch.tensor([1.0, 1.0, 2.0], requires_grad=True)
    adam = torch.optim.Adam([weight], 0.1, fused=True)
    for number in (1.0, -2.0, 0.5):
        learner.learn(number)
        weight.grad = torch.tensor([number, 1.0, 1.0])
        nn.utils.clip_grad_norm_([weight], 1.0)
        adam.step()
    assert torch.equal(torch.cat([learner.weight, learner.other]), weight)


def steps_on_this_rank(folder: str) -> None:
    """Run in each of two processes; the loss is NaN in the second one only."""
    torch.set_num_threads(1)
    learner = Learner(skips=1)
    rank = learner.step.distributed.rank
    learner.learn(1.0 + rank)
    before = learner.state
    learner.learn(math.nan if rank else 1.0)
    assert_equal(learner.state, before)
    learner.learn(2.0)
    learned = learner.state
    message = ""
    try:
        learner.learn(math.nan if rank else 1.0)
    except Diverged as error:
        message = str(error)
    assert_equal(learner.state, learned)
    torch.save({"message": message, "state": learned}, f"{folder}/rank{rank}.pt")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
def test_two_processes_skip_a_step_together_and_stop_together(tmp_path):
    code = (
        "import sys; from accelerate import debug_launcher; from test_gradient_step import steps_on_this_rank;"
        "debug_launcher(steps_on_this_rank, (sys.argv[1],), num_processes=2)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=250)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert_equal(first["state"], second["state"])
    assert "norm of the gradient is nan in gradient step 4" in first["message"]
    assert "the loss is nan in gradient step 4" in second["message"]
