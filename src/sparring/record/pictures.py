"""PNG and MP4 (H.264) writers. Heavy libraries are imported where used."""

from pathlib import Path

import numpy as np

from sparring.errors import UserError

# between the frames of a film strip, pixels
_GAP, _PAPER = 8, 250


class NoVideoEncoder(UserError):
    """There is no ffmpeg to write MP4 with."""


def write_png(path: Path, picture: np.ndarray) -> Path:
    """`[H, W, 3]` uint8."""
    from PIL import Image

    if path.suffix.lower() != ".png":
        raise UserError(f"'{path}' does not end in .png; pictures are written as PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(picture)).save(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from None
    return path


def write_video(path: Path, frames: list[np.ndarray], fps: float) -> Path:
    """`[H, W, 3]` uint8 frames of one size, as H.264 that browsers play."""
    import imageio_ffmpeg

    find_encoder()
    path.parent.mkdir(parents=True, exist_ok=True)
    # H.264 with 4:2:0 colour needs even sides
    height, width = (side + side % 2 for side in frames[0].shape[:2])
    writer = imageio_ffmpeg.write_frames(
        str(path), (width, height), fps=fps, codec="libx264", macro_block_size=2, quality=8, ffmpeg_log_level="error"
    )
    writer.send(None)
    for frame in frames:
        padding = ((0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0))
        writer.send(np.ascontiguousarray(np.pad(frame, padding, mode="edge")))
    writer.close()
    return path


def find_encoder() -> str:
    """The path of ffmpeg; imageio-ffmpeg brings one."""
    import imageio_ffmpeg

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise NoVideoEncoder(f"no videos: {error} (pip install --force-reinstall imageio-ffmpeg)") from None


def filmstrip(frames: list[np.ndarray], columns: int = 3, rows: int = 2) -> np.ndarray:
    """Frames spread evenly over an episode, first to last, in reading order, with a gap between them."""
    picks = np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)
    height, width, _ = frames[0].shape
    strip = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), _PAPER, np.uint8)
    for place, frame in enumerate(picks):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        strip[top : top + height, left : left + width] = frames[frame]
    return strip
