"""Trains a few small runs and takes the screenshots of their reports for docs/report.md, with Chromium.

python benchmarks/report_pictures.py                   # some minutes; needs the extra `browser` and a Chromium
python benchmarks/report_pictures.py --runs FOLDER     # uses the runs in FOLDER, and trains the missing ones there
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TRAIN = ["finetune", "evaluation.every=5", "training.save_every=20"]
RUNS = {
    "reach/seed0": TRAIN,
    "reach/seed1": [*TRAIN, "seed=1"],
    "async": [*TRAIN, "rollout.mode=async", "rollout.staleness=1", "rollout.groups=2"],
    "teacher": [
        "teacher",
        "training.iterations=8",
        "training.log_every=1",
        "teacher.gradient_steps=40",
        "evaluation.episodes=4",
    ],
}
# name -> runs, width, height, colour scheme, first element shown
PICTURES = {
    "light": ("reach", 1280, 1330, "light", None),
    "dark": ("async", 1280, 1330, "dark", "#stages"),
    "phone": ("reach", 390, 1330, "light", None),
    "teacher": ("teacher", 1280, 1330, "light", "#videos"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="folder of the runs; missing ones are trained")
    folder = (parser.parse_args().runs or Path(tempfile.mkdtemp()) / "outputs").absolute()
    for name, words in RUNS.items():
        if not (folder / name).exists():
            sparring(folder, "train", *words, "--output", f"{folder.name}/{name}")
    with sync_playwright() as playwright:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (runs, *look) in PICTURES.items():
            page = folder / f"{name}.html"
            sparring(folder, "report", f"{folder.name}/{runs}", "--output", str(page))
            print(picture(browser, page, IMAGES / f"report_{name}.png", *look))


def picture(browser: Browser, page: Path, image: Path, width: int, height: int, scheme: str, first: str | None) -> Path:
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.goto(page.resolve().as_uri())
    # the browser loads the first frame of a video when it becomes visible
    for video in tab.locator("video").all():
        video.scroll_into_view_if_needed()
        tab.wait_for_timeout(200)
    tab.evaluate("first => first ? document.querySelector(first).scrollIntoView() : scrollTo(0, 0)", first)
    tab.wait_for_timeout(300)
    tab.screenshot(path=image)
    tab.close()
    return image


def sparring(folder: Path, *words: str) -> None:
    """Run the command next to the runs' folder: the page shows the paths as they were given."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "sparring", *words], cwd=folder.parent, check=True)


if __name__ == "__main__":
    main()
