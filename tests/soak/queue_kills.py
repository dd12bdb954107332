"""The durable queue under fire: coordinator, workers, producers and readers killed in random order, again and again.

At the end nothing may be lost, given out again after it was acknowledged, or other than in an undisturbed run. Workers
have a make-believe model, so that a job takes milliseconds.

    python tests/soak/queue_kills.py
    python tests/soak/queue_kills.py --times 1000 --seed 2
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import TESTS, load, parser, work_folder


def tiny_pack(folder: Path) -> Path:
    import numpy as np

    from coremill.native.cache import ensure_pack

    writer = load("gguf_writer", TESTS / "native/gguf_writer.py")
    (folder / "tiny.gguf").write_bytes(writer.tiny_llama(np.random.default_rng(1)).build())
    return ensure_pack(folder / "tiny.gguf", cache_dir=folder / "cache")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--times", type=int, default=200, help="rounds of killing (default: 200)")
    arguments = options.parse_args()
    kills = load("queue_kills_world", TESTS / "coordinator/queue/kills.py")
    with work_folder() as name:
        folder = Path(name)
        world = kills.World(folder, tiny_pack(folder), arguments.seed)
        begun = time.monotonic()
        try:
            for number in range(1, arguments.times + 1):
                world.start_missing()
                world.wait_for_progress()
                world.kill_some()
                if number % 10 == 0:
                    print(f"{time.monotonic() - begun:6.0f} s  round {number}: {dict(world.num_kills)}", flush=True)
            left = world.finish()
        finally:
            world.stop()
        size = (folder / "jobs.sqlite").stat().st_size
        print(f"nothing lost, nothing doubled: {kills.check(folder, left)}; the file has {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
