"""`coremill doctor`: what coremill finds on this machine, what it makes of it, and how fast the machine is."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from typing import Any

import click

from coremill.config.settings import Settings
from coremill.tools.options import Verb, takes

_LIBRARIES = ("numpy", "pyzmq", "msgpack", "psutil", "cffi", "tokenizers", "jinja2", "click", "rich")

# Below these, advice is given.
_MUCH_STEAL = 0.02
_MOST_ON_HUGE_PAGES = 0.9


@click.command(
    cls=Verb,
    examples=[
        ("coremill doctor", "look at this machine (takes about two seconds)"),
        ("coremill doctor --json > machine.json", "the same for a script or a bug report"),
        ("taskset -c 0-3 coremill doctor", "see what a smaller affinity mask would leave"),
    ],
)
@takes("doctor")
def command(settings: Settings) -> None:
    """Show the instruction set, core groups and why, limits, huge pages, and measured speeds.

    How fast the memory reads is remembered in the cache folder: `coremill top` compares with it.
    """
    report = _examine_visibly()
    if settings["json"]:
        import json

        click.echo(json.dumps(report, indent=2))
    elif sys.stdout.isatty():
        _print_rich(report)
    else:
        click.echo(_plain(report), nl=False)


def _examine_visibly() -> dict[str, Any]:
    if not sys.stderr.isatty():
        return examine()
    from rich.console import Console

    with Console(stderr=True).status("measuring the machine ..."):
        return examine()


def examine() -> dict[str, Any]:
    """Everything doctor shows, as plain values."""
    from coremill.config.cputimes import cpu_name
    from coremill.config.hostfiles import HostFiles
    from coremill.config.memory import memory_budget
    from coremill.config.topology import groups_of, survey
    from coremill.tools import machine

    files = HostFiles()
    found = survey()
    groups = groups_of(found)
    memory = memory_budget()
    load = machine.load_average()
    begin = time.monotonic()
    times = machine.CpuTimes.read([core for group in groups for core in group.cores], files)
    ceilings = machine.measure_ceilings(groups)
    # Steal comes in bursts: less than a second says nothing.
    time.sleep(max(0.0, 1 - (time.monotonic() - begin)))
    steal = machine.CpuTimes.read(ceilings.cores, files).steal_since(times)
    quota = found.quota
    report = {
        "isa": machine.isa_facts(),
        "cpu": {
            "name": cpu_name(files),
            "online": len(found.online),
            "usable": sorted(place.cpu for place in found.places),
            "physical_cores": found.num_cores,
            "budget": found.budget,
            "limits": list(found.limits),
            "quota": {"cpus": round(quota.cpus, 3), "file": quota.path} if quota else None,
            "groups": [{"cores": list(g.cores), "numa": g.numa, "why": g.why} for g in groups],
        },
        "memory": {"limit": memory.limit, "available": memory.available, "why": memory.why} if memory else None,
        "huge_pages": machine.huge_page_facts(files),
        "measured": ceilings.as_dict() | {"steal": round(steal, 4), "load": load},
        "cache": _cache_facts(),
        "versions": _versions(),
    }
    report["advice"] = advice(report)
    return report


def _cache_facts() -> dict[str, Any]:
    from coremill.native.cache import cache_folder

    folder = cache_folder()
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(there).free,
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    system = {"coremill": version("coremill"), "python": platform.python_version(), "kernel": platform.release()}
    return system | {name: version(name) for name in _LIBRARIES}


def advice(report: dict[str, Any]) -> list[str]:
    """What is worth changing about this machine, one sentence each."""
    found = []
    isa, cpu, measured, huge = (report[part] for part in ("isa", "cpu", "measured", "huge_pages"))
    if isa["active"] != isa["supported"][0]:
        found.append(f"COREMILL_ISA asks for {isa['active']}, but this CPU can do {isa['supported'][0]}.")
    if isa["supported"] == ["scalar"]:
        found.append("This CPU has no AVX2: everything runs on plain C, many times slower.")
    quota = cpu["quota"]
    if quota and quota["cpus"] < 1:
        found.append(f"The quota of {quota['cpus']:g} CPUs lets a worker run only part of the time.")
    if huge["anonymous"] == "never" or measured["on_huge_pages"] < _MOST_ON_HUGE_PAGES:
        found.append(
            "Memory is not on huge pages, which costs bandwidth: set"
            " /sys/kernel/mm/transparent_hugepage/enabled to madvise or always."
        )
    if measured["steal"] > _MUCH_STEAL:
        found.append(f"The hypervisor took {measured['steal']:.1%} of the time: measurements here vary by as much.")
    from coremill.tools.machine import disturbances

    found += [f"{text[0].upper()}{text[1:]}." for text in disturbances(measured["load"], measured)]
    if not report["cache"]["writable"]:
        found.append("The cache folder cannot be written: set COREMILL_CACHE to a folder that can.")
    return found


# ---- for people ----


def sections(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The report as titled lists of (label, text)."""
    from coremill.config.hostfiles import format_cpu_list
    from coremill.config.memory import format_size

    isa, cpu, memory, huge, measured, cache = (
        report[part] for part in ("isa", "cpu", "memory", "huge_pages", "measured", "cache")
    )
    quota = cpu["quota"]
    pool = huge["pool"]
    missing = [name for name, there in isa["features"].items() if not there]
    gops = measured["int8_gops_per_core"]
    return [
        (
            "Instruction set",
            [
                ("active", isa["active"]),
                ("supported", ", ".join(isa["supported"])),
                ("features", ", ".join(name for name, there in isa["features"].items() if there) or "none"),
                *([("not here", ", ".join(missing))] if missing else []),
            ],
        ),
        (
            "Cores",
            [
                ("CPU", f"{cpu['name']}, {cpu['online']} online, {cpu['physical_cores']} physical cores usable"),
                ("quota", f"{quota['cpus']:g} CPUs ({quota['file']})" if quota else "none"),
                ("budget", f"{cpu['budget']} ({'; '.join(cpu['limits']) or 'every core of the machine'})"),
                *(
                    (f"group {number}", f"CPU {format_cpu_list(tuple(group['cores']))}: {group['why']}")
                    for number, group in enumerate(cpu["groups"])
                ),
            ],
        ),
        (
            "Memory",
            [
                ("limit", f"{format_size(memory['limit'])} ({memory['why']})" if memory else "unknown"),
                ("available", format_size(memory["available"]) if memory else "unknown"),
                (
                    "huge pages",
                    f"anonymous {huge['anonymous'] or 'unknown'}, shared {huge['shared'] or 'unknown'},"
                    f" pool {pool['free']} of {pool['total']} free",
                ),
            ],
        ),
        (
            "Measured",
            [
                ("clock", f"{_range(measured['clock_mhz'])} MHz"),
                ("steal", f"{measured['steal']:.1%}"),
                ("load", f"{measured['load']:g} in the minute before"),
                (
                    "memory read",
                    f"{measured['read_gb_per_s_one_core']} GB/s by one core, {measured['read_gb_per_s_all_cores']} GB/s"
                    f" by all {len(measured['cores'])}; {measured['on_huge_pages']:.0%} on huge pages",
                ),
                (
                    "int8",
                    f"{_range(gops)} G operations/s per core with all busy, {measured['int8_gops_one_core']} alone"
                    f" ({measured['int8_macs_per_cycle']} multiply-adds a cycle)",
                ),
                ("float32", f"{measured['fma_gflops_one_core']} G operations/s, one core"),
            ],
        ),
        (
            "Cache",
            [
                ("folder", cache["folder"] + ("" if cache["exists"] else " (made on first use)")),
                ("writable", "yes" if cache["writable"] else "NO"),
                ("free", format_size(cache["free"])),
            ],
        ),
        ("Versions", [("", ", ".join(f"{name} {number}" for name, number in report["versions"].items()))]),
        *([("Advice", [("", sentence) for sentence in report["advice"]])] if report["advice"] else []),
    ]


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _plain(report: dict[str, Any]) -> str:
    lines = []
    for title, rows in sections(report):
        lines.append(title)
        lines += [f"  {label:<12} {text}" if label else f"  {text}" for label, text in rows]
    return "\n".join(lines) + "\n"


def _print_rich(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, rows in sections(report):
        console.print(Text(title, style="bold yellow" if title == "Advice" else "bold"))
        # Texts hold paths and CPU names: never read as markup.
        table = Table.grid(padding=(0, 2))
        for label, text in rows:
            cells = [Text(label, style="cyan"), Text(text)] if label else [Text(text)]
            table.add_row("", *cells)
        console.print(table)
