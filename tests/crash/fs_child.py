"""A process that forks children which use an fs tier until they are killed, one after the other.

Reads lines of `KIND ROOT NUMBER` from standard input and answers each with the child's process id,
and then, when it has ended, with how. `KIND` is `loop` (store and evict without end), `step` (store
two chunks into a full root, and die before system call NUMBER that changes something, or in the
middle of it) or `batch` (the same in a root so large that the chunks appear together).
"""

import fcntl
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import cast

from kvstrata.core.keys import JobId
from kvstrata.core.results import StoreJob
from tests.fs_world import World, cap

CAP_CHUNKS = 6
BATCH_CAP_CHUNKS = 64


def die() -> None:
    """End as if by a power switch."""
    os.kill(os.getpid(), signal.SIGKILL)


def loop(root: Path, number: int) -> None:
    """Store and evict without end."""
    world = World(root)
    world.open(max_bytes=cap(CAP_CHUNKS))
    rng = random.Random(number)
    while True:
        numbers = rng.sample(range(32), 4)
        for i in numbers:
            job = StoreJob(JobId(world.job_id()), [world.keys[i]], [i])
            world.tier.submit_store(job)
        world.tier.drain_jobs(60.0)


def step(root: Path, number: int, cap_chunks: int = CAP_CHUNKS) -> None:
    """Store two chunks and die at change `number`; odd numbers: halfway in it."""
    world = World(root)
    world.open(max_bytes=cap(cap_chunks), num_threads=1)
    numbers = count(0, 2)
    for module, name in [
        *((os, name) for name in ("link", "rename", "unlink", "mkdir", "utime", "fchmod", "close")),
        *((os, name) for name in ("open", "pwrite", "pwritev")),
        (fcntl, "fcntl"),
    ]:
        setattr(module, name, deadly(getattr(module, name), numbers, number))
    world.store(20, 21)
    world.tier.shutdown()


def batch(root: Path, number: int) -> None:
    """Do `step` where two chunks appear together."""
    step(root, number, BATCH_CAP_CHUNKS)


def deadly(real: Callable[..., object], numbers: "count[int]", at: int) -> Callable[..., object]:
    """Return the function, which kills the process when its turn comes."""

    def call(*args: object, **kwargs: object) -> object:
        number = next(numbers)
        if number == at:
            die()
        elif number + 1 == at:
            if real.__name__ == "pwritev":
                fd, (_, row), _ = cast("tuple[int, tuple[bytes, memoryview], int]", args)
                os.pwrite(fd, bytes(row[:4096]), 4096)
            else:
                with suppress(OSError):  # a directory may be missing, and is made then
                    real(*args, **kwargs)
            die()
        return real(*args, **kwargs)

    return call


def main() -> None:
    """Fork a child for each line."""
    for line in sys.stdin:
        kind, root, number = line.split()
        pid = os.fork()
        if pid == 0:
            {"loop": loop, "step": step, "batch": batch}[kind](Path(root), int(number))
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
