from typing import NamedTuple

import numpy as np


class Task(NamedTuple):
    name: str
    language: str
    problem: str
    problem_folder: str
    bddl_file: str
    init_states_file: str


class Benchmark:
    def __init__(self, task_order_index=0):
        print("[info] using task orders")

    def get_num_tasks(self):
        return 3

    def get_task(self, i):
        return Task(f"task_{i}", f"do task {i}", "Libero", "libero_spatial", f"task_{i}.bddl", f"task_{i}.pruned_init")

    def get_task_init_states(self, i):
        return np.arange(50.0)[:, None] + 100


def get_benchmark(benchmark_name):
    return Benchmark
