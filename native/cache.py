"""The cache of packed models: finding, making, listing and removing packs.

    <cache>/packs/<key>.pack      key = hash of the source's content and the pack version
    <cache>/sources/<marks>.json  what a source's content was found to be, by what the file system says of it
                                  (device, inode, size, times): nothing is hashed twice
    <cache>/models/               fetched model files
    <cache>/locks/<key>.lock      held while a model is packed, so that a second run waits instead of packing too

The rename that publishes a pack makes any race right; the lock only saves work, and is done without where a
file system has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from coremill.config.errors import ModelError, PackError, UnsupportedModelError
from coremill.native.packfile import PACK_VERSION, FileIdentity, is_pack, pack_is_usable

# As in packer, which a warm start does not import.
Progress = Callable[[str, int, int], None]

# A write within one tick of the file system's clock leaves the times as they were; older files are safe.
_CLOCK_TICK_NS = 100_000_000
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model ready to be opened: its pack, and the files it was named by."""

    pack: Path
    sources: tuple[FileIdentity, ...]

    def changes(self) -> list[str]:
        """What happened to the source files since, for the end of a run. Empty when nothing did."""
        return [change for source in self.sources if (change := source.change())]


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the cache is: `cache_dir`, else COREMILL_CACHE, else XDG_CACHE_HOME/coremill, else ~/.cache/coremill."""
    if cache_dir is not None:
        return Path(cache_dir)
    given = os.environ.get("COREMILL_CACHE")
    if given:
        try:
            return Path(given).expanduser()
        except RuntimeError as error:
            raise PackError(f"COREMILL_CACHE is {given}: there is no such home folder") from error
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg, "coremill")
    try:
        return Path.home() / ".cache" / "coremill"
    except RuntimeError as error:
        raise PackError("there is no home folder for the cache; set COREMILL_CACHE to a folder") from error


def ensure_pack(
    model: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The pack of a model, packed first if need be. See `resolve_model`."""
    return resolve_model(model, cache_dir=cache_dir, progress=progress).pack


def resolve_model(
    model: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ResolvedModel:
    """Find or make the pack of a GGUF file (any file of a split model), a pack file, or a known short name.

    `progress(stage, bytes_done, bytes_in_all)` is called while something takes time.

    Raises:
        GGUFError, UnsupportedModelError: the model cannot be used; names what and why.
        PackError: the pack could not be written; names the remedy.
        ModelError: there is no such model, or it could not be fetched.
    """
    root = cache_folder(cache_dir)
    path = find_model(model, root, progress)
    if is_pack(path):
        return ResolvedModel(path, (FileIdentity.of(path),))
    sources = tuple(FileIdentity.of(part) for part in _source_files(path))
    digests = _remembered(root, sources)
    if digests is None:
        digests = _hash_sources(sources, progress)
        sources = _remember(root, sources, digests)
    key = content_key(digests)
    pack = root / "packs" / f"{key}.pack"
    if not pack_is_usable(pack, key):
        _make_pack(root, path, pack, key, sources, digests, progress)
    return ResolvedModel(pack, sources)


def find_model(model: str | os.PathLike[str], root: Path, progress: Progress | None = None) -> Path:
    """The file a model name stands for, fetched first if it is a short name."""
    name, path = os.fspath(model), Path(model)
    if not name:
        raise ModelError("the model's name is empty: give a GGUF file or a short name")
    try:
        mode = os.stat(name).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, ValueError) as error:  # ValueError: it has a null byte
        brief = repr(name) if len(name) <= 80 else repr(name[:80]) + "..."
        raise ModelError(f"model {brief}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_ISDIR(mode):
        raise UnsupportedModelError(f"{path}: is a folder; Hugging Face folders are not yet supported, only GGUF files")
    if stat.S_ISREG(mode):
        return path
    if mode:
        raise ModelError(f"{path}: is not a regular file")
    from coremill.native.fetch import KNOWN_MODELS, fetch_model

    if name in KNOWN_MODELS:
        return fetch_model(name, ensure_folder(root / "models"), progress)
    known = ", ".join(sorted(KNOWN_MODELS))
    problem = f"{name}: there is no such file, and it is not a known short name ({known})"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        problem += "; a model of a hub is not fetched: download one of its GGUF files and give the file's path"
    raise ModelError(problem)


def content_key(digests: Sequence[str]) -> str:
    """Name of a pack: 32 hex digits over the content of the source files and the pack version."""
    text = f"coremill pack {PACK_VERSION}\n" + "\n".join(digests)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def source_description(path: Path, sources: Sequence[FileIdentity], digests: Sequence[str]) -> dict:
    """What a pack says of where it came from: names and content, no folders of this machine."""
    files = [
        {"name": os.path.basename(s.path), "bytes": s.size, "sha256": d} for s, d in zip(sources, digests, strict=True)
    ]
    return {"name": path.name, "files": files}


def pack_file(path: Path, out: Path, progress: Progress | None = None) -> str:
    """Pack a GGUF file into `out`, outside the cache. Returns the key."""
    # Before the model is read, which may take minutes.
    if not out.parent.is_dir():
        raise PackError(f"{out}: there is no folder {out.parent}")
    if out.is_dir():
        raise PackError(f"{out}: is a folder; name a file in it")
    sources = tuple(FileIdentity.of(part) for part in _source_files(path))
    if any(out.exists() and os.path.samefile(out, s.path) for s in sources):
        raise PackError(f"{out}: the output is the model file itself")
    digests = _hash_sources(sources, progress)
    key = content_key(digests)
    _write_checked(path, out, key, sources, digests, progress, in_cache=False)
    return key


def _source_files(path: Path) -> list[Path]:
    """The files of a model, by name alone: a warm start must not parse them."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or not 2 <= int(match["count"]) <= 1000:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    # A missing part is the reader's to report; a file that only looks like a part is a model of its own.
    return parts if all(part.exists() for part in parts) else [path]


# ---- what is known of sources ----


def _memo_path(root: Path, sources: Sequence[FileIdentity]) -> Path:
    marks = repr([s.marks for s in sources])
    return root / "sources" / f"{hashlib.sha256(marks.encode()).hexdigest()[:32]}.json"


def _remembered(root: Path, sources: Sequence[FileIdentity]) -> list[str] | None:
    """Hashes of the sources if they are known. A memo that cannot be read is as good as none."""
    memo = _read_memo(_memo_path(root, sources))
    if memo is None or [s.marks for s in memo[0]] != [s.marks for s in sources]:
        return None
    return memo[1]


def _read_memo(path: Path) -> tuple[list[FileIdentity], list[str]] | None:
    try:
        content = json.loads(path.read_bytes())
        sources = [FileIdentity(**entry) for entry in content["sources"]]
        digests = [str(digest) for digest in content["sha256"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (sources, digests) if len(sources) == len(digests) else None


def _remember(root: Path, sources: tuple[FileIdentity, ...], digests: list[str]) -> tuple[FileIdentity, ...]:
    """Write down what the sources were found to be; without a writable cache they are hashed again next time."""
    content = {"sources": [asdict(s) | {"path": os.path.abspath(s.path)} for s in sources], "sha256": digests}
    try:
        folder = ensure_folder(root / "sources")
        temporary = folder / f".memo-{secrets.token_hex(8)}"
        temporary.write_text(json.dumps(content))
        os.rename(temporary, _memo_path(root, sources))
    except (OSError, PackError):
        # Packing will say what is wrong with the cache, if it comes to that.
        return sources
    return sources


def _hash_sources(sources: Sequence[FileIdentity], progress: Progress | None) -> list[str]:
    """sha256 of each file. Waits out the clock tick of a file written just now, so that its times can be trusted.

    Raises:
        GGUFError: a file is none of its format.
        PackError: a file changed while it was read.
    """
    from coremill.native.gguf import check_magic

    newest = max(max(s.mtime_ns, s.ctime_ns) for s in sources)
    age = time.time_ns() - newest
    if 0 <= age < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age) / 1e9)
    total, done, digests = sum(s.size for s in sources), 0, []
    buffer = memoryview(bytearray(4 << 20))
    for source in sources:
        digest = hashlib.sha256()
        with _opened(source) as file:
            check_magic(source.path, file.read(4))  # a wrong name must not cost the time to read gigabytes
            file.seek(0)
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                if progress:
                    progress("hashing", min(done, total), total)
        digests.append(digest.hexdigest())
    _require_unchanged(sources)
    return digests


@contextmanager
def _opened(source: FileIdentity) -> Iterator:
    try:
        with open(source.path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise ModelError(f"{source.path}: cannot be read: {error.strerror}") from error


def _require_unchanged(sources: Sequence[FileIdentity]) -> None:
    for source in sources:
        if change := source.change():
            raise PackError(f"{change} while it was being packed; run again when it is complete")


# ---- making packs ----


def ensure_folder(folder: Path) -> Path:
    """A folder of the cache, 0700 when made here. Raises PackError when that is impossible."""
    from coremill.native.output import write_error

    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise write_error(error, folder) from error
    return folder


def _make_pack(
    root: Path,
    path: Path,
    pack: Path,
    key: str,
    sources: tuple[FileIdentity, ...],
    digests: list[str],
    progress: Progress | None,
) -> None:
    from coremill.native.output import sweep_temporaries

    ensure_folder(pack.parent)
    with _packing_lock(root, key, progress):
        if pack_is_usable(pack, key):  # the other run has made it
            return
        sweep_temporaries(pack.parent)
        _write_checked(path, pack, key, sources, digests, progress)


def _write_checked(
    path: Path,
    out: Path,
    key: str,
    sources: Sequence[FileIdentity],
    digests: Sequence[str],
    progress: Progress | None,
    *,
    in_cache: bool = True,
) -> None:
    from coremill.native.gguf import open_gguf
    from coremill.native.packer import write_pack

    with open_gguf(path) as gguf:
        opened = [FileIdentity.of(p, info).marks for p, info in zip(gguf.paths, gguf.stats(), strict=True)]
        if opened != [s.marks for s in sources]:
            raise PackError(f"{path}: the file was changed while it was being packed; run again when it is complete")
        write_pack(
            gguf,
            out,
            key,
            source_description(path, sources, digests),
            progress,
            before_publishing=lambda: _require_unchanged(sources),
            in_cache=in_cache,
        )


@contextmanager
def _packing_lock(root: Path, key: str, progress: Progress | None) -> Iterator[None]:
    import fcntl

    from coremill.native.output import lock_if_possible, write_error

    path = ensure_folder(root / "locks") / f"{key}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise write_error(error, path) from error
    try:
        if not lock_if_possible(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
            if progress:
                progress("waiting for another run that packs this model", 0, 0)
            lock_if_possible(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# ---- listing and removing ----


@dataclass(frozen=True, slots=True)
class CachedPack:
    """A pack in the cache. `sources`: files it is known to come from that are still as they were."""

    path: Path
    key: str
    nbytes: int
    last_used: float
    sources: tuple[str, ...]


def list_packs(root: Path) -> list[CachedPack]:
    """Packs of the cache, least recently used first (as far as the file system records access)."""
    by_key: dict[str, list[str]] = {}
    for memo in _files(root / "sources", ".json"):
        known = _read_memo(memo)
        if known and not any(source.change() for source in known[0]):
            by_key.setdefault(content_key(known[1]), []).append(known[0][0].path)
    packs = []
    for path in _files(root / "packs", ".pack"):
        info = path.stat()
        used = max(info.st_atime, info.st_mtime)
        packs.append(CachedPack(path, path.stem, info.st_size, used, tuple(sorted(by_key.get(path.stem, ())))))
    return sorted(packs, key=lambda pack: pack.last_used)


def fetched_models(root: Path) -> list[Path]:
    """Model files that were fetched by a short name."""
    return _files(root / "models", ".gguf")


def prune_cache(root: Path, remove: Sequence[Path]) -> int:
    """Remove these files, what killed runs left behind, and notes on sources that are gone. Returns bytes freed.

    Running workers keep the packs they have mapped until they end.

    Raises:
        PackError: the cache cannot be written.
    """
    from coremill.native.output import sweep_temporaries, write_error

    freed = 0
    try:
        if (root / "packs").is_dir():
            freed += sweep_temporaries(root / "packs")
        for path in remove:
            freed += path.stat().st_size
            path.unlink()
        for memo in _files(root / "sources", ".json"):
            known = _read_memo(memo)
            if known is None or any(source.change() for source in known[0]):
                memo.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, root) from error
    return freed


def _files(folder: Path, suffix: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix == suffix and not p.name.startswith("."))
