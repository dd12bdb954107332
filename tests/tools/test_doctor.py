"""`coremill doctor`: facts from folders, advice from reports, and one real run."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from coremill.config.errors import UnsupportedHostError
from coremill.config.hostfiles import HostFiles
from coremill.tools import doctor, machine
from coremill.tools.cli import main


@pytest.fixture
def files(tmp_path):
    def write(name: str, text: str) -> None:
        path = tmp_path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    made = HostFiles(tmp_path)
    made.write = write
    return made


def test_huge_pages_of_a_folder(files):
    assert machine.huge_page_facts(files) == {
        "anonymous": None,
        "shared": None,
        "defrag": None,
        "size": None,
        "pool": {"size": 0, "total": 0, "free": 0},
    }
    base = "/sys/kernel/mm/transparent_hugepage"
    files.write(f"{base}/enabled", "always [madvise] never\n")
    files.write(f"{base}/shmem_enabled", "always within_size advise [never] deny force\n")
    files.write(f"{base}/hpage_pmd_size", "2097152\n")
    files.write("/proc/meminfo", "HugePages_Total:      12\nHugePages_Free:        3\nHugepagesize:       2048 kB\n")
    facts = machine.huge_page_facts(files)
    assert (facts["anonymous"], facts["shared"], facts["size"]) == ("madvise", "never", 2 << 20)
    assert facts["pool"] == {"size": 2 << 20, "total": 12, "free": 3}


def test_cpu_times(files):
    files.write("/proc/stat", "cpu  9 9 9 9\ncpu0 100 0 0 800 100 0 0 0 50 0\ncpu1 0 0 0 1000\nintr 5\n")
    before = machine.CpuTimes.read([0, 1], files)
    files.write("/proc/stat", "cpu0 150 0 0 810 110 0 0 30 50 0\ncpu1 0 0 0 1100\n")
    after = machine.CpuTimes.read([0, 1], files)
    assert after.steal_since(before) == pytest.approx(0.15)
    assert after.busy_since(before) == pytest.approx(1 - 120 / 200)
    assert machine.CpuTimes.read([7], files).steal_since(machine.CpuTimes.read([7], files)) == 0


def test_cache_sizes(files):
    files.write("/sys/devices/system/cpu/cpu3/cache/index3/size", "32768K\n")
    assert machine.l3_bytes(files, 3) == 32 << 20
    assert machine.l3_bytes(files, 4) == 0


def test_threads_run_where_they_should():
    cores = sorted(os.sched_getaffinity(0))
    assert machine.on_cores(cores, lambda: os.sched_getaffinity(0)) == [{core} for core in cores]
    with pytest.raises(UnsupportedHostError, match="cannot pin a thread"):
        machine.on_cores([*cores, 8191], lambda: None)
    with pytest.raises(ZeroDivisionError):
        machine.on_cores(cores, lambda: 1 / 0)


def test_bandwidth_errors_are_said():
    with pytest.raises(UnsupportedHostError, match=r"bandwidth: .*\(1 cores, 4096 bytes each\)"):
        machine.bandwidth([8191], 4096, 0.01)
    with pytest.raises(UnsupportedHostError, match="must be a multiple of 4096"):
        machine.bandwidth([0], 100, 0.01)


@pytest.fixture(scope="module")
def report():
    """One real examination; tests that change it work on a copy."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COREMILL_")}
    done = CliRunner(env=dict.fromkeys(os.environ.keys() - environ.keys())).invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_report_of_this_machine(report):
    assert set(report) == {"isa", "cpu", "memory", "huge_pages", "measured", "cache", "versions", "advice"}
    assert report["isa"]["active"] == report["isa"]["supported"][0]
    groups = report["cpu"]["groups"]
    assert groups and all(group["why"] for group in groups)
    measured = report["measured"]
    assert measured["cores"] == [core for group in groups for core in group["cores"]]
    assert len(measured["clock_mhz"]) == len(measured["int8_gops_per_core"]) == len(measured["cores"])
    assert 500 < measured["clock_mhz"][0] < 8000
    assert 0.5 < measured["read_gb_per_s_one_core"] < 1000
    assert 1 <= measured["int8_macs_per_cycle"] < 300
    assert 0 <= measured["steal"] <= 1
    assert report["versions"]["coremill"] == "0.1.0"


def test_text_for_people_shows_every_part(report):
    text = doctor._plain(report)
    for title in ("Instruction set", "Cores", "Memory", "Measured", "Cache", "Versions"):
        assert f"\n{title}\n" in f"\n{text}"
    assert f"active       {report['isa']['active']}" in text
    assert "group 0      CPU " in text
    assert "\x1b" not in text


def changed(report, part: str, **values) -> dict:
    return report | {part: report[part] | values}


def test_advice(report):
    calm = changed(report, "measured", steal=0.0, on_huge_pages=1.0, load=0.1)
    calm["measured"] |= {"read_gb_per_s_one_core": 1.0, "read_gb_per_s_all_cores": 2.0}
    calm = changed(calm, "huge_pages", anonymous="madvise")
    calm["isa"] = calm["isa"] | {"supported": ["avx2", "scalar"], "active": "avx2"}
    assert doctor.advice(calm) == []
    for part, values, words in [
        ("isa", {"active": "scalar"}, "COREMILL_ISA asks for scalar, but this CPU can do avx2"),
        ("isa", {"active": "scalar", "supported": ["scalar"]}, "no AVX2"),
        ("cpu", {"quota": {"cpus": 0.5, "file": "x"}}, "The quota of 0.5 CPUs"),
        ("huge_pages", {"anonymous": "never"}, "huge pages"),
        ("measured", {"steal": 0.1}, "The hypervisor took 10.0%"),
        ("measured", {"load": 9999.0}, "The machine was busy"),
        ("cache", {"writable": False}, "COREMILL_CACHE"),
    ]:
        (sentence,) = doctor.advice(changed(calm, part, **values))
        assert words in sentence
    assert "Advice" not in doctor._plain(calm | {"advice": []})
    assert "Advice\n  This." in doctor._plain(calm | {"advice": ["This."]})


def test_wrong_isa_is_said():
    done = subprocess.run(
        [sys.executable, "-m", "coremill.tools", "doctor"],
        env=os.environ | {"COREMILL_ISA": "avx3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("coremill: COREMILL_ISA: 'avx3' is unknown")
    assert done.stderr.count("\n") == 1


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "deep" / "cache"))
    facts = doctor._cache_facts()
    assert (facts["exists"], facts["writable"]) == (False, True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COREMILL_CACHE", str(tmp_path / "file" / "cache"))
    assert doctor._cache_facts()["writable"] is False
