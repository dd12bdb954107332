"""What one more worker costs, by the figures that --stats gives to users."""

from __future__ import annotations

import pytest

from coremill.config.memory import WORKER_BYTES, worker_bytes
from coremill.config.topology import survey
from coremill.native.packfile import open_pack

# Of a worker's own memory, beside scratch and KV: interpreter, libraries, bytes of the tokens.
MOST_PER_WORKER = 60e6


@pytest.fixture(scope="module")
def runs(make_runs, tmp_path_factory):
    # In a cache of its own: whoever else maps the pack would take a part of its PSS.
    return make_runs(cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def rows(workload):
    """Labels and chats, so that every worker has read all weights and filled its scratch."""
    return [*workload("label")[:16], *workload("write")[:16]]


@pytest.fixture(scope="module")
def measured(rows, runs):
    """--stats of runs with one and two workers."""
    if survey().budget < 2:
        pytest.skip("this machine lacks a second core, so a second worker is refused")
    for row in rows:
        row["body"]["max_tokens"] = 8
    found = []
    for num in (1, 2):
        runs.fresh(rows, "--workers", str(num))
        found.append(runs.stats())
        assert len(found[-1]["workers"]) == num
        assert all(worker["prefill_tokens"] and worker["decode_tokens"] for worker in found[-1]["workers"])
    return found


def total(stats, *names):
    return sum(worker[name] for worker in stats["workers"] for name in names)


def test_a_second_worker_costs_little(measured):
    one, two = measured
    extra = total(two, "pss_bytes") - total(one, "pss_bytes")
    scratch_and_kv = total(two, "scratch_bytes", "pss_arena_bytes") - total(one, "scratch_bytes", "pss_arena_bytes")
    print(f"{extra / 1e6:.1f} MB PSS, of which scratch and KV at most {scratch_and_kv / 1e6:.1f} MB")
    assert extra <= MOST_PER_WORKER + max(0, scratch_and_kv)


def test_each_worker_has_little_of_its_own(measured):
    for stats in measured:
        for worker in stats["workers"]:
            print(f"{worker['pss_private_bytes'] / 1e6:.1f} MB, scratch {worker['scratch_bytes'] / 1e6:.1f} MB")
            assert worker["pss_private_bytes"] <= MOST_PER_WORKER + worker["scratch_bytes"]


def test_the_plan_expects_what_a_worker_takes(measured, runs):
    """Rather more than less, but not so much that it would refuse boxes that are large enough."""
    (path,) = runs.cache.rglob("*.pack")
    with open_pack(path) as pack:
        expected = worker_bytes(pack.spec, step_rows=128 + 16, max_active=16, threads=1)
    for stats in measured:
        for worker in stats["workers"]:
            assert worker["pss_private_bytes"] <= expected
            assert (
                worker["scratch_bytes"]
                <= expected - WORKER_BYTES + (4 << 20)
                <= 2 * worker["scratch_bytes"] + (8 << 20)
            )


def test_weights_are_in_memory_once(measured, runs):
    one, two = measured
    (pack,) = runs.cache.rglob("*.pack")
    for stats in (one, two):
        assert 0.5 * pack.stat().st_size < total(stats, "pss_weights_bytes") < 1.05 * pack.stat().st_size
