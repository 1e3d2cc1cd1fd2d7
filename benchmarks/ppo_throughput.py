"""How fast is PPO, compared with stable-baselines3? Three separate questions:

a) same env, same network: the loop of Sparring compared with that of SB3, which uses the same native vector env
b) gain of the env: Sparring compared with SB3 on the same task as 16 gymnasium envs in processes
c) collection compared with a bare loop: the cost of TensorDicts, bookkeeping and storage

    python benchmarks/ppo_throughput.py [--quick] [--only a b c]

Both sides of a comparison take turns in one run, so that a busy moment affects both; medians are compared.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import peers
import report
import torch
from peers import SB3, FreeEnv, NativeVecEnv, Ours, Seconds, Workload

CORES = os.cpu_count() or 1
TARGETS = {"a": {512: 1.1, 64: 1.3}, "b": 2.0, "c": 0.9}


class Side:
    """One side of a comparison, with its number of torch threads and its times."""

    def __init__(self, iterate: Callable[[], Seconds], threads: int = 1):
        self.iterate, self.threads = iterate, threads
        self.times: list[Seconds] = []

    def once(self) -> Seconds:
        torch.set_num_threads(self.threads)
        return self.iterate()

    def measure(self) -> None:
        self.times.append(self.once())

    def find_best_threads(self) -> None:
        """Small networks are often faster with one thread, large ones with one per core."""

        def seconds(threads: int) -> float:
            self.threads = threads
            return min(self.once().total for _ in range(2))

        self.threads = min({1, CORES}, key=seconds)

    def numbers(self, env_steps: int) -> dict:
        total = statistics.median(t.total for t in self.times)
        return {
            "steps_per_second": round(env_steps / total, 1),
            "collect_share": round(statistics.median(t.collect / t.total for t in self.times), 3),
            "collect_seconds": round(statistics.median(t.collect for t in self.times), 4),
            "update_seconds": round(statistics.median(t.update for t in self.times), 4),
            "seconds": [round(t.total, 4) for t in self.times],
            "torch_threads": self.threads,
        }


def take_turns(ours: Side, theirs: Side, rounds: int) -> None:
    """Measure both sides; the first side changes from round to round."""
    for side in (ours, theirs):
        side.once()
    for number in range(rounds):
        for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
            side.measure()


def compare(ours: Ours, theirs: SB3, work: Workload, args, best_threads: bool) -> dict:
    if ours.parameters() != theirs.parameters():
        raise RuntimeError(f"the networks differ: {ours.parameters()} weights here, {theirs.parameters()} in SB3")
    sides = Side(ours.iterate, args.threads), Side(theirs.iterate, args.threads)
    if best_threads:
        for side in sides:
            side.find_best_threads()
    take_turns(*sides, args.rounds)
    ours.close()
    theirs.close()
    mine, peer = (side.numbers(work.env_steps) for side in sides)
    ratio = round(mine["steps_per_second"] / peer["steps_per_second"], 3)
    return {"workload": str(work), "parameters": ours.parameters(), "sparring": mine, "sb3": peer, "ratio": ratio}


def same_env_same_network(args) -> list[dict]:
    results = []
    spec = peers.tabletop(1).spec
    backends = {
        "reach_d0": lambda: peers.tabletop(args.robots, threads=args.env_threads),
        "free env": lambda: FreeEnv(spec, args.robots),
    }
    for label, make in backends.items():
        for minibatch, epochs in ((512, 5), (64, 10)):
            work = Workload(args.robots, args.steps, minibatch, epochs)
            outcome = compare(Ours(make(), work), SB3(NativeVecEnv(make()), work), work, args, best_threads=False)
            # a free env measures the loop alone, for which there is no target
            target = TARGETS["a"][minibatch] if label == "reach_d0" else None
            results.append({"question": "a: same env, same network", "case": label, "target": target} | outcome)
    return results


def gain_of_the_env(args) -> list[dict]:
    results = []
    cases = {
        "state": ((), Workload(args.robots, args.steps, 512, 5)),
        "64 px": (("head",), Workload(args.robots, args.steps, 256, 4)),
    }
    for label, (cameras, work) in cases.items():
        ours = Ours(peers.tabletop(args.robots, cameras), work)
        theirs = SB3(peers.gym_processes(args.robots, cameras), work)
        outcome = compare(ours, theirs, work, args, best_threads=True)
        results.append({"question": "b: native env / SubprocVecEnv", "case": label, "target": TARGETS["b"]} | outcome)
    return results


def collection_vs_bare_loop(args) -> list[dict]:
    results = []
    for label, cameras in {"state": (), "64 px": ("head",)}.items():
        work = Workload(args.robots, args.steps, 512, 1)
        ours = Ours(peers.tabletop(args.robots, cameras, args.env_threads), work)
        backend = peers.tabletop(args.robots, cameras, args.env_threads)
        bare = peers.bare_loop(backend, ours.policy, work.steps)
        sides = Side(_only_collect(ours), args.threads), Side(lambda run=bare: Seconds(run(), 0.0), args.threads)
        take_turns(*sides, 2 * args.rounds)
        ours.close()
        backend.close()
        mine, loop = (side.numbers(work.env_steps) for side in sides)
        results.append(
            {
                "question": "c: collection / bare loop",
                "case": label,
                "target": TARGETS["c"],
                "workload": f"{work.robots} x {work.steps}",
                "sparring": mine,
                "bare loop": loop,
                "ratio": round(mine["steps_per_second"] / loop["steps_per_second"], 3),
            }
        )
    return results


def _only_collect(ours: Ours) -> Callable[[], Seconds]:
    def iterate() -> Seconds:
        started = time.perf_counter()
        ours.phase.collector.collect(ours.phase.buffer)
        return Seconds(time.perf_counter() - started, 0.0)

    return iterate


QUESTIONS = {"a": same_env_same_network, "b": gain_of_the_env, "c": collection_vs_bare_loop}


def as_table(results: list[dict]) -> str:
    rows = [
        (
            "question",
            "case",
            "workload",
            "sparring steps/s",
            "peer steps/s",
            "ratio",
            "target",
            "collecting: ours, peer",
            "torch threads",
        )
    ]
    for result in results:
        mine, peer = result["sparring"], result.get("sb3") or result["bare loop"]
        met = "" if result["target"] is None else f">= {result['target']} {_met(result)}"
        shares = f"{mine['collect_share']:.0%}, {peer['collect_share']:.0%}"
        rows.append(
            (
                result["question"],
                result["case"],
                result["workload"],
                f"{mine['steps_per_second']:,.0f}",
                f"{peer['steps_per_second']:,.0f}",
                f"{result['ratio']:.2f}",
                met,
                shares,
                f"{mine['torch_threads']}, {peer['torch_threads']}",
            )
        )
    return report.table(rows)


def _met(result: dict) -> str:
    return "met" if result["ratio"] >= result["target"] else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=5, help="timed iterations of each side; (c) takes twice as many")
    parser.add_argument("--threads", type=int, default=1, help="torch threads in (a) and (c), of both sides")
    parser.add_argument("--env-threads", type=int, default=0, help="env threads in (a) and (c); 0: one per core")
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny sizes, results not stored")
    args = parser.parse_args()
    args.robots, args.steps = (4, 64) if args.quick else (16, 128)
    args.rounds = 2 if args.quick else args.rounds
    about = report.metadata()
    about |= {"sizes": {"env_threads": args.env_threads or CORES, "rounds": args.rounds}}
    results = []
    for letter in args.only:
        results += QUESTIONS[letter](args)
    if args.quick:
        # the sizes are too small for targets
        results = [result | {"target": None} for result in results]
    print(as_table(results))
    about["load_after"] = report.load()
    print(f"load before {about['load']}, after {about['load_after']}, {CORES} cores")
    if not args.quick:
        report.write_json(report.RESULTS / "ppo_throughput.json", {"about": about, "results": results})


if __name__ == "__main__":
    main()
