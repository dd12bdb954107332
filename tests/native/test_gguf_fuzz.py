"""Thousands of broken files: each is read, or refused with one error; never a crash, a hang, or memory that the
file's own size does not account for."""

import importlib.util
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from coremill.config.errors import GGUFError, ModelError
from coremill.native.gguf import open_gguf
from coremill.native.packer import PackPlan

_spec = importlib.util.spec_from_file_location("gguf_writer", Path(__file__).with_name("gguf_writer.py"))
gguf_writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_writer)

NUM_MUTATIONS = 6000
# Counts, lengths and offsets at which arithmetic goes wrong when it does.
BAD_NUMBERS = [0, 1, 2, 7, 9, 31, 255, 1 << 15, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40]
BAD_NUMBERS += [(1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


def small_model() -> bytes:
    """Every kind of metadata, several formats, two layers' worth of tensors, about 30 kB."""
    formats = {"": "Q8_0", "attn_q": "Q4_1", "ffn_down": "F16", "token_embd": "Q5_0"}
    file = gguf_writer.tiny_llama(np.random.default_rng(3), formats, hidden=32, heads=2, ffn=32, vocab=40)
    for kind in gguf_writer.NUMBERS:
        file.add(f"test.{kind}", kind, 1)
        file.add(f"test.many.{kind}", f"[{kind}]", [0, 1, 1])
    file.add("test.nested", "[[string]]", [["a", "bc"], [], ["d"]])
    return file.build()


def mutate(rng: random.Random, data: bytes, interesting: int) -> bytes:
    """One to three edits, most of them in the first `interesting` bytes."""
    edited = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(interesting) if rng.random() < 0.9 else rng.randrange(len(edited))
        at = min(at, len(edited) - 8)
        kind = rng.randrange(7)
        if kind == 0:
            edited[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            struct.pack_into("<Q", edited, at, rng.choice(BAD_NUMBERS))
        elif kind == 2:
            struct.pack_into("<I", edited, at, rng.choice(BAD_NUMBERS) & 0xFFFFFFFF)
        elif kind == 3:
            del edited[at : at + rng.randint(1, 40)]
        elif kind == 4:
            edited[at:at] = rng.randbytes(rng.randint(1, 40))
        elif kind == 5:
            source = rng.randrange(len(edited) - 64)
            edited[at : at + 40] = edited[source : source + 40]
        else:
            del edited[max(at, 64) :]
        if len(edited) < 80:
            break
    return bytes(edited)


def read_everything(path: Path) -> bool:
    """Whether the file was accepted. Then all of it is looked at, as the packer would."""
    try:
        with open_gguf(path) as model:
            for value in model.metadata.values():
                if hasattr(value, "tolist"):
                    value.tolist()
            for name, info in model.tensors.items():
                assert len(model.data(name)) == info.nbytes
            try:
                PackPlan(model)
            except ModelError as error:
                assert str(error)
    except GGUFError as error:
        assert error.field and str(path) in str(error)
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_mutations(tmp_path, seed):
    data, path, rng = small_model(), tmp_path / "m.gguf", random.Random(seed)
    path.write_bytes(data)
    interesting = min(t.offset for t in open_gguf(path).tensors.values())
    tracemalloc.start()
    try:
        assert read_everything(path)
        baseline = tracemalloc.get_traced_memory()[1]
        accepted, slowest = 0, 0.0
        for _ in range(NUM_MUTATIONS // 4):
            edited = mutate(rng, data, interesting)
            path.write_bytes(edited)
            del edited
            tracemalloc.reset_peak()
            before, start = tracemalloc.get_traced_memory()[0], time.process_time()
            accepted += read_everything(path)
            slowest = max(slowest, time.process_time() - start)
            # Python keeps text at up to 4 bytes a character, beside the bytes it decodes.
            assert tracemalloc.get_traced_memory()[1] - before <= baseline + 5 * len(data)
    finally:
        tracemalloc.stop()
    # Some edits hit padding or weights; if none or most passed, the fuzzer would be testing nothing.
    assert 0 < accepted < NUM_MUTATIONS // 8
    assert slowest < 2


def test_every_header_field_with_every_bad_number(tmp_path):
    """Each position of the header and the first keys, so that no count is left to chance."""
    data, path = small_model(), tmp_path / "m.gguf"
    for at in range(4, 160):
        for number in BAD_NUMBERS:
            edited = bytearray(data)
            struct.pack_into("<Q", edited, at, number)
            path.write_bytes(edited)
            read_everything(path)


@pytest.mark.parametrize("kind", ["u8", "string", "[u8]"])
def test_memory_of_large_arrays_is_bounded_by_the_file(tmp_path, kind):
    """The worst a file can ask for: as many elements as it has room for, each as small as can be."""
    file = gguf_writer.GGUFBuilder()
    file.add("k", f"[{kind}]", ["" if kind == "string" else [] if kind == "[u8]" else 1] * 200_000)
    path = file.save(tmp_path / "m.gguf")
    tracemalloc.start()
    try:
        metadata = open_gguf(path).metadata
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(metadata["k"]) == 200_000
    assert peak < path.stat().st_size + 100_000
