"""Does LeRobot open a dataset that `sparring demos` recorded, and does Sparring open one that LeRobot recorded?

    python benchmarks/lerobot_opens.py read PATH      # compares what LeRobot and Sparring read
    python benchmarks/lerobot_opens.py write PATH     # LeRobot records a small dataset, for `sparring demos show PATH`

Needs a separate environment with lerobot 0.4.x (recipe in docs/demonstrations.md), and `src` on PYTHONPATH.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from sparring.data.dataset import TASK, read_dataset
from sparring.data.lerobot import POINTS


def main():
    command, path = sys.argv[1], Path(sys.argv[2])
    print(", ".join(f"{name} {version(name)}" for name in ("lerobot", "torch", "torchvision", "datasets", "av")))
    {"read": read, "write": write}[command](path)


def read(path: Path) -> None:
    theirs, ours = LeRobotDataset("sparring/demos", root=path), read_dataset(path)
    print(theirs)
    print(f"len {len(theirs)} frames, {theirs.num_episodes} episodes, {theirs.fps} frames/s, {theirs.meta.camera_keys}")
    print(f"stats of the action: q01 {np.round(theirs.meta.stats['action']['q01'], 3).tolist()}")
    starts = np.cumsum(ours.lengths) - ours.lengths
    compared = ["observation.state", "action", "next.reward", "timestamp", *({POINTS} & ours.columns.keys())]
    sharpness = {key: [] for key in theirs.meta.video_keys}
    for index in np.unique(np.linspace(0, len(theirs) - 1, 60).round().astype(int)):
        item, episode = theirs[int(index)], int(ours.columns["episode_index"][index])
        for name in compared:
            assert np.array_equal(item[name].numpy(), ours.columns[name][index]), (index, name)
        task, instructions = ours.texts[TASK]
        assert item["task"] == instructions[task[index]]
        for key in sharpness:
            mine = ours.cameras[key].read(episode, *item[key].shape[1:])[index - starts[episode]]
            sharpness[key].append(psnr(item[key].numpy().transpose(1, 2, 0) * 255, mine))
    first = theirs[0]
    print("frame 0:", {key: list(value.shape) for key, value in first.items() if hasattr(value, "shape")})
    print(f"task of frame 0: {first['task']!r}")
    print(f"60 frames: {', '.join(compared)} and words equal to what we read")
    for key, values in sharpness.items():
        print(f"{key}: our decoding against theirs {np.mean(values):.1f} dB, worst {min(values):.1f} dB")

    ahead = {"action": [k / theirs.fps for k in range(8)]}
    behind = {key: [-1 / theirs.fps, 0.0] for key in theirs.meta.video_keys}
    windows = LeRobotDataset("sparring/demos", root=path, delta_timestamps=ahead | behind)
    end = int(ours.lengths[0]) - 1
    item = windows[end]
    assert torch.equal(item["action_is_pad"], torch.tensor([False] + 7 * [True])), item["action_is_pad"]
    assert np.array_equal(windows[3]["action"].numpy(), ours.columns["action"][3:11])
    print(
        "delta_timestamps: action",
        list(item["action"].shape),
        "padded after the episode's end:",
        item["action_is_pad"].tolist(),
    )
    batch = next(iter(torch.utils.data.DataLoader(windows, batch_size=4, shuffle=False)))
    print("batch:", {key: list(batch[key].shape) for key in ("observation.state", "action", *behind)})


def write(path: Path) -> None:
    """Record two tasks and three episodes; the grey level of each frame encodes its number."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["left", "right"]},
        "observation.images.top": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    }
    dataset = LeRobotDataset.create("sparring/theirs", fps=20, features=features, root=path)
    for episode, length in enumerate((6, 9, 4)):
        for t in range(length):
            frame = {"observation.state": np.array([episode, t, t / 2], np.float32)}
            frame["action"] = np.array([t / 10, -t / 10], np.float32)
            frame["observation.images.top"] = np.full((64, 96, 3), 20 * (t + 1), np.uint8)
            dataset.add_frame(frame | {"task": ("fold the towel", "open the jar")[episode % 2]})
        dataset.save_episode()
    dataset.finalize()
    print(sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()))


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(np.mean((one - other.astype(float)) ** 2), 1e-9)))


if __name__ == "__main__":
    main()
