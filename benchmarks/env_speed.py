"""How fast is the built-in robot suite, compared with its peers and the machine's limits? Four separate questions:

a) microseconds per frame on one core, with shadows, compared with MuJoCo's renderer on the same scene and poses
b) the gain of a second thread, and where the rest is lost
c) simulated seconds per second with two 64 px cameras on one core, compared with Meta-World and robosuite
d) memory and throughput of 1 to 256 robots

    python benchmarks/env_speed.py [--quick] [--only a b c d] [--peers-python PATH]

Each side is a separate process (env_peers.py). Sides take turns in one run, so that a busy moment affects all; medians
are compared. A control step of Sparring is 10 physics steps of 4 ms.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import report
from env_turns import AtOnce, SideFailed, Worker, one_core, take_turns

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.envs.tabletop.scene import CONTROL_HZ, SUBSTEPS, TIMESTEP, load_mujoco
from sparring.envs.tabletop.tasks.registry import find

CORES = os.cpu_count() or 1
TASK = "stack_d0"
CAMERAS = ["head", "wrist"]
# half the length of the finite floor for MuJoCo; it extends beyond the view of the cameras
FLOOR = 20.0
# least correlation between the thumbnails of two images of the same scene
SAME_PICTURE = 0.85


def frames(args) -> list[dict]:
    """Question a; ratio: time of the side / time of Sparring."""
    results = []
    with tempfile.TemporaryDirectory() as folder, one_core():
        model, poses = save_scene(Path(folder), args.robots)
        for size in (64,) if args.quick else (64, 128, 224):
            suite = {"task": TASK, "poses": poses, "threads": 1, "size": size}
            sides = {
                "sparring": Worker("suite_frames", together=args.robots, **suite),
                "sparring, one robot a call": Worker("suite_frames", together=1, **suite),
            } | mujoco_renderers(model, poses, size)
            thumbnails = {name: side.about.pop("thumbnails") for name, side in sides.items()}
            check_same_pictures(thumbnails)
            measured = take_turns(sides, args.rounds, args.seconds)
            micros = {name: numbers["seconds"] / numbers["frames"] * 1e6 for name, numbers in measured.items()}
            for name, numbers in measured.items():
                ratio = micros[name] / micros["sparring"]
                target = ("ratio", ">=", 1.7) if name.startswith("MuJoCo") else ("value", "<=", 220)
                target = target if size == 64 else None
                results.append(answer("a", f"{size} px", name, micros[name], ratio, numbers, target))
    return results


def mujoco_renderers(model: str, poses: str, size: int) -> dict[str, Worker]:
    """The installed GL backends, with the infinite floor of the scene and with a finite one."""
    sides = {}
    for gl in ("egl", "osmesa"):
        try:
            for label, floor in (("", 0.0), (", finite floor", FLOOR)):
                sides[f"MuJoCo {gl}{label}"] = Worker(
                    "mujoco_frames", gl, model=model, poses=poses, size=size, floor=floor
                )
        except SideFailed as error:
            print(f"not measured: MuJoCo with {gl} ({str(error).splitlines()[-1]})")
    return sides


def save_scene(folder: Path, robots: int) -> tuple[str, str]:
    """Write the model, and joint positions `[5 * robots, nq]` along the expert's episodes; return both files."""
    model = find(TASK).scene.compile()
    load_mujoco().mj_saveModel(model, str(folder / "scene.mjb"))
    env = Tabletop(TabletopConfig(task=TASK, control_mode="delta_ee_pos", threads=1), robots)
    env.reset(EpisodeSeeds(0, total_envs=robots))
    expert, poses = Expert(env), []
    for step in range(env.spec.max_episode_steps):
        if step % (env.spec.max_episode_steps // 5) == 0:
            # a state begins with the time and the joint positions
            poses.append(env.state()["physics"][:, 1 : 1 + model.nq])
        env.step(expert())
    env.close()
    np.save(folder / "poses.npy", np.concatenate(poses))
    return str(folder / "scene.mjb"), str(folder / "poses.npy")


def check_same_pictures(thumbnails: dict[str, list[list[float]]]) -> None:
    """Raise an error if a renderer shows another scene: an empty one would be fast."""
    for name, cameras in thumbnails.items():
        for camera, ours, theirs in zip(CAMERAS, thumbnails["sparring"], cameras, strict=True):
            with np.errstate(invalid="ignore"):
                agreement = np.corrcoef(ours, theirs)[0, 1]
            if not agreement > SAME_PICTURE:
                raise RuntimeError(f"{name}: the {camera} camera shows something else, correlation {agreement:.2f}")


def second_thread(args) -> list[dict]:
    """Question b; ratio: gain over one thread. Two processes are the limit of the machine."""
    results = []
    robots = {"task": TASK, "robots": args.robots}
    with tempfile.TemporaryDirectory() as folder:
        _, poses = save_scene(Path(folder), args.robots)
        cases = {
            "step, head + wrist": ("suite_step", robots | {"cameras": CAMERAS}),
            "step, state only": ("suite_step", robots | {"cameras": []}),
            "physics only": ("suite_physics", robots),
            "drawing only": ("suite_frames", {"task": TASK, "poses": poses, "together": args.robots, "size": 64}),
        }
        for case, (kind, arguments) in cases.items():
            sides = {f"threads={threads}": Worker(kind, threads=threads, **arguments) for threads in (1, 2)}
            if kind == "suite_step":
                half = arguments | {"robots": args.robots // 2, "threads": 1}
                sides["two processes"] = AtOnce(Worker(kind, **half), Worker(kind, **half))
            measured = take_turns(sides, args.rounds, args.seconds)
            for name, numbers in measured.items():
                numbers.pop("thumbnails", None)
                ratio = measured["threads=1"]["seconds"] / numbers["seconds"]
                target = ("ratio", ">=", 1.7) if (case, name) == ("step, head + wrist", "threads=2") else None
                results.append(answer("b", case, name, numbers["seconds"] * 1e3, ratio, numbers, target))
    return results


def compare_with_peers(args) -> list[dict]:
    """Question c; ratio: rate of one robot of Sparring / rate of the side."""
    with one_core():
        suite = {"task": TASK, "threads": 1, "cameras": CAMERAS}
        sides = {
            "sparring, 1 robot": Worker("suite_step", robots=1, **suite),
            f"sparring, {args.robots} robots": Worker("suite_step", robots=args.robots, **suite),
        }
        if args.peers_python is None:
            print("not measured: Meta-World and robosuite; benchmarks/README.md explains the set-up for --peers-python")
        else:
            for peer in ("metaworld", "robosuite"):
                for label, hz in (("25 Hz", CONTROL_HZ), ("its own rate", None)):
                    sides[f"{peer}, {label}"] = Worker(peer, "egl", args.peers_python, size=64, hz=hz)
        measured = take_turns(sides, args.rounds, args.seconds)
    rates = {name: numbers["simulated_seconds"] / numbers["seconds"] for name, numbers in measured.items()}
    ours = rates["sparring, 1 robot"]
    return [answer("c", "64 px", name, rates[name], ours / rates[name], measured[name]) for name in measured]


def many_robots(args) -> list[dict]:
    """Question d; ratio: gain over one robot on one thread."""
    results, alone = [], {}
    for robots in (1, 4) if args.quick else (1, 4, 16, 64, 256):
        sides = {
            (case, threads): Worker("suite_step", task=TASK, robots=robots, threads=threads, cameras=cameras)
            for case, cameras in (("state only", []), ("head + wrist", CAMERAS))
            for threads in sorted({1, CORES})
        }
        for (case, threads), numbers in take_turns(sides, args.rounds, args.seconds).items():
            rate = robots / numbers["seconds"]
            ratio = rate / alone.setdefault(case, rate)
            results.append(answer("d", case, f"robots={robots}, threads={threads}", rate, ratio, numbers))
    # grouped by kind of observation
    return sorted(results, key=lambda result: result["case"], reverse=True)


QUESTIONS = {"a": frames, "b": second_thread, "c": compare_with_peers, "d": many_robots}
# headings of `value` and `ratio`
COLUMNS = {
    "a": ("us per frame", "time / Sparring's"),
    "b": ("ms per turn", "gain over one thread"),
    "c": ("simulated s/s", "one Sparring robot / side"),
    "d": ("env steps/s", "gain over one robot"),
}


def answer(question: str, case: str, side: str, value: float, ratio: float, numbers: dict, target=None) -> dict:
    """`target` is a condition on the value or the ratio, such as ("ratio", ">=", 1.7)."""
    result = {"question": question, "case": case, "side": side, "value": round(value, 2), "ratio": round(ratio, 3)}
    if target is not None:
        of, sign, bound = target
        met = result[of] <= bound if sign == "<=" else result[of] >= bound
        result |= {"target": f"{sign} {bound}", "met": met}
    return result | numbers


def as_table(letter: str, results: list[dict]) -> str:
    rows = [("", "case", "side", *COLUMNS[letter], "target", "KiB per robot" if letter == "d" else "")]
    for result in results:
        memory = f"{result['kib_per_robot']:,.0f}" if letter == "d" else ""
        numbers = f"{result['value']:,.1f}", f"{result['ratio']:.2f}"
        judged = f"{result['target']} {'met' if result['met'] else 'MISSED'}" if "target" in result else ""
        rows.append((letter, result["case"], result["side"], *numbers, judged, memory))
    return report.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=0.5, help="approximate duration of a turn")
    parser.add_argument("--peers-python", help="interpreter of the environment with Meta-World and robosuite")
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny sizes, results not stored")
    args = parser.parse_args()
    if args.peers_python is not None and shutil.which(args.peers_python) is None:
        parser.error(f"--peers-python {args.peers_python}: no such program; benchmarks/README.md explains its set-up")
    args.robots = 4 if args.quick else 16
    if args.quick:
        args.rounds, args.seconds = 3, 0.05
    about = report.metadata()
    about |= {"physics": f"{SUBSTEPS} x {TIMESTEP * 1000:g} ms", "rounds": args.rounds, "robots": args.robots}
    results = []
    for letter in args.only:
        answers = QUESTIONS[letter](args)
        if args.quick:
            # the sizes are too small for targets
            answers = [{key: value for key, value in answer.items() if key != "target"} for answer in answers]
        print(as_table(letter, answers), end="\n\n", flush=True)
        results += answers
    about["load_after"] = report.load()
    print(f"load before {about['load']}, after {about['load_after']}, {CORES} cores")
    if not args.quick:
        report.write_json(report.RESULTS / "env_speed.json", {"about": about, "results": results})


if __name__ == "__main__":
    main()
