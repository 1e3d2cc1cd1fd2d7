"""Drawing: frames of a video with text and verdict, film strips, contact sheets, PNG files."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np

from sparring.errors import UserError
from sparring.processes.files import partial_of

# video frames, pixels: the least width of a camera's image, the text and what is around it
WIDE, _TEXT, _LINE, _MARGIN, _FRAME, _VERDICT = 384, 15, 22, 8, 6, 72
_PAPER, _INK, _FAINT = (24, 26, 31), (236, 238, 242), (150, 156, 168)
_VERDICTS = {True: ("success", (52, 168, 104)), False: ("failure", (222, 74, 66))}
_HOLD = 1.0  # seconds for which the last frame stands still, with the verdict
_SHEET_MARGIN, _CAPTION, _GAP = 8, 20, 8  # contact sheets and film strips, pixels
_SHEET_PAPER, _SHEET_INK, _STRIP_PAPER = (250, 250, 248), (40, 44, 52), 250


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


@dataclass(frozen=True)
class Scene:
    """What a video shows. All tiles of a row have as many images `[H, W, 3]`, of one size, as there are captions."""

    rows: list[list[tuple[str, list[np.ndarray]]]]  # rows of (name, image of each moment)
    title: str
    captions: list[tuple[str, ...]]  # of each moment, in columns
    success: bool | None
    fps: float

    def frames(self) -> Iterator[np.ndarray]:
        """`[H, W, 3]` uint8, of one even size; the last one stands for a while, with the verdict."""
        from PIL import Image, ImageDraw, ImageFont

        font, layout = ImageFont.load_default(_TEXT), _Layout(self)
        (width, height), left = layout.size, layout.left
        blank = Image.new("RGB", (width, height), _PAPER)
        pen = ImageDraw.Draw(blank)
        for name, _, (x, y, _, _) in layout.tiles:
            pen.text((x + 2, y - _LINE), name, _FAINT, font)
        title = shown = self.title
        while title and font.getlength(shown) > width - 2 * left - _VERDICT:
            title = title[:-1]
            shown = title + "..."
        pen.text((left, layout.bar), shown, _INK, font)
        for moment, captions in enumerate(self.captions):
            image = blank.copy()
            for _, images, (x, y, *size) in layout.tiles:
                tile = Image.fromarray(np.ascontiguousarray(images[moment]))
                # small images are enlarged by whole pixels, which one wants to see
                smooth = Image.Resampling.NEAREST if size[0] % tile.width == 0 else Image.Resampling.BILINEAR
                image.paste(tile.resize(tuple(size), smooth), (x, y))
            # in columns of equal width: numbers stand still while they change
            pen, column = ImageDraw.Draw(image), (width - 2 * left) / len(captions)
            for place, text in enumerate(captions):
                pen.text((left + round(place * column), layout.bar + _LINE), text, _INK, font)
            yield np.asarray(image)
        if self.success is not None:
            word, colour = _VERDICTS[self.success]  # a frame around all, and a word at the end of the title's line
            pen.rectangle((0, 0, width - 1, height - 1), outline=colour, width=_FRAME)
            end, top = width - 1 - left, layout.bar - 2
            pen.rounded_rectangle((end - _VERDICT, top, end, top + _LINE - 1), 4, colour)
            pen.text((end - _VERDICT / 2, top + 2 + (_LINE - 5) / 2), word, (255, 255, 255), font, anchor="mm")
        yield from repeat(np.asarray(image), round(_HOLD * self.fps))


class _Layout:
    """Each tile's name, images and (left, top, width, height); where the text begins; the size of a frame."""

    def __init__(self, scene: Scene):
        self.left = _MARGIN + _FRAME
        self.tiles, top, right = [], _FRAME, 0
        for row in scene.rows:
            left, tallest = self.left, 0
            top += _LINE
            for name, images in row:
                height, width = images[0].shape[:2]
                # whole where the image is so small that its pixels can be seen anyway
                scale = 1.0 if width >= WIDE else float(-(-WIDE // width)) if 2 * width <= WIDE else WIDE / width
                box = (left, top, round(scale * width), round(scale * height))
                self.tiles.append((name, images, box))
                left, tallest = left + box[2] + _MARGIN, max(tallest, box[3])
            top, right = top + tallest + _MARGIN, max(right, left)
        self.bar = top
        # even: 4:2:0 colour has one value for two pixels
        self.size = tuple(side + side % 2 for side in (right + _FRAME, self.bar + 2 * _LINE + self.left))


def write_png(path: Path, picture: np.ndarray) -> Path:
    from PIL import Image

    if path.suffix.lower() != ".png":
        raise UserError(f"'{path}' does not end in .png; pictures are written as PNG")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_of(path)
        Image.fromarray(np.ascontiguousarray(picture)).save(partial, "PNG", compress_level=3)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from None
    return path


def filmstrip(frames: list[np.ndarray], columns: int = 3, rows: int = 2) -> np.ndarray:
    """Frames spread evenly over an episode, first to last, in reading order, with a gap between them."""
    picks = np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)
    height, width, _ = frames[0].shape
    strip = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), _STRIP_PAPER, np.uint8)
    for place, frame in enumerate(picks):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        strip[top : top + height, left : left + width] = frames[frame]
    return strip
