"""Text and figures drawn into frames."""

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from sparring.data.video import find_ffmpeg
from sparring.errors import UserError

# ---- Contact sheets: pictures in rows, each with a caption.


_SHEET_MARGIN, _CAPTION = 8, 20
_SHEET_PAPER, _SHEET_INK = (250, 250, 248), (40, 44, 52)


def contact_sheet(rows: list[list[tuple[str, np.ndarray]]]) -> np.ndarray:
    """Rows of (caption, `[H, W, 3]` picture) as one picture; rows may be of different lengths."""
    from PIL import Image, ImageDraw, ImageFont

    heights = [max(picture.shape[0] for _, picture in row) + _CAPTION + _SHEET_MARGIN for row in rows]
    width = max(sum(picture.shape[1] + _SHEET_MARGIN for _, picture in row) for row in rows) + _SHEET_MARGIN
    sheet = Image.new("RGB", (width, sum(heights) + _SHEET_MARGIN), _SHEET_PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    top = _SHEET_MARGIN
    for row, height in zip(rows, heights, strict=True):
        left = _SHEET_MARGIN
        for caption, picture in row:
            pen.text((left, top), caption, _SHEET_INK, font)
            sheet.paste(Image.fromarray(picture), (left, top + _CAPTION))
            left += picture.shape[1] + _SHEET_MARGIN
        top += height
    return np.asarray(sheet)


# ---- Frames of a video: pictures of several cameras with their names, and below them what was going on.


# pixels: the least width of a camera's picture, the text and what is around it
WIDE, _TEXT, _LINE, _MARGIN, _FRAME, _VERDICT = 384, 15, 22, 8, 6, 72
_PAPER, _INK, _FAINT = (24, 26, 31), (236, 238, 242), (150, 156, 168)
_VERDICTS = {True: ("success", (52, 168, 104)), False: ("failure", (222, 74, 66))}
# seconds for which the last picture stands still, with how it ended
_HOLD = 1.0


@dataclass(frozen=True)
class Scene:
    """What a video shows. All tiles of a row have as many pictures `[H, W, 3]`, of one size, as there are captions."""

    # rows of (name, picture of each moment)
    rows: list[list[tuple[str, list[np.ndarray]]]]
    title: str
    # of each moment, in columns
    captions: list[tuple[str, ...]]
    # None: nothing tells
    success: bool | None
    fps: float


def frames(scene: Scene) -> Iterator[np.ndarray]:
    """`[H, W, 3]` uint8, of one even size; the last one stands for a while, with the verdict."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_TEXT)
    page = _Page(scene)
    blank = Image.new("RGB", page.size, _PAPER)
    pen = ImageDraw.Draw(blank)
    for name, _, (left, top, _, _) in page.tiles:
        pen.text((left + 2, top - _LINE), name, _FAINT, font)
    pen.text((page.left, page.bar), _fitting(scene.title, font, page.size[0] - 2 * page.left - _VERDICT), _INK, font)

    def frame(moment: int) -> Image.Image:
        image = blank.copy()
        for _, pictures, (left, top, width, height) in page.tiles:
            picture = Image.fromarray(np.ascontiguousarray(pictures[moment]))
            # small pictures are enlarged as they are: one wants to see their pixels
            smooth = Image.Resampling.NEAREST if width % picture.width == 0 else Image.Resampling.BILINEAR
            image.paste(picture.resize((width, height), smooth), (left, top))
        _write_columns(ImageDraw.Draw(image), scene.captions[moment], page, font)
        return image

    for moment in range(len(scene.captions)):
        image = frame(moment)
        yield np.asarray(image)
    if scene.success is not None:
        _write_verdict(ImageDraw.Draw(image), scene.success, page, font)
    yield from repeat(np.asarray(image), round(_HOLD * scene.fps))


class _Page:
    """Where everything is: each tile's name, pictures and (left, top, width, height); where text begins; the size."""

    def __init__(self, scene: Scene):
        self.left = _MARGIN + _FRAME
        self.tiles, top, right = [], _FRAME, 0
        for row in scene.rows:
            left, tallest = self.left, 0
            top += _LINE
            for name, pictures in row:
                height, width = pictures[0].shape[:2]
                times = _enlargement(width)
                box = (left, top, round(times * width), round(times * height))
                self.tiles.append((name, pictures, box))
                left, tallest = left + box[2] + _MARGIN, max(tallest, box[3])
            top, right = top + tallest + _MARGIN, max(right, left)
        self.bar = top
        # even: 4:2:0 colour has one value for two pixels
        self.size = (_even(right + _FRAME), _even(self.bar + 2 * _LINE + self.left))


def _enlargement(width: int) -> float:
    """Whole where the picture is so small that its pixels can be seen anyway."""
    if width >= WIDE:
        return 1.0
    return float(-(-WIDE // width)) if 2 * width <= WIDE else WIDE / width


def _write_columns(pen, captions: tuple[str, ...], page: _Page, font) -> None:
    """In columns of equal width: numbers stand still while they change."""
    column = (page.size[0] - 2 * page.left) / len(captions)
    for place, text in enumerate(captions):
        pen.text((page.left + round(place * column), page.bar + _LINE), text, _INK, font)


def _write_verdict(pen, success: bool, page: _Page, font) -> None:
    """A frame around all, and a word at the end of the title's line."""
    word, colour = _VERDICTS[success]
    right, bottom = page.size[0] - 1, page.size[1] - 1
    pen.rectangle((0, 0, right, bottom), outline=colour, width=_FRAME)
    pen.rounded_rectangle(
        (right - page.left - _VERDICT, page.bar - 2, right - page.left, page.bar + _LINE - 3), 4, colour
    )
    middle = (right - page.left - _VERDICT / 2, page.bar + (_LINE - 5) / 2)
    pen.text(middle, word, (255, 255, 255), font, anchor="mm")


def _fitting(text: str, font, width: int) -> str:
    """As much of it as fits."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _even(side: int) -> int:
    return side + side % 2


# ---- PNG and MP4 (H.264) writers. Heavy libraries are imported where used. A file that is there is whole.


# between the frames of a film strip, pixels
_GAP, _STRIP_PAPER = 8, 250
# small files soon; yuv420p and the index in front are what browsers want; one thread, as others train meanwhile
_CODING = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-threads", "1"]
_PLAYABLE = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
_NICE = 10


def write_png(path: Path, picture: np.ndarray) -> Path:
    """`[H, W, 3]` uint8."""
    from PIL import Image

    if path.suffix.lower() != ".png":
        raise UserError(f"'{path}' does not end in .png; pictures are written as PNG")
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(picture)).save(partial, "PNG", compress_level=3)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from None
    return path


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float) -> Path:
    """`[H, W, 3]` uint8 frames of one size, as H.264 that browsers play, by a process that gives way to others."""
    frames = iter(frames)
    first = next(frames)
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{first.shape[1]}x{first.shape[0]}", "-r", str(fps)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    command = [find_ffmpeg(), "-y", "-v", "error", *given, "-i", "-", *_CODING, *_PLAYABLE, str(partial)]
    with tempfile.TemporaryFile() as words:
        # of its own session: Ctrl-C is ours to answer, and must not cut a video short
        ffmpeg = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=words, start_new_session=True)
        try:
            _give_way(ffmpeg.pid)
            for frame in itertools.chain([first], frames):
                ffmpeg.stdin.write(np.ascontiguousarray(frame).data)
            ffmpeg.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and says why
        except BaseException:
            ffmpeg.kill()
            raise
        finally:
            code = ffmpeg.wait()
        if code:
            words.seek(0)
            reason = words.read().decode(errors="replace").strip().splitlines()
            partial.unlink(missing_ok=True)
            raise UserError(f"'{path}': ffmpeg failed ({reason[-1] if reason else f'exit code {code}'})")
    partial.replace(path)
    return path


def _give_way(pid: int) -> None:
    """To others; a process that has ended, or that may not be told, is as it is."""
    try:
        # never less than we do: whoever is nice himself may not take that back
        os.setpriority(os.PRIO_PROCESS, pid, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))
    except OSError:
        pass


def filmstrip(frames: list[np.ndarray], columns: int = 3, rows: int = 2) -> np.ndarray:
    """Frames spread evenly over an episode, first to last, in reading order, with a gap between them."""
    picks = np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)
    height, width, _ = frames[0].shape
    strip = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), _STRIP_PAPER, np.uint8)
    for place, frame in enumerate(picks):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        strip[top : top + height, left : left + width] = frames[frame]
    return strip
