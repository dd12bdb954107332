"""What all tests share: the repository's root and the models that tests run on, fetched once and kept."""

import os
import signal
from pathlib import Path

import pytest

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
    """Gemma 3 270M Q4_K_M, a base model."""
    from coremill.native.fetch import fetch_model

    return fetch_model("gemma3-270m", model_folder)


@pytest.fixture(scope="session")
def smollm2_pack(smollm2_gguf: Path, model_folder: Path) -> Path:
    """The default model, packed in a cache of the tests' own."""
    from coremill.native.cache import ensure_pack

    return ensure_pack(smollm2_gguf, cache_dir=model_folder / "packs")
