"""Does a small VLA follow its instruction, and does RL improve it on each of three tasks?

    python benchmarks/vla_tasks.py --seed 0
    python benchmarks/vla_tasks.py --seed 0 --minutes 20              # repeat the command to resume
    python benchmarks/vla_tasks.py --summary

Three cubes stand on the table, red on the left, blue in the middle and green on the right, each within about 3 cm of
its place; the instruction names the one to lift, in one of four phrasings. Only the instruction distinguishes the
tasks. The native VLA `tiny` reads two cameras, the proprioceptive state and the bytes of the instruction. It is trained
by imitation on demonstrations of all three tasks (configs/vla_tasks_imitate.yaml), then PPO fine-tunes it on all three,
with a reward of 1 for success (configs/vla_tasks_finetune.yaml).

The ODE policy (greedy) and the SDE policy (sampled, trained by RL) are evaluated on 100 held-out episodes of each task
after imitation, during RL, and at the end; the ODE policy also on the same episodes with the instruction of the next
task (red's for blue's and so on). Targets: higher success on each task, lower success with another task's instruction.
"""

import stages
from stages import Problem, report

RESULTS = report.RESULTS / "vla_tasks.json"
COLOURS = ("red", "blue", "green")
EPISODES = 300
TASKS = tuple(f"pick_{colour}_d0" for colour in COLOURS)
PROBLEM = Problem(TASKS, ["env.cameras=[head,wrist]"], 100, 480_000, 240_000)
WAYS = {"ode": True, "sde": False, "misled": True}


class Misled:
    """A policy that reads another task's instruction, in the same phrasing."""

    def __init__(self, policy, phrasings: int, instructions: int):
        self._policy, self._phrasings, self._instructions = policy, phrasings, instructions

    def __getattr__(self, name: str):
        return getattr(self._policy, name)

    def act(self, td):
        task = td["observation", "task"]
        td["observation", "task"] = (task + self._phrasings) % self._instructions
        td = self._policy.act(td)
        td["observation", "task"] = task
        return td


def judge(policy, config) -> dict:
    """policy -> task -> success rate."""
    from sparring.envs.env import make_env

    env = make_env(config.env, len(TASKS))
    # one task name for each instruction
    names = env.spec.task_names
    env.close()
    misled = Misled(policy, len(names) // len(TASKS), len(names))
    rates = {}
    for way, greedy in WAYS.items():
        played = stages.play(misled if way == "misled" else policy, config, EPISODES, greedy)
        rates[way] = {task: stages.rate([e for e in played if names[e.task] == task]) for task in TASKS}
    return rates


def summary(runs: dict[str, dict]) -> str:
    rows = [("seed", "task", "policy", "imitated", "fine-tuned (100 episodes)", "target")]
    for run in sorted(runs.values(), key=lambda run: run["seed"]):
        first, last = run["imitated"], run["curve"][-1]
        for task in TASKS:
            before, after, misled = first["ode"][task], last["ode"][task], last["misled"][task]
            met = {
                "ode": after["success"] > before["success"],
                # the intervals do not overlap
                "misled": misled["high"] < after["low"],
            }
            for way in WAYS:
                verdict = {True: "met", False: "MISSED", None: ""}[met.get(way)]
                row = (report.rate_in_words(rates[way][task]) for rates in (first, last))
                rows.append((run["seed"], task, way, *row, verdict))
    for task in TASKS:
        for way in WAYS:
            rows.append(("all", task, way, *_pooled(runs, way, task), ""))
    return report.table(rows)


def _pooled(runs: dict[str, dict], way: str, task: str) -> list[str]:
    """Success over all seeds, before and after RL."""
    from sparring.evaluation.play import wilson

    each = EPISODES // len(TASKS)
    texts = []
    for rates in ([run["imitated"] for run in runs.values()], [run["curve"][-1] for run in runs.values()]):
        found = wilson(round(sum(each * rate[way][task]["success"] for rate in rates)), each * len(rates))
        texts.append(report.rate_in_words({"success": found.rate, "low": found.low, "high": found.high}))
    return texts


def main() -> None:
    args = stages.make_parser(__doc__).parse_args()
    if not args.summary:
        configs = ("vla_tasks_imitate.yaml", "vla_tasks_finetune.yaml")
        stages.run(args, "vla", "tasks", PROBLEM, configs, judge, RESULTS)
    stages.print_summary(RESULTS, summary)


if __name__ == "__main__":
    main()
