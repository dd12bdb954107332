"""A bench report as a text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def report_text(report: dict[str, Any]) -> str:
    parts = [_ceilings_text(report["machine"])]
    if "model" in report:
        model = report["model"]
        parts.append(f"Model {model['name']} ({model['architecture']}, {model['weight_bytes'] / 1e6:.0f} MB packed)")
        if "packing" in report:
            packing = report["packing"]
            parts[-1] += f"\nPacked in {packing['seconds']} s, {packing['gb_per_s']} GB/s"
        parts += [_gemm_text(report["gemm"]), _steps_text(report)]
        parts += [_lone_text(report["lone"])] if "lone" in report else []
        parts += [_operations_text(report["one_worker"])]
    parts += [f"Warning: {warning}." for warning in report["warnings"]]
    return "\n\n".join(parts) + "\n"


def _ceilings_text(machine: dict[str, Any]) -> str:
    rows = [
        ("instruction set", machine["isa"]),
        ("clock", f"{min(machine['clock_mhz'])} to {max(machine['clock_mhz'])} MHz"),
        ("memory, one core", f"{machine['read_gb_per_s_one_core']} GB/s"),
        (f"memory, all {len(machine['cores'])} cores", f"{machine['read_gb_per_s_all_cores']} GB/s"),
        (
            "int8, one core",
            f"{machine['int8_gops_one_core']} G operations/s ({machine['int8_macs_per_cycle']} multiply-adds a cycle)",
        ),
        ("int8, each of all", f"{min(machine['int8_gops_per_core'])} G operations/s"),
        ("float32, one core", f"{machine['fma_gflops_one_core']} G operations/s"),
        ("steal", f"{machine['steal']:.1%}"),
        ("load before", f"{machine['load']:g}"),
    ]
    return "Ceilings of this machine\n" + "\n".join(f"  {label:<20}{text}" for label, text in rows)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for people; the first column to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  "
        + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def _gemm_text(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (
            f"{row['matrix']} {row['n']} x {row['k']} {'+'.join(row['formats'])}",
            str(row["tokens"]),
            f"{row['gops']:.0f}",
            f"{row['share_of_kernel']:.0%}",
            f"{row['share_of_dot']:.0%}",
        )
        for row in rows
    ]
    head = ("matrix", "tokens", "Gop/s", "of L1", "of dots")
    note = "  Gop/s: 1e9 operations a second. of L1: of the kernel's rate on data in L1; of dots: of bare dot products."
    return "Matrix products, one core\n" + columns(head, cells) + "\n" + note


def _steps_text(report: dict[str, Any]) -> str:
    # One round has no spread.
    noise = lambda row: f"{row['noise']:.0%}" if report["rounds"] > 1 else "-"  # noqa: E731
    cells = []
    for one, every in zip(report["one_worker"], report["all_workers"], strict=True):
        what = f"prefill of {one['context']}" if one["what"] == "prefill" else f"{one['sequences']} x {one['context']}"
        cells.append(
            (
                what,
                *(f"{one['tokens_per_s']:.0f}", f"{one['share']:.0%}", noise(one)),
                *(f"{every['tokens_per_s']:.0f}", f"{every['share']:.0%}", noise(every)),
            )
        )
    num_workers = report["all_workers"][0]["workers"]
    head = (
        *("sequences x context", "one: t/s", "of limit", "noise"),
        *(f"all {num_workers}: t/s", "of limit", "noise"),
    )
    note = (
        "  t/s: tokens a second. Sequences are per worker. One: steps of a worker in this process;\n"
        "  all: real workers behind a coordinator. noise: spread of the rounds."
    )
    return f"Steps\n{columns(head, cells)}\n{note}"


def _lone_text(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (
            f"{row['what']} {'of' if row['what'] == 'prefill' else 'after'} {row['context']}",
            f"{row['alone_tokens_per_s']:.0f}",
            f"{row['lent_tokens_per_s']:.0f}",
            f"{row['gain']:.2f}",
        )
        for row in rows
    ]
    head = ("one sequence", "alone: t/s", "lent: t/s", "gain")
    note = f"  lent: with the cores of the other workers ({rows[0]['workers']} in all), as they have nothing to run."
    return f"A sequence alone\n{columns(head, cells)}\n{note}"


def _operations_text(rows: Sequence[dict[str, Any]]) -> str:
    """Operations of the prefill and of the largest batch of each context."""
    shown = [row for row in rows if row["what"] == "prefill"]
    for context in dict.fromkeys(row["context"] for row in rows if row["what"] == "decode"):
        shown.append(max((r for r in rows if r["context"] == context and r["what"] == "decode"), key=_num_sequences))
    parts = []
    for row in shown:
        what = f"prefill of {row['context']}" if row["what"] == "prefill" else f"{row['sequences']} x {row['context']}"
        cells = [
            (o["operation"], f"{o['ms']:.3f}", f"{o['limit_ms']:.3f}", f"{o['share']:.0%}" if o["share"] else "-")
            for o in row["operations"]
        ]
        parts.append(f"Operations, {what}\n" + columns(("all layers", "ms", "limit, ms", "share"), cells))
    return "\n\n".join(parts)


def _num_sequences(row: dict[str, Any]) -> int:
    return row["sequences"]
