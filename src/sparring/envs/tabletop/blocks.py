"""Free bodies as MJCF text: solids to be pushed, grasped or put upon. Held by friction alone."""

from dataclasses import dataclass

from sparring.envs.tabletop.scene import SLIDES, Part, Thing

CUBE_HALF = 0.022
OBJECT = 'contype="3" conaffinity="3"'
_HANDLE = "0.20 0.22 0.27 1"


@dataclass(frozen=True)
class Block:
    """One solid; a cube unless it says otherwise."""

    name: str
    rgb: tuple[float, float, float]
    # half lengths, metres
    half: tuple[float, float, float] = (CUBE_HALF, CUBE_HALF, CUBE_HALF)
    mass: float = 0.06
    # box, ball, cylinder (upright), capsule (along x) or ellipsoid, as large as fits into `half`
    shape: str = "box"
    mechanisms: tuple[str, ...] = ()
    # boxes that are part of it: (centre, half lengths), from its own centre
    handles: tuple[tuple[tuple[float, float, float], tuple[float, float, float]], ...] = ()

    def part(self) -> Part:
        # what is round would roll for ever without friction against rolling
        surface = f'friction="{SLIDES} 0.02 0.001" condim="{4 if self.shape == "box" else 6}" {OBJECT}'
        solid = f'<geom name="{self.name}" {_shape(self)} mass="{self.mass}" rgba="{spaced(self.rgb)} 1" {surface}/>'
        handles = "".join(
            f'<geom type="box" pos="{spaced(pos)}" size="{spaced(half)}" mass="0.02" rgba="{_HANDLE}" {surface}/>'
            for pos, half in self.handles
        )
        return free_body(self, solid + handles)


def free_body(thing: Thing, inside: str) -> Part:
    """A body that moves freely, standing on the table at first; `inside` are its shapes and the bodies it carries.

    Elliptic cones and a stiff friction direction keep it from creeping out of the fingers. Its joint comes after the
    arm's, so that the arm's positions are the first ones whatever stands on the table.
    """
    return Part(
        f"""
    <body name="{thing.name}" pos="0 0 {thing.half[2]}">
      <freejoint name="{thing.name}"/>{inside}
    </body>""",
        options='cone="elliptic" impratio="5"',
    )


def spaced(values: tuple[float, ...]) -> str:
    return " ".join(str(value) for value in values)


def _shape(thing: Block) -> str:
    """Type and size as MuJoCo wants them: a capsule's half length leaves out its round ends."""
    x, _, z = thing.half
    return {
        "box": f'type="box" size="{spaced(thing.half)}"',
        "ball": f'type="sphere" size="{x}"',
        "cylinder": f'type="cylinder" size="{x} {z}"',
        "capsule": f'type="capsule" size="{z}" fromto="{z - x} 0 0 {x - z} 0 0"',
        "ellipsoid": f'type="ellipsoid" size="{spaced(thing.half)}"',
    }[thing.shape]
