"""Whole runs: every row once, in the right file, with the right numbers."""

import gzip
import json
import random
import zlib

import pytest

from coremill.config.errors import RunError


def prompts(num, **extra):
    return [{"custom_id": f"row-{i}", "prompt": f"prompt {i}", **extra} for i in range(num)]


def test_every_row_once_with_the_answer_of_its_request(batch):
    batch.write(prompts(500))
    ran = batch.run()
    assert set(batch.answers()) == {f"row-{i}" for i in range(500)}
    assert batch.failures() == []
    assert not batch.errors.exists()
    assert ran.outcome.stopped is None
    progress = ran.outcome.progress
    assert (progress.num_read, progress.num_results, progress.num_errors, progress.num_rows) == (500, 500, 0, 500)


def test_shape_of_a_result_line(batch):
    batch.write([{"custom_id": "a", "prompt": "hi"}, {"messages": [{"role": "user", "content": "yo"}]}])
    batch.run(in_order=True)
    first, second = batch.results()
    assert list(first) == ["id", "custom_id", "response", "error", "timing"]
    assert first["id"].startswith("batch_req_")
    assert first["error"] is None
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"].startswith("req_")
    body = first["response"]["body"]
    assert body["object"] == "text_completion" and body["model"] == "fake" and body["system_fingerprint"] == "fp_0"
    choice = body["choices"][0]
    assert choice["text"] and choice["finish_reason"] == "length" and choice["index"] == 0
    usage = body["usage"]
    assert usage["prompt_tokens"] == 2 and usage["total_tokens"] == 2 + usage["completion_tokens"]
    assert first["timing"] == {
        "queued_seconds": 0.1, "prefill_seconds": 0.2, "decode_seconds": 0.3, "worker": 0, "cached_tokens": 0,
    }  # fmt: skip
    assert second["custom_id"] == "line-2"
    body = second["response"]["body"]
    assert body["object"] == "chat.completion" and body["choices"][0]["message"]["role"] == "assistant"


def test_default_length_is_16_for_completions_and_the_room_left_for_chats(batch):
    batch.write([{"prompt": "hi"}, {"messages": [{"role": "user", "content": "yo"}]}, {"prompt": "x", "max_tokens": 3}])
    ran = batch.run()
    by_key = {request.key: request for request in ran.engine.submitted}
    assert by_key["line-1"].max_tokens == 16
    assert by_key["line-2"].max_tokens == 100 - len("<user>yo")
    assert by_key["line-3"].max_tokens == 3


def test_seeds_come_from_the_row_or_from_run_seed_and_custom_id(batch):
    batch.write([{"custom_id": "a", "prompt": "x"}, {"custom_id": "b", "prompt": "x", "seed": -1}])
    one = {request.key: request.seed for request in batch.run().engine.submitted}
    batch.out.unlink()
    two = {request.key: request.seed for request in batch.run(run_seed=1).engine.submitted}
    assert one["b"] == two["b"] == 2**64 - 1
    assert one["a"] != two["a"]
    # A fixed point of the file format: results of older versions must stay reproducible.
    assert one["a"] == 12116123774835215124


def test_input_order_when_asked(batch, fake_engine):
    batch.write([row if i % 7 else "broken" for i, row in enumerate(prompts(300))])
    batch.run(engine=fake_engine(slots=30), in_order=True, window_rows=50)
    assert [row["custom_id"] for row in batch.results()] == [f"row-{i}" for i in range(300) if i % 7]
    assert [row["custom_id"] for row in batch.failures()] == [f"line-{i + 1}" for i in range(0, 300, 7)]


def test_as_they_finish_otherwise(batch, fake_engine):
    batch.write(prompts(300))
    batch.run(engine=fake_engine(slots=30))
    assert [row["custom_id"] for row in batch.results()] != [f"row-{i}" for i in range(300)]


def test_the_window_bounds_rows_in_flight(batch, fake_engine):
    batch.write(prompts(300))
    for options in ({}, {"in_order": True}):
        ran = batch.run(engine=fake_engine(slots=100), window_rows=20, **options)
        assert ran.engine.most_waiting <= 20
        batch.out.unlink()


def test_errors_of_each_stage_go_to_the_error_file(batch, fake_engine):
    batch.write(
        [
            {"custom_id": "ok", "prompt": "hi"},
            "not json",
            {"custom_id": "template", "prompt": "bad template"},
            {"custom_id": "long", "prompt": "x" * 99},
            {"custom_id": "engine", "prompt": "y"},
        ]
    )
    ran = batch.run(engine=fake_engine(fail=frozenset({"engine"})))
    assert list(batch.answers()) == ["ok"]
    failures = {row["custom_id"]: row["error"] for row in batch.failures()}
    assert {key: (error["code"], error["line"]) for key, error in failures.items()} == {
        "line-2": ("invalid_json", 2),
        "template": ("template_error", 3),
        "long": ("context_length_exceeded", 4),
        "engine": ("nonfinite", 5),
    }
    message = failures["long"]["message"]
    assert "99 tokens" in message and "16 (the default)" in message and "115" in message and "100" in message
    assert ran.outcome.error_codes == {
        "invalid_json": 1, "template_error": 1, "context_length_exceeded": 1, "nonfinite": 1,
    }  # fmt: skip


def test_plan_of_a_small_file(batch):
    batch.write([*prompts(10), {"prompt": "x" * 99}])
    ((plan, num_rows, skipped),) = batch.run().plans
    assert (plan.whole, plan.num_rows, plan.num_unfit, plan.num_read) == (True, 10, 1, 11)
    assert plan.prompt_tokens == 10 * len("prompt 0") and plan.max_new_tokens == 160
    assert plan.shared_tokens == 9 * len("prompt ")
    assert (num_rows, skipped) == (11, 0)


def test_plan_of_a_large_file_covers_its_first_rows(batch):
    batch.write(prompts(5000))
    ((plan, num_rows, _),) = batch.run().plans
    assert not plan.whole and 0 < plan.num_rows < 5000  # 1024, or what a quarter of a second is enough for
    assert 4000 < num_rows < 6000


def test_plan_counts_what_will_surprise(batch):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    batch.write([chat, {**chat, "max_tokens": 3}, {"prompt": "x", "max_tokens": 65}, {"prompt": "x", "max_tokens": 64}])
    ((plan, _, _),) = batch.run(rules={"arena_tokens": 64}).plans
    assert (plan.num_rows, plan.num_unlimited, plan.num_unfit_arena) == (4, 1, 2)


def test_rows_may_name_any_model_when_asked(batch):
    batch.write([{"custom_id": "a", "model": "gpt-4o-mini", "prompt": "x"}])
    batch.run()
    (failure,) = batch.failures()
    assert failure["error"]["code"] == "model_not_found" and "--any-model" in failure["error"]["message"]
    batch.run(rules={"models": None}, retry=True)
    assert set(batch.answers()) == {"a"}


def test_plain_text_as_chats(batch):
    batch.write(b"Hello\n")
    seen = []

    def prepare(requests):
        seen.extend(requests)
        return [(1, 2)] * len(requests)

    batch.run(format="text", rules={"chat": True, "system": "Be brief."}, prepare_with=prepare)
    (request,) = seen
    assert request.kind == "chat" and request.prompt is None
    roles = [(message["role"], message["content"]) for message in request.messages]
    assert roles == [("system", "Be brief."), ("user", "Hello")]
    assert batch.results()[0]["response"]["body"]["object"] == "chat.completion"


def test_automatic_custom_ids_that_are_taken(batch):
    batch.write([{"custom_id": "line-2", "prompt": "x"}, {"prompt": "y"}, {"custom_id": "line-2", "prompt": "z"}])
    batch.run()
    assert set(batch.answers()) == {"line-2"}
    automatic, given = (row["error"]["message"] for row in batch.failures())
    assert automatic.startswith("the row has no 'custom_id', and its automatic one, 'line-2', is an earlier row's")
    assert given == "'custom_id' is 'line-2': an earlier row has it already"


@pytest.mark.parametrize("in_order", [False, True])
def test_rows_in_front_of_a_broken_end_are_run_before_it_is_an_error(batch, in_order):
    rows = [{"custom_id": f"row-{i}", "prompt": f"prompt {random.Random(i).random()}"} for i in range(2000)]
    packed = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    whole = zlib.decompressobj(wbits=31).decompress(packed[: len(packed) // 2]).count(b"\n")
    batch.write(packed[: len(packed) // 2], "in.jsonl.gz")
    for _ in range(2):
        with pytest.raises(RunError, match=f"after line {whole}: .*; the rows before it are done"):
            batch.run(input=batch.folder / "in.jsonl.gz", in_order=in_order)
        assert set(batch.answers()) == {f"row-{i}" for i in range(whole)} and not batch.errors.exists()
    batch.write(packed, "in.jsonl.gz")
    batch.run(input=batch.folder / "in.jsonl.gz", in_order=in_order)
    assert len(batch.answers()) == len(rows)


def test_an_empty_input_is_a_run_of_no_rows(batch):
    batch.write(b"")
    ran = batch.run()
    assert batch.results() == [] and ran.outcome.progress.num_rows == 0


def test_error_lines_are_json_whatever_the_row_was(batch):
    batch.write(
        [json.dumps({"custom_id": "a", "prompt": "x", "\ud800\x1b[2J": 1}), json.dumps({"custom_id": "\ud800"})]
    )
    batch.run()
    assert [row["error"]["code"] for row in batch.failures()] == ["unknown_parameter", "invalid_value"]
