"""Descriptions of architectures: one module each, one function that turns a pack into a plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from coremill.config.errors import UnsupportedModelError
from coremill.worker.plan import Plan

if TYPE_CHECKING:
    from coremill.native.packfile import PackFile

# Modules here by the name GGUF files give the architecture.
_MODULES = dict.fromkeys(("llama", "qwen2", "qwen3", "gemma", "gemma3"), "llama")


def describe(pack: PackFile) -> Plan:
    """The plan of a packed model.

    Raises:
        UnsupportedModelError: no description of its architecture exists.
    """
    module = _MODULES.get(pack.spec.architecture)
    if module is None:
        raise UnsupportedModelError(f"architecture '{pack.spec.architecture}' has no plan")
    return import_module(f"coremill.worker.architectures.{module}").describe(pack)
