"""The world model's memory of each robot, or of each stream of windows, between decisions."""

import torch
from tensordict import TensorDict

from sparring.world_models.world_model import MemoryStateManager


def decision(is_first) -> TensorDict:
    return TensorDict({"is_first": torch.tensor(is_first)}, [len(is_first)])


def test_memory_is_carried_to_the_next_decision_and_cleared_at_the_start_of_an_episode():
    manager = MemoryStateManager(3, 2)
    assert manager.enter(decision([False, False, True]))["memory", "world_model"].eq(0).all()
    manager.leave(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    entered = manager.enter(decision([False, True, False]))["memory", "world_model"]
    assert entered.tolist() == [[1, 2], [0, 0], [5, 6]]


def test_windows_receive_the_memory_in_their_first_column():
    manager = MemoryStateManager(2, 1)
    manager.leave(torch.tensor([[7.0], [8.0]]))
    is_first = torch.tensor([[False, True, False], [True, False, False]])
    windows = manager.enter(TensorDict({"is_first": is_first}, [2, 3]))
    # the model itself clears the memory at a beginning in mid-window
    assert windows["memory", "world_model"][..., 0].tolist() == [[7, 0, 0], [0, 0, 0]]
    manager.leave(torch.arange(6.0).reshape(2, 3, 1))
    assert manager.memory[:, 0].tolist() == [2, 5]


def test_no_gradient_passes_from_one_window_to_the_next():
    manager = MemoryStateManager(1, 2)
    manager.leave(torch.ones(1, 2, requires_grad=True) * 2)
    assert not manager.enter(decision([False]))["memory", "world_model"].requires_grad


def test_one_robot_can_have_two_memories():
    td = decision([False])
    for key, value in (("world_model", 1.0), ("world_model_wrist", 2.0)):
        manager = MemoryStateManager(1, 1, key=("memory", key))
        manager.leave(torch.full((1, 1), value))
        manager.enter(td)
    assert td["memory", "world_model"].item() == 1 and td["memory", "world_model_wrist"].item() == 2


def test_memory_is_saved_and_restored():
    manager, other = MemoryStateManager(2, 3), MemoryStateManager(2, 3)
    manager.leave(torch.rand(2, 3))
    other.load_state_dict(manager.state_dict())
    assert torch.equal(other.memory, manager.memory)
