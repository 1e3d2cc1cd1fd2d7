"""`imitate`: behaviour cloning. Draw demonstrated chunks, learn to reproduce them, repeat."""

import copy
import logging
import time
from collections import defaultdict
from dataclasses import asdict

import torch

from sparring.algorithms.gradient_step import GradientStep, schedule
from sparring.config.schema import Config
from sparring.contract import POLICY_MEMORY
from sparring.data.batches import BatchBuilder
from sparring.data.chunks import ActionChunks
from sparring.data.demonstrations import Demonstrations
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.phases.configs import ImitateConfig
from sparring.phases.demonstrations import (
    cameras_of,
    make_imitation_env,
    open_demonstrations,
    read_datasets,
    refuse_other_split,
    split_demonstrations,
    split_stamp,
)
from sparring.phases.phase import Phase, Progress
from sparring.policies.policy import Policy, make_policy
from sparring.processes.distributed import Distributed
from sparring.processes.memory import explain_oom

log = logging.getLogger(__name__)
MAX_GRAD_NORM = 1.0


class Imitate(Phase):
    """Trains a policy from demonstrations. The env gives only shapes of observations and actions; it takes no step."""

    default_limit = ("iterations", 20)
    model: Policy

    def __init__(
        self,
        config: ImitateConfig,
        env: Env,
        policy: Policy,
        chunks: ActionChunks,
        distributed: Distributed,
        seed: int,
        updates: int = default_limit[1],
        held_out: ActionChunks | None = None,
    ):
        """`updates`: number of updates of the run, for the estimate of its duration. `held_out`: demonstrations for
        evaluation, if the env has no simulator."""
        if type(policy).imitation_loss is Policy.imitation_loss:
            raise UserError(f"{type(policy).__name__} has no imitation_loss(), which `imitate` needs; implement it")
        self.config, self.env, self.policy, self.chunks = config, env, policy, chunks
        self.held_out = held_out
        self.evaluation = "policy" if held_out is None else "actions"
        self.distributed, self.seed = distributed, seed
        # saved and evaluated: the averaged weights if imitate.ema is set, else the weights
        with explain_oom("allocating gradients" + ("" if config.ema is None else " and imitate.ema"), policy):
            self.model = policy if config.ema is None else copy.deepcopy(policy).requires_grad_(False)
            # only the actor: demonstrations do not train a critic, and weight decay must not change it
            groups = [{"params": policy.actor_parameters(), "lr": config.learning_rate}]
            adamw, decay = torch.optim.AdamW, config.weight_decay
            rate = f"imitate.learning_rate={config.learning_rate:g}"
            self.optimizer = GradientStep(groups, distributed, MAX_GRAD_NORM, rate, adamw, weight_decay=decay)
        # each process draws its own batches
        self.batches = BatchBuilder(chunks, config.batch_size, seed * 1009 + distributed.rank, distributed.device)
        # [F, M]: memory of each demonstrated step, computed at first use
        self._memory: torch.Tensor | None = None
        self.gradient_steps = 0
        self.progress = Progress()
        self.updates = updates
        # time of this process's first gradient step, and gradient steps since then; None: the estimate was logged
        self._pace: tuple[float, int] | None = (0.0, -1)

    @classmethod
    def from_config(cls, config: Config, distributed: Distributed) -> "Imitate":
        datasets = read_datasets(config.imitate)
        env = make_imitation_env(config, datasets, distributed.device)
        policy = make_policy(config.policy, env.spec, config.rollout.action_steps, distributed.device)
        demonstrations = open_demonstrations(config, datasets, env.spec, policy)
        training, others = split_demonstrations(demonstrations, config)
        held_out = ActionChunks(others, policy.chunk, env.spec) if others else None
        chunks = ActionChunks(training, policy.horizon, env.spec, config.imitate.episodes)
        updates = config.training.iterations or cls.default_limit[1]
        phase = cls(config.imitate, env, policy, chunks, distributed, config.seed, updates, held_out)
        phase.optimizer.skips = config.training.skip_nonfinite_steps
        return phase

    @property
    def learns_from(self) -> str:
        folders = ", ".join(map(_described, self.chunks.demonstrations))
        held_out = f", {self.held_out.episodes} held out" if self.held_out else ""
        steps = f"{len(self.chunks):,} steps"
        return f"{self.chunks.episodes} demonstrations ({steps}) of {folders}{held_out}, from {self._inputs}"

    @property
    def _inputs(self) -> str:
        """The inputs of the policy as text."""
        shapes = [self.env.spec.observation[f"image/{camera}"][0] for camera in cameras_of(self.policy)]
        # [3, 64, 64] -> 64, [3, 48, 64] -> 48x64; each size once
        sizes = " and ".join(dict.fromkeys("x".join(map(str, dict.fromkeys(shape[1:]))) for shape in shapes))
        images = f"images ({len(shapes)} camera{'s'[: len(shapes) > 1]}, {sizes} px)" if shapes else ""
        inputs = [images, *(name for name in ("state", "points") if name in self.env.spec.observation)]
        return " and ".join(filter(None, inputs))

    def step(self, fraction: float) -> dict[str, float]:
        started = time.perf_counter()
        if self.progress.updates == 0:
            self._begin()
        lr = self.config.learning_rate * schedule(self.config.lr_schedule, fraction)
        self.optimizer.set_lr(lr)
        self.policy.train()
        steps: list[dict[str, torch.Tensor]] = []
        for number in range(self.config.steps_per_update):
            with explain_oom("imitating", self.policy, self.config.batch_size, "imitate.batch_size"):
                numbers = self._gradient_step()
            steps.append(numbers)
            if self._pace is not None:
                self._log_duration(number + 1, numbers["loss"])
        self.policy.eval()
        self.progress.updates += 1
        sums: dict[str, torch.Tensor | float] = defaultdict(float)
        left_out = self.optimizer.end_update()
        for numbers in steps:
            if not left_out or numbers["grad_norm"].isfinite():
                for name, value in numbers.items():
                    sums[name] += value
        taken = self.config.steps_per_update - left_out
        means = {name: float(value) / taken for name, value in sums.items()}
        means |= {"steps_skipped": float(left_out)} if self.optimizer.skips else {}
        return self.distributed.mean(means) | {"lr": lr, "update_seconds": time.perf_counter() - started}

    def _log_duration(self, made: int, loss: torch.Tensor) -> None:
        """Log the estimated duration once, after a second of gradient steps (without the first) or at the end of the
        update. `made`: gradient steps of this update so far."""
        assert self._pace is not None
        float(loss)  # waits for the GPU
        self._pace = since, steps = self._pace[0] or time.perf_counter(), self._pace[1] + 1
        seconds, each = time.perf_counter() - since, self.config.steps_per_update
        if not steps or (seconds < 1 and made < each):
            return
        self._pace = None
        left = self.updates - self.progress.updates
        total = max(seconds / steps * (left * each - made) + seconds, 1)
        duration = f"{total:.0f} s" if total < 100 else f"{total / 60:.0f} min"
        log.info("imitating from %s: about %s for %s updates on this machine", self._inputs, duration, left)
        # the dataset has the poses of objects, and the policy does not observe them
        own = [demos for demos in self.chunks.demonstrations if demos.dataset.is_own]
        recorded = any("observation.privileged" in demos.dataset.columns for demos in own)
        how = "instead of images" if "images" in self._inputs else "in addition to the robot's state"
        if recorded and ("images" in self._inputs or "privileged" in self.env.spec.observation):
            log.info("to imitate from the poses of objects %s: env.object_state=state env.cameras=[]", how)

    def state_dict(self) -> dict:
        state: dict = {"progress": asdict(self.progress), "optimizer": self.optimizer.state_dict()}
        state["gradient_steps"] = self.gradient_steps
        if self.held_out is not None:
            state["held_out"] = split_stamp(self.held_out.demonstrations)
        if self.model is not self.policy:
            # cloned: parameters are views of one vector, and saving a view saves the whole vector
            state["policy"] = {name: tensor.detach().clone() for name, tensor in self.policy.state_dict().items()}
        return state

    def process_state(self) -> dict:
        return {"batches": self.batches.state_dict()}

    def load_state_dict(self, state: dict, process_state: dict) -> list[str]:
        if self.held_out is not None:
            refuse_other_split(state["held_out"], self.held_out.demonstrations)
        self.progress = Progress(**state["progress"])
        self.gradient_steps = state["gradient_steps"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(process_state["batches"])
        if self.model is not self.policy:
            self.policy.load_state_dict(state["policy"])
        return []

    def _begin(self) -> None:
        """Fit the normalisers; give all processes and the average the same weights."""
        for demos in self.chunks.demonstrations:
            # another program recorded it
            for line in demos.report() if not demos.dataset.is_own else ():
                log.info("%s", line)
            for line in demos.warnings:
                log.warning("%s", line)
        # here, after pretrained weights are loaded: weights from imitation keep their own statistics
        config = self.config
        self.model.fit_normalizers(self.chunks.statistics(), config.state_normalization, config.normalization)
        if self.model is not self.policy:
            self.policy.load_state_dict(self.model.state_dict())
            self.distributed.broadcast_weights(self.model)
        self.distributed.broadcast_weights(self.policy)

    def _gradient_step(self) -> dict[str, torch.Tensor]:
        # a function of (seed, process, step): nothing to save
        number = (self.seed * 1_000_003 + self.gradient_steps) * 1009 + self.distributed.rank
        generator = torch.Generator(self.distributed.device).manual_seed(number)
        batch = next(self.batches)
        if self.policy.memory_size:
            if self._memory is None:
                # the normalisers are fitted and do not change any more
                self._memory = self.chunks.memory(self.policy, self.distributed.device)
            batch.set(POLICY_MEMORY, self._memory[batch["step"]])
        pixels, images = self.config.image_augmentation, batch["observation"].get("image", None)
        if pixels and images is not None:
            for camera, frames in images.items():
                images[camera] = _shifted(frames, pixels, generator)
        loss, numbers = self.policy.imitation_loss(batch, generator)
        norm = self.optimizer(batch, loss)
        self.gradient_steps += 1
        self._update_ema()
        return numbers | {"loss": loss.detach(), "grad_norm": norm}

    @torch.no_grad()
    def _update_ema(self) -> None:
        if self.model is self.policy:
            return
        # a smaller decay at first, so that the random initial weights lose their influence sooner
        assert self.config.ema is not None
        decay = min(self.config.ema, self.gradient_steps / (self.gradient_steps + 10))
        for average, now in zip(self.model.parameters(), self.policy.parameters(), strict=True):
            average.lerp_(now, 1 - decay)
        for buffer, newest in zip(self.model.buffers(), self.policy.buffers(), strict=True):
            buffer.copy_(newest)


def _shifted(images: torch.Tensor, pixels: int, generator: torch.Generator) -> torch.Tensor:
    """Shift each of `[B, 3, H, W]` by a random whole number of pixels, at most `pixels`; the border is repeated."""
    count, _, height, width = images.shape
    shift = torch.randint(-pixels, pixels + 1, (2, count, 1), generator=generator, device=images.device)
    rows = (torch.arange(height, device=images.device) + shift[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + shift[1]).clamp(0, width - 1)
    each = torch.arange(count, device=images.device)[:, None, None]
    # [B, H, W, 3] -> [B, 3, H, W]: indices on both sides of a slice put their dims first
    return images[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _described(demos: Demonstrations) -> str:
    """The folder, and the scaling of its images if any: scaled images differ from those of the env."""
    shapes = zip(demos.recorded_shapes.values(), demos.image_shapes.values(), strict=True)
    scaled = {f"{before[0]}x{before[1]} to {now[0]}x{now[1]} pixels" for before, now in shapes if before != now}
    return f"{demos.path}" + (f", images scaled from {', '.join(sorted(scaled))}" if scaled else "")
