"""Mapped memory, the arena, and workers that do not outlive their parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from coremill.config.arena import HUGE_PAGE, ArenaGeometry, blocks_for
from coremill.config.errors import ConfigError, EngineError, PackError
from coremill.native import ffi
from coremill.native.arena import create_arena, map_arena
from coremill.native.mapping import SharedMap

GEOMETRY = ArenaGeometry(num_layers=2, num_kv_heads=3, head_dim=64, num_blocks=100)


def test_geometry():
    assert GEOMETRY.head_bytes == 8192
    assert GEOMETRY.block_bytes == 2 * 3 * 8192
    assert GEOMETRY.token_bytes == GEOMETRY.block_bytes // 32 == 2 * 3 * 64 * 2 * 2
    assert GEOMETRY.total_bytes == 3 * HUGE_PAGE
    assert [blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


@pytest.mark.parametrize("change", [{"num_blocks": 0}, {"head_dim": -1}, {"kv_type": "q3"}, {"block_tokens": 16}])
def test_bad_geometries(change):
    fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "num_blocks": 1}
    with pytest.raises(ConfigError, match=next(iter(change))):
        ArenaGeometry(**{**fields, **change})


def test_arena_is_shared_zeroed_and_of_fixed_size():
    fd = create_arena(GEOMETRY, "coremill-test")
    assert not os.get_inheritable(fd)
    with map_arena(fd, GEOMETRY) as one, map_arena(fd, GEOMETRY) as two:
        assert one.address % HUGE_PAGE == two.address % HUGE_PAGE == 0
        ours, theirs = (ffi.buffer(m.pointer(), m.length) for m in (one, two))
        assert ours[: 1 << 20] == bytes(1 << 20)
        ours[-5:] = b"hello"
        assert theirs[-5:] == b"hello"
        for size in (0, 2 * GEOMETRY.total_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    with pytest.raises(ValueError, match="closed"):
        one.pointer()
    larger = ArenaGeometry(num_layers=2, num_kv_heads=3, head_dim=64, num_blocks=200)
    with pytest.raises(EngineError, match="not inside a file of"):
        map_arena(fd, larger)
    os.close(fd)


def test_an_arena_beyond_all_memory_is_one_error():
    with pytest.raises(ConfigError, match=r"arena: \d+ bytes"):
        ArenaGeometry(num_layers=4096, num_kv_heads=4096, head_dim=4096, num_blocks=2**31 - 1)


def test_a_limit_on_file_sizes_is_named_with_its_remedies():
    code = (
        "import resource; from coremill.config.errors import EngineError\n"
        "from coremill.config.arena import ArenaGeometry\n"
        "from coremill.native.arena import create_arena\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: create_arena(ArenaGeometry(num_layers=2, num_kv_heads=3, head_dim=64, num_blocks=100))\n"
        "except EngineError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith(f"arena of {GEOMETRY.total_bytes} bytes: File too large; ")
    assert "(ulimit -f) is 1048576 bytes" in result.stdout and "(--arena)" in result.stdout


def test_mapping_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096) + b"data" * 3000)
    with open(path, "rb") as file:
        mapped = SharedMap(file.fileno(), 4096, 12000, writable=False, what="f", error=PackError)
        assert mapped.address % HUGE_PAGE == 0
        assert ffi.buffer(mapped.pointer(), 12000)[:] == b"data" * 3000
        with pytest.raises(PackError, match="f: 12001 bytes at 4096 are not inside"):
            SharedMap(file.fileno(), 4096, 12001, writable=False, what="f", error=PackError)
        with pytest.raises(PackError, match="f: cannot map 10 bytes at 100"):
            SharedMap(file.fileno(), 100, 10, writable=False, what="f", error=PackError)
        with pytest.raises(EngineError, match="Permission denied"):
            SharedMap(file.fileno(), 0, 4096, writable=True, what="f")
    mapped.close()
    mapped.close()


CHILD = """
import os, sys, time
from coremill.native import ffi, lib
err = ffi.new("char[]", 100)
assert lib.cm_watch_parent(int(sys.argv[1]), err, len(err)) == 0
print("ready", flush=True)
while True:  # a busy interpreter does not hold the watcher up
    pass
"""


def test_a_watched_process_ends_with_its_parents_pipe():
    read, write = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(read)], pass_fds=[read], stdout=subprocess.PIPE)
    os.close(read)
    assert child.stdout.readline() == b"ready\n"
    os.write(write, b"what is written does not matter")
    time.sleep(0.05)
    assert child.poll() is None
    os.close(write)
    assert child.wait(timeout=5) == 3
    child.stdout.close()


def test_a_watched_process_ends_when_its_parent_is_killed():
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            "read, write = os.pipe()\n"
            f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(read)], pass_fds=[read])\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(60)\n",
        ],
        stdout=subprocess.PIPE,
    )
    lines = [parent.stdout.readline(), parent.stdout.readline()]
    pid = next(int(line) for line in lines if line != b"ready\n")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    # The pipe of stdout is the orphan's too: it ends when the last of them is gone.
    assert parent.stdout.read() == b""
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    state = open(f"/proc/{pid}/stat").read().split()[2] if os.path.exists(f"/proc/{pid}") else "gone"
    assert state in ("gone", "Z")
    parent.stdout.close()
