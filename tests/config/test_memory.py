"""Memory limits of machines described as folders, and the arena planned from them."""

from dataclasses import replace

import pytest

from coremill.config.cgroups import oom_kills
from coremill.config.errors import ConfigError
from coremill.config.hostfiles import HostFiles
from coremill.config.memory import (
    BASE_BYTES,
    MemoryBudget,
    MemoryNeed,
    format_size,
    memory_budget,
    parse_size,
    plan_arena,
)

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


def test_kills_for_want_of_memory_are_counted_in_every_group(host):
    host.cgroup2("/a/b")
    assert oom_kills(HostFiles(host.root)) == 0
    host.write("/proc/vmstat", "nr_free_pages 5\noom_kill 2")
    host.write(f"{V2}/a/b/memory.events", "low 0\noom 4\noom_kill 3")
    host.write(f"{V2}/a/memory.events", "oom_kill 4")
    assert oom_kills(HostFiles(host.root)) == 9


def test_kills_for_want_of_memory_in_version_1(host):
    host.cgroup1("/docker/abc", root="/docker/abc")
    host.write(f"{V1}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7")
    assert oom_kills(HostFiles(host.root)) == 7


MIB = 1 << 20
FIXED = GIB + 2 * 50 * MIB + BASE_BYTES


def need(num_workers: int = 2) -> MemoryNeed:
    """Weights of 1 GiB, workers of 50 MiB; a longest request takes 128 MiB."""
    return MemoryNeed(
        weights=GIB,
        per_worker=50 * MIB,
        num_workers=num_workers,
        max_active=16,
        block_bytes=MIB,
        blocks_per_request=128,
    )


def budget(available: int) -> MemoryBudget:
    return MemoryBudget(64 * GIB, available, "memory of the machine")


def test_arena_holds_every_active_request():
    assert plan_arena(need(), None, budget(64 * GIB)) == 32 * 128 * MIB


def test_arena_is_bounded_by_its_share():
    assert plan_arena(need(), None, budget(FIXED + 2 * GIB)) == GIB


def test_arena_of_an_unknown_machine():
    assert plan_arena(need(1), None, None) == 16 * 128 * MIB
    assert plan_arena(need(1), 700 * GIB, None) == 700 * GIB


def test_arena_by_hand_may_take_all_that_is_left_and_no_more():
    assert plan_arena(need(), 10 * MIB + 5, budget(FIXED + 10 * MIB + 5)) == 10 * MIB
    with pytest.raises(ConfigError, match="not enough memory"):
        plan_arena(need(), 11 * MIB, budget(FIXED + 10 * MIB))


def test_arena_by_hand_must_hold_a_block():
    with pytest.raises(ConfigError, match="arena is 1 KiB: it must hold at least one block of 1 MiB"):
        plan_arena(need(), 1024, budget(64 * GIB))


def suggestions(text: str) -> list[str]:
    return text.partition("this would fit: ")[2].split(", or ")


def test_one_request_does_not_fit():
    memory = budget(FIXED + 200 * MIB)
    with pytest.raises(ConfigError) as error:
        plan_arena(need(), None, memory)
    assert str(error.value) == (
        "not enough memory: weights 1 GiB + 2 x 50 MiB for workers + 96 MiB for the coordinator + 128 MiB of KV cache "
        "(one request of ctx 4096) = 1.316 GiB, but 1.387 GiB are free of 64 GiB (memory of the machine); without "
        "--arena, requests get 50% of what the rest leaves; this would fit: --arena 192M, or --ctx 3072"
    )
    assert plan_arena(need(), 200 * MIB, memory) == 200 * MIB
    assert plan_arena(replace(need(), blocks_per_request=100), None, memory) == 100 * MIB


def test_fewer_workers_may_fit():
    memory = budget(FIXED + 230 * MIB)
    with pytest.raises(ConfigError) as error:
        plan_arena(need(), None, memory)
    assert suggestions(str(error.value)) == ["--arena 222M", "--ctx 3552", "--workers 1"]
    assert plan_arena(need(1), None, memory) >= 128 * MIB


def test_the_arena_asked_for_does_not_fit():
    memory = budget(FIXED + 140 * MIB)
    with pytest.raises(ConfigError, match=r"180 MiB of KV cache \(the arena asked for\) = .* but .* are free") as error:
        plan_arena(need(), 180 * MIB, memory)
    assert suggestions(str(error.value)) == ["--arena 132M", "--workers 1"]


def test_nothing_fits():
    with pytest.raises(ConfigError, match="no setting fits"):
        plan_arena(need(), None, budget(GIB))


def test_a_limit_on_addresses_bounds_the_arena():
    addresses = need().addresses
    memory = replace(budget(64 * GIB), addresses=addresses + 200 * MIB)
    assert plan_arena(need(), None, memory) == 200 * MIB
    assert plan_arena(need(), 200 * MIB, memory) == 200 * MIB
    with pytest.raises(ConfigError, match=r"not enough addresses: .* \(ulimit -v, RLIMIT_AS\)") as error:
        plan_arena(need(), 201 * MIB, memory)
    assert suggestions(str(error.value)) == ["--arena 200M"]
    with pytest.raises(ConfigError, match=r"\(one request of ctx 4096\)") as error:
        plan_arena(need(), None, replace(memory, addresses=addresses + 100 * MIB))
    assert suggestions(str(error.value)) == ["--ctx 3200"]
    with pytest.raises(ConfigError, match="no setting fits"):
        plan_arena(need(), None, replace(memory, addresses=addresses))


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
