"""Packing: unpacked panels equal the source value for value, for every format and fusion."""

import importlib.util
import stat
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coremill.config.errors import UnsupportedModelError
from coremill.config.formats import BY_NAME, FORMATS, Format
from coremill.config.layout import all_rules
from coremill.native import ffi, lib
from coremill.native.gguf import open_gguf
from coremill.native.packer import write_pack
from coremill.native.packfile import PackFile, open_pack


def _helper(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gguf_writer, r16 = _helper("gguf_writer"), _helper("r16")
KEY = "00112233445566778899aabbccddeeff"
NAMES = list(BY_NAME)


# ---- an independent reader of panels ----


def codes_of(panel: np.ndarray, fmt: Format, k: int) -> np.ndarray:
    """Codes uint8 [16][k] of a panel's first plane, straight from the layout's description."""
    bits = int(fmt.name[1])
    lines = panel.reshape(k // 32, {4: 4, 5: 5, 6: 6, 8: 8}[bits], 16, 4)  # [block][line][row][i]
    codes = np.zeros((k // 32, 8, 16, 4), np.uint8)  # [block][group][row][i]
    for j in range(8):
        if bits == 8:
            codes[:, j] = lines[:, j]
            continue
        codes[:, j] = lines[:, j % 4] & 15 if j < 4 else lines[:, j % 4] >> 4
        if bits == 5:
            codes[:, j] |= (lines[:, 4] >> j & 1) << 4
        if bits == 6:
            codes[:, j] |= (lines[:, 4 + j // 4] >> 2 * (j % 4) & 3) << 4
    return codes.transpose(2, 0, 1, 3).reshape(16, k)


def unpack_panel(data: bytes | memoryview, fmt: Format, k: int) -> np.ndarray:
    """The values f32 [16][k] of one panel."""
    raw = np.frombuffer(data, np.uint8)
    if fmt.block_len == 1:
        values = raw[: k * 16 * fmt.block_bytes].view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[fmt.name])
        if fmt.name == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(k, 16).T.astype(np.float32)
    plane = k // 32 * {"4": 256, "5": 320, "6": 384, "8": 512}[fmt.name[1]]
    codes = codes_of(raw[:plane], fmt, k).astype(np.float32)
    scales = raw[plane:]

    def halves(block: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(block).view("<f2").astype(np.float32)

    def spread(per_block: np.ndarray, length: int) -> np.ndarray:
        return np.repeat(per_block.T, length, axis=1)  # [block][16] -> [16][k]

    if fmt.name in ("Q4_0", "Q5_0", "Q8_0"):
        zero = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}[fmt.name]
        return spread(halves(scales[: k // 32 * 32].reshape(-1, 32)), 32) * (codes - np.float32(zero))
    if fmt.name in ("Q4_1", "Q5_1"):
        both = halves(scales[: k // 32 * 64].reshape(-1, 64))
        return spread(both[:, :16], 32) * codes + spread(both[:, 16:], 32)
    if fmt.name == "Q6_K":
        block = scales[: k // 256 * 288].reshape(-1, 288)
        sub = block[:, 32:].view(np.int8).reshape(-1, 16, 16).astype(np.float32)  # [256-block][sub][row]
        d = halves(block[:, :32])[:, None] * sub
        return spread(d.reshape(-1, 16), 16) * (codes - np.float32(32))
    block = scales[: k // 256 * 320].reshape(-1, 320)
    sub = block[:, 64:].reshape(-1, 2, 8, 16).astype(np.float32)
    d, dmin = halves(block[:, :32])[:, None] * sub[:, 0], halves(block[:, 32:64])[:, None] * sub[:, 1]
    return spread(d.reshape(-1, 16), 32) * codes - spread(dmin.reshape(-1, 16), 32)


def dequantized(raw: bytes, fmt: Format, rows: int, k: int) -> np.ndarray:
    """The gguf package's values."""
    data = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    if fmt.name in ("F32", "F16"):
        data = data.view({"F32": np.float32, "F16": np.float16}[fmt.name])
    return gguf.dequantize(data, gguf.GGMLQuantizationType(fmt.type_id)).astype(np.float32).reshape(rows, k)


def pack_rows(raw: bytes, fmt: Format, rows: int, k: int, stride_extra: int = 0) -> tuple[np.ndarray, int, int]:
    """Panels in memory with an unreadable page right behind, and their size and stride."""
    size = lib.cm_panel_bytes(fmt.type_id, k)
    stride, panels = size + stride_extra, -(-rows // 16)
    source = r16.guarded(len(raw), np.uint8)
    source[:] = np.frombuffer(raw, np.uint8)
    out = r16.guarded((panels - 1) * stride + size, np.uint8, 0xAA)
    result = lib.cm_pack_panels(
        fmt.type_id, ffi.from_buffer(source), len(raw), k, rows, ffi.from_buffer(out), len(out), stride
    )
    assert result == 0
    return out, size, stride


# ---- one matrix in C ----


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 9), extreme=st.booleans(), seed=st.integers(0, 1 << 30))
def test_unpacked_panels_equal_the_source(name, rows, blocks, extreme, seed):
    fmt, rng = BY_NAME[name], np.random.default_rng(seed)
    k = blocks * fmt.block_len if fmt.block_len > 1 else blocks * 7
    raw = gguf_writer.random_tensor(rng, fmt, rows, k, extreme=extreme)
    out, size, stride = pack_rows(raw, fmt, rows, k, stride_extra=64)
    panels = [out[i * stride : i * stride + size] for i in range(-(-rows // 16))]
    values = np.concatenate([unpack_panel(panel.tobytes(), fmt, k) for panel in panels])
    np.testing.assert_array_equal(values[:rows], dequantized(raw, fmt, rows, k))
    assert not np.any(values[rows:])  # zero rows fill the last panel
    for i in range(len(panels) - 1):  # and nothing is written between panels
        assert np.all(out[i * stride + size : (i + 1) * stride] == 0xAA)
    source = np.frombuffer(raw, np.uint8).reshape(rows, -1)
    for i, panel in enumerate(panels):
        assert panel.tobytes() == r16.pack_panel(fmt, source[16 * i : 16 * i + 16], k)


def test_sizes_that_do_not_fit_are_refused():
    q4, size = BY_NAME["Q4_0"].type_id, lib.cm_panel_bytes(BY_NAME["Q4_0"].type_id, 64)
    source, out = ffi.new("uint8_t[]", 36 * 20), ffi.new("uint8_t[]", 2 * size)

    def pack(format=q4, src_len=36 * 20, k=64, rows=20, dst_len=2 * size, stride=size) -> int:
        return lib.cm_pack_panels(format, source, src_len, k, rows, out, dst_len, stride)

    assert pack() == 0
    for wrong in (
        {"format": 4}, {"format": -1}, {"format": 1 << 30}, {"src_len": 719}, {"src_len": 721}, {"src_len": 0},
        {"k": 48}, {"k": 0}, {"k": -64}, {"k": 1 << 30}, {"rows": 0}, {"rows": -1}, {"rows": 19}, {"rows": 1 << 30},
        {"dst_len": 2 * size - 1}, {"dst_len": 0}, {"stride": size - 1}, {"stride": 1 << 62}, {"stride": 0},
    ):  # fmt: skip
        assert pack(**wrong) == -1, wrong


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_panel_sizes(fmt):
    for k in (1, 31, 32, 33, 256, 320, 576, 4096):
        size = lib.cm_panel_bytes(fmt.type_id, k)
        if k % fmt.block_len:
            assert size == 0
        else:
            assert size % 64 == 0
            widened = k // 256 * 16 * {"Q4_K": 8, "Q5_K": 8, "Q6_K": 0}.get(fmt.name, 0) // 2
            assert 0 <= size - 16 * fmt.row_bytes(k) - widened < 64 + (k // 256) * 64


# ---- whole files ----


def pack(folder: Path, builder, name: str = "model") -> PackFile:
    source = builder.save(folder / f"{name}.gguf")
    out = folder / f"{name}.pack"
    with open_gguf(source) as model:
        write_pack(model, out, KEY, {"name": source.name})
    return open_pack(out, verify=True)


def panel_data(opened: PackFile, name: str) -> list[tuple[Format, bytes]]:
    matrix = opened.matrices[name]
    table = np.frombuffer(opened.data(matrix.panels_offset, 16 * matrix.num_panels), r16.PANEL)
    panels = []
    for offset, type_id, _ in table.tolist():
        fmt = FORMATS[type_id]
        panels.append((fmt, bytes(opened.data(offset, lib.cm_panel_bytes(type_id, matrix.k)))))
    return panels


def matrix_values(opened: PackFile, name: str) -> np.ndarray:
    k = opened.matrices[name].k
    return np.concatenate([unpack_panel(data, fmt, k) for fmt, data in panel_data(opened, name)])


def check_against_source(opened: PackFile, builder) -> None:
    """Every part of every matrix and vector, through the fusion, against the tensors that went in."""
    tensors = {name: (shape, type_id, data) for name, shape, type_id, data in builder.tensors}
    for rule in all_rules(opened.spec):
        if rule.name in opened.matrices:
            values = matrix_values(opened, rule.name)
            for i, part in enumerate(rule.parts):
                (k, rows), type_id, data = tensors[part.source]
                step = 16 * len(rule.parts) if rule.fusion == "interleave" else 16
                picked = [values[rule.first_row(i) + p * step :][:16] for p in range(part.panels)]
                expected = dequantized(data, FORMATS[type_id], rows, k)
                np.testing.assert_array_equal(np.concatenate(picked)[:rows], expected, rule.name)
        elif rule.name in opened.vectors and rule.matrix is None:
            vector = opened.vectors[rule.name]
            expected = np.frombuffer(tensors[rule.parts[0].source][2], np.float32)
            np.testing.assert_array_equal(np.frombuffer(opened.data(vector.offset, 4 * vector.length), "<f4"), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("name", NAMES)
def test_whole_model_of_each_format(tmp_path, name):
    small = BY_NAME[name].block_len < 256
    sizes = (
        {"hidden": 96, "heads": 3, "kv_heads": 1, "ffn": 160, "vocab": 331} if small else {"hidden": 256, "ffn": 512}
    )
    builder = gguf_writer.tiny_llama(np.random.default_rng(5), name, extreme=True, layers=1, tied=False, **sizes)
    check_against_source(pack(tmp_path, builder), builder)


def test_mixed_formats_as_in_real_files(tmp_path):
    formats = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q5_K", "attn_k": "Q5_0", "token_embd": "Q8_0"}
    formats |= {"ffn_up": "Q4_1", "attn_output": "BF16", "output": "Q6_K"}
    builder = gguf_writer.tiny_llama(np.random.default_rng(6), formats, hidden=256, ffn=256, vocab=300, tied=False)
    opened = pack(tmp_path, builder)
    check_against_source(opened, builder)
    qkv = opened.matrices["blk.1.attn_qkv"]
    assert [FORMATS[f].name for f in qkv.formats] == ["Q4_K", "Q5_0", "Q6_K"]
    assert qkv.parts == (("blk.1.attn_q", 0, 256), ("blk.1.attn_k", 256, 128), ("blk.1.attn_v", 384, 128))
    gate_up = [fmt.name for fmt, _ in panel_data(opened, "blk.0.ffn_gate_up")]
    assert gate_up == ["Q4_K", "Q4_1"] * 16


def test_parts_that_end_within_a_panel(tmp_path):
    """Rows that are no multiple of 16 are filled up part by part, and biases likewise."""
    sizes = {"hidden": 36, "heads": 6, "kv_heads": 3, "ffn": 40, "vocab": 259}
    builder = gguf_writer.tiny_llama(np.random.default_rng(7), "F16", biases=True, rope_factors=True, **sizes)
    opened = pack(tmp_path, builder)
    check_against_source(opened, builder)
    tensors = {name: np.frombuffer(data, np.float32) for name, _, t, data in builder.tensors if t == 0}

    def vector(name: str) -> np.ndarray:
        return np.frombuffer(opened.data(opened.vectors[name].offset, 4 * opened.vectors[name].length), "<f4")

    qkv = opened.matrices["blk.0.attn_qkv"]
    assert qkv.parts == (("blk.0.attn_q", 0, 36), ("blk.0.attn_k", 48, 18), ("blk.0.attn_v", 80, 18))
    bias = np.zeros(16 * qkv.num_panels, np.float32)
    for name, first, rows in qkv.parts:
        bias[first : first + rows] = tensors[f"{name}.bias"]
    np.testing.assert_array_equal(vector("blk.0.attn_qkv.bias"), bias)
    paired = vector("blk.0.ffn_gate_up.bias").reshape(3, 2, 16)
    for i, name in enumerate(("gate", "up")):
        rows = paired[:, i].reshape(-1)
        np.testing.assert_array_equal(rows[:40], tensors[f"blk.0.ffn_{name}.bias"])
        assert not rows[40:].any()
    np.testing.assert_array_equal(vector("rope_factors"), tensors["rope_freqs.weight"])
    assert opened.spec.rope.scaling == "llama3"


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_vectors_become_f32(tmp_path, name):
    builder = gguf_writer.tiny_llama(np.random.default_rng(8), "F32", layers=1)
    raw = gguf_writer.random_tensor(np.random.default_rng(9), BY_NAME[name], 1, 64)
    at = [t[0] for t in builder.tensors].index("output_norm.weight")
    builder.tensors[at] = ("output_norm.weight", (64,), BY_NAME[name].type_id, raw)
    opened = pack(tmp_path, builder)
    values = np.frombuffer(opened.data(opened.vectors["output_norm"].offset, 256), "<f4")
    np.testing.assert_array_equal(values, dequantized(raw, BY_NAME[name], 1, 64)[0])


def test_split_model_packs_like_a_whole_one(tmp_path):
    builder = gguf_writer.tiny_llama(np.random.default_rng(10), "Q8_0")
    whole = pack(tmp_path, builder)
    tensors, half = builder.tensors, len(builder.tensors) // 2
    for index, part in enumerate((tensors[:half], tensors[half:])):
        file = gguf_writer.GGUFBuilder()
        file.raw_keys = list(builder.raw_keys) if index == 0 else []
        for key, number in (("no", index), ("count", 2), ("tensors.count", len(tensors))):
            file.add(f"split.{key}", "u16", number)
        file.tensors = part
        file.save(tmp_path / f"split-{index + 1:05d}-of-00002.gguf")
    with open_gguf(tmp_path / "split-00001-of-00002.gguf") as model:
        write_pack(model, tmp_path / "split.pack", KEY, {"name": "model.gguf"})
    assert (tmp_path / "split.pack").read_bytes()[4096:] == whole.path.read_bytes()[4096:]


def test_form_of_the_file(tmp_path):
    builder = gguf_writer.tiny_llama(np.random.default_rng(11), "Q4_0", tied=False)
    opened = pack(tmp_path, builder)
    info = opened.path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o444
    assert opened.data_offset % (2 << 20) == 0 and opened.data_offset + opened.data_length == info.st_size
    for matrix in opened.matrices.values():
        assert matrix.offset % 4096 == 0 and matrix.panels_offset % 64 == 0
    assert all(vector.offset % 64 == 0 for vector in opened.vectors.values())
    assert opened.key == KEY and opened.identity.change() is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "model.pack"]
    # The small parts.
    tokens = dict(zip(range(300), gguf_writer.byte_level_tokens(300)[0], strict=True))
    assert opened.tokenizer["tokenizer.ggml.tokens"] == list(tokens.values())
    assert opened.chat_template == "{{ messages[0]['content'] }}"
    table = opened.token_bytes
    assert len(table) == 300 and table[0] == table[2] == b""
    assert sorted(table[i] for i in range(3, 259)) == [bytes([b]) for b in range(256)]
    assert table[260] == b"ab"
    with pytest.raises(IndexError):
        table[300]


def test_sentencepiece_token_bytes():
    from coremill.native.token_bytes import TokenBytes, build_token_bytes

    pieces = ["<unk>", "<s>", "▁the", "<0xE4>", "é", "<tool>", "[unused]"]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces}
    metadata["tokenizer.ggml.token_type"] = [2, 3, 1, 6, 1, 4, 5]
    table = TokenBytes(memoryview(build_token_bytes(metadata)))
    assert list(table) == [b"", b"", b" the", b"\xe4", "é".encode(), b"<tool>", b""]
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.model 'bert'"):
        build_token_bytes(metadata | {"tokenizer.ggml.model": "bert"})
    with pytest.raises(UnsupportedModelError, match="token_type has 1 entries"):
        build_token_bytes(metadata | {"tokenizer.ggml.token_type": [1]})


# ---- what is refused ----


def refused(folder: Path, builder, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        pack(folder, builder)
    assert [p.name for p in folder.iterdir()] == ["model.gguf"]


def test_unsupported_formats_are_named(tmp_path):
    for type_id, size, name in ((10, 84, "Q2_K"), (20, 18, "IQ4_NL"), (39, 17, "MXFP4")):
        builder = gguf_writer.tiny_llama(np.random.default_rng(12), "F32", hidden=256, layers=1)
        at = [t[0] for t in builder.tensors].index("blk.0.attn_k.weight")
        length = 256 if type_id == 10 else 32
        builder.tensors[at] = ("blk.0.attn_k.weight", (256, 128), type_id, bytes(256 * 128 // length * size))
        refused(tmp_path, builder, f"'blk.0.attn_k.weight' has format {name}")


def test_missing_extra_and_misshapen_tensors(tmp_path):
    rng = np.random.default_rng(13)
    builder = gguf_writer.tiny_llama(rng)
    del builder.tensors[-1]
    refused(tmp_path, builder, "'output_norm.weight' is missing")
    builder = gguf_writer.tiny_llama(rng)
    builder.tensor("blk.0.attn_q_norm.weight", (16,), 0, bytes(64))
    refused(tmp_path, builder, "'blk.0.attn_q_norm.weight' has no place")
    builder = gguf_writer.tiny_llama(rng)
    builder.tensor("blk.0.ffn_gate_exps.weight", (16,), 0, bytes(64))
    refused(tmp_path, builder, "mixtures of experts are not supported")
    builder = gguf_writer.tiny_llama(rng, ffn=96)
    builder.tensors = [(n, (64, 64) if "ffn_up" in n else s, t, d) for n, s, t, d in builder.tensors]
    refused(tmp_path, builder, r"'blk.0.ffn_up.weight' has shape \(64, 64\), but .* \(64, 96\)")
    builder = gguf_writer.tiny_llama(rng, layers=1)
    builder.tensors = [(n, s, 8 if "output_norm" in n else t, d) for n, s, t, d in builder.tensors]
    refused(tmp_path, builder, "'output_norm.weight' has format Q8_0")
