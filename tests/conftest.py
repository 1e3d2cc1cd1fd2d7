import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Two test processes on two cores are faster with one thread each, and small numbers do not gain from more."""
    torch.set_num_threads(1)
