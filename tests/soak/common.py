"""What the long runs share: the system tests' way to start the command and look at what it leaves."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent


def load(name: str, path: Path) -> Any:
    """A module of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="smollm2", help="as for coremill run (default: smollm2)")
    made.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    return made


def runs_maker(model: str, folder: str) -> Any:
    """make_runs() of tests/system/conftest.py for this model, packed in the user's own cache."""
    from coremill.native.cache import cache_folder, ensure_pack

    system = load("system_conftest", TESTS / "system/conftest.py")
    pack = ensure_pack(model)
    # Checking the books after each event takes time that grows with the run; here it is done when idle.
    return _Plain(system.RunsMaker(Path(folder), pack, cache_folder()))


class _Plain:
    def __init__(self, maker: Any) -> None:
        self._maker = maker
        self.close = maker.close

    def __call__(self) -> Any:
        runs = self._maker()
        runs.environ.pop("COREMILL_DEBUG_BOOKS", None)
        return runs


def work_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="coremill-soak-")


def own_python(folder: Path) -> Path:
    """The interpreter of a copy of this environment, which nobody else maps: memory of files is shared out among all
    processes that map them, and strangers come and go."""
    venv.EnvBuilder(symlinks=False, with_pip=False).create(folder)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / name / "site-packages"
    without = shutil.ignore_patterns("cmake", "pip", "__pycache__")
    shutil.copytree(sysconfig.get_path("platlib"), target, dirs_exist_ok=True, ignore=without)
    return folder / "bin/python"
