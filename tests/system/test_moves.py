"""Conversations and workers that come and go, on the default model in Python: what is computed is counted by those who
compute it."""

from __future__ import annotations

import time

import pytest

from coremill.config.topology import survey
from coremill.coordinator import Coordinator
from coremill.coordinator.prefix import MIN_COPY, common_length
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService

TWO = min(2, survey().budget)


def computed(coordinator: Coordinator) -> int:
    """Prompt tokens, by the workers' own count."""
    return sum(worker["prefill_tokens"] for worker in coordinator.stats()["workers"])


def test_each_turn_of_a_chat_finds_its_history(smollm2_pack):
    """Prompts and answers of earlier turns, whoever computed them; several chats at once, on all workers."""
    chats = [[{"role": "user", "content": f"Tell me about {topic}."}] for topic in ("bees", "salt", "clouds", "glass")]
    asked = ("Why is that?", "Give an example.")
    with Coordinator(smollm2_pack, workers=TWO) as coordinator, TextService(smollm2_pack) as text:
        held: list[tuple[int, ...]] = [()] * len(chats)  # what lies in the arena for each
        num_prompt = num_cached = 0
        for turn in range(3):
            prompts = [prepared.ids for prepared in text.prepare([TextRequest(messages=chat) for chat in chats])]
            jobs = [coordinator.submit(messages=chat, max_tokens=40, temperature=0) for chat in chats]
            for number, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
                done = job.result(120)
                known = min(common_length(held[number], prompt), len(prompt) - 1)
                assert done.usage.prompt_tokens == len(prompt)
                assert done.usage.cached_tokens >= known - MIN_COPY
                assert turn == 0 or known > 40 * turn  # the answers too, give or take how their texts are cut anew
                held[number] = (*prompt, *done.token_ids[:-1])  # the last is never read
                num_prompt += len(prompt)
                num_cached += done.usage.cached_tokens
                if turn < len(asked):
                    chats[number] += [
                        {"role": "assistant", "content": done.text},
                        {"role": "user", "content": asked[turn]},
                    ]
        assert computed(coordinator) == num_prompt - num_cached
        assert coordinator.stats()["sequences"]["recomputed_tokens"] == 0


@pytest.mark.skipif(TWO < 2, reason="this machine lacks a second core, so a second worker is refused")
def test_workers_that_leave_and_come_cost_no_token(smollm2_pack):
    requests = [
        {"prompt": f"{number} things to know about rivers:", "max_tokens": 120 + number, "seed": number}
        for number in range(24)
    ]

    def tokens(jobs) -> list[tuple[int, ...]]:
        return [job.result(120).token_ids for job in jobs]

    with Coordinator(smollm2_pack, workers=2, max_active=16, prefix_cache=False) as coordinator:
        expected = tokens([coordinator.submit(**request) for request in requests])
        before = coordinator.stats()
        jobs = [coordinator.submit(**request) for request in requests]
        for _ in range(2):
            wait_for_second(coordinator, "ready", with_rows_of=2 * len(requests))
            coordinator.workers(1)
            wait_for_second(coordinator, "stopped")
            coordinator.workers(2)
        assert tokens(jobs) == expected
        after = coordinator.stats()
    assert after["sequences"]["moved"] > before["sequences"]["moved"]
    assert after["sequences"]["recomputed_tokens"] == 0
    for name in ("prefill_tokens", "decode_tokens"):
        once = sum(worker[name] for worker in before["workers"])
        assert sum(worker[name] for worker in after["workers"]) == 2 * once, name


def wait_for_second(coordinator: Coordinator, state: str, with_rows_of: int = 0) -> None:
    """The second worker is in this state, and has rows unless so many have finished."""
    deadline = time.monotonic() + 60
    while True:
        stats = coordinator.stats()
        second = stats["workers"][1]
        if second["state"] == state and (second["active"] or stats["queue"]["finished"] >= with_rows_of):
            return
        assert time.monotonic() < deadline, second
        time.sleep(0.002)


def test_only_what_can_never_fit_the_arena_is_refused(make_runs):
    """Room for one long row: the others wait for it, and the one that is longer than the arena is an error row."""
    runs = make_runs()
    rows = [
        {"custom_id": f"{length}-{number}", "prompt": list(range(100, 100 + length)), "max_tokens": 8, "temperature": 0}
        for number in range(3)
        for length in (40, 300, 360)
    ]
    runs.write(rows)
    said = runs.run("--arena", "8M", status=3)  # eleven blocks of 32 tokens
    assert "3 rows too long for --arena " in said
    assert {name.split("-")[0] for name in runs.bodies()} == {"40", "300"}
    refused = [line for line in runs.errors.read_text().splitlines() if '"arena_too_small"' in line]
    assert len(refused) == 3 and all("360-" in line for line in refused)
