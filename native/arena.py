"""The KV arena: one memfd, made by the coordinator, inherited by descriptor, mapped by all.

Memory is committed as blocks are first written, in huge pages where the kernel allows it: the engine asks for
them region by region (native/src/engine.c), as a memfd gets none by itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource

from coremill.config.arena import ArenaGeometry
from coremill.config.errors import EngineError, UnsupportedHostError
from coremill.native.mapping import SharedMap

# What the arena is called in /proc/PID/smaps.
ARENA_NAME = "coremill-arena"


def create_arena(geometry: ArenaGeometry, name: str = ARENA_NAME) -> int:
    """A descriptor of zeroed shared memory of `geometry.total_bytes`, close-on-exec, whose size is sealed.

    Raises:
        EngineError: the kernel refuses a file of that size.
        UnsupportedHostError: it refuses shared memory altogether.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise UnsupportedHostError(f"memfd_create: {error.strerror}; shared memory is needed") from error
    try:
        os.ftruncate(fd, geometry.total_bytes)
        # Nobody who holds the descriptor can cut the memory off under the others.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.EFBIG, errno.ENOMEM, errno.ENOSPC, errno.EINVAL):
            raise
        raise EngineError(f"arena of {geometry.total_bytes} bytes: {error.strerror}{_remedy(error)}") from error
    return fd


def _remedy(error: OSError) -> str:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno != errno.EFBIG or limit == resource.RLIM_INFINITY:
        return ""
    # Shared memory is a file without a name.
    return (
        f"; the limit on file sizes (ulimit -f) is {limit} bytes, and counts for shared memory too: raise it, "
        "or make the arena smaller (--arena)"
    )


class ArenaMap(SharedMap):
    """The arena in this process, for reading and writing."""

    def __init__(self, fd: int, geometry: ArenaGeometry) -> None:
        super().__init__(fd, 0, geometry.total_bytes, writable=True, what="arena")
        self.geometry = geometry


def map_arena(fd: int, geometry: ArenaGeometry) -> ArenaMap:
    """Map an arena made by `create_arena` with the same geometry.

    Raises:
        EngineError: the memory is smaller than the geometry says, or cannot be mapped.
    """
    return ArenaMap(fd, geometry)
