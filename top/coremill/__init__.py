"""coremill runs language models over files of prompts on every core of a CPU machine.

Names are resolved on first use, so that a worker, which imports this
package on its way to `coremill.worker`, does not load the coordinator and everything it needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coremill.coordinator import Coordinator

    __version__: str

__all__ = ["Coordinator", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Coordinator":
        from coremill.coordinator import Coordinator

        return Coordinator
    if name == "__version__":
        from importlib.metadata import version

        return version("coremill")
    raise AttributeError(f"module 'coremill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
