"""A minute of chaos, or as long as the rows last, over whole workload files.

A worker is killed every second, one is stopped, the coordinator is killed twice; the same command goes on each time.
At the end the results must be those of an undisturbed run, byte by byte, with nothing set aside and nothing left.

    python tests/soak/chaos.py
    python tests/soak/chaos.py --rows label.jsonl read.jsonl write.jsonl --every 1

By default the rows are those of tests/data/workloads; larger files of the same kind make a longer run.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from common import TESTS, load, parser, runs_maker, work_folder

chaos = load("chaos", TESTS / "system/chaos.py")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", type=Path, default=sorted((TESTS / "data/workloads").glob("*.jsonl")))
    options.add_argument("--every", type=float, default=1.0, help="seconds between two kills of a worker")
    options.add_argument("--coordinators", type=int, default=2, help="how often the coordinator is killed")
    given = options.parse_args()
    rows = [json.loads(line) for path in given.rows for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):  # greedy and sampled
        row["body"]["temperature"] = number % 3 / 2
    rng = random.Random(given.seed)
    rng.shuffle(rows)
    with work_folder() as folder:
        make_runs = runs_maker(given.model, folder)
        try:
            begun = time.monotonic()
            undisturbed = make_runs().fresh(rows)
            print(f"undisturbed: {len(rows)} rows in {time.monotonic() - begun:.1f} s", flush=True)
            runs = make_runs()
            runs.write(rows)
            found = chaos.disturb(runs, len(rows), rng, every=given.every, deaths=given.coordinators)
            print(
                f"disturbed: {found.seconds:.1f} s, {found.workers_killed} workers killed, {found.workers_stopped} "
                f"stopped, {found.coordinators_killed} coordinators killed"
            )
            wrong = chaos.judge(runs, undisturbed)
        finally:
            make_runs.close()
    for line in wrong:
        print(f"WRONG: {line}")
    print("results differ" if wrong else "results are byte-identical, nothing set aside, nothing left")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
