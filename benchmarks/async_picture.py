"""Draws the stages of an asynchronous run over time (results of `async.py vla`): docs/images/async_timeline.png.

python benchmarks/async_picture.py
"""

import argparse
import json
from pathlib import Path

import report
from PIL import Image, ImageDraw, ImageFont

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "async_timeline.png"
SECONDS = 4.0
# in pixels; the picture is drawn at twice its displayed size
WIDTH, LEFT, LANE, BAR, TOP, BOTTOM = 1600, 300, 56, 38, 24, 64
INK, PAPER, FAINT = (40, 44, 52), (255, 255, 255), (222, 224, 228)
# from top to bottom
COLOURS = {"simulate": (0, 114, 178), "infer": (213, 94, 0), "learn": (0, 138, 104)}


def draw(spans: list[dict]) -> Image.Image:
    lanes = sorted({(stage, s["who"]) for s in spans for stage in COLOURS if s["stage"] == stage}, key=_lane_order)
    begin = min(span["begin"] for span in spans if span["stage"] == "learn")
    scale = (WIDTH - LEFT - TOP) / SECONDS
    height = TOP + len(lanes) * LANE + BOTTOM
    page, font = Image.new("RGB", (WIDTH, height), PAPER), ImageFont.load_default(26)
    pen = ImageDraw.Draw(page)
    for second in range(int(SECONDS) + 1):
        x = LEFT + second * scale
        pen.line([(x, TOP), (x, height - BOTTOM)], FAINT, 2)
        pen.text((x, height - BOTTOM + 10), f"{second} s", INK, font, anchor="ma")
    for lane, (stage, who) in enumerate(lanes):
        y = TOP + lane * LANE + (LANE - BAR) // 2
        name = stage if who in ("learner", "collector") else f"{stage}, {who.replace('collector', 'group')}"
        pen.text((LEFT - 16, y + BAR // 2), name, INK, font, anchor="rm")
        for span in spans:
            first, last = max(span["begin"] - begin, 0.0), min(span["end"] - begin, SECONDS)
            if (span["who"], span["stage"]) == (who, stage) and last > first:
                left, right = LEFT + first * scale, LEFT + last * scale
                # one pixel less, so that consecutive spans remain distinguishable
                pen.rectangle([left, y, max(right - 1, left), y + BAR], COLOURS[stage])
    return page


def _lane_order(lane: tuple[str, str]) -> tuple[int, str]:
    stage, who = lane
    return list(COLOURS).index(stage), who


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    spans = json.loads((report.RESULTS / "async.json").read_text())["parts"]["vla"]["async/0"]["spans"]
    draw(spans).save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
