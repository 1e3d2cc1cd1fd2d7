import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# tests run on the CPU even if the machine has GPUs; set before torch looks for GPUs
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# two test processes on two cores, and the processes that they start, are fastest with one thread each
os.environ["OMP_NUM_THREADS"] = "1"
# tests sign with a key of their own, not with the user's; the processes of xdist share it
if "PYTEST_XDIST_WORKER" not in os.environ:
    _HOME = tempfile.TemporaryDirectory(prefix="sparring-tests-")
    os.environ["XDG_CONFIG_HOME"] = _HOME.name

# a shell starts background jobs with SIGINT ignored, and the processes that tests interrupt would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

import preloaded  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# child processes import from the same paths: the package, the doubles, the benchmarks
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

# modules whose tests kill, stop or time processes: they run one after the other, in one test process
TIMED = {
    "test_console",
    "test_distributed",
    "test_hangs",
    "test_imports",
    "test_launch",
    "test_process",
    "test_remote_failures",
    "test_report_browser",
    "test_run_ends",
    "test_watch",
}
# modules that train, record or start interpreters; `./test.sh --fast` leaves them out
SLOW = TIMED | {
    "test_adversarial",
    "test_api",
    "test_chaos",
    "test_cli",
    "test_compare",
    "test_demos",
    "test_distributed_vla",
    "test_docs",
    "test_episodes",
    "test_experts",
    "test_flow",
    "test_imitate",
    "test_learns",
    "test_native_forward",
    "test_native_vla",
    "test_phases_distributed",
    "test_phases_vla",
    "test_policy_memory",
    "test_preloaded",
    "test_remote",
    "test_resume",
    "test_teacher",
    "test_train_all",
    "test_vla",
    "test_walk",
    "test_world_model_learner",
}
# the longest modules start first, so that both test processes end at about the same time
LONGEST = ["test_docs", "test_remote", "test_flow", "test_phases_distributed", "test_experts", "test_phases_vla"]
LONGEST += ["test_resume", "test_native_vla", "test_demos", "test_cli", "test_episodes", "test_world_model_learner"]
LONGEST += ["test_learns", "test_vla", "test_imitate", "test_teacher", "test_policy_memory", "test_walk"]


def pytest_configure(config: pytest.Config) -> None:
    # by default xdist starts with the modules that have the most tests
    config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Keep the tests of a module in one process, where they share its fixtures.

    xdist's `xdist_group` marks have no effect since pytest 9.2: they were part of the test's name.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = Path(nodeid.partition("::")[0]).stem
            return "timed" if module in TIMED else module

    return ByModule(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def order(item: pytest.Item) -> int:
        name = item.path.stem
        return -1 if name in TIMED else LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=order)
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def single_thread():
    """Small tensors do not gain from more threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def reset_logging():
    """Remove the log handlers that the runs of the previous test installed."""
    logger = logging.getLogger("sparring")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(scope="session")
def fork_server():
    with preloaded.start_server() as server:
        yield server


@pytest.fixture(scope="module")
def forked(request):
    """Start the processes of this module's tests with torch already imported; see tests/doubles/preloaded.py."""
    # only on Linux can they become children of the requesting process
    if sys.platform != "linux":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        server = request.getfixturevalue("fork_server")
        patch.setattr(preloaded.Popen, "server", server, raising=False)
        patch.setattr(subprocess, "Popen", preloaded.Popen)
        yield


@pytest.fixture
def not_forked(forked, monkeypatch):
    """Start the processes of this test as users start them, although its module uses `forked`."""
    monkeypatch.setattr(subprocess, "Popen", preloaded.Real)
