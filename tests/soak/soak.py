"""Many short rows with a steady stream of distinct prefixes: memory must stand still, and the books balance.

Every second the PSS of each process of the run is taken, split into what it is of: weights, KV arena, memory of its
own, libraries. From a tenth to nine tenths of the rows no figure of a process may differ from another by more than 5 %.

    python tests/soak/soak.py                              20,000 rows, some six minutes
    python tests/soak/soak.py --rows 4000 --arena 150M     a first look

An arena fills up to an eighth (or to what was ever in use) before blocks are used again. With the default model and
arena that takes some 1,000 rows, so in a shorter run workers still grow after a tenth of it.

It all runs on a copy of the environment and of the model, as the memory of a file is split between all who map it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import own_python, parser, runs_maker, work_folder

from coremill.config.smaps import Memory, measure_memory
from coremill.native.arena import ARENA_NAME
from coremill.native.cache import ensure_pack

LIMIT, BEGIN, END = 0.05, 0.1, 0.9
# Figures are medians of the samples this near to a share of the rows.
NEAR = 0.02
WORDS = "river stone lamp winter bread north paper cloud garden engine silver letter music harbour seven glass".split()


class Sample(NamedTuple):
    """One process when this share of the rows was done. own: PSS of memory that is of no file, the arena apart."""

    share: float
    memory: Memory
    own: int

    def parts(self) -> dict[str, int]:
        """Of the PSS, in bytes."""
        rest = self.memory.private - self.own
        return {"weights": self.memory.weights, "arena": self.memory.arena, "own": self.own, "libraries": rest}


def own_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("Pss_Anon:")), 0)


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


def role(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
    return next((word.rpartition(".")[2] for word in words if word.endswith((".worker", ".helper"))), "coordinator")


def watch(runs: Any, pack: Path, num_rows: int, *options: str) -> dict[str, list[Sample]]:
    """Samples of each process while the command runs."""
    process = runs.start(*options)
    found: dict[str, list[Sample]] = {}
    names: dict[int, str] = {}
    shown = 0.0
    while process.poll() is None:
        time.sleep(1)
        share = runs.num_rows() / num_rows
        for pid in runs.processes():
            try:
                memory, own = measure_memory(str(pack), ARENA_NAME, pid), own_bytes(pid)
                name = names.get(pid) or names.setdefault(pid, f"{role(pid)} {pid}")
            except OSError:  # gone meanwhile
                continue
            if memory.pss:
                found.setdefault(name, []).append(Sample(share, memory, own))
        if share >= shown + 0.1:
            shown = share
            print(f"{share:.0%}", end=" ", flush=True)
    said = process.communicate()[1]
    print()
    if process.returncode:
        raise SystemExit(said)
    return found


def report(name: str, samples: list[Sample]) -> bool:
    """Prints what became of a process' memory; whether it stood still."""
    begin, end = ([sample for sample in samples if abs(sample.share - share) <= NEAR] for share in (BEGIN, END))
    between = [sample.memory.pss / 1e6 for sample in samples if BEGIN <= sample.share <= END]
    if not (begin and end):
        print(f"{name}: too few samples")
        return False

    def around(of: Callable[[Sample], int]) -> tuple[float, float]:
        return tuple(median(map(of, near)) / 1e6 for near in (begin, end))

    early, late = around(lambda sample: sample.memory.pss)
    spread = max(between) / min(between) - 1
    split = [(part, *around(lambda sample, part=part: sample.parts()[part])) for part in begin[0].parts()]
    print(
        f"{name}: PSS {early:.1f} MB at {BEGIN:.0%} and {late:.1f} at {END:.0%} ({late / early - 1:+.1%}), "
        f"{min(between):.1f} to {max(between):.1f} between ({spread:.1%}); "
        + ", ".join(f"{part} {one:.1f} and {two:.1f}" for part, one, two in split)
    )
    return spread <= LIMIT


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=20000)
    options.add_argument("--arena", help="as for coremill run")
    options.add_argument("--copied", action="store_true", help="this is the copy of the environment")
    given = options.parse_args()
    if not given.copied:
        ensure_pack(given.model)  # fetching needs pip, which the copy does not have
        with work_folder() as folder:
            python = own_python(Path(folder, "environment"))
            return subprocess.run([python, *sys.argv, "--copied"]).returncode
    with work_folder() as folder:
        pack = Path(shutil.copy(ensure_pack(given.model), folder)).resolve()
        make_runs = runs_maker(str(pack), folder)
        try:
            runs = make_runs()
            runs.write(make_rows(given.rows, random.Random(given.seed)))
            begun = time.monotonic()
            found = watch(runs, pack, given.rows, *(["--arena", given.arena] if given.arena else []))
            seconds = time.monotonic() - begun
            stats, num_done = runs.stats(), len(runs.results())
            errors = runs.errors.read_text() if runs.errors.exists() else ""
        finally:
            make_runs.close()
    print(f"{num_done} of {given.rows} rows in {seconds:.1f} s ({num_done / seconds:.1f} rows/s)")
    stand_still = [report(name, samples) for name, samples in sorted(found.items())]
    arena = stats["arena"]
    parts = {name: count for name, count in arena.items() if name.endswith("_blocks")}
    balanced = sum(parts.values()) == arena["blocks"] and not parts["private_blocks"] + parts["shared_blocks"]
    print(f"arena: {parts} of {arena['blocks']} blocks{'' if balanced else ', which do not add up'}")
    good = all(stand_still) and balanced and not errors and num_done == given.rows
    print("as it should be" if good else "NOT as it should be")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
