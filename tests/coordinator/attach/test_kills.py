"""Everything killed in random order, ten times; tests/soak/queue_kills.py does it two hundred times."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("kills", Path(__file__).parent.parent / "queue" / "kills.py")
kills = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(kills)


def test_nothing_is_lost_or_doubled(tiny_pack, tmp_path):
    world = kills.World(tmp_path, tiny_pack, seed=1)
    try:
        for _ in range(10):
            world.start_missing()
            world.wait_for_progress()
            world.kill_some()
        left = world.finish()
    finally:
        world.stop()
    counts = kills.check(tmp_path, left)
    assert counts["accepted"] >= 20 and counts["read"] >= 20
    assert world.num_kills.keys() == {"coordinator", "worker", "producer", "reader"}
