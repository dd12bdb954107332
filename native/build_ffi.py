"""Write the C source of the extension module: `build_ffi.py ABI.INC OUT.c`, run by CMake."""

import sys
from pathlib import Path

from cffi import FFI


def main(abi_path: str, out_path: str) -> None:
    ffi = FFI()
    ffi.cdef(Path(abi_path).read_text(encoding="utf-8"))
    ffi.set_source("coremill.native._native", '#include "coremill.h"')
    ffi.emit_c_code(out_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
