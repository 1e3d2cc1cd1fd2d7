"""Settings below the given ones: phase defaults, and settings inherited from other runs: the policy from `pretrained`,
the env from `imitate.demos`, the world model from `student.teacher` and `rollout.imagined`, policy and world model from
`adversarial.*`."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from sparring.config.text import Setting, read_settings, shortened
from sparring.config.trust import refuse_code
from sparring.envs.configs import DatasetConfig
from sparring.errors import UserError
from sparring.policies.configs import OF_A_METHOD
from sparring.processes.files import read_small

USUAL = {"env": "tabletop", "policy": "actor_critic", "world_model": "token"}
_PLAYGROUND = {
    "env.task": ["explore"],
    "env.cameras": ["head", "wrist"],
    "env.object_state": "hidden",  # the model must remember objects out of view
    "rollout.action_steps": 4,  # a decision lasts 160 ms, so that frames differ
}
# rollouts of two episodes per robot; the random function of gsde is drawn once per episode
_EXPLORER = _PLAYGROUND | {"rollout.steps": 50, "policy.distribution": "gsde", "policy.sde_sample_freq": 25}
_EXPLORER |= {"policy.init_std": 0.3, "ppo.gamma": 0.99, "ppo.policy_lr": 5e-4, "ppo.critic_lr": 1e-3}
_EXPLORER |= {"ppo.mini_batch_size": 200, "ppo.ppo_epochs": 4, "ppo.target_kl": 0.05}
_EXPLORER["ppo.value_loss_coef"] = 0.02  # larger values saturate the shared encoder
# phase -> dotted key -> value, above the defaults of the sections; those of `env` are for the built-in arm
PHASE_DEFAULTS = {
    "teacher": _PLAYGROUND | {"rollout.steps": 25, "training.log_every": 5, "training.save_every": 20},
    "student": _EXPLORER,
    "adversarial": _EXPLORER | {"training.log_every": 5, "training.save_every": 10},
}
# finetune with `pretrained`: algorithm -> key of its section -> value; small steps keep the pretrained skill
_CAREFUL = {"policy_lr": 1e-4, "target_kl": 0.05}
# the critic of ppo is untrained and may learn faster
_OF_PRETRAINED = {"ppo": _CAREFUL | {"critic_lr": 1e-3, "critic_warmup_updates": 3}, "grpo": _CAREFUL}
# env settings that change neither observations nor actions: they are not inherited
_OF_THE_RUN = ("env.threads", "env.reward", "env.video_renderer", "env.vectorize", "env.workers", "env.success_return")
# settings of env.name=dataset, besides the name
_OF_A_DATASET = set(DatasetConfig.model_fields) - {"name"}

# the length of a run; a resumed run may have other limits
LIMITS = ("training.total_timesteps", "training.num_episodes", "training.iterations")
# settings that do not change training; a resumed run may have other values
FREE_TO_DIFFER = (
    *("resume", "output", "device", "threads", "logging.", "evaluation.", "rollout.watchdog_s"),
    *("rollout.render_episodes", "training.save_every", "training.log_every", "training.keep_checkpoints"),
    "training.skip_nonfinite_steps",
    *("env.threads", "env.workers", "env.video_renderer", "ppo.micro_batch_size", "grpo.micro_batch_size"),
)


def inherited_settings(phase: str, settings: list[Setting]) -> list[Setting]:
    given = {setting.key: setting.value for setting in settings}
    inherited: list[Setting] = []
    if isinstance(given.get("pretrained"), str):
        inherited += _of_checkpoint("pretrained", given, ("env", "policy"))
        name, source = str(given.get("algorithm", "ppo")), f"pretrained={given['pretrained']}"
        careful = _OF_PRETRAINED.get(name, {}) if phase == "finetune" else {}
        inherited += [Setting(f"{name}.{key}", value, source) for key, value in careful.items()]
    if phase == "imitate":
        # the env of our demonstrations overrides that of `pretrained`
        inherited += _of_demonstrations(given, has_env=any(setting.key == "env.name" for setting in inherited))
    explores = phase in ("student", "adversarial")
    for key in [f"{phase}.teacher", "rollout.imagined"] if explores else ["rollout.imagined"]:
        if isinstance(given.get(key), str):
            inherited += _of_checkpoint(key, given, ("env", "world_model"))
    if phase == "adversarial" and isinstance(given.get("adversarial.student"), str):
        inherited += _of_checkpoint("adversarial.student", given, ("policy",), "student.cameras")
    return inherited


def _of_checkpoint(key: str, given: dict[str, Any], sections: tuple[str, ...], *keys: str) -> list[Setting]:
    """The settings of `sections`, `keys` and rollout.action_steps of a checkpoint; a weights file has no config."""
    from sparring.runs.checkpoint import find_checkpoint
    from sparring.runs.fits import other_origin

    path = given[key]
    folder, saved = (None, []) if os.path.exists(path) else _of_resumed_run(key, given)
    if folder is None:
        try:
            found = find_checkpoint(path)
        except OSError as error:  # e.g. a name that is too long, or no permission
            raise UserError(f"{key} = '{shortened(path)}': cannot be read ({error.strerror})") from None
        folder = found.parent if found.is_file() else found
        saved = read_settings(folder / "config.yaml") if (folder / "config.yaml").is_file() else []
        trained = next((s.value for s in saved if s.key == "phase"), None)
        # checked first, because this reason explains more than an env that does not match
        if trained and "world_model" in sections and (other := other_origin("world_model", trained)):
            raise UserError(f"{key} = '{path}': {other}")
    method = next((s.value for s in saved if s.key == "policy.method"), None)
    if given.get("policy.method", method) != method:
        saved = [s for s in saved if s.key not in [f"policy.{name}" for name in OF_A_METHOD]]
    names = {s.key: s.value for s in saved if s.key in [f"{section}.name" for section in sections]}
    # a different kind of env or network has different settings; loading the weights checks whether they fit
    same = [f"{named.partition('.')[0]}." for named, name in names.items() if given.get(named, name) == name]
    wanted = (*same, "rollout.action_steps", *keys)
    saved = [s for s in saved if s.key.startswith(wanted) and s.key not in _OF_THE_RUN]
    refuse_code(folder, "config.yaml", saved)
    return [Setting(s.key, s.value, f"{key}={path}") for s in saved]


def _of_resumed_run(key: str, given: dict[str, Any]) -> tuple[Path | None, list[Setting]]:
    """The newest checkpoint of the run to resume, and its settings, if that run started from `given[key]`."""
    from sparring.config.schema import Config
    from sparring.runs.checkpoint import newest_whole

    named = {name: given[name] for name in ("output", "phase") if name in given}
    folder = Config.model_construct(**named).run_folder
    newest = None if given.get("resume", "auto") == "never" else newest_whole(folder)
    saved = read_settings(newest / "config.yaml") if newest else []
    return (newest, saved) if any(s.key == key and s.value == given[key] for s in saved) else (None, [])


def _of_demonstrations(given: dict[str, Any], has_env: bool) -> list[Setting]:
    """The env of the first dataset with the tasks of all datasets. If another program recorded them and there is no
    env: env.name=dataset. `has_env`: whether `pretrained` has one."""
    demos = given.get("imitate.demos")
    folders = [demos] if isinstance(demos, str) else demos if isinstance(demos, (list, tuple)) else []
    files = [Path(path) / "meta/sparring.json" for path in folders if isinstance(path, str)]
    # these settings alone do not choose an env
    has_env |= any(key.startswith("env.") and key.partition(".")[2] not in _OF_A_DATASET for key in given)
    if not has_env and files and all(file.parents[1].exists() and not file.is_file() for file in files):
        return [Setting("env.name", "dataset", f"imitate.demos={files[0].parents[1]}")]
    if not files or not all(file.is_file() for file in files):
        return []
    envs, checksums = zip(*map(_recorded_env, files), strict=True)
    if given.get("env.name", envs[0]["name"]) != envs[0]["name"]:
        return []
    tasks = list(dict.fromkeys(task for env in envs for task in env.get("task", [])))
    values = {f"env.{key}": value for key, value in (envs[0] | ({"task": tasks} if tasks else {})).items()}
    folder = files[0].parents[1]
    source = f"imitate.demos={folder}"
    settings = [Setting(k, v, source, sha256=checksums[0]) for k, v in values.items() if k not in _OF_THE_RUN]
    refuse_code(folder, "meta/sparring.json", settings)
    return settings


def _recorded_env(file: Path) -> tuple[dict[str, Any], str]:
    from sparring.data.dataset import DatasetError

    try:
        content = read_small(file)
        env = json.loads(content)["env"]
        # only the built-in robot has a list of tasks
        tasks = {} if ":" in env["name"] else {"task": list(env["task"])}
        return env | {"name": env["name"]} | tasks, hashlib.sha256(content).hexdigest()
    except (OSError, ValueError) as error:
        why = str(error)
    except (KeyError, TypeError, RecursionError):
        why = "env.name or env.task is missing"
    advice = "copy the dataset again, or delete this file and set env.* to the env of the demonstrations"
    raise DatasetError(f"'{file}' cannot be read ({why}); {advice}")
