"""Draws who was at work when in a run that async.py vla measured: docs/images/async_timeline.png.

python benchmarks/async_picture.py
"""

import json
from pathlib import Path

import report
from PIL import Image, ImageDraw, ImageFont

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "async_timeline.png"
SECONDS = 4.0
# pixels, drawn at twice the size that they are shown at
WIDTH, LEFT, LANE, BAR, TOP, BOTTOM = 1600, 300, 56, 38, 24, 64
INK, PAPER, FAINT = (40, 44, 52), (255, 255, 255), (222, 224, 228)
# (who, stage), what it is called, colour
LANES = (
    ("collector 0", "simulate", "simulate, group 0", (0, 114, 178)),
    ("collector 1", "simulate", "simulate, group 1", (86, 160, 211)),
    ("collector 0", "infer", "infer, group 0", (213, 94, 0)),
    ("collector 1", "infer", "infer, group 1", (236, 152, 64)),
    ("learner", "learn", "learn", (0, 138, 104)),
)


def draw(spans: list[dict]) -> Image.Image:
    begin = min(span["begin"] for span in spans if span["stage"] == "learn")
    scale = (WIDTH - LEFT - TOP) / SECONDS
    height = TOP + len(LANES) * LANE + BOTTOM
    page, font = Image.new("RGB", (WIDTH, height), PAPER), ImageFont.load_default(26)
    pen = ImageDraw.Draw(page)
    for second in range(int(SECONDS) + 1):
        x = LEFT + second * scale
        pen.line([(x, TOP), (x, height - BOTTOM)], FAINT, 2)
        pen.text((x, height - BOTTOM + 10), f"{second} s", INK, font, anchor="ma")
    for lane, (who, stage, name, colour) in enumerate(LANES):
        y = TOP + lane * LANE + (LANE - BAR) // 2
        pen.text((LEFT - 16, y + BAR // 2), name, INK, font, anchor="rm")
        for span in spans:
            first, last = span["begin"] - begin, min(span["end"] - begin, SECONDS)
            if (span["who"], span["stage"]) == (who, stage) and last > max(first, 0):
                # turns that follow each other at once are seen apart
                pen.rectangle([LEFT + max(first, 0) * scale, y, LEFT + last * scale - 1, y + BAR], colour)
    return page


def main() -> None:
    spans = json.loads((report.RESULTS / "async.json").read_text())["parts"]["vla"]["async/0"]["spans"]
    draw(spans).save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
