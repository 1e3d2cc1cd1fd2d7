"""Evaluation without a simulator: the error of predicted actions on held-out demonstrations. A entries of an action."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from tensordict import TensorDict

from sparring.config.schema import Config
from sparring.contract import POLICY_MEMORY, EnvSpec
from sparring.data.chunks import ActionChunks
from sparring.errors import UserError
from sparring.evaluation.files import EvaluationResult, text_table
from sparring.evaluation.play import Device
from sparring.noise import keyed_uniform
from sparring.phases.demonstrations import (
    make_imitation_env,
    open_demonstrations,
    read_datasets,
    refuse_other_split,
    split_demonstrations,
)
from sparring.policies.policy import Policy
from sparring.runs.fits import spec_differences

_AT_ONCE = 256  # decisions per batch


@dataclass
class ActionError(EvaluationResult):
    names: list[str]  # of the entries
    error: np.ndarray  # [A]: mean squared error, in units of the dataset
    baseline: np.ndarray  # [A]: that of always predicting the mean action of the training episodes
    decisions: int

    @classmethod
    def run(
        cls, config: Config, policy: Policy, device: Device, spec: EnvSpec, split: list[str] | None = None
    ) -> "ActionError":
        """Of a saved run, on the episodes that were held out from it. `spec`: that of the run, in whose units its
        actions are; `split`: the stamp of its demonstrations, None if it is unknown."""
        datasets = read_datasets(config.imitate)
        now = make_imitation_env(config, datasets).spec
        # bounds that are inferred may differ
        now = replace(now, action_low=spec.action_low, action_high=spec.action_high)
        if differences := spec_differences(spec, now):
            raise UserError("\n".join(["the demonstrations differ from those of the run:", *differences]))
        trained, others = split_demonstrations(open_demonstrations(config, datasets, spec, policy), config)
        if split is not None:
            refuse_other_split(split, others)
        training = ActionChunks(trained, policy.chunk, spec, config.imitate.episodes)
        held_out = ActionChunks(others, policy.chunk, spec)
        return cls.of(policy, held_out, training, spec, config, torch.device(device))

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        policy: Policy,
        held_out: ActionChunks,
        training: ActionChunks,
        spec: EnvSpec,
        config: Config,
        device: torch.device,
    ) -> "ActionError":
        """Decide at every step of `evaluation.episodes` held-out episodes, and compare the whole chunks."""
        was_training = policy.training
        policy.eval()
        episodes = min(config.evaluation.episodes, held_out.episodes)
        # evenly spaced, so that they are of all datasets
        chosen = ((torch.arange(episodes) + 0.5) * held_out.episodes / episodes).long()
        ranges = zip(held_out.first_steps[chosen].tolist(), held_out.episode_lengths[chosen].tolist(), strict=True)
        steps = torch.cat([torch.arange(first, first + length) for first, length in ranges])
        memory = held_out.memory(policy, device, chosen) if policy.memory_size else None
        mean = torch.from_numpy(training.statistics()["action"]["mean"]).float()
        # [A]: sums of squares over steps of valid chunks
        error, baseline, count = torch.zeros(len(mean)), torch.zeros(len(mean)), 0
        for part in steps.split(_AT_ONCE):
            td = TensorDict({"observation": held_out.observation(part)}, [len(part)]).to(device)
            if memory is not None:
                td.set(POLICY_MEMORY, memory[part])
            if policy.start_size:
                start = keyed_uniform(config.seed, part.numpy(), np.zeros(1, np.int64), policy.start_size)[0]
                td["start"] = torch.from_numpy(start).to(device)
            shown, valid = held_out.actions(part), held_out.valid(part)
            # [B, C, A] -> [steps, A]
            predicted = policy.act(td)["action"].float().cpu()[:, : shown.shape[1], : len(mean)]
            error += (predicted - shown[..., : len(mean)])[valid].square().sum(0)
            baseline += (mean - shown[..., : len(mean)])[valid].square().sum(0)
            count += int(valid.sum())
        policy.train(was_training)
        # [A]: of the dataset's units in one unit of an action
        scale = (np.array(spec.action_high) - np.array(spec.action_low)) / 2 if spec.action_low else np.ones(len(mean))
        names = held_out.demonstrations[0].action_names or [f"action_{entry}" for entry in range(len(mean))]
        errors = [(total / count).numpy() * scale**2 for total in (error, baseline)]
        return cls(episodes, config.seed, names, errors[0], errors[1], len(steps))

    @property
    def ratios(self) -> list[float | None]:
        """[A]: squared errors relative to the mean action; None for an entry that does not vary."""
        pairs = zip(self.error.tolist(), self.baseline.tolist(), strict=True)
        return [error / baseline if baseline > 1e-12 else None for error, baseline in pairs]

    @property
    def ratio(self) -> float | None:
        known = [ratio for ratio in self.ratios if ratio is not None]
        return sum(known) / len(known) if known else None

    def table(self, width: int | None = None) -> str:
        rows: list[tuple[str, ...]] = [("action entry", "error (RMS)", "mean action", "ratio of squares")]
        errors = zip(self.names, np.sqrt(self.error), np.sqrt(self.baseline), self.ratios, strict=True)
        rows += [(name, f"{own:.4g}", f"{mean:.4g}", _shown(ratio)) for name, own, mean, ratio in errors]
        whole = [f"{np.sqrt(values.mean()):.4g}" for values in (self.error, self.baseline)]
        return text_table([*rows, ("all", *whole, _shown(self.ratio))], width=width, spare=(0,))

    def numbers(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {"episodes": self.episodes}
        found |= {"action_error": float(np.sqrt(self.error.mean())), "action_error_ratio": self.ratio}
        entries = zip(self.names, self.ratios, strict=True)
        return found | {f"{name}/action_error_ratio": ratio for name, ratio in entries}

    def content(self) -> dict:
        each = {"error": np.sqrt(self.error).tolist(), "mean_action_error": np.sqrt(self.baseline).tolist()}
        entries = zip(self.names, *each.values(), self.ratios, strict=True)
        rows = {name: dict(zip((*each, "ratio"), values, strict=True)) for name, *values in entries}
        return {"decisions": self.decisions, "action_error": {"ratio": self.ratio, "entries": rows}}


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"
