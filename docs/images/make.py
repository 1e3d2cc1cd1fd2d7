"""Makes the pictures of docs/suite.md, and those of the tutorials from what their commands left:

python docs/images/make.py
python docs/images/make.py --tutorials outputs
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from sparring.demos.show import task_rows
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.record.overlay import contact_sheet, write_png

HERE = Path(__file__).parent
# one colour per number of a segmentation: nothing, scenery, robot, two objects
PALETTE = np.array([(255, 255, 255), (228, 219, 204), (120, 128, 140), (220, 60, 50), (50, 90, 215)], np.uint8)

# picture -> six moments of an episode, in the outputs of a tutorial
EPISODES = {
    "tutorial_lift": "quickstart/lift_d0/samples/episode_*_0.png",
    "tutorial_planar": "planar/samples/episode_*_1.png",
    "tutorial_stack": "stack_rl/samples/rollout_*_1.png",
}
PREDICTIONS = "quickstart_all/teacher_rl/samples/*_pred_vs_gt.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutorials", type=Path, metavar="OUTPUTS")
    outputs = parser.parse_args().tutorials
    if outputs is not None:
        tutorials(outputs)
        return
    tasks = task_rows()
    # the last picture of each row, five to a line
    last = [(row[-1][0].split(",")[0].removesuffix("_d0"), row[-1][1]) for row in tasks]
    sheets = {"tasks": tasks, "overview": [last[:5], last[5:]], "domains": domain_rows(), "views": view_rows()}
    for name, rows in sheets.items():
        print(write_png(HERE / f"suite_{name}.png", contact_sheet(rows)))


def tutorials(outputs: Path) -> None:
    """The newest sample of each run, and of the world model the first, one of the middle and the last."""
    pictures = {name: Image.open(max(outputs.glob(files))) for name, files in EPISODES.items()}
    samples = sorted(outputs.glob(PREDICTIONS))
    samples = [samples[0], samples[len(samples) // 2], samples[-1]]
    enlarged = [Image.open(file).resize((320, 320), Image.Resampling.NEAREST) for file in samples]
    captions = [f"episode {int(file.stem.split('_')[1])}: predicted, true" for file in samples]
    sheet = contact_sheet([[(text, np.asarray(picture)) for text, picture in zip(captions, enlarged, strict=True)]])
    for name, picture in {**pictures, "tutorial_predictions": Image.fromarray(sheet)}.items():
        picture.convert("RGB").save(HERE / f"{name}.webp", quality=85)
        print(HERE / f"{name}.webp")


def domain_rows() -> list[list[tuple[str, np.ndarray]]]:
    """The same start under different domains."""
    switches = ("appearance", "background", "light", "camera_pose", "clutter")
    pictures = [("as usual", _start())] + [(name, _start(domain_randomization=(name,))) for name in switches]
    everything = [(f"all, episode {seed}", _start(seed, domain_randomization="all")) for seed in range(3)]
    noise = ("explore, noise_screen", _start(task="explore", noise_screen=True, cameras=("head",)))
    return [pictures[:5], [*pictures[5:], *everything, noise]]


def view_rows() -> list[list[tuple[str, np.ndarray]]]:
    """What a camera gives at 224 pixels."""
    cameras, size = ("head", "wrist"), 224
    config = TabletopConfig(
        task="stack_d1", threads=1, cameras=cameras, image_size=size, depth=True, segmentation=True, points=1024
    )
    seen = Tabletop(config, 1).reset(EpisodeSeeds(0))
    rows = []
    for camera in cameras:
        image, depth = seen[f"image/{camera}"][0].transpose(1, 2, 0), seen[f"depth/{camera}"][0, 0]
        grey = (255 * np.clip(1 - depth / depth.max(), 0, 1)).astype(np.uint8)[..., None].repeat(3, 2)
        parts = PALETTE[seen[f"segmentation/{camera}"][0, 0]]
        rows.append([(f"image/{camera}", image), (f"depth/{camera}", grey), (f"segmentation/{camera}", parts)])
    rows[0].append(("points, from above", _from_above(seen["points"][0], size)))
    return rows


def _start(seed: int = 0, **config) -> np.ndarray:
    env = Tabletop(TabletopConfig(**{"task": "stack_d1", "threads": 1} | config), 1)
    env.reset(EpisodeSeeds(seed))
    picture = env.render(0)
    env.close()
    # the first camera of those side by side
    return picture[:, : picture.shape[0]]


def _from_above(points: np.ndarray, size: int) -> np.ndarray:
    """Points `[P, 6]` on white, the highest on top."""
    canvas = np.full((size, size, 3), 255, np.uint8)
    for x, y, _, *rgb in points[points[:, 2].argsort()]:
        row, column = int(size * (0.9 - (x + 0.5) / 0.9)), int(size * (0.5 - y / 0.9))
        canvas[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = np.multiply(rgb, 255)
    return canvas


if __name__ == "__main__":
    main()
