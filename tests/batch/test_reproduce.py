"""The command that runs one row alone."""

from __future__ import annotations

import shlex

from coremill.config.engine import EngineConfig
from coremill.config.request import GenerationRequest, SamplingParams, SequenceRequest
from coremill.coordinator.batch.job import BatchOptions
from coremill.coordinator.batch.reproduce import reproducing, reproducing_call


def command(input: str = "in.jsonl", format: str = "jsonl", engine=None, defaults=None, **more) -> str:
    options = BatchOptions(
        input, "out.jsonl", "smollm2", engine or EngineConfig(), defaults or SamplingParams(), **more
    )
    return reproducing(options, format)(7)


TAIL = "coremill run - -m smollm2 --format jsonl --workers 1 -o reproduce.jsonl"


def test_a_plain_file():
    assert command() == f"sed -n '7{{p;q}}' in.jsonl | {TAIL}"


def test_names_are_quoted():
    assert command("my file.jsonl").startswith("sed -n '7{p;q}' 'my file.jsonl' | ")


def test_compressed_and_standard_input():
    assert command("a.jsonl.gz") == f"zcat a.jsonl.gz | sed -n '7{{p;q}}' | {TAIL}"
    assert command("a.zst") == f"zstdcat a.zst | sed -n '7{{p;q}}' | {TAIL}"
    assert command("-") == f"sed -n '7{{p;q}}' INPUT | {TAIL}"


def test_what_the_result_depends_on_comes_along_and_nothing_else():
    made = command(
        format="text",
        engine=EngineConfig(workers=2, max_active=3, ctx=512, seed=9, prefix_cache=False),
        defaults=SamplingParams(temperature=0.5, stop=("a b", "c")),
        chat=True,
        system="Be brief.",
        in_order=True,
    )
    words = shlex.split(made.partition(" | ")[2])
    assert words[:9] == ["coremill", "run", "-", "-m", "smollm2", "--format", "text", "--workers", "1"]
    assert words[9:] == [
        *("--ctx", "512", "--seed", "9", "--temperature", "0.5", "--stop", '["a b", "c"]', "--chat"),
        *("--system", "Be brief.", "-o", "reproduce.jsonl"),
    ]


def test_a_job_in_python():
    sampling = SamplingParams(temperature=0.0, top_k=5)
    request = GenerationRequest("a", "chat", ({"role": "user", "content": "Hi"},), None, sampling, allow_special=True)
    sequence = SequenceRequest("a", (1, 2), max_tokens=9, temperature=0.0, top_k=5, seed=0)
    config = EngineConfig(workers=3, max_active=2, prefix_cache=False)
    call = "Coordinator('smollm2', workers=1).submit(messages=..., max_tokens=9, seed=0, temperature=0.0, top_k=5"
    assert reproducing_call("smollm2", config, request, sequence) == f"{call}, allow_special=True)"
