"""How fast are the worker processes on Meta-World, compared with the bare simulator and gymnasium's AsyncVectorEnv?

    python benchmarks/metaworld_speed.py [--quick]

`state`: 16 robots (the default) on as many workers as cores, compared with one bare simulator per core (the limit) and
with AsyncVectorEnv. `camera`: with one 64 px camera and decisions of 4 control steps; Sparring draws the frames that a
policy sees, AsyncVectorEnv draws one per step. All sides reset after 200 steps and take turns in one run; medians are
compared. Targets: 0.85 of the limit; 1.2 times AsyncVectorEnv from the state, 2 times with the camera.
"""

import argparse
import os

import report
from env_turns import AtOnce, Worker, take_turns

RESULTS = report.RESULTS / "metaworld_speed.json"
TASK = {"task": "push-v3", "limit": 200}
ROBOTS, CHUNK, CORES = 16, 4, os.cpu_count() or 1


def measure(rounds: int, seconds: float) -> list[dict]:
    results = []
    for case, cameras, chunk in (("state", [], 1), ("camera", ["corner"], CHUNK)):
        run = TASK | {"robots": ROBOTS, "cameras": cameras, "gl": "egl"}
        sides: dict[str, Worker | AtOnce] = {
            "sparring": Worker("metaworld_workers", workers=CORES, chunk=chunk, **run),
            "AsyncVectorEnv": Worker("metaworld_async", **run),
        }
        if case == "state":
            sides["bare simulators"] = AtOnce(*(Worker("metaworld_bare", **TASK) for _ in range(CORES)))
        measured = take_turns(sides, rounds, seconds)
        # AtOnce: CORES simulators take their turns at the same time
        rates = {
            name: found["env_steps"] * (CORES if name == "bare simulators" else 1) / found["seconds"]
            for name, found in measured.items()
        }
        targets = {
            ("state", "bare simulators"): 0.85,
            ("state", "AsyncVectorEnv"): 1.2,
            ("camera", "AsyncVectorEnv"): 2,
        }
        for name, rate in rates.items():
            about = {"case": case, "side": name, "steps_per_second": round(rate)}
            about |= {"ratio": round(rates["sparring"] / rate, 3), "target": targets.get((case, name))}
            results.append(about | {"versions": measured[name].get("versions", {})})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate duration of a turn")
    parser.add_argument("--quick", action="store_true", help="check that it runs; results are not stored")
    args = parser.parse_args()
    results = measure(3, 0.2) if args.quick else measure(args.rounds, args.seconds)
    rows = [("case", "side", "steps/s", "sparring / side", "target")]
    rows += [(r["case"], r["side"], f"{r['steps_per_second']:,}", r["ratio"], r["target"] or "-") for r in results]
    print(report.table(rows))
    if not args.quick:
        report.write_json(RESULTS, report.metadata() | {"results": results})


if __name__ == "__main__":
    main()
