import logging
import os
import signal
import sys

# the tests are about numbers on a CPU, also on a machine with GPUs; said before torch looks for them
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# a job in the background is started with Ctrl-C ignored, and would hand that on to the processes that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402

# children find what this process finds, installed or not: the package, the doubles, the benchmarks
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)


@pytest.fixture(autouse=True)
def one_thread():
    """Two test processes on two cores are faster with one thread each, and small numbers do not gain from more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nobody_logs():
    """Runs set up logging for their process; what one test left must not be there in the next."""
    logger = logging.getLogger("sparring")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
