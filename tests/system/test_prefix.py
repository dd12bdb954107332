"""What sequences have in common is computed once, by whichever worker, and nothing else changes."""

from __future__ import annotations

import pytest

from coremill.config.topology import survey

TWO = str(min(2, survey().budget))


@pytest.fixture(scope="module")
def runs(make_runs):
    return make_runs()


def computed(runs) -> int:
    """Prompt tokens that workers have computed, by their own count."""
    return sum(worker["prefill_tokens"] for worker in runs.stats()["workers"])


def cached_of(runs) -> dict[str, int]:
    return {name: body["usage"]["prompt_tokens_details"]["cached_tokens"] for name, body in runs.bodies().items()}


@pytest.fixture(scope="module")
def labels(workload):
    return workload("label")[:96]


@pytest.fixture(scope="module")
def undisturbed(runs, labels):
    """Without the cache."""
    made = runs.fresh(labels, "--no-prefix-cache")
    stats = runs.stats()
    assert stats["cached_tokens"] == 0 and computed(runs) == stats["prompt_tokens"]
    return made


@pytest.mark.parametrize("workers", ["1", TWO])
def test_a_shared_prefix_is_computed_once_for_any_number_of_workers(runs, labels, undisturbed, workers):
    assert runs.fresh(labels, "--workers", workers) == undisturbed
    stats = runs.stats()
    assert computed(runs) == stats["prompt_tokens"] - stats["cached_tokens"]
    assert stats["cached_tokens"] == sum(cached_of(runs).values()) >= 0.85 * stats["prompt_tokens"]
    shared = min(count for count in cached_of(runs).values() if count)
    assert list(cached_of(runs).values()).count(0) == 1  # who computed it for all
    assert shared > 150


def test_a_tiny_arena_only_takes_longer(runs, labels, undisturbed):
    """Room for two rows and a little: others are paused, dropped, computed again."""
    assert runs.fresh(labels[:24], "--workers", TWO, "--arena", "16M") == {
        row["custom_id"]: undisturbed[row["custom_id"]] for row in labels[:24]
    }


def test_chats_go_on_from_their_history(runs, workload):
    chats = workload("write")[:3]
    for row in chats:
        row["body"] |= {"max_tokens": 40, "temperature": 0}
    first = runs.fresh(chats, "--workers", "1")
    assert first
    answers = {name: body["choices"][0]["message"]["content"] for name, body in runs.bodies().items()}
    turns = [
        {
            **row,
            "custom_id": f"{row['custom_id']}-again",
            "body": {
                **row["body"],
                "messages": [
                    *row["body"]["messages"],
                    {"role": "assistant", "content": answers[row["custom_id"]]},
                    {"role": "user", "content": "Now shorter."},
                ],
            },
        }
        for row in chats
    ]
    # One at a time, so that each second turn comes after its first.
    together = runs.fresh([*chats, *turns], "--workers", "1", "--max-active", "1")
    usage = {name: body["usage"] for name, body in runs.bodies().items()}
    assert runs.fresh([*chats, *turns], "--workers", "1", "--no-prefix-cache") == together
    for row in chats:
        first, second = usage[row["custom_id"]], usage[f"{row['custom_id']}-again"]
        found = max(usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second))
        assert found >= first["prompt_tokens"] - 8  # whichever ran first


def test_two_unrelated_prefixes_both_stay(runs, workload):
    """Two documents, asked in turn."""
    documents = [row["body"]["messages"] for row in workload("read")[:2]]
    rows = [
        {
            "custom_id": f"ask-{number}",
            "messages": [*documents[number % 2], {"role": "assistant", "content": "Yes."},
                         {"role": "user", "content": f"And what of point {number}?"}],
            "max_tokens": 3,
            "temperature": 0,
        }
        for number in range(8)
    ]  # fmt: skip
    runs.fresh(rows, "--workers", TWO)
    usage = [body["usage"] for body in runs.bodies().values()]
    cold = [one for one in usage if one["prompt_tokens_details"]["cached_tokens"] < one["prompt_tokens"] // 2]
    assert len(cold) == 2
    assert computed(runs) == runs.stats()["prompt_tokens"] - runs.stats()["cached_tokens"]
