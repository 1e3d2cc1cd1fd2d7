"""Contact sheets: pictures in rows, each with a caption."""

import numpy as np

_MARGIN, _CAPTION = 8, 20
_PAPER, _INK = (250, 250, 248), (40, 44, 52)


def contact_sheet(rows: list[list[tuple[str, np.ndarray]]]) -> np.ndarray:
    """Rows of (caption, `[H, W, 3]` picture) as one picture; rows may be of different lengths."""
    from PIL import Image, ImageDraw, ImageFont

    heights = [max(picture.shape[0] for _, picture in row) + _CAPTION + _MARGIN for row in rows]
    width = max(sum(picture.shape[1] + _MARGIN for _, picture in row) for row in rows) + _MARGIN
    sheet = Image.new("RGB", (width, sum(heights) + _MARGIN), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    top = _MARGIN
    for row, height in zip(rows, heights, strict=True):
        left = _MARGIN
        for caption, picture in row:
            pen.text((left, top), caption, _INK, font)
            sheet.paste(Image.fromarray(picture), (left, top + _CAPTION))
            left += picture.shape[1] + _MARGIN
        top += height
    return np.asarray(sheet)
