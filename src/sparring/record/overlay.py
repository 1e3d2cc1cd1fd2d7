"""Draws video frames with captions and outcome, contact sheets and filmstrips; writes PNG files."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from sparring.errors import UserError
from sparring.processes.files import partial_of

# video frames, in pixels: minimum width of a camera's image, font size, line, margin, border, badge
WIDE, _TEXT, _LINE, _MARGIN, _BORDER, _BADGE = 384, 15, 22, 8, 6, 72
_BACKGROUND, _INK, _FAINT = (24, 26, 31), (236, 238, 242), (150, 156, 168)
_OUTCOMES = {True: ("success", (52, 168, 104)), False: ("failure", (222, 74, 66))}
_HOLD = 1.0  # seconds that the last frame is shown, with the outcome
_SHEET_MARGIN, _CAPTION, _GAP = 8, 20, 8  # contact sheets and filmstrips, in pixels
_SHEET_BACKGROUND, _SHEET_INK, _STRIP_BACKGROUND = (250, 250, 248), (40, 44, 52), 250


def contact_sheet(rows: list[list[tuple[str, np.ndarray]]]) -> np.ndarray:
    """Draw rows of (caption, `[H, W, 3]` image) as one image; rows may have different lengths."""
    from PIL import Image, ImageDraw, ImageFont

    heights = [max(image.shape[0] for _, image in row) + _CAPTION + _SHEET_MARGIN for row in rows]
    width = max(sum(image.shape[1] + _SHEET_MARGIN for _, image in row) for row in rows) + _SHEET_MARGIN
    sheet = Image.new("RGB", (width, sum(heights) + _SHEET_MARGIN), _SHEET_BACKGROUND)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    top = _SHEET_MARGIN
    for row, height in zip(rows, heights, strict=True):
        left = _SHEET_MARGIN
        for caption, image in row:
            pen.text((left, top), caption, _SHEET_INK, font)
            sheet.paste(Image.fromarray(image), (left, top + _CAPTION))
            left += image.shape[1] + _SHEET_MARGIN
        top += height
    return np.asarray(sheet)


@dataclass(frozen=True)
class Scene:
    """The content of a video. Each tile has one `[H, W, 3]` image per frame; all its images have one size."""

    rows: list[list[tuple[str, list[np.ndarray]]]]  # rows of tiles: (name, images)
    title: str
    captions: list[tuple[str, ...]]  # of each frame, in columns
    success: bool | None
    fps: float

    def frames(self) -> Iterator[np.ndarray]:
        """Yield `[H, W, 3]` uint8 frames of one even size; the last one is repeated, with the outcome."""
        from PIL import Image, ImageDraw, ImageFont

        font, layout = ImageFont.load_default(_TEXT), _Layout(self)
        (width, height), left = layout.size, layout.left
        blank = Image.new("RGB", (width, height), _BACKGROUND)
        pen = ImageDraw.Draw(blank)
        for name, _, (x, y, _, _) in layout.tiles:
            pen.text((x + 2, y - _LINE), name, _FAINT, font)
        title = shown = self.title
        while title and font.getlength(shown) > width - 2 * left - _BADGE:
            title = title[:-1]
            shown = title + "..."
        pen.text((left, layout.bar), shown, _INK, font)
        for index, captions in enumerate(self.captions):
            image = blank.copy()
            for _, images, (x, y, *size) in layout.tiles:
                tile = Image.fromarray(np.ascontiguousarray(images[index]))
                # enlarge small images by whole pixels, so that single pixels stay visible
                smooth = Image.Resampling.NEAREST if size[0] % tile.width == 0 else Image.Resampling.BILINEAR
                image.paste(tile.resize(tuple(size), smooth), (x, y))
            # columns of equal width, so that changing numbers keep their position
            pen, width_of_column = ImageDraw.Draw(image), (width - 2 * left) / len(captions)
            for column, text in enumerate(captions):
                pen.text((left + round(column * width_of_column), layout.bar + _LINE), text, _INK, font)
            yield np.asarray(image)
        if self.success is not None:
            word, colour = _OUTCOMES[self.success]  # a border, and a badge at the end of the title line
            pen.rectangle((0, 0, width - 1, height - 1), outline=colour, width=_BORDER)
            end, top = width - 1 - left, layout.bar - 2
            pen.rounded_rectangle((end - _BADGE, top, end, top + _LINE - 1), 4, colour)
            pen.text((end - _BADGE / 2, top + 2 + (_LINE - 5) / 2), word, (255, 255, 255), font, anchor="mm")
        yield from repeat(np.asarray(image), round(_HOLD * self.fps))


class _Layout:
    """`tiles`: name, images and (left, top, width, height) of each; `bar`: top of the text; `size` of a frame."""

    def __init__(self, scene: Scene):
        self.left = _MARGIN + _BORDER
        self.tiles, top, right = [], _BORDER, 0
        for row in scene.rows:
            left, tallest = self.left, 0
            top += _LINE
            for name, images in row:
                height, width = images[0].shape[:2]
                # an integer scale for small images: see `frames`
                scale = 1.0 if width >= WIDE else float(-(-WIDE // width)) if 2 * width <= WIDE else WIDE / width
                box = (left, top, round(scale * width), round(scale * height))
                self.tiles.append((name, images, box))
                left, tallest = left + box[2] + _MARGIN, max(tallest, box[3])
            top, right = top + tallest + _MARGIN, max(right, left)
        self.bar = top
        # even sides: 4:2:0 colour has one value for two pixels
        self.size = tuple(side + side % 2 for side in (right + _BORDER, self.bar + 2 * _LINE + self.left))


def write_png(path: Path, image: np.ndarray) -> Path:
    from PIL import Image

    if path.suffix.lower() != ".png":
        raise UserError(f"'{path}' does not end in .png; give a file name that does, as images are written as PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(path)
        Image.fromarray(np.ascontiguousarray(image)).save(partial, "PNG", compress_level=3)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from None
    return path


def filmstrip(frames: list[np.ndarray], columns: int = 3, rows: int = 2) -> np.ndarray:
    """Draw frames at equal distances over an episode, first to last, in reading order, with gaps between them."""
    picks = np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)
    height, width, _ = frames[0].shape
    strip = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), _STRIP_BACKGROUND, np.uint8)
    for cell, frame in enumerate(picks):
        top, left = cell // columns * (height + _GAP), cell % columns * (width + _GAP)
        strip[top : top + height, left : left + width] = frames[frame]
    return strip
