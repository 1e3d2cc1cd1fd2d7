"""The Python API: the same code that the command line runs.

config = load_config("run.yaml")
env = make_env(config.env, num_envs=16)
policy = make_policy(config.policy, env.spec, chunk=1)
trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=2048, buffer_type="standard", batch_size=64)
trainer.train(total_timesteps=100_000)
print(trainer.evaluate(episodes=100).table())

GRPO needs whole episodes of groups of robots:
env = make_env(config.env, num_envs=16, group_size=8)
trainer = Trainer(policy, env, GRPO(config.grpo, policy), episodes_per_batch=32)

With mode="async", a second process collects while the policy learns (docs/async.md):
trainer = Trainer(policy, env, PPO(config.ppo, policy), mode="async")
"""

from pathlib import Path
from typing import Any, cast

from sparring.algorithms.grpo import GRPO
from sparring.algorithms.ppo import PPO, Algorithm
from sparring.config.resolve import resolve
from sparring.config.schema import load_config
from sparring.config.text import saved_settings
from sparring.config.trust import trusted_settings, trusting
from sparring.envs.env import Env, make_env
from sparring.errors import UserError
from sparring.evaluation.play import Evaluation, evaluate
from sparring.phases.build import build_env, refuse_of_script
from sparring.phases.finetune import Finetune
from sparring.phases.student import with_cameras
from sparring.policies import POLICIES
from sparring.policies.policy import Policy, make_policy
from sparring.record.log import RunLog
from sparring.runs.checkpoint import checkpoint_folder, load_spec
from sparring.runs.fits import load_weights
from sparring.runs.run import Run
from sparring.world_models.world_model import WorldModel, make_world_model


class Trainer:
    """Runs the training loop with an env, a policy and an algorithm. Without `output` nothing is written to disk.

    mode="sync" alternates between collecting and learning. mode="async" does both at once: a second process builds an
    env and a policy from the configs of the given ones, which must come from make_env and make_policy, and receives the
    policy's weights. buffer_type="vla" selects the ring buffer of the newest decisions and mode="async".
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        algorithm,
        buffer_size: int | None = None,
        buffer_type: str = "standard",
        batch_size: int | None = None,
        output: str | Path | None = None,
        seed: int = 0,
        quiet: bool = False,
        episodes_per_batch: int | None = None,
        mode: str | None = None,
        staleness: int = 1,
    ):
        """Between two updates it collects `episodes_per_batch` whole episodes, or `buffer_size` decisions (None: 2048).

        `mode`: "sync" or "async"; None: "async" for buffer_type="vla". `staleness` (async): the number of updates that
        a rollout may be behind.
        """
        # the source document that defines buffer type "vla" uses it for asynchronous collection
        asked = f"{mode=}" if mode else f"{buffer_type=} (mode='async')"
        mode = mode or ("async" if buffer_type == "vla" else "sync")
        if mode == "async":
            _check_async(asked, policy, env, algorithm, staleness)
        if buffer_size is None and episodes_per_batch is None:
            buffer_size = 2048
        self.policy, self.env, self.algorithm = policy, env, algorithm
        if batch_size is not None:
            algorithm.config = algorithm.config.model_copy(update={"mini_batch_size": batch_size})
        self.quiet = quiet
        rollout: dict[str, Any] = {"n_envs": env.num_envs, "action_steps": policy.chunk, "group_size": env.group_size}
        rollout |= {"max_episode_steps": env.spec.max_episode_steps or None, "mode": mode, "staleness": staleness}
        rollout["n_episodes_per_batch"] = episodes_per_batch
        self.settings: dict[str, Any] = {"seed": seed, "device": str(env.device)}
        self.settings["output"] = None if output is None else str(output)
        self.settings |= {"buffer": {"size": buffer_size, "type": buffer_type}, "rollout": rollout}
        self.settings |= {"env": _section(env), "policy": _section(policy)} | _named(algorithm)
        if output is not None and not all(self.settings[name] for name in ("env", "policy")):
            raise UserError("output=... saves a run by its config: make env and policy with make_env and make_policy")
        self.algorithm.seed = seed
        self.run: Run | None = None
        self._closed = False

    def train(self, total_timesteps: int) -> bool:
        """Train until `total_timesteps` env steps are done; False if interrupted. Call again with more to continue."""
        config = load_config(self.settings | {"training": {"total_timesteps": total_timesteps}}, inherit=False)
        if self.run is None:
            distributed, env = self.algorithm.distributed, self.env
            # before the actor process exists, because it also receives that process's output
            run_log = RunLog(config.logging, self.quiet, distributed.rank)
            if config.rollout.mode == "async":
                env = cast(Env, build_env(config, distributed, env.device))
            phase = Finetune.of(config, env, self.policy, self.algorithm, distributed)
            self.run = Run(config, phase, folder=config.output is not None, quiet=self.quiet, run_log=run_log)
        elif self._closed:
            raise UserError("this Trainer was closed, and its actor process has ended; create a new Trainer")
        else:
            self.run.extend(config)
        return self.run.run()

    def evaluate(self, episodes: int = 100) -> Evaluation:
        """Evaluate on held-out episodes in a separate env, compared with random actions on the same episodes."""
        if self.env.config is None:
            raise UserError("evaluate() builds a second env from the env's config; create the env with make_env()")
        limit = self.env.spec.max_episode_steps or None
        env = make_env(self.env.config, self.env.num_envs, limit, self.env.device)
        try:
            return evaluate(self.policy, env, episodes, self.settings["seed"], self.policy.chunk)
        finally:
            env.close()

    def close(self) -> None:
        """End the actor process of mode="async"; without this call it ends with the program."""
        if self.run is not None and self.run.config.rollout.mode == "async":
            self.run.phase.env.close()
            self._closed = True


def load_policy(path: str | Path, device: str = "cpu", trust: bool = False) -> Policy:
    """The trained policy of a run folder or checkpoint, ready to act. Every weight must fit. Needs no env.

    `trust`: allow classes that a config from another user names (docs/security.md).
    """
    with trusting(trust):
        checkpoint = checkpoint_folder(path)
        needed = ("policy.", "rollout.action_steps", "student.cameras")
        config = load_config(None, trusted_settings(checkpoint, needed), inherit=False)
        spec = load_spec(checkpoint)
        phase = saved_settings(checkpoint).get("phase")
        if phase in ("student", "adversarial"):
            spec = with_cameras(spec, config.student.cameras)  # the explorer may have fewer cameras than the env
        policy = make_policy(config.policy, spec, config.rollout.action_steps, device)
        load_weights(policy, checkpoint, "policy." if phase == "adversarial" else "")
    return policy.eval()


def load_world_model(path: str | Path, device: str = "cpu", trust: bool = False) -> WorldModel:
    """The trained world model of a teacher or adversarial run or checkpoint. Every weight must fit.

    `trust`: allow classes that a config from another user names (docs/security.md).
    """
    with trusting(trust):
        checkpoint = checkpoint_folder(path)
        phase = saved_settings(checkpoint).get("phase")
        if phase not in ("teacher", "adversarial"):
            raise UserError(
                f"'{path}' is a run of `sparring train {phase}`, which has no world model; give a teacher's run"
            )
        settings = trusted_settings(checkpoint, ("world_model.", "rollout.action_steps"))
        config = load_config(None, settings, inherit=False)
        model = make_world_model(config.world_model, load_spec(checkpoint), config.rollout.action_steps)
        load_weights(model, checkpoint, "world_model." if phase == "adversarial" else "")
    return model.to(device).eval()


def _section(thing) -> dict:
    config = getattr(thing, "config", None)
    return {} if config is None else config.model_dump()


def _check_async(asked: str, policy: Policy, env: Env, algorithm: Any, staleness: int) -> None:
    """Raise for parts that the actor process cannot rebuild, or whose stale decisions cannot be corrected."""
    # an env of another class, such as ImaginedEnv, may have the config of the env that it replaces
    configs = {"env": env.config if type(env) is Env else None, "policy": getattr(policy, "config", None)}
    if configs["env"] is None:
        why = f"this {type(env).__name__} has none; create it with make_env, or use mode='sync'"
        raise UserError(f"{asked} builds a second env in another process from the config of the first, and {why}")
    if configs["policy"] is None:
        raise UserError(
            f"{asked} builds a second policy in another process from the config of the first, and this "
            f"{type(policy).__name__} has none; create it with make_policy (your own class keeps its config as "
            "self.config), or use mode='sync'"
        )
    classes = {name: str(getattr(config, "name", "")) for name, config in configs.items()}
    classes["algorithm"] = f"{type(algorithm).__module__}:{type(algorithm).__qualname__}"
    for name, found in classes.items():
        refuse_of_script(found, f"{asked}: the {name} '{found}'", "mode='sync'")
    made = resolve(classes["policy"], POLICIES, "policy")
    # a name that resolves to a function selects one of the built-in classes
    if type(policy) is not made if isinstance(made, type) else not type(policy).__module__.startswith("sparring."):
        name = f"{type(policy).__module__}:{type(policy).__qualname__}"
        other = f"'{classes['policy']}', which is not the class of this one"
        advice = f"set policy.name to '{name}' in its config, or use mode='sync'"
        raise UserError(f"{asked} would build a policy by the name in its config, {other}; {advice}")
    if staleness and isinstance(algorithm, Algorithm):
        algorithm.off_policy.check_correctable()


def _named(algorithm) -> dict:
    settings = algorithm.config.model_dump()
    for name, kind in (("ppo", PPO), ("grpo", GRPO)):
        if isinstance(algorithm, kind):
            return {"algorithm": name, name: settings}
    return {"algorithm": f"{type(algorithm).__module__}:{type(algorithm).__qualname__}", "algorithm_config": settings}
