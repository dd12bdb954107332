"""Many short rows with a steady stream of distinct prefixes: memory must stand still, and the books balance.

Every half second the PSS of each process of the run is taken. Each process is reported with its figures at a tenth
and at nine tenths of the rows; those must lie within 5 % of each other.

    python tests/soak/soak.py                              20,000 rows
    python tests/soak/soak.py --rows 1500 --arena 150M     a first look

With a larger arena the cache of prefixes fills for the first thousand rows or so, and memory grows until then.
"""

from __future__ import annotations

import random
import sys
import time
from statistics import median

from common import parser, runs_maker, work_folder

LIMIT = 0.05
WORDS = "river stone lamp winter bread north paper cloud garden engine silver letter music harbour seven glass".split()


def make_rows(count: int, rng: random.Random) -> list[dict]:
    """Chats and completions; a prefix serves some five rows and then never comes again."""
    rows = []
    for number in range(count):
        prefix = random.Random(number // 5)
        begin = " ".join(prefix.choices(WORDS, k=prefix.randint(5, 40)))
        text = f"{begin} {number}: {' '.join(rng.choices(WORDS, k=rng.randint(1, 20)))}"
        body = {"max_tokens": rng.randint(1, 8), "temperature": number % 2, "seed": number}
        asked = {"prompt": text} if number % 3 else {"messages": [{"role": "user", "content": text}]}
        rows.append({"custom_id": f"row-{number}", **body, **asked})
    return rows


def pss(pid: int) -> int | None:
    """Bytes, or None when the process is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return None


def role(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
    return next((word.rpartition(".")[2] for word in words if word.endswith((".worker", ".helper"))), "coordinator")


def watch(runs, num_rows: int, *options: str) -> dict[str, list[tuple[float, int]]]:
    """Of each process, (share of the rows done, PSS) over time, while the command runs."""
    process = runs.start(*options)
    found: dict[str, list[tuple[float, int]]] = {}
    names: dict[int, str] = {}
    shown = 0.0
    while process.poll() is None:
        time.sleep(0.5)
        share = runs.num_rows() / num_rows
        for pid in runs.processes():
            size = pss(pid)
            if size is not None:
                name = names.get(pid) or names.setdefault(pid, f"{role(pid)} {pid}")
                found.setdefault(name, []).append((share, size))
        if share >= shown + 0.1:
            shown = share
            print(f"{share:.0%}", end=" ", flush=True)
    said = process.communicate()[1]
    print()
    if process.returncode:
        raise SystemExit(said)
    return found


def around(samples: list[tuple[float, int]], share: float) -> float | None:
    """Median PSS near this share of the rows."""
    near = [size for at, size in samples if abs(at - share) <= 0.04]
    return median(near) if near else None


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=20000)
    options.add_argument("--arena", help="as for coremill run")
    given = options.parse_args()
    wrong = False
    with work_folder() as folder:
        make_runs = runs_maker(given.model, folder)
        try:
            runs = make_runs()
            runs.write(make_rows(given.rows, random.Random(given.seed)))
            begun = time.monotonic()
            found = watch(runs, given.rows, *(["--arena", given.arena] if given.arena else []))
            seconds = time.monotonic() - begun
            stats, num_done = runs.stats(), len(runs.results())
            errors = runs.errors.read_text() if runs.errors.exists() else ""
        finally:
            make_runs.close()
    print(f"{num_done} of {given.rows} rows in {seconds:.1f} s ({num_done / seconds:.1f} rows/s)")
    for name, samples in sorted(found.items()):
        early, late = around(samples, 0.1), around(samples, 0.9)
        if early is None or late is None:
            print(f"{name}: too few samples")
            wrong = True
            continue
        change = late / early - 1
        wrong |= abs(change) > LIMIT
        print(f"{name}: PSS {early / 1e6:.1f} MB at 10 %, {late / 1e6:.1f} MB at 90 % ({change:+.1%})")
    arena = stats["arena"]
    parts = {name: count for name, count in arena.items() if name.endswith("_blocks")}
    balanced = sum(parts.values()) == arena["blocks"]
    print(f"arena: {parts} of {arena['blocks']} blocks{'' if balanced else ', which do not add up'}")
    wrong |= not balanced or bool(errors) or num_done != given.rows
    print("NOT as it should be" if wrong else "as it should be")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
