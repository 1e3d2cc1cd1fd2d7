"""What does it cost to store experience? Two separate questions:

a) adding a rollout and reading it, compared with a list of TensorDicts and with bare tensor copies
b) memory of images, compared with storing both `observation` and `next/observation`

    python benchmarks/data.py [--quick] [--only a b] [--rounds 15] [--threads 1]

A rollout is 128 decisions of 16 robots with head and wrist cameras at 64 px; an episode ends in 1 of 50 decisions. The
sides take turns in one process, so that a busy moment affects all; medians are compared. Each side keeps its result
until its next turn, as a training loop does, so that freeing memory counts as part of its time.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import report
import torch
from tensordict import TensorDict

from sparring.data.buffer import RolloutBuffer, VLABuffer

CAMERAS = ("head", "wrist")
AT_LEAST_5 = {"sense": ">=", "target": 5.0}


class Experience:
    """T transitions of N robots with random values, in the format of env and policy."""

    def __init__(self, steps: int, envs: int, size: int):
        self.steps, self.envs, self.size = steps, envs, size
        self.random = torch.Generator().manual_seed(0)
        observation, self.transitions = self._observation(), []
        for _ in range(steps):
            root = self._observation()
            self.transitions.append(self._transition(observation, root))
            observation = root
        self.root = TensorDict({"observation": observation}, [envs])

    def _transition(self, observation: TensorDict, root: TensorDict) -> TensorDict:
        done = torch.rand(self.envs, generator=self.random) < 0.02
        after = root
        if done.any():
            after = root.clone()
            after[done] = self._observation()[done]
        nothing = torch.zeros(self.envs, dtype=torch.bool)
        following = {
            "observation": after,
            "reward": torch.rand(self.envs, 1, generator=self.random),
            "executed": torch.ones(self.envs, dtype=torch.int64),
            "terminated": done,
            "truncated": nothing.clone(),
            "success": nothing.clone(),
        }
        action = torch.rand(self.envs, 1, 8, generator=self.random)
        values = {"observation": observation, "is_first": nothing.clone(), "action": action}
        return TensorDict(values | {"next": TensorDict(following, [self.envs])}, [self.envs])

    def _observation(self) -> TensorDict:
        shape = (self.envs, 3, self.size, self.size)
        images = {c: torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.random) for c in CAMERAS}
        values = {
            "image": TensorDict(images, [self.envs]),
            "state": torch.rand(self.envs, 24, generator=self.random),
            "task": torch.zeros(self.envs, dtype=torch.int64),
        }
        return TensorDict(values, [self.envs])


# ---- a


def list_of(experience: Experience, copies: bool) -> Callable:
    """A list of TensorDicts; `copies`: of copies, since the buffers own their data, too."""

    def turn(_):
        kept = []
        for td in experience.transitions:
            kept.append(td.clone() if copies else td)
        return torch.stack(kept)

    return turn


def rollout_buffer(experience: Experience) -> Callable:
    buffer = RolloutBuffer(experience.steps)

    def turn(_):
        buffer.clear()
        for td in experience.transitions:
            buffer.add(td)
        buffer.close(experience.root)
        return buffer.get(flatten=False)

    return turn


def ring(experience: Experience) -> Callable:
    buffer = VLABuffer(experience.steps)

    def turn(_):
        # the same transitions follow again: the first one does not continue the last one
        buffer.clear()
        for td in experience.transitions:
            buffer.add(td)
        buffer.close(experience.root)
        return buffer.get(flatten=False)

    return turn


def bare_copies(experience: Experience, out: bool) -> Callable:
    """Copies of the stored tensors, observations once, and nothing else; `out`: also copies of all rows at the end."""
    ended = [td["next", "terminated"].nonzero()[:, 0] for td in experience.transitions]
    last = [list(td["next", "observation"].values(True, True)) for td in experience.transitions]
    rows = [bare(td) for td in experience.transitions] + [bare(experience.root)]
    store = {key: torch.zeros(len(rows), *value.shape, dtype=value.dtype) for key, value in rows[0].items()}

    def turn(_):
        for number, row in enumerate(rows):
            for key, value in row.items():
                store[key][number].copy_(value)
        finals = [[leaf.index_select(0, e) for leaf in leaves] for e, leaves in zip(ended, last, strict=True) if len(e)]
        return {key: column[:-1].clone() for key, column in store.items()} if out else (store, finals)

    return turn


def bare(td: TensorDict) -> dict:
    return dict(td.exclude(("next", "observation")).items(True, True))


def add_and_get(args) -> list[dict]:
    experience = Experience(args.steps, args.robots, args.size)
    sides = {
        "list of TensorDicts": list_of(experience, copies=False),
        "list of copied TensorDicts": list_of(experience, copies=True),
        "RolloutBuffer": rollout_buffer(experience),
        "bare copies in": bare_copies(experience, out=False),
        "VLABuffer": ring(experience),
        "bare copies in and out": bare_copies(experience, out=True),
    }
    limits = {"RolloutBuffer": "bare copies in", "VLABuffer": "bare copies in and out"}
    seconds = take_turns(sides, args.rounds)
    results = []
    for name, value in seconds.items():
        results.append(answer("a", f"{name}: ms", value * 1e3))
        if name in limits:
            for kept, target in (("list of TensorDicts", AT_LEAST_5), ("list of copied TensorDicts", {})):
                results.append(answer("a", f"{name}: times as fast as the {kept}", seconds[kept] / value, **target))
            results.append(answer("a", f"{name}: times the bare copies", value / seconds[limits[name]], "<=", 1.3))
    return results


def take_turns(sides: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median seconds of each side; the first side changes from round to round."""
    held, times = dict.fromkeys(sides), {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            held[name] = sides[name](held[name])
            times[name].append(time.perf_counter() - started)
    # without the first two, which allocate memory
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


# ---- b


def memory(args) -> list[dict]:
    experience = Experience(args.steps, args.robots, args.size)
    image = ("observation", "image")
    both = sum(tensor.nbytes for td in experience.transitions for tensor in td[image].values()) * 2
    buffer = VLABuffer(args.steps)
    for td in experience.transitions:
        buffer.add(td)
    buffer.close(experience.root)
    _, last = buffer.finals()
    kept = sum(tensor.nbytes for tensor in (*buffer.get()[image].values(), *buffer.last[image].values()))
    kept += sum(tensor.nbytes for tensor in last["image"].values())
    return [
        answer("b", "both observations: MB of images", both / 1e6),
        answer("b", f"VLABuffer: MB of images, {len(last)} ends of episodes", kept / 1e6),
        answer("b", "VLABuffer: times less", both / kept, ">=", 1.9),
    ]


# ---- results

QUESTIONS = {"a": add_and_get, "b": memory}


def answer(question: str, what: str, value: float, sense: str = "", target: float | None = None) -> dict:
    return {"question": question, "what": what, "value": round(value, 3), "sense": sense, "target": target}


def as_table(results: list[dict]) -> str:
    rows = [("", "what", "value", "target", "")]
    for r in results:
        met = "" if r["target"] is None else "met" if meets(r) else "NOT MET"
        target = "" if r["target"] is None else f"{r['sense']} {r['target']}"
        rows.append((r["question"], r["what"], f"{r['value']:.2f}", target, met))
    return report.table(rows)


def meets(result: dict) -> bool:
    value, target = result["value"], result["target"]
    return value >= target if result["sense"] == ">=" else value <= target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side in (a)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of all sides")
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny sizes, results not stored")
    args = parser.parse_args()
    args.steps, args.robots, args.size = (16, 4, 32) if args.quick else (128, 16, 64)
    args.rounds = 2 if args.quick else args.rounds
    torch.set_num_threads(args.threads)
    about = report.metadata() | {
        "sizes": {name: getattr(args, name) for name in ("steps", "robots", "size", "threads")}
    }
    results = [result for letter in args.only for result in QUESTIONS[letter](args)]
    if args.quick:
        # the sizes are too small for targets
        results = [result | {"target": None} for result in results]
    print(as_table(results))
    about["load_after"] = report.load()
    print(f"load before {about['load']}, after {about['load_after']}")
    if not args.quick:
        report.write_json(report.RESULTS / "data.json", {"about": about, "results": results})


if __name__ == "__main__":
    main()
