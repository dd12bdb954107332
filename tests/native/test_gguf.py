"""The GGUF reader on well-formed files, and the name and offset it gives for each fault."""

import array
import importlib.util
import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from coremill.config.errors import GGUFError, UnsupportedModelError
from coremill.config.model import ModelSpec
from coremill.native.gguf import GGML_TYPES, open_gguf

_spec = importlib.util.spec_from_file_location("gguf_writer", Path(__file__).with_name("gguf_writer.py"))
gguf_writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_writer)
GGUFBuilder, string = gguf_writer.GGUFBuilder, gguf_writer.string


def failure(path: Path, data: bytes) -> GGUFError:
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    return caught.value


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("version", [2, 3])
def test_every_metadata_type(path, version):
    file = GGUFBuilder(version)
    numbers = {
        "u8": 200,
        "i8": -3,
        "u16": 65535,
        "i16": -300,
        "u32": 1 << 31,
        "i32": -5,
        "u64": 1 << 63,
        "i64": -(1 << 62),
    }
    for kind, number in numbers.items():
        file.add(f"one.{kind}", kind, number)
        file.add(f"many.{kind}", f"[{kind}]", [number, 0, 1])
    file.add("one.f32", "f32", 0.5)
    file.add("one.f64", "f64", 1e300)
    file.add("many.f64", "[f64]", [1e300, -0.0])
    file.add("one.bool", "bool", True)
    file.add("many.bool", "[bool]", [True, False])
    file.add("one.string", "string", "Größe 世界")
    file.add("many.string", "[string]", ["", "a", "世界"])
    file.add("nested.bools", "[[bool]]", [[], [True]])
    file.add("nested", "[[i16]]", [[1, -2], [], [3]])
    file.add("nested.strings", "[[string]]", [["a"], ["b", "c"]])
    file.add("empty", "[u32]", [])
    metadata = open_gguf(file.save(path)).metadata
    for kind, number in numbers.items():
        assert metadata[f"one.{kind}"] == number
        assert metadata[f"many.{kind}"].tolist() == [number, 0, 1]
    assert metadata["one.f32"] == 0.5 and metadata["one.f64"] == 1e300
    assert metadata["many.f64"] == array.array("d", [1e300, -0.0])
    assert metadata["one.bool"] is True
    flags = metadata["many.bool"]
    assert repr(flags.tolist()) == repr(list(flags)) == repr(flags[:]) == "[True, False]"
    assert len(flags) == 2 and flags[0] is True and flags[-1] is False
    assert repr(metadata["nested.bools"].tolist()) == "[[], [True]]"
    assert metadata["one.string"] == "Größe 世界"
    strings = metadata["many.string"]
    assert list(strings) == ["", "a", "世界"] == strings.tolist()
    assert (len(strings), strings[-1], strings[1:]) == (3, "世界", ["a", "世界"])
    assert metadata["nested"].tolist() == [[1, -2], [], [3]]
    assert metadata["nested.strings"].tolist() == [["a"], ["b", "c"]]
    assert len(metadata["empty"]) == 0


def test_booleans_are_no_numbers_of_a_model(path):
    """One for each layer would pass as 1."""
    file = gguf_writer.tiny_llama(np.random.default_rng(1))
    file.raw_keys = [key for key in file.raw_keys if b"head_count_kv" not in key]
    file.add("llama.attention.head_count_kv", "[bool]", [True, True])
    made = open_gguf(file.save(path))
    with pytest.raises(UnsupportedModelError, match=r"head_count_kv is an array of 2, not a number or one for each"):
        ModelSpec.from_gguf(made.metadata, made.tensors)


def test_agrees_with_the_gguf_package(path):
    """A file written by the reference library reads back alike, offsets included."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    writer.add_array("some.floats", [0.5, 1.5])
    writer.add_custom_alignment(64)
    tensors = {"a": rng.random((3, 5), np.float32), "b": rng.random((7,), np.float32).astype(np.float16)}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata["tokenizer.ggml.tokens"].tolist() == ["a", "b", "ü"]
    assert ours.metadata["some.floats"].tolist() == [0.5, 1.5]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(int(length) for length in tensor.shape)
        assert bytes(ours.data(tensor.name)) == tensors[tensor.name].tobytes()
        part = memoryview(bytearray(4))
        ours.read_into(tensor.name, 2, part)
        assert part == tensors[tensor.name].tobytes()[2:6]


def test_type_table_agrees_with_the_gguf_package():
    for number, (block_len, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[int(number)]
        # The package counts the two scales of Q8_1, which no file holds, as f32; ggml has f16.
        assert ours == (number.name, block_len, 36 if number.name == "Q8_1" else block_bytes)


def test_large_vocabularies_are_quick(path):
    file = GGUFBuilder()
    file.add("tokenizer.ggml.tokens", "[string]", [f"token{i}" for i in range(262_144)])
    file.save(path)
    start = time.process_time()
    tokens = open_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert time.process_time() - start < 0.9
    assert tokens[262_143] == "token262143"


# ---- faults ----


def header(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


@pytest.mark.parametrize(
    ("data", "field", "offset", "words"),
    [
        (b"", "header", 0, "24 bytes"),
        (b"GGUF\3\0\0\0", "header", 0, "24 bytes"),
        (b"PK\3\4" + bytes(40), "magic", 0, "not a GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version", 4, "big-endian"),
        (header(version=1), "version", 4, "1 is not supported"),
        (header(version=4), "version", 4, "4 is not supported"),
        (header(tensors=1 << 63), "tensor count", 8, "limit"),
        (header(tensors=1000), "tensor count", 8, "do not fit"),
        (header(keys=(1 << 64) - 1), "metadata key count", 16, "limit"),
        (header(keys=1) + struct.pack("<Q", 1 << 62), "metadata key 0 length", 24, "limit"),
        (header(keys=1) + string("k") + struct.pack("<I", 13), "metadata 'k' type", 33, "13"),
        (header(keys=1) + string(b"\xff\xfe") + bytes(9), "metadata key 0", 32, "UTF-8"),
        (header(keys=1) + string("") + bytes(9), "metadata key 0", 24, "empty"),
        (header(keys=1) + string("k") + struct.pack("<IB", 7, 2), "metadata 'k'", 37, "boolean"),
        (header(keys=1) + string("k") + struct.pack("<IIQBB", 9, 7, 2, 1, 2), "metadata 'k'", 49, "boolean"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 61), "metadata 'k' count", 41, "do not fit"),
        (header(keys=1) + string("k") + struct.pack("<IIQ", 9, 99, 0), "metadata 'k' element type", 37, "99"),
        (header(keys=1) + string("k") + struct.pack("<IQ", 8, 50), "metadata 'k'", 45, "ends"),
    ],
)  # fmt: skip
def test_header_and_metadata_faults(path, data, field, offset, words):
    error = failure(path, data)
    assert (error.field, error.offset) == (field, offset)
    assert words in str(error) and str(path) in str(error)


def test_second_string_of_an_array_is_named(path):
    file = GGUFBuilder()
    file.add("k", "[string]", ["good", b"\xff"])
    error = failure(path, file.build())
    assert error.field == "metadata 'k'[1]" and "UTF-8" in str(error)


def test_nested_arrays_end(path):
    bomb = struct.pack("<IQ", 9, 1) * 10_000
    error = failure(path, header(keys=1) + string("k") + struct.pack("<I", 9) + bomb + bytes(64))
    assert "nested" in str(error)


def test_duplicate_keys(path):
    file = GGUFBuilder()
    file.add("k", "u8", 1)
    file.add("k", "u8", 1)
    error = failure(path, file.build())
    assert error.offset == 24 + len(string("k")) + 5 and "twice" in str(error)


@pytest.mark.parametrize("alignment", [0, 1, 24, 1 << 21, -32])
def test_bad_alignment(path, alignment):
    file = GGUFBuilder()
    file.add("general.alignment", "i32", alignment)
    assert failure(path, file.build()).field == "metadata 'general.alignment'"


@pytest.mark.parametrize(
    ("tensor", "what", "words"),
    [
        (("t", (0,), 0), "dimension 0", "empty"),
        (("t", (4, 0), 0), "dimension 1", "empty"),
        (("t", (1 << 63,), 0), "dimension 0", "too large"),
        (("t", (1 << 32, 1 << 32), 0), "dimension 1", "too large"),
        (("t", (1 << 40, 1 << 12, 1 << 12), 0), "dimension 2", "too large"),
        (("t", (), 0), "dimension count", "0"),
        (("t", (1, 1, 1, 1, 1), 0), "dimension count", "5"),
        (("t", (32,), 4), "type", "4"),
        (("t", (32,), 1 << 31), "type", "not a GGML"),
        (("t", (33,), 2), "type", "multiple of 32"),
        (("t", (128,), 14), "type", "multiple of 256"),
        (("t", (1 << 20,), 0), "offset", "file has"),
    ],
)  # fmt: skip
def test_tensor_faults(path, tensor, what, words):
    file = GGUFBuilder()
    file.tensor(*tensor, bytes(128))
    error = failure(path, file.build())
    assert error.field == f"tensor 't' {what}" and words in str(error)
    assert error.offset is not None and 24 <= error.offset < len(file.build())


@pytest.mark.parametrize(
    ("offsets", "words"),
    [([0, 16], "alignment"), ([0, 32], "overlaps"), ([32, 0], "overlaps"), ([0, 1 << 62], "file has")],
)
def test_tensor_offset_faults(path, offsets, words):
    file = GGUFBuilder()
    file.tensor("a", (16,), 0, bytes(64))
    file.tensor("b", (16,), 0, bytes(64))
    assert words in str(failure(path, file.build(offsets)))


def test_duplicate_and_unnamed_tensors(path):
    for name, words in (("a", "twice"), ("", "empty")):
        file = GGUFBuilder()
        file.tensor("a", (16,), 0, bytes(64))
        file.tensor(name, (16,), 0, bytes(64))
        assert words in str(failure(path, file.build()))


def test_truncated_anywhere(path):
    data = gguf_writer.tiny_llama(np.random.default_rng(0), layers=1, hidden=32, heads=2, ffn=32, vocab=8).build()
    path.write_bytes(data)
    last = max(t.offset + t.nbytes for t in open_gguf(path).tensors.values())
    for length in range(0, last, 7):
        assert failure(path, data[:length]).field


def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "regular"), (".", "regular"), ("absent", "No such file")):
        with pytest.raises(GGUFError, match=words):
            open_gguf(tmp_path / name)


def test_file_cut_short_while_read(path):
    file = GGUFBuilder()
    file.tensor("a", (1024,), 0, bytes(4096))
    opened = open_gguf(file.save(path))
    os.truncate(path, 200)
    with pytest.raises(GGUFError, match="cut short"):
        opened.read_into("a", 0, memoryview(bytearray(4096)))
    with pytest.raises(ValueError, match="outside"):
        opened.read_into("a", 4090, memoryview(bytearray(16)))


# ---- split files ----


def split_model(folder: Path, **changes: int) -> list[Path]:
    """Three files of two tensors each. `changes` overrides the keys of the last file."""
    paths = []
    for index in range(3):
        file = GGUFBuilder()
        if index == 0:
            file.add("general.architecture", "string", "llama")
        keys = {"no": index, "count": 3, "tensors_count": 6} | (changes if index == 2 else {})
        file.add("split.no", "u16", keys["no"])
        file.add("split.count", "u16", keys["count"])
        file.add("split.tensors.count", "i32", keys["tensors_count"])
        for i in range(2):
            file.tensor(f"t{2 * index + i}", (8,), 0, np.full(8, 2 * index + i, np.float32).tobytes())
        paths.append(file.save(folder / f"m-{index + 1:05d}-of-00003.gguf"))
    return paths


@pytest.mark.parametrize("given", [0, 2])
def test_split_files_are_joined(tmp_path, given):
    paths = split_model(tmp_path)
    model = open_gguf(paths[given])
    assert model.paths == paths and model.metadata["general.architecture"] == "llama"
    assert list(model.tensors) == [f"t{i}" for i in range(6)]
    for i in range(6):
        assert bytes(model.data(f"t{i}")) == np.full(8, i, np.float32).tobytes()
    assert b"".join(bytes(chunk) for chunk in model.chunks(100)) == b"".join(p.read_bytes() for p in paths)


@pytest.mark.parametrize(("changes", "words"), [({"no": 1}, "split.no"), ({"count": 2}, "split.count")])
def test_split_files_that_disagree(tmp_path, changes, words):
    with pytest.raises(GGUFError, match=words):
        open_gguf(split_model(tmp_path, **changes)[0])


def test_split_files_missing_renamed_or_doubled(tmp_path):
    paths = split_model(tmp_path)
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    with pytest.raises(GGUFError, match="not named like"):
        open_gguf(renamed)
    first = GGUFBuilder()
    for key, number in (("no", 0), ("count", 3), ("tensors.count", 5)):
        first.add(f"split.{key}", "u16", number)
    first.tensor("t2", (8,), 0, bytes(32))
    first.save(paths[0])
    with pytest.raises(GGUFError, match="two files"):
        open_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(GGUFError, match="No such file"):
        open_gguf(paths[0])
