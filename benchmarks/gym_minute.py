"""Do Gymnasium envs train, evaluate and record videos with the commands of docs/extending.md, in about a minute each?

python benchmarks/gym_minute.py     # after the pip commands of that page; finished runs are not repeated
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

from report import RESULTS, metadata, write_json

ROOT = Path(__file__).parents[1]
HARDWARE = "2 cores of an AMD EPYC, no GPU"


def commands() -> list[str]:
    """The training commands of the how-to that set total_timesteps."""
    section = (ROOT / "docs" / "extending.md").read_text().partition("## A gymnasium env")[2]
    block = re.findall(r"```bash\n(.*?)```", section, re.S)[0]
    return [line for line in block.splitlines() if line.startswith("sparring train") and "total_timesteps" in line]


def run(command: str) -> dict:
    words = shlex.split(command)
    folder = Path(words[words.index("--output") + 1])
    status = folder / "status.json"
    if not status.is_file() or json.loads(status.read_text())["state"] != "finished":
        subprocess.run(words, check=True)
    content, found = json.loads(status.read_text()), json.loads((folder / "evaluation.json").read_text())
    why = re.search(r"no video: (.*)", (folder / "train.log").read_text())
    return {
        "command": command,
        "seconds": round(content["seconds"], 1),
        "progress": content["progress"],
        "held_out_episodes": found["episodes"],
        "evaluation": found["scores"],
        "videos": sorted(video.name for video in folder.glob("videos/*.mp4")),
        "no_video": why and why.group(1),
    }


def main() -> None:
    runs = [run(command) for command in commands()]
    for each in runs:
        shown = ", ".join(each["videos"]) or each["no_video"]
        print(f"{each['progress']['env_steps']:>8,} steps  {each['seconds']:>6} s  {each['command']}\n  {shown}")
    write_json(RESULTS / "gym_minute.json", {"about": metadata(), "hardware": HARDWARE, "runs": runs})


if __name__ == "__main__":
    main()
