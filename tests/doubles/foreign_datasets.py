"""Datasets as other programs write them, built by hand: LeRobot v2.1 and v3.0, robomimic HDF5. And an env for them."""

import io
import json
from pathlib import Path

import gymnasium
import numpy as np
import pyarrow
import pyarrow.parquet
from gymnasium import spaces
from PIL import Image

from sparring.data import video

TASKS = ("push the red block", "open the drawer", "fold the towel")


class ReachEnv(gymnasium.Env):
    """A point moves to a target in a square of side 2: the first step within 0.1 ends the episode. The image (24 x 40)
    is as bright as the x of the target. Actions are velocities of 0 to `scale`, at rest in the middle."""

    def __init__(self, fps: int | None = 20, scale: float = 10.0, image: bool = False, text: bool = False):
        self.metadata = {"render_fps": fps} if fps else {}
        parts = {"agent_pos": spaces.Box(-2, 2, (2,)), "goal": spaces.Box(-2, 2, (2,))}
        if image:
            parts["view"] = spaces.Box(0, 255, (24, 40, 3), np.uint8)
        if text:
            parts["words"] = spaces.Text(60)
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Box(0, scale, (2,))
        self.scale, self.image, self.text = scale, image, text
        self.max_episode_steps = 25

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self._observed(), {}

    def step(self, action):
        self.position = self.position + 0.1 * (np.asarray(action) / self.scale * 2 - 1)
        success = bool(np.linalg.norm(self.goal - self.position) < 0.1)
        return self._observed(), float(success), success, False, {"is_success": success}

    def _observed(self):
        parts = {"agent_pos": self.position.astype(np.float32), "goal": self.goal.astype(np.float32)}
        if self.image:
            parts["view"] = np.full((24, 40, 3), grey(self.goal[0]), np.uint8)
        return parts | ({"words": TASKS[0]} if self.text else {})


def grey(x: float) -> int:
    return int(np.clip(128 + 100 * x, 0, 255))


def episodes(count: int = 12, scale: float = 10.0, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """An expert's episodes in `ReachEnv`: position, goal, action, reward [T, ...]; of various lengths."""
    found = []
    for number in range(count):
        env = ReachEnv(scale=scale)
        rows, done = {name: [] for name in ("position", "goal", "action", "reward")}, False
        env.reset(seed=1000 * seed + number)
        while not done and len(rows["goal"]) < 40:
            action = (np.clip((env.goal - env.position) / 0.1, -1, 1) + 1) / 2 * scale
            for name, value in (("position", env.position), ("goal", env.goal), ("action", action)):
                rows[name].append(np.array(value, np.float32))
            _, reward, done, _, _ = env.step(action)
            rows["reward"].append(np.float32(reward))
        found.append({name: np.stack(values) for name, values in rows.items()})
    return found


def _images(episode: dict[str, np.ndarray], height: int, width: int) -> np.ndarray:
    """`[T, H, W, 3]`"""
    return np.stack([np.full((height, width, 3), grey(goal[0]), np.uint8) for goal in episode["goal"]])


def lerobot_v21(
    folder: Path, recorded: list[dict[str, np.ndarray]], fps: int = 20, names: dict[str, str] | None = None,
    size: tuple[int, int] = (48, 80), embedded: bool = False, words: tuple[str, ...] = TASKS,
) -> Path:  # fmt: skip
    """`names`: of the keys, if they differ from LeRobot's usual ones. `embedded`: images inside the tables. Two
    episodes in each chunk."""
    key = {"position": "observation.state", "goal": "observation.environment_state", "action": "action"}
    key |= {"camera": "observation.images.top"} | (names or {})
    features = {
        key[name]: {"dtype": "float32", "shape": [2], "names": ["x", "y"]} for name in ("position", "goal", "action")
    }
    kind = "image" if embedded else "video"
    features[key["camera"]] = {"dtype": kind, "shape": [*size, 3], "names": ["height", "width", "channels"]}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    total = sum(len(episode["action"]) for episode in recorded)
    info = {
        "codebase_version": "v2.1", "robot_type": "so100", "total_episodes": len(recorded), "total_frames": total,
        "total_tasks": len(words), "total_videos": len(recorded), "total_chunks": -(-len(recorded) // 2),
        "chunks_size": 2,
        "fps": fps, "splits": {"train": f"0:{len(recorded)}"}, "features": features,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }  # fmt: skip
    (folder / "meta").mkdir(parents=True)
    (folder / "meta/info.json").write_text(json.dumps(info))
    lines = {
        "tasks": [{"task_index": n, "task": text} for n, text in enumerate(words)],
        "episodes": [],
        "episodes_stats": [],
    }
    first = 0
    for number, episode in enumerate(recorded):
        length, task = len(episode["action"]), number % len(words)
        columns = {key[name]: episode[name].tolist() for name in ("position", "goal", "action")}
        columns |= {"timestamp": (np.arange(length) / fps).astype(np.float32), "frame_index": np.arange(length)}
        columns |= {"episode_index": np.full(length, number), "index": np.arange(first, first + length)}
        columns |= {"task_index": np.full(length, task)}
        images = _images(episode, *size)
        place = f"chunk-{number // 2:03d}"
        if embedded:
            columns[key["camera"]] = [
                {"bytes": png(image), "path": f"frame_{t:06d}.png"} for t, image in enumerate(images)
            ]
        else:
            file = folder / f"videos/{place}/{key['camera']}/episode_{number:06d}.mp4"
            file.parent.mkdir(parents=True, exist_ok=True)
            video.encode(file, images, fps, "yuv420p")
        file = folder / f"data/{place}/episode_{number:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        lines["episodes"].append({"episode_index": number, "tasks": [words[task]], "length": length})
        stats = {"action": {"min": episode["action"].min(0).tolist(), "count": [length]}}
        lines["episodes_stats"].append({"episode_index": number, "stats": stats})
        first += length
    for name, rows in lines.items():
        (folder / f"meta/{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def robomimic(
    file: Path, recorded: list[dict[str, np.ndarray]], control_freq: int | None = 20, language: bool = False,
    size: tuple[int, int] = (48, 80), valid: tuple[int, ...] = (),
) -> Path:  # fmt: skip
    """Episodes are stored in another order than their numbers, as `demo_10` comes before `demo_2`."""
    import h5py

    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as opened:
        data = opened.create_group("data")
        kwargs = {} if control_freq is None else {"control_freq": control_freq}
        data.attrs["env_args"] = json.dumps({"env_name": "Reach", "env_type": 1, "env_kwargs": kwargs})
        data.attrs["total"] = sum(len(episode["action"]) for episode in recorded)
        for number, episode in reversed(list(enumerate(recorded))):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(episode["action"])
            if language:
                demo.attrs["ep_meta"] = json.dumps({"lang": TASKS[number % 3]})
            demo["actions"], demo["rewards"] = episode["action"].astype(np.float64), episode["reward"]
            demo["dones"] = (episode["reward"] > 0).astype(np.int64)
            demo["states"] = np.zeros((len(episode["action"]), 9))
            demo["obs/goal"], demo["obs/agent_pos"] = episode["goal"].astype(np.float64), episode["position"]
            demo["obs/view_image"] = _images(episode, *size)
            demo["obs/view_depth"] = np.zeros((len(episode["action"]), *size, 1), np.float32)
        if valid:
            others = [number for number in range(len(recorded)) if number not in valid]
            for name, numbers in (("train", others), ("valid", valid)):
                opened[f"mask/{name}"] = np.array([f"demo_{number}" for number in numbers], "S8")
    return file
