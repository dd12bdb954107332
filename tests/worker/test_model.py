"""WorkerModel on small random models against an independent forward pass."""

import math

import numpy as np
import pytest

from coremill.config.errors import EngineError, UnsupportedModelError
from coremill.worker.model import SampleSpec

TOKENS = [(7 * i * i + 3 * i) % 77 for i in range(75)]  # crosses two block borders


def plain_angles(num_tokens: int, dim: int, theta: float = 10000.0) -> np.ndarray:
    return np.arange(num_tokens)[:, None] * theta ** (-2.0 * np.arange(dim // 2) / dim)


def assert_close(ours: np.ndarray, reference: np.ndarray) -> None:
    # Differences come from f32 sums and from keys that fall on the other side of an f16 rounding.
    assert np.abs(ours - reference).max() < 2e-3 * np.abs(reference).max()
    assert np.abs(ours - reference).mean() < 1e-4 * np.abs(reference).max()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"bias": True},
        {"kv_heads": 6, "head_dim": 16, "rope_dim": 16},
        {"kv_heads": 1, "head_dim": 64, "rope_dim": 32, "hidden": 64, "ffn": 96},
        {"architecture": "qwen2", "bias": True},
        {"architecture": "qwen2", "head_dim": 32, "rope_dim": 32, "tied": True},
        {"architecture": "qwen3"},
        {"architecture": "gemma", "tied": True},
        {"architecture": "gemma3", "tied": True, "layers": 7, "window": 33, "theta": 1e6, "seed": 2},
        {"window": 40},
        {"window": 1},
        {"layers": 1, "heads": 1, "kv_heads": 1, "vocab": 16, "head_dim": 8, "rope_dim": 8},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_logits_are_those_of_an_independent_forward_pass(tiny, harness, expected, changes):
    model = tiny(**changes)
    tokens = [t % model.shape.vocab for t in TOKENS]
    reference = expected(model, tokens, plain_angles(len(tokens), model.shape.rope_dim, model.shape.theta))
    assert_close(harness(model.pack, all_logits=True).logits(tokens), reference)


@pytest.mark.parametrize("changes", [{}, {"window": 33}], ids=("plain", "window"))
def test_q8_logits_are_near_those_of_an_independent_forward_pass(tiny, harness, expected, changes):
    """Two random layers; 8 bits of keys, values, queries and weights cost some hundredths of the logits' spread."""
    model = tiny(head_dim=32, **changes)
    reference = expected(model, TOKENS, plain_angles(len(TOKENS), model.shape.rope_dim))
    got = harness(model.pack, all_logits=True, kv="q8").logits(TOKENS)
    assert np.abs(got - reference).mean() < 0.02 * reference.std()


def test_head_sizes_without_kernels_are_refused(tiny, harness):
    with pytest.raises(UnsupportedModelError, match="heads of 20 elements"):
        harness(tiny(head_dim=20).pack)


def test_rope_scalings(tiny, harness, expected):
    plain = plain_angles(len(TOKENS), 20)
    linear = tiny(rope=(("scaling.type", "linear"), ("scaling.factor", 4.0)))
    assert_close(harness(linear.pack, all_logits=True).logits(TOKENS), expected(linear, TOKENS, plain / 4))

    factors = tuple(1.0 + i for i in range(10))
    llama3 = tiny(factors=factors)
    assert_close(
        harness(llama3.pack, all_logits=True).logits(TOKENS), expected(llama3, TOKENS, plain / np.array(factors))
    )

    yarn = tiny(
        rope=(("scaling.type", "yarn"), ("scaling.factor", 4.0), ("scaling.original_context_length", 64)),
    )
    low = max(math.floor(20 * math.log(64 / (32 * 2 * math.pi)) / (2 * math.log(10000.0))), 0)
    high = min(math.ceil(20 * math.log(64 / (2 * math.pi)) / (2 * math.log(10000.0))), 19)
    ramp = np.clip((np.arange(10) - low) / (high - low), 0, 1)
    angles = plain * (1 - ramp) + plain / 4 * ramp
    reference = expected(yarn, TOKENS, angles, magnitude=0.1 * math.log(4) + 1)
    assert_close(harness(yarn.pack, all_logits=True).logits(TOKENS), reference)


LOCAL = {"architecture": "gemma3", "tied": True, "layers": 7, "window": 33}
SHAPES = pytest.mark.parametrize("changes", [{"bias": True}, LOCAL], ids=("plain", "windows"))


@SHAPES
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 32, 64])
def test_chunks_and_threads_do_not_show(tiny, harness, kv, threads, chunk, changes):
    pack = tiny(**changes).pack
    whole = harness(pack, all_logits=True, kv=kv).logits(TOKENS)
    again = harness(pack, all_logits=True, kv=kv, threads=threads).logits(TOKENS, chunk)
    assert whole.tobytes() == again.tobytes()


@SHAPES
def test_batch_mates_do_not_show(tiny, harness, kv, changes):
    """Mixed prefill and decode of five sequences give what each gives alone."""
    pack = tiny(**changes).pack
    prompts = [TOKENS[i : i + n] for i, n in enumerate((1, 31, 32, 33, 50))]
    samples = [SampleSpec(), SampleSpec(1.0, seed=5), SampleSpec(0.7, 0.9, 20, 0.01, 6), SampleSpec(), SampleSpec(2.0)]
    alone = harness(pack, kv=kv)
    lone = [alone.generate(p, 12, sample=s) for p, s in zip(prompts, samples, strict=True)]

    together = harness(pack, threads=2, kv=kv)
    tokens, done = [list(p) for p in prompts], [0] * 5
    blocks = [together.blocks(len(p) + 12) for p in prompts]
    while any(len(t) < len(p) + 12 for t, p in zip(tokens, prompts, strict=True)):
        together.batch.clear()
        rows = []
        for i in sorted(range(5), key=lambda i: (len(tokens[i]) * 7 + i) % 5):  # the order changes from step to step
            pending = len(tokens[i]) - done[i]
            count = min(pending, 11)
            if len(tokens[i]) >= len(prompts[i]) + 12:
                continue
            last = count == pending
            together.batch.add(tokens[i][done[i] : done[i] + count], done[i], blocks[i], samples[i] if last else None)
            done[i] += count
            rows += [i] if last else []
        for i, out in zip(rows, together.model.step(together.batch), strict=True):
            assert out.status == "ok"
            tokens[i].append(out.token)
    assert [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)] == lone


def test_greedy_is_the_best_logit_and_logits_steps_sample_too(tiny, harness):
    h = harness(tiny().pack, all_logits=True)
    logits = h.logits(TOKENS)
    (out,) = h.step((TOKENS[:50], 0, h.blocks(50), SampleSpec()))
    assert out == (int(logits[49].argmax()), "ok")
    h.batch.clear()
    h.batch.add(TOKENS[:10], 0, h.blocks(10), SampleSpec())
    h.batch.add(TOKENS[:20], 0, h.blocks(20), SampleSpec())
    rows = np.frombuffer(h.model.logits_step(h.batch), np.float32).reshape(30, -1)
    assert rows[:10].tobytes() == logits[:10].tobytes() and rows[10:].tobytes() == logits[:20].tobytes()


def test_blocks_hold_everything(tiny, harness, kv):
    """A sequence goes on from its blocks alone: in another model object over the same arena."""
    pack = tiny().pack
    first = harness(pack, kv=kv)
    whole = first.generate(TOKENS[:40], 10)
    blocks = first.blocks(60)
    (out,) = first.step((TOKENS[:40], 0, blocks, SampleSpec()))
    assert out.token == whole[0]
    other = harness(pack, kv=kv)
    other.model.close()
    other.model = type(first.model)(pack, first.arena, max_step_tokens=64)
    (out,) = other.step((whole[:3], 40, blocks, SampleSpec()))
    assert out.token == whole[3]


@pytest.mark.parametrize("count", [0, 1, 13, 31, 32])
def test_a_copied_block_goes_on_as_the_original_would(tiny, harness, kv, count):
    h = harness(tiny().pack, kv=kv)
    whole = h.generate(TOKENS[:70], 3)
    source, target = h.blocks(64), h.blocks(80)
    h.step((TOKENS[:32] + TOKENS[40:72], 0, source, None))  # its second block has other tokens than ours, but for
    h.step((TOKENS[32 : 32 + count] or TOKENS[:1], 32, source, None))  # the first few
    h.model.copy_block(source[1], target[1], count)
    h.model.copy_block(source[0], target[0], 32)
    (out,) = h.step((TOKENS[32 + count : 70], 32 + count, target, SampleSpec()))
    assert out.token == whole[0]


@pytest.mark.parametrize(("source", "target", "count"), [(0, 0, 1), (-1, 1, 1), (0, 64, 1), (0, 1, 33), (0, 1, -1)])
def test_copies_of_nothing_are_refused(tiny, harness, source, target, count):
    with pytest.raises(EngineError, match=f"{count} tokens of block {source} to block {target}"):
        harness(tiny().pack, num_blocks=64).model.copy_block(source, target, count)


def test_nonfinite_logits_are_one_rows_status(tiny, harness):
    h = harness(tiny().pack)
    good, bad = h.blocks(40), h.blocks(40)
    h.step((TOKENS[:33], 0, good, None))
    h.step((TOKENS[:20], 0, bad, None))
    (expected,) = h.step((TOKENS[33:34], 33, good, SampleSpec()))
    # NaN keys in the other sequence's block.
    start = h.arena.address + bad[0] * h.geometry.block_bytes
    from coremill.native import ffi

    ffi.memmove(ffi.cast("char *", start), b"\xff\x7f" * 64, 128)
    for sample in (SampleSpec(), SampleSpec(1.0, seed=3)):
        outs = h.step((TOKENS[20:21], 20, bad, sample), (TOKENS[33:34], 33, good, SampleSpec()))
        assert outs == [(-1, "nonfinite"), expected]


def test_what_a_step_refuses(tiny, harness):
    h = harness(tiny().pack, num_blocks=8)
    before = h.generate(TOKENS[:20], 3)
    refused = {
        "token 77 of 77": (([77], 0, [0], None),),
        "token -1 of 77": (([-1], 0, [0], None),),
        "block 8 of 8": (([1], 0, [8], None),),
        "block -1 of 8": (([1] * 33, 0, [0, -1], None),),
        "limit 256": (([1] * 7, 250, [0] * 9, None),),
        "temperature": (([1], 0, [0], SampleSpec(-1.0)),),
        "temperature is": (([1], 0, [0], SampleSpec(math.nan)),),
        "top_p": (([1], 0, [0], SampleSpec(1.0, top_p=0.0)),),
        "min_p": (([1], 0, [0], SampleSpec(1.0, min_p=1.5)),),
        "top_k": (([1], 0, [0], SampleSpec(1.0, top_k=-1)),),
        "0 rows": (),
    }
    for message, rows in refused.items():
        with pytest.raises(EngineError, match=message):
            h.step(*rows)
    with pytest.raises(EngineError, match="all logits"):
        h.batch.clear()
        h.batch.add([1], 0, [0])
        h.model.logits_step(h.batch)
    h._next_block = 4
    assert h.generate(TOKENS[:20], 3) == before


def test_what_a_batch_refuses(tiny, harness):
    h = harness(tiny().pack, max_step_tokens=8, max_sequences=2)
    for message, row in {
        "0 tokens": ([], 0, [0]),
        "9 tokens": ([1] * 9, 0, [0]),
        "blocks for 8 tokens at 30": ([1] * 8, 30, [0]),
        "at -1": ([1], -1, [0]),
    }.items():
        with pytest.raises(ValueError, match=message):
            h.batch.add(*row)
    h.batch.add([1], 0, [0])
    assert h.batch.room == 7
    h.batch.add([1], 0, [1])
    assert h.batch.room == 0
    with pytest.raises(ValueError, match="room for 0"):
        h.batch.add([1], 0, [2])


def test_profile_progress_and_table(tiny, harness):
    words = memoryview(bytearray(64)).cast("Q")
    h = harness(tiny().pack, profile=True, progress=words)
    h.generate(TOKENS[:20], 5)
    profile = h.model.profile()
    assert words[0] == 5 * len(profile) and words[1] == 0
    assert [p.calls for p in profile] == [5] * len(profile)
    assert all(p.seconds > 0 for p in profile)
    table = h.model.op_table().splitlines()
    assert len(table) == len(profile) + 1
    assert any("1.ffn_gate_up" in line and "silu(gate) * up" in line for line in table)
    assert harness(tiny().pack).model.profile() == []


def test_arena_of_another_model(tiny, harness):
    with pytest.raises(EngineError, match="num_kv_heads"):
        h = harness(tiny().pack)
        type(h.model)(tiny(kv_heads=6).pack, h.arena)
