"""What does an update of a flow policy cost, for each scoring method?

    python benchmarks/flow_cost.py [--device cpu] [--steps 10] [--batch 256] [--rounds 15] [--quick]

Scoring a complete chain of K denoising steps runs the action transformer K times; scoring one drawn step runs it once.
Two parts are timed: forward and backward of the action head alone (features given), and the complete update (two 64 px
cameras, state, critic, loss, optimiser). Methods and parts take turns in one process; medians are compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import report
import torch
from tensordict import TensorDict

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.contract import EnvSpec
from sparring.policies.configs import FlowConfig
from sparring.policies.flow.policy import FlowPolicy

METHODS = ("flow_sde", "flow_sde_one_step", "flow_noise")
CHUNK, DIMS, STATE, SIZE = 8, 8, 24, 64


def make_policy(method: str, args) -> FlowPolicy:
    observation = {f"image/{camera}": ((3, SIZE, SIZE), "uint8") for camera in ("head", "wrist")}
    spec = EnvSpec(observation | {"state": ((STATE,), "float32")}, DIMS)
    torch.manual_seed(0)
    return FlowPolicy(FlowConfig(method=method, sampling_steps=args.steps), spec, CHUNK).to(args.device).eval()


def decisions(policy: FlowPolicy, batch: int, device: str) -> TensorDict:
    """A rollout of one decision of each of B robots, [1, B], as a collector stores it."""
    shape = (batch, 3, SIZE, SIZE)
    images = {camera: torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for camera in ("head", "wrist")}
    observation = TensorDict({"image": images, "state": torch.randn(batch, STATE, device=device)}, [batch])
    td = TensorDict({"observation": observation}, [batch], device=device)
    td["noise"] = torch.rand(batch, policy.noise_size, device=device).clamp(0.01, 0.99)
    with torch.no_grad():
        td = policy.act(td)
        no = torch.zeros(batch, dtype=torch.bool, device=device)
        rewards, executed = torch.rand(batch, CHUNK, device=device), torch.full((batch,), CHUNK, device=device)
        following = {"reward": rewards, "executed": executed, "terminated": no, "truncated": no, "value": td["value"]}
        td["next"] = TensorDict(following, [batch])
        td.update(policy.complete(td))
    return td.exclude("noise")[None]


def head(policy: FlowPolicy, td: TensorDict) -> Callable[[], None]:
    """Forward and backward of the action transformer over the scored actions."""
    flat = td[0]
    with torch.no_grad():
        _, about = policy.encode(flat)

    def turn() -> None:
        _, _, terms = policy._score(about, flat["trace"])
        terms.log_prob.sum().backward()

    return turn


def whole_update(policy: FlowPolicy, td: TensorDict) -> Callable[[], None]:
    ppo = PPO(PPOConfig(ppo_epochs=1, mini_batch_size=td.numel(), policy_lr=1e-6), policy)
    # the stored log-probabilities belong to these weights, so each turn restores them
    weights = {name: value.clone() for name, value in policy.state_dict().items()}

    def turn() -> None:
        ppo.update(td.copy())
        with torch.no_grad():
            for name, value in policy.state_dict().items():
                value.copy_(weights[name])

    return turn


def take_turns(sides: dict, rounds: int, device: str) -> dict:
    """Median milliseconds of each side."""
    times = {name: [] for name in sides}
    for _ in range(rounds + 2):
        for name, turn in sides.items():
            started = time.perf_counter()
            turn()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) * 1e3)
    # the first two warm up
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps K")
    parser.add_argument("--batch", type=int, default=256, help="decisions per minibatch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny sizes, results not stored")
    args = parser.parse_args()
    args.batch, args.rounds = (8, 1) if args.quick else (args.batch, args.rounds)
    torch.set_num_threads(args.threads)
    about = report.metadata() | {"device": report.device(args.device), "sizes": vars(args) | {"chunk": CHUNK}}
    sides = {}
    for method in METHODS:
        for part, make in (("head", head), ("update", whole_update)):
            policy = make_policy(method, args)
            sides[method, part] = make(policy, decisions(policy, args.batch, args.device))
    milliseconds = take_turns(sides, args.rounds, args.device)
    results = [
        {
            "method": method,
            "part": part,
            "ms": round(ms, 3),
            "times_as_fast_as_flow_sde": round(milliseconds["flow_sde", part] / ms, 2),
        }
        for (method, part), ms in milliseconds.items()
    ]
    rows = [("method", "part", "ms", "times as fast as flow_sde", "target")]
    for result in results:
        judged = result["method"] == "flow_sde_one_step" and result["part"] == "head" and not args.quick
        met = "met" if result["times_as_fast_as_flow_sde"] >= 6 else "NOT MET"
        rows.append((*result.values(), f">= 6 {met}" if judged else ""))
    print(report.table(rows))
    about["load_after"] = report.load()
    print(f"load before {about['load']}, after {about['load_after']}")
    if not args.quick:
        name = "flow_cost" if args.device == "cpu" else "flow_cost_gpu"
        report.write_json(report.RESULTS / f"{name}.json", {"about": about, "results": results})


if __name__ == "__main__":
    main()
