"""The default model: a request's tokens do not depend on how its rows were computed."""

import json
import os
import random
from pathlib import Path

import pytest

from coremill.native import ffi, lib, select_isa
from coremill.native.packfile import open_pack
from coremill.worker.model import SampleSpec

ISAS = [ffi.string(lib.cm_isa_name(i)).decode() for i in range(lib.cm_isa_count()) if lib.cm_isa_supported(i)]
SAMPLES = [SampleSpec(), SampleSpec(1.0, seed=11), SampleSpec(0.8, 0.95, 40, 0.0, 12)]
COUNT = 12


@pytest.fixture(scope="module")
def pack(smollm2_pack: Path):
    with open_pack(smollm2_pack) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[list[int]]:
    """Three prompts, cut so that none of 7, 32 and 64 divides their lengths."""
    lines = (repo_root / "tests/data/reference/smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    ids = [json.loads(line)["prompt_ids"] for line in lines]
    rest = [token for line in ids[1:] for token in line]
    return [ids[0], rest[:75], rest[75:206]]


@pytest.fixture
def generate(pack, prompts, harness, kv):
    """generate(chunk, **options) -> tokens of the three prompts, one after the other."""

    def run(chunk: int = 64, **options) -> list[list[int]]:
        h = harness(pack, max_step_tokens=64, kv=kv, **options)
        return [h.generate(prompts[i], COUNT, chunk, SAMPLES[i]) for i in range(3)]

    return run


@pytest.fixture
def undisturbed(generate) -> list[list[int]]:
    return generate()


@pytest.mark.parametrize(("chunk", "threads"), [(1, 1), (7, 1), (64, 2), (7, 2)])
def test_chunks_and_threads(generate, undisturbed, chunk, threads):
    assert generate(chunk, threads=threads) == undisturbed


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_that_come_and_go(pack, prompts, harness, kv, undisturbed, threads):
    """Between any two steps, cores are borrowed, exchanged and given back."""
    cores, rng = sorted(os.sched_getaffinity(0)), random.Random(threads)
    h = harness(pack, max_step_tokens=64, kv=kv, threads=threads)
    step = h.model.step

    def step_with_others(batch):
        h.model.borrow(rng.choices(cores, k=rng.randrange(3)))
        return step(batch)

    h.model.step = step_with_others
    assert [h.generate(prompts[i], COUNT, 7, SAMPLES[i]) for i in range(3)] == undisturbed


def test_batch_mates(pack, prompts, harness, kv, undisturbed):
    """All three at once, with thirteen other sequences in the same steps."""
    h = harness(pack, num_blocks=128, kv=kv)
    tokens = [list(p) for p in prompts] + [[17 * i + 3] for i in range(13)]
    samples = SAMPLES + [SampleSpec(1.0, seed=i) for i in range(13)]
    ends = [len(t) + COUNT for t in tokens]
    blocks, done = [h.blocks(end) for end in ends], [0] * len(tokens)
    while any(len(t) < end for t, end in zip(tokens[:3], ends, strict=False)):
        h.batch.clear()
        rows = []
        for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i]) - done[i]):
            count = min(len(tokens[i]) - done[i], h.batch.room, 23)
            if count == 0 or len(tokens[i]) == ends[i]:
                continue
            last = done[i] + count == len(tokens[i])
            h.batch.add(tokens[i][done[i] : done[i] + count], done[i], blocks[i], samples[i] if last else None)
            done[i] += count
            rows += [i] if last else []
        for i, out in zip(rows, h.model.step(h.batch), strict=True):
            tokens[i].append(out.token)
    assert [t[-COUNT:] for t in tokens[:3]] == undisturbed


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(pack, prompts, harness, kv, undisturbed, isa):
    """All three prompts; for scalar, which is slow, one that crosses a block."""
    before = ffi.string(lib.cm_isa_active()).decode()
    cut = prompts[2][:34]
    fast = harness(pack, kv=kv).generate(cut, 3, sample=SAMPLES[1])
    try:
        select_isa(isa)
        h = harness(pack, max_step_tokens=64, kv=kv)
    finally:
        select_isa(before)  # a model keeps the kernels it was made with
    assert h.generate(cut, 3, sample=SAMPLES[1]) == fast
    if isa != "scalar":
        assert [h.generate(prompts[i], COUNT, 64, SAMPLES[i]) for i in range(3)] == undisturbed
