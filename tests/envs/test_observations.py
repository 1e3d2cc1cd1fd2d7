"""Roles of the entries of gymnasium observation spaces: inferred, set, refused; and the values that they become."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sparring.contract import text_of
from sparring.envs.configs import GymConfig
from sparring.envs.observations import ObservationMap

UINT8 = {"low": 0, "high": 255, "dtype": np.uint8}


def image_space(*shape):
    return spaces.Box(shape=shape, **UINT8)


def map_of(space, roles=None):
    return ObservationMap(SimpleNamespace(observation_space=space), GymConfig(name="test", roles=roles or {}))


def written(space, value, roles=None, info=None):
    """The observation of the contract that a value of this space becomes."""
    observations, info = map_of(space, roles), info or {}
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in observations.spec.items()}
    observations.check(value, info)
    observations.write(value, info, arrays, 0)
    return {key: array[0] for key, array in arrays.items()}


# --- inferred roles


def test_vectors_numbers_and_choices_become_one_state_in_the_order_of_their_keys():
    space = spaces.Dict(
        z=spaces.Box(-9, 9, (2,), np.float64),
        a=spaces.Discrete(3, start=10),
        b=spaces.MultiDiscrete([2, 3]),
        c=spaces.MultiBinary(2),
        d=spaces.Box(-9, 9, (), np.float32),
    )
    value = {"z": np.array([7.5, 8]), "a": np.int64(12), "b": np.array([1, 0]), "c": np.array([1, 0]), "d": 4.0}
    result = written(space, value)
    assert list(result) == ["state"] and result["state"].dtype == np.float32
    assert result["state"].tolist() == [0, 0, 1] + [0, 1, 1, 0, 0] + [1, 0] + [4] + [7.5, 8]


def test_nested_dicts_and_tuples_are_followed_down_to_their_leaves():
    # as of gym-aloha
    space = spaces.Dict(
        pixels=spaces.Dict(top=image_space(8, 10, 3), side=image_space(3, 6, 4)), agent_pos=spaces.Box(-1, 1, (14,))
    )
    value = {
        "pixels": {"top": np.full((8, 10, 3), 7, np.uint8), "side": np.full((3, 6, 4), 9, np.uint8)},
        "agent_pos": np.arange(14, dtype=np.float32),
    }
    result = written(space, value)
    assert {key: array.shape for key, array in result.items()} == {
        "state": (14,),
        "image/side": (3, 6, 4),
        "image/top": (3, 8, 10),
    }
    assert (result["image/top"] == 7).all() and (result["image/side"] == 9).all()
    pair = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))
    assert written(pair, (1, np.float32([0.5])))["state"].tolist() == [0, 1, 0.5]


def test_images_become_channels_first_and_gray_ones_three_channels():
    rgb = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    image = written(image_space(2, 4, 3), rgb)["image/head"]
    assert image.shape == (3, 2, 4) and image[1, 1, 2] == rgb[1, 2, 1]
    gray = np.arange(30, dtype=np.uint8).reshape(1, 5, 6)
    assert (written(image_space(1, 5, 6), gray)["image/head"] == gray).all()
    flat = np.arange(80, dtype=np.uint8).reshape(8, 10)
    assert (written(image_space(8, 10), flat)["image/head"] == flat).all()


def test_frames_of_a_stack_become_cameras():
    frames = np.stack([np.full((8, 8, 3), k, np.uint8) for k in range(4)])
    result = written(image_space(4, 8, 8, 3), frames)
    assert {key: int(array.mean()) for key, array in result.items()} == {f"image/head_{k}": k for k in range(4)}


def test_a_frame_stack_wrapper_stacks_states_and_gray_images():
    class Env(gymnasium.Env):
        action_space = spaces.Discrete(2)
        observation_space = spaces.Dict(gray=image_space(8, 9), x=spaces.Box(-1, 1, (2,)))

    env = gymnasium.wrappers.FrameStackObservation(Env(), 3)
    observations = ObservationMap(env, GymConfig(name="test"))
    assert observations.spec == {
        **{f"image/gray_{k}": ((3, 8, 9), "uint8") for k in range(3)},
        "state": ((6,), "float32"),
    }


def test_depth_and_point_clouds_are_recognised_by_their_names_and_shapes():
    space = spaces.Dict(
        head_depth=spaces.Box(0, 9, (6, 8, 1), np.float32),
        wrist_depth=spaces.Box(0, 9, (6, 8), np.float64),
        point_cloud=spaces.Box(-9, 9, (50, 6), np.float32),
    )
    depth = np.arange(48.0).reshape(6, 8)
    value = {"head_depth": depth[..., None], "wrist_depth": depth, "point_cloud": np.ones((50, 6))}
    result = written(space, value)
    for name in ("head", "wrist"):
        assert result[f"depth/{name}"].shape == (1, 6, 8) and (result[f"depth/{name}"][0] == depth).all()
    assert result["points"].shape == (50, 6) and map_of(spaces.Dict(pcd=spaces.Box(-1, 1, (9, 3)))).spec == {
        "points": ((9, 3), "float32")
    }


def test_goals_are_part_of_the_state():
    part = spaces.Box(-9, 9, (1,), np.float64)
    space = spaces.Dict(observation=part, achieved_goal=part, desired_goal=part)
    value = {name: np.array([k]) for k, name in enumerate(("observation", "achieved_goal", "desired_goal"))}
    assert written(space, value)["state"].tolist() == [1, 2, 0]


def test_text_is_an_instruction_in_utf8():
    space = spaces.Dict(task=spaces.Text(10), x=spaces.Box(-1, 1, (1,)))
    result = written(space, {"task": "put 杯 on", "x": np.zeros(1)})
    assert result["instruction"].shape == (40,) and text_of(result["instruction"]) == "put 杯 on"
    with pytest.raises(ValueError, match=r"observation\['task'\] of test is 3; expected text"):
        written(space, {"task": 3, "x": np.zeros(1)})


def test_equal_last_keys_keep_their_whole_path():
    space = spaces.Dict(a=spaces.Dict(rgb=image_space(8, 8, 3)), b=spaces.Dict(rgb=image_space(8, 8, 3)))
    assert list(map_of(space).spec) == ["image/a_rgb", "image/b_rgb"]


# --- set roles


def test_roles_decide_what_is_ambiguous():
    grid = spaces.Box(-9, 9, (40, 3), np.float64)
    value = np.arange(120.0).reshape(40, 3)
    with pytest.raises(ValueError, match=r"role of observation 'observation' \(float64 \[40, 3\]\) .* is ambiguous"):
        map_of(grid)
    assert written(grid, value, {"observation": "state"})["state"].tolist() == value.ravel().tolist()
    assert written(grid, value, {"observation": "points"})["points"].tolist() == value.tolist()
    assert written(grid, value, {"observation": "depth/top"})["depth/top"].shape == (1, 40, 3)


def test_float_images_are_scaled_where_their_role_says_so():
    space = spaces.Box(0, 1, (2, 2, 3), np.float32)
    image = written(space, np.full((2, 2, 3), 0.5, np.float32), {"observation": "image/top"})["image/top"]
    assert image.dtype == np.uint8 and (image == 128).all()
    with pytest.raises(ValueError, match="values of 0 to 1"):
        map_of(spaces.Box(-1, 1, (2, 2, 3), np.float32), {"observation": "image/top"})
    with pytest.raises(ValueError, match="an image needs uint8, or floats"):
        map_of(spaces.Box(0, 255, (2, 2, 3), np.int32), {"observation": "image/top"})


def test_entries_can_be_ignored_and_cameras_renamed():
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,)), odd=spaces.Sequence(spaces.Discrete(2)), cam=image_space(8, 8, 3))
    assert list(map_of(space, {"odd": "ignore", "cam": "image/wrist"}).spec) == ["image/wrist", "state"]
    with pytest.raises(ValueError, match=r"set env.roles=\{odd: ignore\}"):
        map_of(space)


def test_an_instruction_comes_from_info_where_its_role_says_so():
    space, roles = spaces.Box(-1, 1, (1,)), {"info/instruction": "instruction"}
    result = written(space, np.zeros(1), roles, {"instruction": "lift the cube"})
    assert text_of(result["instruction"]) == "lift the cube"
    with pytest.raises(ValueError, match=r"returned no info\['instruction'\]"):
        written(space, np.zeros(1), roles, {})


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"y": "state"}, "test has no observation 'y'; it has x, z"),
        ({"x": "picture"}, r"env.roles=\{x: picture\}; expected image/NAME"),
        ({"x": "image/top"}, r"env.roles=\{x: image/top\}: test has Box.* expected uint8"),
        ({"x": "points"}, "expected .P, 3 or 6."),
        ({"x": "instruction"}, "expected a Text space"),
        ({"x": "ignore", "z": "ignore"}, "no observation of test has a role other than ignore"),
        ({"info/a": "state"}, "expected instruction, for a text in info"),
    ],
)
def test_wrong_roles_are_refused(roles, message):
    with pytest.raises(ValueError, match=message):
        map_of(spaces.Dict(x=spaces.Box(-1, 1, (2,)), z=spaces.Discrete(2)), roles)


def test_two_entries_with_one_role_are_refused():
    space = spaces.Dict(a=image_space(8, 8, 3), b=image_space(8, 8, 3))
    with pytest.raises(ValueError, match="'a' and 'b' of test have the same role image/top"):
        map_of(space, {"a": "image/top", "b": "image/top"})


# --- wrong values


def test_wrong_shapes_and_keys_are_refused_not_broadcast():
    with pytest.raises(ValueError, match=r"of test has shape \(1,\) .*observation_space .*\(4,\)"):
        written(spaces.Box(-1, 1, (4,)), np.zeros(1, np.float32))
    nested = spaces.Dict(arm=spaces.Dict(x=spaces.Box(-1, 1, (1,))))
    with pytest.raises(ValueError, match="expected the key 'arm/x'"):
        written(nested, {"arm": {}})


@pytest.mark.parametrize("space", [image_space(8, 8, 4), spaces.Sequence(spaces.Discrete(2)), image_space(2, 2, 8, 8)])
def test_spaces_without_a_role_are_refused(space):
    with pytest.raises(ValueError, match=r"env.roles=\{observation: "):
        map_of(space)


def test_describe_lists_what_becomes_of_each_entry():
    space = spaces.Dict(a=spaces.Box(-1, 1, (2,), np.float64), cam=image_space(8, 8, 3), odd=spaces.Discrete(5))
    assert list(map_of(space, {"odd": "ignore"}).describe()) == [
        ("a", "Box [2] float64 -> state, 2 numbers"),
        ("cam", "Box [8, 8, 3] uint8 -> image/cam"),
        ("odd", "Discrete [] int64 -> ignored"),
    ]
