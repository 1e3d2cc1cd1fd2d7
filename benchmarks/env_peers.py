"""Worker process of env_speed.py: times one kind of work on request.

    python env_peers.py KIND '{"size": 64, ...}'

When ready, the process prints a description of its work as one line of JSON. It answers each input line with a number
k by the seconds that k turns took, and exits at the end of its input. Imports depend on the kind: Meta-World and
robosuite are installed in an environment without sparring. A turn is a control step, or all frames of some poses.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

Turn = Callable[[], object]
CAMERAS = ("head", "wrist")


def suite_step(task: str, robots: int, threads: int, cameras: list[str], size: int = 64) -> tuple[Turn, dict]:
    """A control step of all robots. Memory is the increase in a process that already runs one robot."""
    from sparring.envs.configs import TabletopConfig
    from sparring.envs.tabletop.backend import Tabletop

    config = TabletopConfig(task=task, cameras=tuple(cameras), image_size=size, threads=threads)
    alone = _stepper(Tabletop(config, 1))
    for _ in range(3):
        alone()
    before = _resident_bytes()
    env = Tabletop(config, robots)
    turn = _stepper(env)
    kept = [turn() for _ in range(3)][-1:]
    kib = (_resident_bytes() - before) / robots / 1024
    # `alone` and the last observation live until here: reuse of freed memory would not be counted
    del alone, kept
    return turn, {"simulated_seconds": robots / env.spec.control_hz, "kib_per_robot": round(kib, 1)}


def suite_physics(task: str, robots: int, threads: int) -> tuple[Turn, dict]:
    """The physics of a control step; the motors hold each arm in place."""
    world, rows, _ = _suite_world(task, robots, threads)
    held = world.arms(rows)[:, 0]
    return lambda: world.advance(rows, held), {}


def suite_frames(
    task: str, poses: str, threads: int, together: int, size: int, cameras: list[str] = CAMERAS
) -> tuple[Turn, dict]:
    """Draw all poses, `together` per call: from joint positions to pixels."""
    qpos = np.load(poses)
    world, rows, goal = _suite_world(task, len(qpos), threads)
    state = world.state()
    # a state begins with the time and the joint positions
    state[:, 1 : 1 + qpos.shape[1]] = qpos
    world.set_state(state)
    groups = np.split(rows, range(together, len(rows), together))

    def turn() -> dict:
        return [world.views(group, goal[group], tuple(cameras), size) for group in groups][0]

    # [n, 3, H, W] -> [H, W, 3] of the first pose
    first = [image[0].transpose(1, 2, 0) for image in turn().values()]
    return turn, {"frames": len(qpos) * len(cameras), "thumbnails": [_thumbnail(image) for image in first]}


def mujoco_frames(model: str, poses: str, size: int, floor: float, cameras: list[str] = CAMERAS) -> tuple[Turn, dict]:
    """Draw the same poses with MuJoCo: from joint positions to pixels.

    MuJoCo draws an infinite floor as thousands of tiles, which takes most of its time. `floor` is half the length of a
    finite floor of a single tile; 0 keeps the original scene.
    """
    import mujoco

    compiled = mujoco.MjModel.from_binary_path(model)
    if floor:
        # half lengths and the distance of grid lines
        compiled.geom("floor").size[:] = floor
    data, fast = mujoco.MjData(compiled), FastCameras(compiled, cameras, size)
    qpos = np.load(poses)

    def turn() -> None:
        for row in qpos:
            data.qpos[:] = row
            mujoco.mj_kinematics(compiled, data)
            mujoco.mj_camlight(compiled, data)
            fast.draw(data)

    turn()
    data.qpos[:] = qpos[0]
    mujoco.mj_forward(compiled, data)
    # rows come bottom up
    thumbnails = [_thumbnail(image[::-1]) for image in fast.draw(data)]
    return turn, {"frames": len(qpos) * len(cameras), "thumbnails": thumbnails, "gl": fast.driver()}


def metaworld(size: int, hz: float | None) -> tuple[Turn, dict]:
    """A control step of pick-place; `hz` None: the default rate of Meta-World. Resets are excluded."""
    from metaworld import ML1

    benchmark = ML1("pick-place-v3", seed=0)
    env = benchmark.train_classes["pick-place-v3"]()
    env.set_task(benchmark.train_tasks[0])
    env.reset()
    env.max_path_length = sys.maxsize
    if hz is not None:
        env.frame_skip = round(1 / hz / env.model.opt.timestep)
    fast = FastCameras(env.model, ["corner", "gripperPOV"], size)
    act = _random_actions((4,))

    def turn() -> np.ndarray:
        env.step(act())
        return fast.draw(env.data)

    simulated = env.frame_skip * env.model.opt.timestep
    return turn, {"simulated_seconds": simulated, "gl": fast.driver(), "versions": _versions("metaworld", "mujoco")}


def metaworld_bare(task: str, limit: int) -> tuple[Turn, dict]:
    """A control step of one Meta-World env without any wrapper; a reset after each `limit` steps."""
    from sparring.envs.sims.metaworld import make

    env, act, number = make(task)._env, _random_actions((4,)), 0
    env.reset()

    def turn() -> None:
        nonlocal number
        env.step(act())
        number += 1
        if number % limit == 0:
            env.reset()

    return turn, {"env_steps": 1, "versions": _versions("metaworld", "mujoco")}


def metaworld_workers(
    task: str, limit: int, robots: int, workers: int, cameras: list[str], chunk: int
) -> tuple[Turn, dict]:
    """A decision of all robots in worker processes of Sparring; each decision is `chunk` control steps."""
    from sparring.envs.backend import EpisodeSeeds
    from sparring.envs.configs import GymConfig
    from sparring.envs.workers import ProcessBackend

    kwargs = {"cameras": cameras}
    config = GymConfig(name=f"metaworld:{task}", kwargs=kwargs, vectorize="process", workers=workers)
    env = ProcessBackend(config, robots, limit)
    env.reset(EpisodeSeeds(0, total_envs=robots))
    act = _random_actions((robots, chunk, 4))
    return lambda: env.step(act()), {"env_steps": robots * chunk}


def metaworld_async(task: str, limit: int, robots: int, cameras: list[str]) -> tuple[Turn, dict]:
    """A control step of all robots in gymnasium's AsyncVectorEnv: one process per robot, a frame at each step."""
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([partial(_drawn_metaworld, task, limit, cameras)] * robots)
    env.reset(seed=0)
    act = _random_actions((robots, 4))
    return lambda: env.step(act()), {"env_steps": robots, "versions": _versions("gymnasium")}


def _drawn_metaworld(task: str, limit: int, cameras: list[str]):
    """Sparring's adapter as a usual gymnasium env, which draws its cameras at each step."""
    import gymnasium

    from sparring.envs.sims.metaworld import make

    env = gymnasium.wrappers.TimeLimit(make(task, cameras), limit)
    shown = gymnasium.spaces.Dict({key: env.observation_space[key] for key in ("state", *cameras)})
    return gymnasium.wrappers.TransformObservation(
        env, lambda found: {key: found[key]() if callable(found[key]) else found[key] for key in shown}, shown
    )


def robosuite(size: int, hz: float | None) -> tuple[Turn, dict]:
    """A control step of Lift with a Panda; `hz` None: the default rate of robosuite. Resets are excluded."""
    from robosuite import make

    env = make(
        "Lift",
        robots="Panda",
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        ignore_done=True,
        hard_reset=False,
        **({} if hz is None else {"control_freq": hz}),
    )
    env.reset()
    # robosuite's own cameras do not show the collision shapes, either
    fast = FastCameras(env.sim.model._model, ["frontview", "robot0_eye_in_hand"], size)
    fast.option.geomgroup[0] = 0
    act = _random_actions((env.action_dim,))

    def turn() -> np.ndarray:
        env.step(act())
        return fast.draw(env.sim.data._data)

    simulated = env.control_timestep
    return turn, {"simulated_seconds": simulated, "gl": fast.driver(), "versions": _versions("robosuite", "mujoco")}


class FastCameras:
    """MuJoCo's renderer with its fastest settings, through MUJOCO_GL (egl or osmesa)."""

    def __init__(self, model, cameras: list[str], size: int):
        import mujoco

        self._mujoco, self._model = mujoco, model
        quality = model.vis.quality
        quality.offsamples = quality.shadowsize = 0  # no smoothed edges, no shadow map
        quality.numslices, quality.numstacks, quality.numquads = 12, 6, 1
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._gl = importlib.import_module(f"mujoco.{os.environ['MUJOCO_GL']}").GLContext(size, size)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        # no shadow, reflection, sky box, fog or haze
        self._scene.flags[:] = 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_CULL_FACE] = 1
        self.option = mujoco.MjvOption()
        self.option.flags[mujoco.mjtVisFlag.mjVIS_TEXTURE] = 0
        self.option.sitegroup[:] = 0
        self._cameras = [mujoco.MjvCamera() for _ in cameras]
        for camera, name in zip(self._cameras, cameras, strict=True):
            camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(name).id
        self._rectangle = mujoco.MjrRect(0, 0, size, size)
        self._pixels = np.empty((len(cameras), size, size, 3), np.uint8)

    def draw(self, data) -> np.ndarray:
        """`[cameras, H, W, 3]`, bottom row first. The scene is built once for all cameras."""
        mujoco, scene = self._mujoco, self._scene
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, data, self.option, None, self._cameras[0], everything, scene)
        for number, (camera, pixels) in enumerate(zip(self._cameras, self._pixels, strict=True)):
            if number:
                mujoco.mjv_updateCamera(self._model, data, camera, scene)
            mujoco.mjr_render(self._rectangle, scene, self._context)
            mujoco.mjr_readPixels(pixels, None, self._rectangle, self._context)
        return self._pixels

    def driver(self) -> str:
        from OpenGL import GL

        return GL.glGetString(GL.GL_RENDERER).decode()


def _stepper(env) -> Turn:
    """Steps `env` under random actions. Episodes end at different times, as in training."""
    from sparring.envs.backend import EpisodeSeeds

    env.reset(EpisodeSeeds(0, total_envs=env.num_envs))
    state = env.state()
    state["elapsed"] = np.arange(env.num_envs) * env.spec.max_episode_steps // env.num_envs
    env.set_state(state)
    act = _random_actions((env.num_envs, 1, env.spec.action_dim))
    return lambda: env.step(act())


def _suite_world(task: str, robots: int, threads: int) -> tuple:
    """(world with robots at the start of an episode, all rows, their goals `[n, 3]`)."""
    from sparring.envs.tabletop.tasks.registry import find
    from sparring.envs.tabletop.world import World

    kind = find(task)
    world, goal = World([kind.scene] * robots, threads), np.zeros((robots, 3))
    for row in range(robots):
        start = kind.start(np.random.default_rng(row))
        world.place(row, start, clutter=np.empty((0, 7)))
        goal[row] = start.goal
    return world, np.arange(robots), goal


def _random_actions(shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
    """A function that cycles through actions drawn in advance, so that drawing them is not timed."""
    actions = np.random.default_rng(0).uniform(-1, 1, (64, *shape)).astype(np.float32)
    number = -1

    def act() -> np.ndarray:
        nonlocal number
        number = (number + 1) % len(actions)
        return actions[number]

    return act


def _thumbnail(image: np.ndarray) -> list[float]:
    """`[H, W, 3]` -> red minus blue of 16 x 16 blocks, which hardly depends on lights, to compare renderers."""
    n = len(image) // 16
    colour = image[:, :, 0].astype(float) - image[:, :, 2]
    return colour.reshape(16, n, 16, n).mean(axis=(1, 3)).ravel().round(1).tolist()


def _versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _seconds(turn: Turn, turns: int) -> float:
    started = time.perf_counter()
    for _ in range(turns):
        turn()
    return time.perf_counter() - started


_SUITE = (suite_step, suite_physics, suite_frames, mujoco_frames)
_SIMULATORS = (metaworld, metaworld_bare, metaworld_workers, metaworld_async, robosuite)
KINDS = {kind.__name__: kind for kind in (*_SUITE, *_SIMULATORS)}


def main() -> None:
    # stdout is for answers only: output of libraries goes to stderr
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    turn, about = KINDS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        print(_seconds(turn, int(line)), file=answers)


if __name__ == "__main__":
    main()
