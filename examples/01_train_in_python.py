"""Train and evaluate from Python: the same code that `sparring train finetune` runs.

python examples/01_train_in_python.py
"""

import argparse

from sparring import PPO, Trainer, load_config, load_policy, make_env, make_policy


def main(total_timesteps: int, output: str) -> None:
    config = load_config({"env": {"task": "reach_d0"}})
    env = make_env(config.env, num_envs=16)
    policy = make_policy(config.policy, env.spec, chunk=1)
    algorithm = PPO(config.ppo, policy)

    trainer = Trainer(policy, env, algorithm, buffer_size=2048, buffer_type="standard", batch_size=512, output=output)
    trainer.train(total_timesteps=total_timesteps)
    print(trainer.evaluate(episodes=50).table())

    # load the trained policy from its run folder, and compute the actions for one observation
    trained = load_policy(output)
    td = trained.act(env.reset(seed=1, split="eval"))
    print("first actions:", td["action"][:2, 0].tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-timesteps", type=int, default=100_000)
    parser.add_argument("--output", default="outputs/example_01")
    arguments = parser.parse_args()
    main(arguments.total_timesteps, arguments.output)
