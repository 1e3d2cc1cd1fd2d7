"""Does exploration data improve a world model more than random data, on objects of unseen tasks?

    python benchmarks/phases/teacher.py --seed 0               # first, the world model,
    python benchmarks/phases/student.py --seed 0               # and the explorer
    python benchmarks/phases/retrain.py --seed 0
    python benchmarks/phases/retrain.py --summary

The explorer, which samples its actions as in training, and random actions like the teacher's play the same new episodes
of `explore`. On 6,400 decisions of each, a world model is trained from scratch, with the same initial weights, as many
gradient steps, and the frozen tokenizer of the teacher. Both then predict episodes of scripted experts. Target: on
pixels of objects, over both cameras and all tasks, at least 15 % less squared error with exploration data. One thread.
"""

import json
import time
from pathlib import Path

import torch
from exploring import explorer_config
from script import RUNS, finish, flags, report, show, stored, student_of, suffix, teacher_of, with_student
from tensordict import TensorDict

from sparring.algorithms.world_model import WorldModelLearner
from sparring.api import load_policy, load_world_model, make_env, make_world_model
from sparring.collect.collector import Collector
from sparring.data import EpisodeRecorder, EpisodeStore, ShuffledWindows
from sparring.envs.tabletop.experts import Expert
from sparring.evaluation.play import held_out_episodes
from sparring.evaluation.world_model import _measure
from sparring.phases.replay import Replay
from sparring.policies.policy import Policy
from sparring.policies.random import ColouredNoise
from sparring.processes.distributed import Distributed
from sparring.runs.checkpoint import checkpoint_folder, load_spec

RESULTS = report.RESULTS / "phases_retrain.json"
TASKS, SOURCES = ("push_d0", "lift_d0", "place_d0"), ("copy", "teacher", "random", "explorer")
# added to the seed, so that neither the teacher nor the student has played these episodes
EPISODES, BETTER, NEW_EPISODES = 16, 0.15, 1_000_000
SETTINGS = ["rollout.steps=400", "training.iterations=8", "training.bptt_length=8", "world_model.tokenizer_steps=0"]
SETTINGS += ["teacher.gradient_steps=250", "teacher.batch_size=4", "teacher.burn_in=6", "teacher.learning_rate=3e-3"]


def outcome(folder: Path, seed: int, teacher: Path, student: Path, deadline: float, changes: list[str]) -> dict | None:
    """None if the deadline, in CPU seconds of this process, passes before the end."""
    torch.set_num_threads(1)
    config = explorer_config(teacher, folder, seed, [*SETTINGS, *changes])
    models, records = {"teacher": load_world_model(teacher)}, {}
    for who, actor in {"random": None, "explorer": student}.items():
        collected = collect(folder / who, actor, config)
        models[who], learned = learn(folder / who, models["teacher"], config, deadline)
        records[who] = collected | learned
        if learned["updates"] < config.training.iterations:
            return None
    started = time.process_time()
    figures = {task: judge(models, task, config) for task in TASKS}
    seconds = [time.process_time() - started, *(r["collect_seconds"] + r["learn_seconds"] for r in records.values())]
    about = {"problem": "retrain", "seed": seed, "commit": report.commit(), "cpu": report.cpu_model()}
    return about | {"done": True, "cpu_seconds": sum(seconds), "runs": records, "figures": figures}


def collect(folder: Path, student: Path | None, config) -> dict:
    """Record episodes of the explorer, or of random actions, unless they exist; return their figures."""
    log, rollout = folder / "collected.json", config.rollout
    if log.is_file():
        return json.loads(log.read_text())
    started = time.process_time()
    env = make_env(config.env, rollout.n_envs, rollout.max_episode_steps)
    correlation = ColouredNoise.share_of(rollout.n_envs, config.teacher.coloured) * config.teacher.correlation
    policy = load_policy(student) if student else ColouredNoise(env.spec, rollout.action_steps, correlation)
    store = EpisodeStore(folder / "episodes")
    store.rewind(0)  # discard the episodes of an interrupted call
    collector = Collector(env, policy, config.seed + NEW_EPISODES, chunk=rollout.action_steps)
    recorder = EpisodeRecorder(store, rollout.n_envs, folder.name, exclude=("noise", "trace", "log_prob", "value"))
    while store.num_steps < rollout.n_envs * rollout.steps:
        recorder.add(collector.decide())
    contacts = [episode.contact for episode in collector.drain_episodes()]
    store.close()
    env.close()
    record = {"decisions": store.num_steps, "contact": sum(contacts) / len(contacts)}
    report.write_json(log, record | {"collect_seconds": time.process_time() - started})
    return json.loads(log.read_text())


def learn(folder: Path, teacher, config, deadline: float) -> tuple:
    """(world model, record) after all updates, or those before the deadline; repeat the call to resume."""
    settings, updates, saved = config.teacher, config.training.iterations, folder / "learned.pt"
    spec = load_spec(checkpoint_folder(config.student.teacher))
    torch.manual_seed(config.seed)  # the same initial weights and random numbers for both
    model = make_world_model(config.world_model, spec, config.rollout.action_steps)
    model.tokenizer.load_state_dict(teacher.tokenizer.state_dict())
    learner = WorldModelLearner(settings, model, Distributed("cpu"), "teacher")
    windows = ShuffledWindows(EpisodeStore(folder / "episodes", True), config.training.bptt_length, settings.burn_in)
    replay = Replay(windows, settings.batch_size, model.memory_size, config.seed, torch.device("cpu"))
    parts, record = (model, learner, replay), {"updates": 0, "learn_seconds": 0.0}
    if saved.is_file():
        *states, rng_state, record = torch.load(saved)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(rng_state)
    while record["updates"] < updates and time.process_time() < deadline:
        started = time.process_time()
        metrics = learner.update(replay, settings.gradient_steps, record["updates"] / updates)
        record["updates"] += 1
        record["learn_seconds"] += time.process_time() - started
        print(folder.name, record["updates"], {name: round(value, 3) for name, value in metrics.items()}, flush=True)
        torch.save([*(part.state_dict() for part in parts), torch.get_rng_state(), record], folder / "partial")
        (folder / "partial").replace(saved)
    replay.close()
    tokenizers = (kept.tokenizer.state_dict().values() for kept in (teacher, model))
    assert all(map(torch.equal, *tokenizers)), "the tokenizer has changed"
    return model, record


class Scripted(Policy):
    """A scripted expert as a policy that decides on single steps, without noise."""

    noise_size = 1

    def __init__(self, env):
        super().__init__()
        self.expert = Expert(env.backend)

    def act(self, td: TensorDict) -> TensorDict:
        return td.set("action", torch.from_numpy(self.expert()).float())


def judge(models: dict, task: str, config) -> dict:
    """Camera -> number of object pixels in held-out episodes of the expert, and each model's squared error there."""
    env = make_env(config.env.model_copy(update={"task": (task,), "segmentation": True}), EPISODES)
    played = held_out_episodes(env, Scripted(env), EPISODES, config.seed, chunk=1)
    env.close()
    episodes = in_decisions(played, config.rollout.action_steps)
    found = {who: _measure(model, episodes)["cameras"] for who, model in models.items()}
    figures = {camera: dict(measured["object_mse"]) for camera, measured in found["teacher"].items()}
    for camera, errors in figures.items():
        errors |= {who: cameras[camera]["object_mse"]["prediction"] for who, cameras in found.items()}
    return figures


def in_decisions(steps: TensorDict, chunk: int) -> TensorDict:
    """Steps `[E, T]` -> decisions `[E, T // chunk]` on chunks of `chunk` steps."""
    steps = steps[:, : steps.shape[1] // chunk * chunk]
    decisions = steps[:, ::chunk].select("observation", "is_first", "mask").clone()
    decisions["next"] = steps[:, chunk - 1 :: chunk]["next"]
    # [E, T, 1, A] -> [E, T // chunk, chunk, A]
    decisions["action"] = steps["action"].flatten(1, 2).unflatten(1, (-1, chunk))
    # the world models were trained with the instructions of `explore` only
    decisions["observation", "task"].zero_()
    return decisions


def pooled(parts: list[dict]) -> dict:
    """Mean errors over all pixels."""
    pixels = sum(part["pixels"] for part in parts)
    return {who: sum(part[who] * part["pixels"] for part in parts) / pixels for who in SOURCES} | {"pixels": pixels}


def summary(runs: dict[str, dict]) -> str:
    rows, lines = [("seed", "task", "camera", "pixels", *SOURCES, "explorer to random")], []
    for run in runs.values():
        parts = {(task, camera): e for task, cameras in run["figures"].items() for camera, e in cameras.items()}
        cameras = {camera: [e for (_, name), e in parts.items() if name == camera] for _, camera in parts}
        parts |= {("all", camera): pooled(of) for camera, of in (cameras | {"all": [*parts.values()]}).items()}
        for where, errors in parts.items():
            change = errors["explorer"] / errors["random"] - 1
            shown = [f"{errors['pixels']:,}", *(f"{errors[who]:.5f}" for who in SOURCES), f"{change:+.1%}"]
            rows.append((run["seed"], *where, *shown))
        touched = ", ".join(f"{who} {record['contact']:.1%}" for who, record in run["runs"].items())
        said = f"{change:+.1%} {'met' if -change >= BETTER else 'MISSED'}; contact: {touched}"
        lines.append(f"seed {run['seed']}: {said}; CPU minutes: {run['cpu_seconds'] / 60:.1f}")
    return "\n".join([report.table(rows), *lines])


def main() -> None:
    args = with_student(flags(__doc__)).parse_args()
    if args.summary:
        return show(stored(RESULTS), summary)
    folder = RUNS / (f"retrain_seed{args.seed}" + suffix(args))
    deadline = time.process_time() + 60 * args.minutes
    run = outcome(folder, args.seed, teacher_of(args), student_of(args), deadline, args.set)
    show(finish(args, run, RESULTS), summary)


if __name__ == "__main__":
    main()
