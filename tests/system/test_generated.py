"""What a killed coordinator costs: tokens that had been generated for rows which were not in the files yet, no more.

Workers count in pages of shared memory, which can be read when all who wrote to them are gone."""

from __future__ import annotations

import time

import pytest

from coremill.config.counters import open_pages

MAX_ACTIVE, MAX_TOKENS = 2, 24
OPTIONS = ("--max-active", str(MAX_ACTIVE))
# Rows that are finished and not in the files yet, at most. The writer takes all there are at once.
MOST_UNWRITTEN = 6


@pytest.fixture(scope="module")
def rows(workload):
    chosen = [*workload("write")[:28], *workload("label")[:12]]
    for number, row in enumerate(chosen):
        row["body"] |= {"max_tokens": MAX_TOKENS - number % 8, "temperature": number % 2}
    return chosen


def completion_tokens(runs) -> int:
    """Of the rows in OUT, whose last line may be torn."""
    whole = runs.out.read_bytes()
    runs.out.write_bytes(whole[: whole.rfind(b"\n") + 1])
    made = sum(body["usage"]["completion_tokens"] for body in runs.bodies().values())
    runs.out.write_bytes(whole)
    return made


def generated(runs) -> int:
    """By the workers' own count, as the command's statistics have it."""
    return sum(worker["decode_tokens"] for worker in runs.stats()["workers"])


@pytest.fixture(scope="module")
def one_run(make_runs, rows):
    """(results, tokens generated, number of workers) of an undisturbed run."""
    runs = make_runs()
    results = runs.fresh(rows, *OPTIONS)
    assert generated(runs) == completion_tokens(runs)
    return results, generated(runs), len(runs.stats()["workers"])


@pytest.mark.parametrize("num_finished", [1, 10, 25])
def test_both_runs_together_generate_one_run_and_what_was_in_flight(make_runs, rows, one_run, num_finished):
    results, expected, num_workers = one_run
    runs = make_runs()
    runs.write(rows)
    process = runs.start(*OPTIONS)
    deadline = time.monotonic() + 120
    while runs.num_rows() < num_finished:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    pages = open_pages(process.pid)
    process.kill()
    process.communicate()
    assert runs.processes_after_a_second() == []
    first, written = sum(page["decode_tokens"] for page in pages), completion_tokens(runs)
    for page in pages:
        page.close()
    assert written < expected, "it was done before it could be killed"

    runs.run(*OPTIONS)
    assert runs.results() == results
    second, in_flight = generated(runs), first - written
    print(f"{first} + {second} generated, {expected} by one run, {in_flight} in flight")
    assert first + second == expected + in_flight
    assert in_flight <= (num_workers * MAX_ACTIVE + MOST_UNWRITTEN) * MAX_TOKENS
