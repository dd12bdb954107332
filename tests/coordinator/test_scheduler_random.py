"""Random events against the real scheduler and real worker loops: nothing is lost, run twice or starved, the books
balance after every event, and every row gets the tokens of an undisturbed run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.coordinator.prefix import MIN_WAIT


def disturb(world, rng: random.Random, sim, num_rows: int, poison: set[int]) -> None:
    """Everything that can happen, in any order, until all rows have been submitted."""
    while len(world.requests) < num_rows:
        index = rng.choice(list(world.workers))
        worker = world.workers[index]
        match rng.choices(range(8), [4, 8, 8, 8, 1, 1, 0.3, 0.3])[0]:
            case 0:
                request = sim.random_request(rng, f"row {len(world.requests)}", family=rng.choice([0, 1, 1, 2]))
                if rng.random() < 0.03:
                    request.prompt_ids += (sim.POISON,)
                    poison.add(len(world.requests) + 1)
                world.submit(request)
            case 1:
                world.deliver(index, rng.randint(1, 4))
            case 2:
                worker.hear(rng.randint(1, 4))
                if worker.stopped:
                    world.deliver(index)
                    world.die(index)
            case 3:
                world.step(index)
            case 4 if worker.stepped and world.scheduler.slots[index].stepped:
                world.deliver(index, rng.randint(0, len(worker.outbox)))
                world.die(index)
            case 5 if world.requests:
                world.cancel(rng.choice(list(world.requests)))
            case 6:
                world.set_workers(rng.randint(1, len(world.pages)))
            case 7:
                world.pause(not world.scheduler.paused)
    world.pause(False)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 4),
    max_active=st.integers(1, 5),
    num_blocks=st.sampled_from([6, 9, 20, 200]),
    step_tokens=st.sampled_from([1, 7, 16, 64]),
    prefix_cache=st.sampled_from([True, True, True, False]),
)
def test_random_events(sim, seed, num_workers, max_active, num_blocks, step_tokens, prefix_cache):
    rng, poison = random.Random(seed), set()
    groups = sim.core_groups(num_workers, rng.choice([1, 2]))
    limits = sim.Limits(num_workers, max_active, num_blocks, 190, sim.VOCAB, prefix_cache=prefix_cache, groups=groups)
    world = sim.World(limits, step_tokens)
    disturb(world, rng, sim, num_rows=40, poison=poison)
    world.run()
    assert world.given_up is None
    for ticket, result in world.results.items():
        if result.error is None:
            world.verify(ticket)
            assert ticket not in poison
        else:
            allowed = {"cancelled"} | ({"worker_crashed"} if ticket in poison else set())
            assert result.error.code in allowed, result.error


@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8, 12])
def test_a_tight_arena_is_slow_but_never_stuck(world, sim, num_blocks):
    rng = random.Random(num_blocks)
    shared = world(num_workers=2, max_active=4, num_blocks=num_blocks)
    for row in range(30):
        shared.submit(sim.random_request(rng, str(row), longest=90))
    shared.run()
    for ticket in shared.requests:
        shared.verify(ticket)


@pytest.mark.parametrize("num_blocks", [6, 9, 40, 400])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_families_of_prompts_in_arenas_of_all_sizes(world, sim, num_workers, num_blocks):
    rng = random.Random(num_blocks)
    shared = world(num_workers=num_workers, max_active=4, num_blocks=num_blocks)
    for row in range(60):
        shared.submit(sim.random_request(rng, str(row), longest=90, family=1 + row % 3))
    shared.run()
    for ticket in shared.requests:
        shared.verify(ticket)
    if num_blocks == 400:
        assert shared.scheduler.counts["cached_tokens"] > 200
        assert shared.scheduler.counts["recomputed_tokens"] == 0


def test_poison_rows_among_good_ones(world, sim):
    rng = random.Random(5)
    shared = world(num_workers=2, max_active=4, num_blocks=200)
    for row in range(40):
        request = sim.random_request(rng, str(row))
        if row % 10 == 3:
            request.prompt_ids += (sim.POISON,)
        shared.submit(request)
    shared.run()
    for ticket, result in shared.results.items():
        if (ticket - 1) % 10 == 3:
            assert result.error.code == "worker_crashed"
        else:
            shared.verify(ticket)
    assert shared.given_up is None and shared.retired == []


@pytest.mark.parametrize("step_tokens", [1, 5, 64, 512])
@pytest.mark.parametrize("max_active", [1, 5, 16])
def test_batching_and_chunking_change_nothing(world, sim, max_active, step_tokens):
    rng = random.Random(1)
    shared = world(num_workers=1, max_active=max_active, num_blocks=300, step_tokens=step_tokens)
    for row in range(30):
        shared.submit(sim.random_request(rng, str(row)))
    shared.run()
    for ticket in shared.requests:
        shared.verify(ticket)


@pytest.mark.parametrize(("num_workers", "num_rows"), [(2, 40), (3, 40), (4, 100)])
def test_at_the_end_of_a_file_nobody_idles_while_another_holds_two(world, sim, num_workers, num_rows):
    """Time in turns, in each of which every worker does one step."""
    for seed in range(5):
        rng = random.Random(seed)
        shared = world(num_workers=num_workers, max_active=8, num_blocks=400)
        for row in range(num_rows):
            length = rng.choice([5, 20, 60, 200])
            prompt = tuple(rng.randrange(1, sim.POISON) for _ in range(8))
            shared.submit(sim.SequenceRequest(str(row), prompt, length, seed=rng.randrange(1 << 60)))
        held = []
        while shared.turn():
            held.append([len(worker.loop.sequences) for worker in shared.workers.values()])
        tail = held[-max(len(held) // 10, 1) :]
        for index in range(num_workers):
            idle = sum(counts[index] == 0 and max(counts) >= 2 for counts in tail)
            assert idle <= max(len(tail) / 5, 2), (seed, index, tail)
        shared.run()
        assert shared.num_loans
        assert shared.scheduler.counts["recomputed_tokens"] == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_workers=st.integers(1, 5),
    max_active=st.integers(1, 6),
    step_tokens=st.sampled_from([1, 7, 16, 64]),
)
def test_what_prompts_share_is_computed_once(sim, seed, num_workers, max_active, step_tokens):
    """Counted by those who compute, in an arena that is large enough; rows come before, while and after others run."""
    rng = random.Random(seed)
    groups = sim.core_groups(num_workers)
    world = sim.World(sim.Limits(num_workers, max_active, 3000, 400, sim.VOCAB, groups=groups), step_tokens)
    prompts = [()]
    for row in range(rng.randint(2, 40)):
        # A branch off another prompt, somewhere; its end is its own.
        begin = rng.choice(prompts)
        begin = begin[: rng.choice([len(begin), rng.randint(0, len(begin))])]
        more = rng.choice([0, 1, 31, 32, 33, rng.randint(0, 100)])
        prompt = begin + tuple(rng.randrange(1, sim.POISON) for _ in range(more + 12))
        prompts.append(prompt[-380:] if len(prompt) > 380 else prompt)
        world.submit(sim.SequenceRequest(str(row), prompts[-1], rng.randint(1, 20), seed=rng.randrange(1 << 64)))
        for _ in range(rng.choice([0, 0, 1, 5])):
            world.turn()
    world.run()
    for ticket in world.requests:
        world.verify(ticket)
    beginnings = {prompt[:end] for prompt in prompts for end in range(1, len(prompt) + 1)}
    # The last token of each prompt is always computed, and whoever shares a block that is not full yet may rather
    # compute up to MIN_WAIT - 1 tokens of it than wait.
    computed = sum(page["prefill_tokens"] for page in world.pages.values())
    assert computed <= len(beginnings) + (len(prompts) - 1) * MIN_WAIT
    again = [tokens for tokens, count in world.full_blocks.items() if count > 1 and tokens in beginnings]
    # What comes after a whole prompt may have been generated, by chance as another prompt goes on.
    assert all(any(tokens[: len(prompt)] == prompt for prompt in prompts[1:]) for tokens in again)
