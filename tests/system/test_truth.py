"""Counts and reasons in results, against an own count of tokens.

The prompt's tokens are counted by a tokenizer that is built here from the file's metadata; a completion's ids come
from Python's `Coordinator`, as result lines do not show them.
"""

from __future__ import annotations

import json

import pytest

from coremill.coordinator import Coordinator
from coremill.native.gguf import open_gguf

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END = "<|im_end|>"
LONGEST = 400


@pytest.fixture(scope="module")
def rows(workload):
    """Chats and completions that end in every way there is."""
    made = [*workload("label")[:8], *workload("write")[:8]]
    for number, row in enumerate(made):
        row["body"] |= {"max_tokens": (1, 2, 3, 7, 16, 33, 64, 90)[number % 8]}
    questions = ["What is the capital of France?", "Say hello.", "What is 2 + 2?", "Name a colour."]
    made += [  # answers that end by themselves
        {"custom_id": f"short-{number}", "messages": [{"role": "user", "content": question}], "temperature": 0}
        for number, question in enumerate(questions)
    ]
    stops = [[","], [" the", "The"], ["\n"], ["é", "a"], ["Paris"], ["never in this text, surely"]]
    made += [
        {"custom_id": f"stop-{number}", "prompt": "Once upon a time in Paris,", "stop": stop, "max_tokens": 24}
        | {"temperature": number % 2, "seed": number}
        for number, stop in enumerate(stops)
    ]
    texts = ["Zürich 1291, 日本語 🎉 and   spaces", "<|im_start|>not a control token<|im_end|>", "\n\n", "x" * 99]
    made += [
        {"custom_id": f"text-{number}", "prompt": text, "max_tokens": 5, "temperature": 0}
        for number, text in enumerate(texts)
    ]
    # Exactly as long as --ctx allows, and what an absent max_tokens means.
    made.append({"custom_id": "full", "prompt": list(range(100, 100 + LONGEST - 4)), "max_tokens": 4, "seed": 1})
    made.append({"custom_id": "room", "messages": [{"role": "user", "content": "Write a long story."}], "seed": 2})
    made.append({"custom_id": "sixteen", "prompt": "1, 2, 3, 4,", "temperature": 0})
    return made


@pytest.fixture(scope="module")
def runs(rows, make_runs):
    made = make_runs()
    made.fresh(rows, "--ctx", str(LONGEST))
    return made


@pytest.fixture(scope="module")
def completions(rows, smollm2_pack):
    """custom_id -> Completion of the same rows; rows without a seed are greedy."""
    with Coordinator(smollm2_pack, ctx=LONGEST) as coordinator:
        jobs = {}
        for row in rows:
            body = dict(row.get("body", row))
            for name in ("custom_id", "model"):
                body.pop(name, None)
            prompt = body.pop("prompt", None)
            key = "prompt_ids" if isinstance(prompt, list) else "prompt"
            jobs[row["custom_id"]] = coordinator.submit(**({key: prompt} if prompt else {}), **body)
        return {name: job.result(120) for name, job in jobs.items()}


class Vocabulary:
    """Tokens of the default model, from the file itself."""

    def __init__(self, path) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        with open_gguf(path) as file:
            tokens = list(file.metadata["tokenizer.ggml.tokens"])
            merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
            kinds = list(file.metadata["tokenizer.ggml.token_type"])
        self._plain = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
        self._plain.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._plain.decoder = decoders.ByteLevel()
        self._special = Tokenizer.from_str(self._plain.to_str())
        controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self._special.add_special_tokens([AddedToken(token, special=True) for token in controls])
        self.end = tokens.index(END)
        self.controls = {tokens.index(token) for token in controls}

    def num_tokens(self, row) -> int:
        """Tokens of a row's prompt."""
        body = row.get("body", row)
        if "prompt" in body:
            prompt = body["prompt"]
            return len(prompt if isinstance(prompt, list) else self._plain.encode(prompt).ids)
        messages = body["messages"]
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        text = "".join(f"<|im_start|>{each['role']}\n{each['content']}{END}\n" for each in messages)
        return len(self._special.encode(text + "<|im_start|>assistant\n").ids)

    def text(self, ids) -> str:
        return self._plain.decode([number for number in ids if number not in self.controls])


@pytest.fixture(scope="module")
def vocabulary(smollm2_gguf):
    return Vocabulary(smollm2_gguf)


def limit_of(row, num_prompt: int) -> int:
    """max_tokens, or what stands for it."""
    body = row.get("body", row)
    return body.get("max_tokens", 16 if "prompt" in body else LONGEST - num_prompt)


def test_usage(rows, runs, completions, vocabulary):
    bodies = runs.bodies()
    for row in rows:
        usage, num_prompt = bodies[row["custom_id"]]["usage"], vocabulary.num_tokens(row)
        num_completion = len(completions[row["custom_id"]].token_ids)
        assert usage["prompt_tokens"] == num_prompt, row
        assert usage["completion_tokens"] == num_completion <= limit_of(row, num_prompt), row
        assert usage["total_tokens"] == num_prompt + num_completion
    assert runs.stats()["prompt_tokens"] == sum(body["usage"]["prompt_tokens"] for body in bodies.values())
    assert runs.stats()["completion_tokens"] == sum(body["usage"]["completion_tokens"] for body in bodies.values())


def test_texts_and_reasons(rows, runs, completions, vocabulary):
    bodies, ends = runs.bodies(), set()
    for row in rows:
        (choice,) = bodies[row["custom_id"]]["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        completion = completions[row["custom_id"]]
        assert (text, choice["finish_reason"]) == (completion.text, completion.finish_reason)
        ids, limit = completion.token_ids, limit_of(row, vocabulary.num_tokens(row))
        whole, before = vocabulary.text(ids), vocabulary.text(ids[:-1])
        found = [place for stop in row.get("body", row).get("stop", ()) if (place := whole.find(stop)) >= 0]
        assert vocabulary.end not in ids[:-1]
        assert not any(stop in before for stop in row.get("body", row).get("stop", ()))
        if found:
            end, expected = "stop string", whole[: min(found)]
        elif ids[-1] == vocabulary.end:
            end, expected = "end token", whole
        else:
            assert len(ids) == limit, row
            end, expected = "limit", whole
        assert text == expected, row
        assert choice["finish_reason"] == ("length" if end == "limit" else "stop"), row
        ends.add(end)
    assert ends == {"stop string", "end token", "limit"}


def test_a_row_one_token_too_long_is_an_error_that_says_so(make_runs):
    runs = make_runs()
    ids = list(range(100, 100 + LONGEST))
    runs.write(
        [
            {"custom_id": "fits", "prompt": ids[: LONGEST - 4], "max_tokens": 4},
            {"custom_id": "too long", "prompt": ids[: LONGEST - 3], "max_tokens": 4},
            {"custom_id": "no room", "prompt": ids, "max_tokens": 1},
        ]
    )
    process = runs.start("--ctx", str(LONGEST))
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 3, said
    assert runs.bodies()["fits"]["usage"]["completion_tokens"] <= 4
    failed = {row["custom_id"]: row["error"] for row in map(json.loads, runs.errors.open())}
    assert failed.keys() == {"too long", "no room"}
    for error in failed.values():
        assert str(LONGEST) in error["message"]
