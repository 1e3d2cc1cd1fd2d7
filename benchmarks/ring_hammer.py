"""A writer and a reader process at one ring, as fast as they can, with a checksum in everything that is written.

The ring is so small that the writer overtakes the reader all the time. Every observation of robot n at time t is a
picture with its CRC and (t, n); whatever is read must be whole, in order, and followed by its true next observation.
"""

import time
import zlib
from collections import Counter
from multiprocessing import get_context

import torch
from tensordict import TensorDict

from sparring.data.ring import VLABuffer

CAPACITY, ENVS, SIZE = 24, 4, 32
_generator = torch.Generator().manual_seed(0)
PICTURES = torch.randint(0, 256, (97, 3, SIZE, SIZE), dtype=torch.uint8, generator=_generator)


def hammer(seconds: float) -> dict[str, int]:
    """Counts of what was written, read and found wrong; the writer is this process, the reader another."""
    torch.set_num_threads(1)
    writer = Writer()
    ring = VLABuffer(CAPACITY, final_slots=3 * ENVS, shared=True)
    ring.allocate(writer.transition())
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read, args=(ring.handle(), theirs, seconds))
    reader.start()
    theirs.close()
    while not ours.poll():
        writer.write(ring)
    counts = ours.recv()
    reader.join()
    return {"written": writer.clock} | counts


class Writer:
    """Transitions without end; some end episodes, and now and then the ring is closed, cleared, or given a rollout."""

    def __init__(self):
        self.clock = 0
        self.random = torch.Generator().manual_seed(1)
        self.checksums = torch.tensor([zlib.crc32(picture.numpy().tobytes()) for picture in PICTURES])

    def write(self, ring: VLABuffer) -> None:
        kind = int(torch.randint(100, (), generator=self.random))
        if kind == 0:
            ring.clear()
            self.clock += 10
        elif kind == 1:
            ring.add(torch.stack([self.transition() for _ in range(5)]))
        else:
            ring.add(self.transition())
        if kind == 2:
            ring.close(TensorDict({"observation": self.observation(self.clock, 0)}, [ENVS]))

    def transition(self) -> TensorDict:
        before = self.observation(self.clock, 0)
        done = torch.rand(ENVS, generator=self.random) < 0.1
        after = self.observation(self.clock + 1, 0)
        after[done] = self.observation(self.clock + 1, 1)[done]
        following = {"observation": after, "terminated": done, "truncated": torch.zeros_like(done)}
        following["reward"] = torch.full((ENVS, 1), self.clock + 1)
        action = torch.full((ENVS, 1, 2), self.clock)
        self.clock += 1
        return TensorDict({"observation": before, "action": action, "next": TensorDict(following, [ENVS])}, [ENVS])

    def observation(self, clock: int, final: int) -> TensorDict:
        env = torch.arange(ENVS)
        picture = (clock * 7 + env * 13 + final * 31) % len(PICTURES)
        stamp = torch.stack([torch.full((ENVS,), clock), env, torch.full((ENVS,), final)], 1)
        values = {"image": PICTURES[picture], "stamp": stamp, "checksum": self.checksums[picture]}
        return TensorDict(values, [ENVS])


def read(handle, results, seconds: float) -> None:
    """In the other process: read in every way there is until the time is over, and send what was found."""
    torch.set_num_threads(1)
    ring, counts, generator = VLABuffer.attach(handle), Counter(), torch.Generator().manual_seed(2)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            batch = ring.sample(16, generator)
            window = ring.get(flatten=False, following=True)
        except RuntimeError:
            # the writer has just cleared it
            counts["empty"] += 1
            continue
        counts["sampled"] += len(batch)
        counts["got"] += window.numel()
        counts["wrong"] += wrong_transitions(batch) + wrong_transitions(window.flatten(0, 1))
        # of each robot, one after the other
        clocks = window["observation", "stamp"][..., 0]
        counts["disorder"] += int((clocks.diff(dim=0) != 1).sum())
    results.send(dict(counts))


def wrong_transitions(flat: TensorDict) -> int:
    """How many of [B] are not what was written."""
    here, there = flat["observation"], flat["next", "observation"]
    clock, done = here["stamp"][:, 0], flat["next", "terminated"].long()
    # as it should be: [B, 3]
    expected = torch.stack([clock + 1, here["stamp"][:, 1], done], 1)
    right = (there["stamp"] == expected).all(1) & (flat["action"] == clock[:, None, None]).all(2)[:, 0]
    right &= flat["next", "reward"][:, 0] == clock + 1
    for observation in (here, there):
        sums = [zlib.crc32(image.numpy().tobytes()) for image in observation["image"]]
        right &= observation["checksum"] == torch.tensor(sums)
    return int((~right).sum())
