"""Core groups of machines described as folders."""

import os

import pytest

from coremill.config.errors import ConfigError
from coremill.config.hostfiles import format_cpu_list, parse_cpu_list
from coremill.config.topology import discover, survey

V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/cpu,cpuacct"


def cores_of(host, **options) -> list[tuple[int, ...]]:
    return [group.cores for group in discover(root=host.root, **options)]


def smt_host(host) -> None:
    """4 cores, 8 threads: siblings are n and n + 4."""
    host.write("/sys/devices/system/cpu/online", "0-7")
    host.write("/sys/devices/system/node/node0/cpulist", "0-7")
    host.affinity("0-7")
    for cpu in range(8):
        host.cpu(cpu, core=cpu % 4, siblings=f"{cpu % 4},{cpu % 4 + 4}", l3="0-7")


def two_sockets(host, *, per_socket: int = 4, l3_size: int = 2) -> None:
    """Two nodes; L3 caches of `l3_size` cores."""
    last = 2 * per_socket - 1
    host.write("/sys/devices/system/cpu/online", f"0-{last}")
    host.affinity(f"0-{last}")
    for socket in (0, 1):
        host.write(
            f"/sys/devices/system/node/node{socket}/cpulist", f"{socket * per_socket}-{(socket + 1) * per_socket - 1}"
        )
    for cpu in range(2 * per_socket):
        first = cpu // l3_size * l3_size
        host.cpu(cpu, core=cpu % per_socket, socket=cpu // per_socket, l3=f"{first}-{first + l3_size - 1}")


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5-6"])
def test_cpu_lists_round_trip(text):
    assert format_cpu_list(parse_cpu_list(text)) == text


def test_cpu_list_of_odd_text():
    assert parse_cpu_list("") == ()
    assert parse_cpu_list(" 2-1, 3 ,x") == (3,)


def test_no_quota_gives_a_group_per_core(host):
    host.simple(4)
    assert cores_of(host) == [(0,), (1,), (2,), (3,)]
    group = discover(root=host.root)[0]
    assert group.numa == 0
    assert group.why == "one physical core, NUMA node 0, L3 of CPUs 0-3"


def test_quota_is_floored_and_says_why(host):
    host.simple(8)
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpu.max", "350000 100000")
    assert len(cores_of(host)) == 3
    assert f"3 of 8 CPUs used: cgroup quota of 3.5 CPUs ({V2}/job/cpu.max)" in discover(root=host.root)[0].why


@pytest.mark.parametrize("period", [100_000, 10_000])
def test_quota_below_a_core_still_gives_one(host, period):
    host.simple(2)
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpu.max", f"{period // 2} {period}")
    assert cores_of(host) == [(0,)]


def test_quota_exact_to_the_core(host):
    host.simple(8)
    host.cgroup2("/job")
    # 0.3 / 0.1 is below 3 in floating point.
    host.write(f"{V2}/job/cpu.max", "300000 100000")
    assert len(cores_of(host)) == 3


def test_quota_on_a_parent_only(host):
    host.simple(8)
    host.cgroup2("/a/b/c")
    host.write(f"{V2}/a/b/c/cpu.max", "max 100000")
    host.write(f"{V2}/a/cpu.max", "200000 100000")
    assert len(cores_of(host)) == 2
    assert survey(host.root).quota.path == f"{V2}/a/cpu.max"


def test_tightest_of_the_chain_counts(host):
    host.simple(8)
    host.cgroup2("/a/b")
    host.write(f"{V2}/a/b/cpu.max", "500000 100000")
    host.write(f"{V2}/a/cpu.max", "250000 50000")
    host.write(f"{V2}/cpu.max", "100000 25000")
    assert survey(host.root).quota.cpus == 4


def test_version_1_quota_on_parent(host):
    host.simple(8)
    host.cgroup1("/docker/abc")
    host.write(f"{V1}/docker/abc/cpu.cfs_quota_us", -1)
    host.write(f"{V1}/docker/abc/cpu.cfs_period_us", 100_000)
    host.write(f"{V1}/docker/cpu.cfs_quota_us", 150_000)
    host.write(f"{V1}/docker/cpu.cfs_period_us", 50_000)
    assert len(cores_of(host)) == 3


def test_version_1_inside_a_container_without_namespaces(host):
    """The path is that of the host, the mount shows only the container's part."""
    host.simple(8)
    host.cgroup1("/docker/abc/inner", root="/docker/abc")
    host.write(f"{V1}/cpu.cfs_quota_us", 200_000)
    host.write(f"{V1}/cpu.cfs_period_us", 100_000)
    host.write(f"{V1}/inner/cpu.cfs_quota_us", 400_000)
    host.write(f"{V1}/inner/cpu.cfs_period_us", 100_000)
    assert len(cores_of(host)) == 2


def test_group_outside_of_what_is_mounted(host):
    host.simple(8)
    host.cgroup2("/../../other", root="/")
    host.write(f"{V2}/cpu.max", "200000 100000")
    assert len(cores_of(host)) == 2
    host.cgroup2("/elsewhere", root="/docker/abc")
    assert len(cores_of(host)) == 2


def test_longest_visible_chain_is_taken(host):
    host.simple(8)
    host.write("/proc/self/cgroup", "0::/pod/app")
    host.write(
        "/proc/self/mountinfo",
        "40 1 0:28 /pod/app /mnt/own rw - cgroup2 cgroup2 rw\n41 1 0:28 / /mnt/all\\040groups rw - cgroup2 cgroup2 rw",
    )
    host.write("/mnt/all groups/pod/cpu.max", "300000 100000")
    assert len(cores_of(host)) == 3


def test_both_versions_at_once(host):
    host.simple(8)
    host.cgroup1("/x")
    host.write(f"{V1}/x/cpu.cfs_quota_us", 500_000)
    host.write(f"{V1}/x/cpu.cfs_period_us", 100_000)
    mounts = (host.root / "proc/self/mountinfo").read_text()
    host.write(
        "/proc/self/mountinfo", mounts + "50 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate"
    )
    assert len(cores_of(host)) == 5
    host.write("/sys/fs/cgroup/unified/cpu.max", "400000 100000")
    assert len(cores_of(host)) == 4


@pytest.mark.parametrize("text", ["", "max", "max 100000", "0 100000", "100000 0", "nonsense"])
def test_quota_files_that_limit_nothing(host, text):
    host.simple(4)
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpu.max", text)
    assert len(cores_of(host)) == 4


def test_quota_without_a_period_has_the_kernels_default(host):
    host.simple(4)
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpu.max", "200000")
    assert len(cores_of(host)) == 2


def test_cpuset_of_one_cpu(host):
    host.simple(4)
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpuset.cpus.effective", "2")
    host.affinity("2")
    assert cores_of(host) == [(2,)]
    assert "1 of 4 CPUs used: cpuset 2" in discover(root=host.root)[0].why
    assert "affinity" not in discover(root=host.root)[0].why


def test_affinity_mask(host):
    host.simple(8)
    host.affinity("1,3,5")
    assert cores_of(host) == [(1,), (3,), (5,)]
    assert "affinity mask 1,3,5" in discover(root=host.root)[0].why


def test_mask_wider_than_what_is_online(host):
    host.simple(4)
    host.write("/sys/devices/system/cpu/online", "0-1,3")
    host.affinity("0-127")
    assert cores_of(host) == [(0,), (1,), (3,)]


def test_smt_siblings_are_left_alone(host):
    smt_host(host)
    assert cores_of(host) == [(0,), (1,), (2,), (3,)]


def test_one_cpu_of_each_core_whichever_the_mask_leaves(host):
    smt_host(host)
    host.affinity("1-6")
    assert cores_of(host) == [(1,), (2,), (3,), (4,)]


def test_smt_siblings_when_more_is_asked_for(host):
    smt_host(host)
    assert cores_of(host, workers=6) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert "SMT sibling" in discover(root=host.root, workers=6)[4].why
    with pytest.raises(ConfigError, match=r"--workers 9 x --cores-per-worker 1 needs 9 cores, but only 8 \(4 physical"):
        discover(root=host.root, workers=9)


def test_quota_counts_before_siblings(host):
    smt_host(host)
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpu.max", "200000 100000")
    assert cores_of(host) == [(0,), (1,)]
    with pytest.raises(ConfigError, match=r"only 2 may be used: cgroup quota of 2 CPUs"):
        discover(root=host.root, workers=3)


def test_workers_and_cores_per_worker(host):
    host.simple(8)
    assert cores_of(host, workers=2) == [(0,), (1,)]
    assert cores_of(host, cores_per_worker=3) == [(0, 1, 2), (3, 4, 5)]
    assert cores_of(host, workers=1, cores_per_worker=8) == [tuple(range(8))]
    with pytest.raises(ConfigError, match="--cores-per-worker 9 needs 9 cores, but only 8 may be used"):
        discover(root=host.root, cores_per_worker=9)
    with pytest.raises(ConfigError, match="--workers 3 x --cores-per-worker 3 needs 9 cores"):
        discover(root=host.root, workers=3, cores_per_worker=3)


def test_two_sockets(host):
    two_sockets(host)
    groups = discover(root=host.root, cores_per_worker=2)
    assert [(group.cores, group.numa) for group in groups] == [((0, 1), 0), ((2, 3), 0), ((4, 5), 1), ((6, 7), 1)]


def test_core_ids_repeat_on_the_second_socket(host):
    """Without sibling lists, socket and core id together name a core."""
    two_sockets(host)
    for cpu in range(8):
        (host.root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").unlink()
    assert len(cores_of(host)) == 8


def test_groups_keep_to_one_cache_then_to_one_node(host):
    two_sockets(host, per_socket=6, l3_size=3)
    assert cores_of(host, cores_per_worker=2) == [(0, 1), (3, 4), (6, 7), (9, 10), (2, 5), (8, 11)]
    assert "spans 2 L3 caches" in discover(root=host.root, cores_per_worker=2)[4].why


def test_a_group_spans_nodes_only_when_it_must(host):
    two_sockets(host, per_socket=3, l3_size=3)
    assert cores_of(host, cores_per_worker=2) == [(0, 1), (3, 4)]
    assert cores_of(host, cores_per_worker=2, workers=3) == [(0, 1), (3, 4), (2, 5)]
    assert cores_of(host, cores_per_worker=5) == [(0, 1, 2, 3, 4)]
    assert "NUMA nodes 0, 1" in discover(root=host.root, cores_per_worker=5)[0].why


def test_small_budget_stays_on_the_node_with_most_cores(host):
    two_sockets(host)
    host.affinity("2-7")
    host.cgroup2("/job")
    host.write(f"{V2}/job/cpu.max", "300000 100000")
    assert cores_of(host) == [(4,), (5,), (6,)]


def hybrid(host) -> None:
    """2 fast cores of two threads (0-3), 4 slow ones (4-7)."""
    host.write("/sys/devices/system/cpu/online", "0-7")
    host.affinity("0-7")
    host.write("/sys/devices/cpu_core/cpus", "0-3")
    host.write("/sys/devices/cpu_atom/cpus", "4-7")
    for cpu in range(4):
        host.cpu(cpu, core=cpu // 2, siblings=f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}", l3="0-7")
    for cpu in range(4, 8):
        host.cpu(cpu, core=cpu + 10, l3="0-7")


def test_hybrid_takes_fast_cores_first(host):
    hybrid(host)
    assert cores_of(host) == [(0,), (2,), (4,), (5,), (6,), (7,)]
    assert cores_of(host, workers=2) == [(0,), (2,)]
    assert "efficiency core" in discover(root=host.root)[2].why


def test_hybrid_groups_do_not_mix(host):
    hybrid(host)
    assert cores_of(host, cores_per_worker=2) == [(0, 2), (4, 5), (6, 7)]


def test_hybrid_by_capacity(host):
    host.simple(4)
    for cpu, capacity in enumerate([446, 446, 1024, 1009]):
        host.write(f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity", capacity)
    assert cores_of(host) == [(2,), (3,), (0,), (1,)]


def test_core_ids_all_zero(host):
    """Seen on virtual machines: core_id says nothing, the sibling lists do."""
    host.simple(4)
    for cpu in range(4):
        host.cpu(cpu, core=0)
    assert len(cores_of(host)) == 4


def test_nothing_but_the_mask(host):
    host.affinity("0-2")
    assert cores_of(host) == [(0,), (1,), (2,)]
    assert discover(root=host.root)[0].why == "one physical core, NUMA node 0"


def test_empty_tree_assumes_what_python_counts(host):
    assert len(cores_of(host)) == os.cpu_count()


def test_this_machine():
    groups = discover()
    cores = [core for group in groups for core in group.cores]
    assert cores
    assert set(cores) <= os.sched_getaffinity(os.getpid())
    assert len(set(cores)) == len(cores)
