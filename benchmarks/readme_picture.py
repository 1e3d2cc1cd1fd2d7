"""Makes the animation of the README from run folders: held-out episodes before and after training.

    python benchmarks/suite_learning.py lift_d0 --seed 0      # makes benchmarks/runs/lift_d0_seed0; likewise stack_d0
    python benchmarks/readme_picture.py outputs/finetune_rl benchmarks/runs/lift_d0_seed0 benchmarks/runs/stack_d0_seed0

One column per run. The upper row shows the policy with untrained weights and sampled actions, as training begins; the
lower row shows the newest checkpoint with greedy actions. Both play the same held-out episodes in the order of their
seeds, without selection, as seen by the head camera. Prints how many of the shown episodes were successes.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sparring.api import load_policy
from sparring.collect.camera import EpisodeVideo
from sparring.config.schema import load_config
from sparring.envs.env import Env
from sparring.evaluation.play import held_out_env, play
from sparring.policies.policy import Policy, make_policy
from sparring.processes.distributed import seed_everything
from sparring.record.videos import _by_camera
from sparring.runs.checkpoint import checkpoint_folder

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "learning.webp"
EPISODES = 2
# pixels
TILE, GAP, LINE, SIDE, EDGE = 200, 8, 26, 30, 4
PAPER, INK, GREEN = (24, 26, 31), (236, 238, 242), (52, 168, 104)
# frames for which the last image of an episode stays; every `STRIDE`-th of 25 frames per second is shown
HOLD, STRIDE = 12, 2
ROWS = ("before", "after")


def videos(run: Path, episodes: int) -> tuple[str, list[EpisodeVideo], list[EpisodeVideo], Env]:
    """(task, first episodes before training, first episodes after training, env)."""
    checkpoint = checkpoint_folder(run)
    config = load_config(checkpoint / "config.yaml")
    env = held_out_env(config, "cpu", robots=episodes)
    seed_everything(config.seed)
    untrained = make_policy(config.policy, env.spec, config.rollout.action_steps)
    before = _first_episodes(untrained, env, config, episodes, greedy=False)
    after = _first_episodes(load_policy(checkpoint), env, config, episodes, greedy=True)
    return config.env.task[0], before, after, env


def _first_episodes(policy: Policy, env: Env, config, episodes: int, greedy: bool) -> list[EpisodeVideo]:
    _, played = play(policy, env, episodes, config.seed, config.rollout.action_steps, greedy, videos=episodes)
    return sorted((video.rendered() for video in played), key=lambda video: video.episode.env)


def head(video: EpisodeVideo, env: Env) -> list[Image.Image]:
    pictures = _by_camera(video.frames, env.spec.video_cameras)["head"][::STRIDE]
    return [Image.fromarray(np.ascontiguousarray(p)).resize((TILE, TILE), Image.Resampling.LANCZOS) for p in pictures]


def pages(columns: list[tuple[str, list[EpisodeVideo], list[EpisodeVideo], Env]]) -> Iterator[Image.Image]:
    """One frame after the other; a column whose episode has ended waits for the longest one."""
    for number in range(EPISODES):
        tiles = [[head(video[number], env) for video in (before, after)] for _, before, after, env in columns]
        won = [[video[number].episode.success for video in (before, after)] for _, before, after, _ in columns]
        length = max(len(pictures) for column in tiles for pictures in column)
        for frame in range(length + HOLD):
            yield _page([task for task, *_ in columns], tiles, won, frame)


def _page(tasks: list[str], tiles: list[list[list[Image.Image]]], won: list[list[bool]], frame: int) -> Image.Image:
    font, upright = ImageFont.load_default(15), ImageFont.load_default(14)
    page = Image.new("RGB", (SIDE + len(tasks) * (TILE + GAP), LINE + len(ROWS) * (TILE + GAP)), PAPER)
    pen = ImageDraw.Draw(page)
    for row, word in enumerate(ROWS):
        label = Image.new("RGB", (TILE, SIDE - GAP), PAPER)
        ImageDraw.Draw(label).text((TILE / 2, (SIDE - GAP) / 2), word, INK, upright, anchor="mm")
        page.paste(label.rotate(90, expand=True), (GAP // 2, LINE + row * (TILE + GAP)))
    for column, task in enumerate(tasks):
        left = SIDE + column * (TILE + GAP)
        pen.text((left + TILE / 2, LINE / 2), task, INK, font, anchor="mm")
        for row, pictures in enumerate(tiles[column]):
            top = LINE + row * (TILE + GAP)
            page.paste(pictures[min(frame, len(pictures) - 1)], (left, top))
            if frame >= len(pictures) and won[column][row]:
                pen.rectangle((left, top, left + TILE - 1, top + TILE - 1), outline=GREEN, width=EDGE)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of policies, one column each")
    parser.add_argument("--output", type=Path, default=PICTURE, metavar="WEBP")
    parser.add_argument("--quality", type=int, default=60)
    args = parser.parse_args()
    columns = [videos(run, EPISODES) for run in args.runs]
    for task, before, after, env in columns:
        won = [sum(video.episode.success for video in row) for row in (before, after)]
        print(f"{task}: of {EPISODES} episodes {won[0]} were successes before and {won[1]} after training")
        env.close()
    first, *others = pages(columns)
    milliseconds = round(1000 * STRIDE / columns[0][3].spec.control_hz)
    first.save(
        args.output,
        save_all=True,
        append_images=others,
        duration=milliseconds,
        loop=0,
        quality=args.quality,
        method=4,
    )
    print(f"{args.output}: {1 + len(others)} frames, {args.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
