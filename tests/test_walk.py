"""How many files a reader of a run must open, traced in two updates of `sparring train finetune`.

`PYTHONPATH=src python tests/test_walk.py` prints the files of each stretch.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparring"
COMMAND = ["train", "finetune", "--envs", "4", "rollout.steps=16", "training.iterations=2", "evaluation.episodes=4"]
COMMAND += ["device=cpu", "threads=1", "env.threads=1", "ppo.mini_batch_size=32", "ppo.ppo_epochs=1"]
# stretch -> its function, and the largest allowed number of files whose functions it is the first to call
STRETCHES = {
    "all": ("main", 70),
    # 8, plus the warning about a config of somebody else's run (trust.py)
    "config": ("config_of", 9),
    # 30, plus the signature of the config (manifest.py) and the watchdog of robots (heartbeat.py)
    "build": ("Run.__init__", 33),
    "collect": ("Finetune.collect", 18),
    "learn": ("Finetune.learn", 8),
}


class Tracer:
    """A profile function that records the files of the package in which functions run first, without imports."""

    def __init__(self):
        self.files: dict[str, dict[str, list[str]]] = {stretch: {} for stretch in STRETCHES}
        self.seen = set()
        self.open = dict.fromkeys(STRETCHES, 0)
        self.importing = 0

    def __call__(self, frame, event, _):
        if event not in ("call", "return"):
            return
        code, step = frame.f_code, 1 if event == "call" else -1
        if code.co_name == "<module>":
            self.importing += step
        if self.importing or not code.co_filename.startswith(str(SOURCE)):
            return
        for stretch, (function, _) in STRETCHES.items():
            self.open[stretch] += step if code.co_qualname == function else 0
        # a function counts once: a reader knows it from its first call
        if event == "call" and code not in self.seen and "<" not in code.co_name:
            self.seen.add(code)
            file = str(Path(code.co_filename).relative_to(SOURCE))
            for stretch in filter(self.open.get, STRETCHES):
                self.files[stretch].setdefault(file, []).append(code.co_qualname)


def trace(output: str) -> dict[str, dict[str, list[str]]]:
    """Stretch -> file -> its functions, in the order of their first calls."""
    from sparring.cli.main import main

    tracer = Tracer()
    sys.setprofile(tracer)
    try:
        assert main([*COMMAND, "--output", output]) == 0
    finally:
        sys.setprofile(None)
    return tracer.files


@pytest.fixture(scope="module")
def walked(tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = [sys.executable, __file__, "--json", str(tmp_path_factory.mktemp("walk") / "run")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stretch", STRETCHES)
def test_number_of_files_is_within_budget(walked, stretch):
    files, (_, most) = walked[stretch], STRETCHES[stretch]
    assert files, "nothing was traced: has the function of this stretch another name?"
    listed = "\n".join(f"{file}: {', '.join(names)}" for file, names in sorted(files.items()))
    assert len(files) <= most, f"{stretch}: {len(files)} files, at most {most} wanted\n{listed}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--json"]:
        print(json.dumps(trace(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = trace(f"{folder}/run")
        for stretch, files in found.items():
            print(f"\n{stretch}: {len(files)} files (at most {STRETCHES[stretch][1]})")
            for file, names in sorted(files.items()):
                print(f"  {file:40} {' '.join(names)}")
