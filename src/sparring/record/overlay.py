"""Frames of a video: pictures of several cameras with their names, and below them what was going on."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

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
