"""Shared memory at fixed places: what a descriptor holds, mapped where huge pages can back it."""

from __future__ import annotations

import os

from coremill.config.errors import CoremillError, EngineError


class SharedMap:
    """`length` bytes of a descriptor from `offset`, mapped shared at a multiple of 2 MiB.

    The descriptor is not kept: it may be closed afterwards.

    Args:
        error: class of the exception when the mapping fails or the file is too short.
        what: what is mapped, for its message.

    Attributes:
        address: where; 0 once closed.
        length: bytes.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        length: int,
        *,
        writable: bool,
        what: str,
        error: type[CoremillError] = EngineError,
    ) -> None:
        from coremill.native import ffi, lib

        self._lib, self._ffi = lib, ffi
        self.address, self.length = 0, length
        size = os.fstat(fd).st_size
        if offset + length > size:
            raise error(f"{what}: {length} bytes at {offset} are not inside a file of {size}")
        err = ffi.new("char[]", 256)
        pointer = lib.cm_map(fd, offset, length, writable, err, len(err))
        if pointer == ffi.NULL:
            raise error(f"{what}: {ffi.string(err).decode(errors='replace')}")
        self.address = int(ffi.cast("uintptr_t", pointer))

    def pointer(self) -> object:
        """As a cffi `uint8_t *`, valid until `close`."""
        if not self.address:
            raise ValueError("the mapping is closed")
        return self._ffi.cast("uint8_t *", self.address)

    def close(self) -> None:
        """Unmap; nobody may use the address any more."""
        if self.address:
            self._lib.cm_unmap(self._ffi.cast("void *", self.address), self.length)
            self.address = 0

    def __enter__(self) -> SharedMap:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def map_weights(pack) -> SharedMap:
    """The data of an open `PackFile`: read-only, its pages shared with every process that maps the same file.

    Raises:
        PackError: the file cannot be mapped, or is shorter than it says.
    """
    from coremill.config.errors import PackError

    return SharedMap(pack.fd, pack.data_offset, pack.data_length, writable=False, what=str(pack.path), error=PackError)
