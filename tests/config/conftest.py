"""A machine as a folder."""

import pytest


class FakeHost:
    """A tree of /proc and /sys files. `root` is what the code under test is given."""

    def __init__(self, root):
        self.root = root

    def write(self, name: str, text: object) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def affinity(self, cpus: str) -> None:
        self.write("/proc/self/status", f"Name:\tpython3\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nThreads:\t1")

    def cpu(self, cpu: int, *, core: int, socket: int = 0, siblings: str | None = None, l3: str | None = None) -> None:
        folder = f"/sys/devices/system/cpu/cpu{cpu}"
        self.write(f"{folder}/topology/core_id", core)
        self.write(f"{folder}/topology/physical_package_id", socket)
        self.write(f"{folder}/topology/thread_siblings_list", siblings or cpu)
        if l3:
            self.write(f"{folder}/cache/index3/level", 3)
            self.write(f"{folder}/cache/index3/shared_cpu_list", l3)

    def simple(self, num_cores: int) -> None:
        """One socket, no SMT, one L3, every CPU allowed."""
        cpus = f"0-{num_cores - 1}" if num_cores > 1 else "0"
        self.write("/sys/devices/system/cpu/online", cpus)
        self.write("/sys/devices/system/node/node0/cpulist", cpus)
        self.affinity(cpus)
        for cpu in range(num_cores):
            self.cpu(cpu, core=cpu, l3=cpus)

    def cgroup2(self, path: str, *, root: str = "/", point: str = "/sys/fs/cgroup") -> None:
        self.write("/proc/self/cgroup", f"0::{path}")
        self.write("/proc/self/mountinfo", f"31 23 0:28 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw")

    def cgroup1(self, path: str, *, root: str = "/") -> None:
        base = "/sys/fs/cgroup"
        self.write(
            "/proc/self/cgroup", f"9:memory:{path}\n4:cpu,cpuacct:{path}\n3:cpuset:{path}\n1:name=systemd:/x\n0::/"
        )
        self.write(
            "/proc/self/mountinfo",
            "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
            f"32 31 0:29 {root} {base}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"34 31 0:31 {root} {base}/cpuset rw shared:3 master:1 - cgroup cgroup rw,cpuset\n"
            f"35 31 0:32 {root} {base}/memory rw - cgroup cgroup rw,memory",
        )


@pytest.fixture
def host(tmp_path) -> FakeHost:
    return FakeHost(tmp_path)
