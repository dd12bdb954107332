"""Whatever a row's bytes must not depend on, changed one by one and together, on real rows."""

from __future__ import annotations

import random

import pytest

from coremill.config.topology import survey
from coremill.native import ffi, lib

ISAS = {ffi.string(lib.cm_isa_name(i)).decode(): lib.cm_isa_supported(i) for i in range(lib.cm_isa_count())}
# On a machine with a single core, two workers are refused.
TWO = str(min(2, survey().budget))

# What differs from the base run. Names are options of `coremill run`, except isa (COREMILL_ISA) and shuffled.
ALONE = [
    {"workers": "1"},
    {"workers": TWO},
    {"max_active": "1"},
    {"max_active": "5"},
    {"max_active": "16"},
    {"step_tokens": "7"},
    {"step_tokens": "64"},
    {"step_tokens": "512"},
    {"isa": "avx2"},
    {"isa": "avx_vnni"},
    {"isa": "avx512_vnni"},
    {"shuffled": "1"},
    {"no_prefix_cache": ""},
    {"no_lending": "", "workers": TWO},
]
MIXED = [
    {"workers": TWO, "max_active": "1", "step_tokens": "512", "isa": "avx2"},
    {"workers": "1", "max_active": "5", "step_tokens": "64", "shuffled": "2"},
    {"cores_per_worker": TWO, "step_tokens": "7", "isa": "avx_vnni"},
    # Room for the document and little else: the others wait.
    {"workers": TWO, "arena": "52M", "step_tokens": "32", "shuffled": "3"},
    {"workers": "1", "max_active": "16", "step_tokens": "3", "isa": "avx512_vnni"},
    {"cores_per_worker": TWO, "max_active": "5", "step_tokens": "100", "shuffled": "4", "in_order": ""},
]


@pytest.fixture(scope="module")
def rows(workload):
    """A long document, labels that share a prefix, short chats, greedy and sampled, and bare completions."""
    (document,) = [row for row in workload("read") if row["custom_id"] == "read-0013"]  # 1,784 tokens
    document["body"]["max_tokens"] = 10
    labels, chats = workload("label")[:6], workload("write")[:10]
    ways = [{"temperature": 1}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.5, "top_k": 20, "min_p": 0.05}]
    for number, row in enumerate(chats):
        row["body"]["max_tokens"] = 8 + 2 * number
        if number >= 4:  # without a seed of its own, a row draws one from its custom_id
            row["body"] |= ways[number % 3] | ({"seed": number} if number % 2 else {})
    return [*labels, document, *chats, *short_rows()]


def short_rows():
    """Few enough tokens for the scalar kernels."""
    asked = [
        ("The capital of France is", {"temperature": 0}),
        ("Bees make", {"temperature": 0.9, "top_p": 0.9, "seed": 5}),
        ("1, 2, 3,", {"temperature": 0, "stop": [" 6", "\n"]}),
    ]
    return [
        {"custom_id": f"short-{number}", "prompt": prompt, "max_tokens": 5, **fields}
        for number, (prompt, fields) in enumerate(asked)
    ]


@pytest.fixture(scope="module")
def runs(make_runs):
    return make_runs()


@pytest.fixture(scope="module")
def base(rows, runs):
    return runs.fresh(rows)


def in_words(setting: dict[str, str]) -> str:
    return "-".join(f"{name}_{value}".rstrip("_") for name, value in setting.items())


@pytest.mark.parametrize("setting", ALONE + MIXED, ids=in_words)
def test_same_bytes(rows, base, runs, setting):
    setting = dict(setting)
    environ = {}
    if isa := setting.pop("isa", None):
        if not ISAS[isa]:
            pytest.skip(f"this CPU lacks {isa}")
        environ["COREMILL_ISA"] = isa
    if seed := setting.pop("shuffled", None):
        rows = random.Random(seed).sample(rows, len(rows))
    options = [word for name, value in setting.items() for word in (f"--{name.replace('_', '-')}", value) if word]
    assert runs.fresh(rows, *options, **environ) == base
    if isa is not None:
        assert {worker["isa"] for worker in runs.stats()["workers"]} == {isa}


def test_same_bytes_of_the_scalar_kernels(base, runs):
    made = runs.fresh(short_rows(), COREMILL_ISA="scalar")
    assert made == {name: base[name] for name in made}
    assert {worker["isa"] for worker in runs.stats()["workers"]} == {"scalar"}


def test_same_bytes_when_sequences_give_way(workload, make_runs):
    """Room for two rows where eight want to grow: some are interrupted and go on later."""
    rows, runs = workload("write")[:8], make_runs()
    for row in rows:
        row["body"] |= {"max_tokens": 100, "temperature": 0.8}
    plenty = runs.fresh(rows)
    assert runs.fresh(rows, "--arena", "7M") == plenty
    assert runs.stats()["sequences"]["paused"] > 0


def test_rows_do_not_run_alike_by_chance(base, runs, rows):
    """Another seed of the run changes rows that draw theirs from it, and no other."""
    chosen = [row for row in rows if row.get("body", row)["temperature"]]
    drawn = {row["custom_id"] for row in chosen if "seed" not in row.get("body", row)}
    made = runs.fresh(chosen, "--seed", "1")
    assert {name for name in made if made[name] != base[name]} == drawn
