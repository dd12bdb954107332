"""Pack files as foreign files: damage is found, edits never crash, and failed writes leave nothing behind."""

import importlib.util
import os
import random
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest

from coremill.config.errors import ModelError, PackError
from coremill.native import packfile
from coremill.native.gguf import open_gguf
from coremill.native.packer import write_pack
from coremill.native.packfile import PANEL_ENTRY, PackFile, open_pack

_spec = importlib.util.spec_from_file_location("gguf_writer", Path(__file__).with_name("gguf_writer.py"))
gguf_writer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gguf_writer)
KEY = "00112233445566778899aabbccddeeff"


def reseal(data: bytearray, opened: PackFile | None = None) -> bytes:
    """Makes all checksums of sections and header right again after an edit; those of `opened`'s panel tables too."""
    if opened is not None:
        at, length, crc = opened.panel_tables
        table = data[opened.data_offset + at :][:length]
        old, new = (msgpack.packb(number | 1 << 32) for number in (crc, zlib.crc32(table)))
        data[:] = data.replace(old, new, 1)
    fixed, entry = packfile._FIXED, packfile._SECTION
    for i in range(len(packfile.SECTIONS)):
        at = fixed.size + i * entry.size
        kind, _, offset, length = entry.unpack_from(data, at)
        entry.pack_into(data, at, kind, zlib.crc32(data[offset : offset + length]), offset, length)
    struct.pack_into("<I", data, 4092, zlib.crc32(data[:4092]))
    return bytes(data)


def read_pack(path: Path) -> bool:
    """Whether the pack was accepted; then everything in it is read."""
    try:
        with open_pack(path) as opened:
            assert opened.tokenizer is not None
            assert all(isinstance(piece, bytes) for piece in opened.token_bytes)
            assert opened.chat_template is None or opened.chat_template
            for matrix in opened.matrices.values():
                table = opened.data(matrix.panels_offset, PANEL_ENTRY.size * matrix.num_panels)
                for offset, _, _ in PANEL_ENTRY.iter_unpack(table):
                    assert len(opened.data(offset, 64)) == 64
            for vector in opened.vectors.values():
                assert len(opened.data(vector.offset, 4 * vector.length)) == 4 * vector.length
    except PackError as error:
        assert str(path) in str(error) or "token bytes" in str(error)
        return False
    return True


@pytest.fixture(scope="module")
def small_pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    builder = gguf_writer.tiny_llama(np.random.default_rng(14), layers=1, hidden=32, heads=2, ffn=32, vocab=40)
    with open_gguf(builder.save(folder / "model.gguf")) as model:
        write_pack(model, folder / "model.pack", KEY, {"name": "model.gguf"})
    return folder / "model.pack"


def test_damaged_data_is_found_by_verify(tmp_path, small_pack):
    opened = open_pack(small_pack)
    places = {name: m.offset + 5 for name, m in opened.matrices.items()}
    places |= {name: v.offset for name, v in opened.vectors.items()}
    for name, place in places.items():
        data = bytearray(small_pack.read_bytes())
        data[opened.data_offset + place] ^= 1
        (tmp_path / "p").write_bytes(data)
        open_pack(tmp_path / "p")
        with pytest.raises(PackError, match=f"'{name}'.*checksum"):
            open_pack(tmp_path / "p", verify=True)


def test_damaged_panel_tables_are_found_at_once(tmp_path, small_pack):
    """Also when all that the kernels rely on holds: here two panels of one format have changed places."""
    opened = open_pack(small_pack)
    table = opened.data_offset + opened.matrices["token_embd"].panels_offset
    data = bytearray(small_pack.read_bytes())
    first, second = data[table : table + 16], data[table + 16 : table + 32]
    data[table : table + 32] = second + first
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(PackError, match=r"panel tables: the checksum.*remove the file and pack the model again"):
        open_pack(tmp_path / "p")
    (tmp_path / "p").write_bytes(reseal(data, opened))
    open_pack(tmp_path / "p")


def test_truncated_packs(tmp_path, small_pack):
    data = small_pack.read_bytes()
    for length in [0, 7, 8, 100, 4095, 4096, 5000, 1 << 21, len(data) - 1]:
        (tmp_path / "p").write_bytes(data[:length])
        with pytest.raises(PackError):
            open_pack(tmp_path / "p")
    (tmp_path / "p").write_bytes(data + b"\0")
    with pytest.raises(PackError, match="describes"):
        open_pack(tmp_path / "p")


def test_other_versions_are_refused(tmp_path, small_pack):
    data = bytearray(small_pack.read_bytes())
    struct.pack_into("<I", data, 8, packfile.PACK_VERSION + 1)
    (tmp_path / "p").write_bytes(reseal(data))
    with pytest.raises(PackError, match="version"):
        open_pack(tmp_path / "p")


@pytest.mark.parametrize("sealed", [False, True], ids=["checksums wrong", "checksums right"])
def test_mutated_packs(tmp_path, small_pack, sealed):
    """Edits of header, sections and panel tables. With right checksums only the checks of content are left."""
    original, rng, path = small_pack.read_bytes(), random.Random(15), tmp_path / "p"
    opened = open_pack(small_pack)
    spots = [(0, packfile._FIXED.size + 5 * packfile._SECTION.size)]
    spots += [(offset, length) for _, offset, length in opened._sections.values()]
    spots += [(opened.data_offset, opened.panel_tables[1])]
    path.write_bytes(original)
    accepted = 0
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            start, length = rng.choice(spots)
            at = start + rng.randrange(length)
            number = rng.choice([0, 1, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1, rng.getrandbits(64)])
            size = rng.choice([1, 1, 4, 8])
            data[at : at + size] = number.to_bytes(8, "little")[:size]
        edited = reseal(data, opened) if sealed else bytes(data)
        with open(path, "r+b") as file:  # only what changed: the file is two megabytes of padding
            file.write(edited[: 1 << 17])
            file.seek(opened.data_offset)
            file.write(edited[opened.data_offset :])
        accepted += read_pack(path)
    assert accepted < 1200


def with_section(data: bytes, opened: PackFile, name: str, content: bytes) -> bytes:
    """The pack with another content of a section, of any length that fits."""
    edited = bytearray(data)
    _, offset, _ = opened._sections[name]
    at = packfile._FIXED.size + packfile.SECTIONS.index(name) * packfile._SECTION.size
    packfile._SECTION.pack_into(edited, at, packfile.SECTIONS.index(name), 0, offset, len(content))
    edited[offset : offset + len(content)] = content
    return reseal(edited)


def numbers_in(value, path=()):
    """Paths to all numbers, strings and flags of nested maps and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path
        return
    for key, inner in items:
        yield from numbers_in(inner, (*path, key))


@pytest.mark.parametrize("section", ["description", "directory"])
def test_every_field_with_every_bad_value(tmp_path, small_pack, section):
    """Well-formed sections with right checksums that lie: about sizes, offsets, formats, lengths."""
    original, opened, path = small_pack.read_bytes(), open_pack(small_pack), tmp_path / "p"
    content = opened._unpack(section)
    bad = [0, 1, -1, 63, 64, 4096, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, 1.5, float("nan"), None, "", [], {}, True]
    for where in numbers_in(content):
        for number in bad:
            edited = msgpack.unpackb(msgpack.packb(content))
            inner = edited
            for key in where[:-1]:
                inner = inner[key]
            inner[where[-1]] = number
            path.write_bytes(with_section(original, opened, section, msgpack.packb(edited)))
            read_pack(path)


# ---- memory ----

_MEASURE = """
import fcntl, sys
from pathlib import Path
import msgpack
from coremill.native import lib
from coremill.native.gguf import open_gguf
from coremill.native.packer import write_pack

def peak():
    # Not ru_maxrss: that one starts with the peak of the process that started this one.
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024

lib.cm_panel_bytes(0, 1)
before = peak()
with open_gguf(sys.argv[1]) as model:
    write_pack(model, Path(sys.argv[2]), "00" * 16, {})
print(peak() - before)
"""


def test_memory_stays_near_the_largest_tensor(tmp_path):
    sizes = {"layers": 6, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096}
    builder = gguf_writer.tiny_llama(np.random.default_rng(16), "Q8_0", **sizes)
    largest = max(len(data) for *_, data in builder.tensors)
    source = builder.save(tmp_path / "m.gguf")
    assert source.stat().st_size > 20 * largest
    command = [sys.executable, "-c", _MEASURE, source, tmp_path / "m.pack"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    # Two chunks of buffers beside the largest tensor; the interpreter and its modules were there before.
    assert 0 < int(result.stdout) < largest + (10 << 20)


# ---- disks that are full ----


def _limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_limit_on_file_sizes(tmp_path):
    source = gguf_writer.tiny_llama(np.random.default_rng(17)).save(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from coremill.native.gguf import open_gguf; from coremill.native.packer import write_pack\n"
        "from coremill.config.errors import PackError\n"
        "try: write_pack(open_gguf(sys.argv[1]), Path(sys.argv[2]), '00' * 16, {})\n"
        "except PackError as error: print(error)"
    )
    command = [sys.executable, "-c", code, source, tmp_path / "out" / "m.pack"]
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=_limit_file_size, check=True)
    assert "ulimit -f" in result.stdout
    assert not os.listdir(tmp_path / "out")


def test_errors_while_packing_leave_nothing(tmp_path, monkeypatch):
    source = gguf_writer.tiny_llama(np.random.default_rng(18)).save(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()

    def interrupted(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    for error, progress in ((KeyboardInterrupt, interrupted), (ModelError, None)):
        with open_gguf(source) as model, pytest.raises(error):
            if progress is None:
                os.truncate(source, 5000)
            write_pack(model, tmp_path / "out" / "m.pack", KEY, {}, progress)
        assert not os.listdir(tmp_path / "out")
