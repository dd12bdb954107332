"""Memory limits of machines described as folders, and the arena planned from them."""

import pytest

from coremill.config.errors import ConfigError
from coremill.config.memory import MemoryBudget, default_arena_bytes, format_size, memory_budget, parse_size

GIB = 1 << 30
V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"


@pytest.fixture
def host(host):
    host.write("/proc/meminfo", "MemTotal:       33554432 kB\nMemFree:  1048576 kB\nMemAvailable:   16777216 kB")
    return host


def test_without_a_cgroup_limit(host):
    assert memory_budget(host.root) == MemoryBudget(32 * GIB, 16 * GIB, "memory of the machine")


def test_version_2_limit_on_a_parent(host):
    host.cgroup2("/a/b")
    host.write(f"{V2}/a/b/memory.max", "max")
    host.write(f"{V2}/a/memory.max", 8 * GIB)
    host.write(f"{V2}/a/memory.current", 3 * GIB)
    host.write(f"{V2}/a/memory.stat", f"anon {GIB}\nactive_file {GIB}\ninactive_file {GIB}\nshmem 0")
    assert memory_budget(host.root) == MemoryBudget(8 * GIB, 7 * GIB, f"cgroup limit ({V2}/a/memory.max)")


def test_limit_and_headroom_may_come_from_different_groups(host):
    host.cgroup2("/a/b")
    host.write(f"{V2}/a/b/memory.max", 4 * GIB)
    host.write(f"{V2}/a/memory.max", 8 * GIB)
    host.write(f"{V2}/a/memory.current", 7 * GIB)
    assert memory_budget(host.root) == MemoryBudget(4 * GIB, GIB, f"cgroup limit ({V2}/a/b/memory.max)")


def test_memory_high_is_a_limit(host):
    host.cgroup2("/a")
    host.write(f"{V2}/a/memory.max", 8 * GIB)
    host.write(f"{V2}/a/memory.high", 6 * GIB)
    assert memory_budget(host.root).limit == 6 * GIB


def test_version_1(host):
    host.cgroup1("/docker/abc", root="/docker/abc")
    host.write(f"{V1}/memory.limit_in_bytes", 2 * GIB)
    host.write(f"{V1}/memory.usage_in_bytes", GIB)
    host.write(f"{V1}/memory.stat", f"cache {GIB}\ntotal_active_file {GIB // 4}\ntotal_inactive_file {GIB // 4}")
    assert memory_budget(host.root) == MemoryBudget(2 * GIB, 3 * GIB // 2, f"cgroup limit ({V1}/memory.limit_in_bytes)")


def test_version_1_unlimited(host):
    host.cgroup1("/")
    host.write(f"{V1}/memory.limit_in_bytes", 9223372036854771712)
    assert memory_budget(host.root).limit == 32 * GIB


def test_limit_above_the_machine(host):
    host.cgroup2("/a")
    host.write(f"{V2}/a/memory.max", 64 * GIB)
    assert memory_budget(host.root) == MemoryBudget(32 * GIB, 16 * GIB, "memory of the machine")


def test_without_memavailable(host):
    host.write("/proc/meminfo", "MemTotal: 33554432 kB\nMemFree: 1048576 kB")
    assert memory_budget(host.root).available == GIB


def test_nothing_known(tmp_path):
    assert memory_budget(tmp_path) is None


def arena(available: int, *, num_active: int = 32, weight_bytes: int = GIB) -> int:
    memory = MemoryBudget(64 * GIB, available, "memory of the machine")
    return default_arena_bytes(
        block_bytes=1 << 20, blocks_per_request=128, num_active=num_active, weight_bytes=weight_bytes, memory=memory
    )


def test_arena_holds_every_active_request():
    assert arena(64 * GIB) == 32 * 128 << 20


def test_arena_is_bounded_by_its_share():
    assert arena(5 * GIB) == 2 * GIB


def test_arena_that_cannot_hold_one_request():
    with pytest.raises(ConfigError, match=r"needs 128 MiB of KV cache, but only 100 MiB may be used: 50% of the"):
        arena(GIB + (200 << 20))


def test_arena_of_an_unknown_machine():
    assert default_arena_bytes(block_bytes=10, blocks_per_request=2, num_active=3, weight_bytes=5, memory=None) == 60


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512M", 512 << 20), ("1.5 GiB", 3 << 29), ("2kb", 2048), ("1T", 1 << 40), (" 3 g ", 3 << 30)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "g", "-1", "nan", "1..2", "1e3", "1_0", "1 X", ".", "0x10"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError):
        parse_size(text)


def test_sizes_for_people():
    assert [format_size(n) for n in (0, 1023, 3 << 29, 5 << 40)] == ["0 bytes", "1023 bytes", "1.5 GiB", "5 TiB"]
