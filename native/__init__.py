"""Everything that touches raw memory. `lib` and `ffi` are the C side's functions and types.

The extension module is loaded on first use of either name, not on import: commands that never compute
(`--help`, `cache ls`) must not pay for it, nor fail on a machine whose CPU setting is wrong.
Loading selects the instruction set once, for the whole process; `COREMILL_ISA` and `COREMILL_CPU_MASK`
are read then.
"""

from coremill.config.errors import ConfigError

__all__ = ["ffi", "lib", "select_isa"]


def select_isa(name: str | None = None) -> str:
    """Choose the kernels by name, or as the environment says; return the name of those chosen."""
    from coremill.native._native import ffi, lib

    err = ffi.new("char[]", 512)
    chosen = lib.cm_isa_select(ffi.NULL if name is None else name.encode(), err, len(err))
    if chosen < 0:
        raise ConfigError(ffi.string(err).decode(errors="replace"))
    return ffi.string(lib.cm_isa_name(chosen)).decode()


def __getattr__(name: str):
    if name not in ("ffi", "lib"):
        raise AttributeError(f"module 'coremill.native' has no attribute {name!r}")
    from coremill.native import _native

    # An explicit select_isa() that came first stands.
    if _native.lib.cm_isa_active() == _native.ffi.NULL:
        select_isa()
    # Both become plain attributes only after a valid selection, so a bad setting fails every time.
    globals().update(ffi=_native.ffi, lib=_native.lib)
    return globals()[name]
