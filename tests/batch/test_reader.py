"""Files as people have them: every byte sequence becomes rows, error rows, or one clear error."""

import gzip
import hashlib
import json
import os
import threading
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from coremill.config.errors import RunError
from coremill.coordinator.batch.reader import LineReader
from coremill.coordinator.batch.source import open_source

ROWS = b"".join(b'{"prompt":"%d"}\n' % i for i in range(1000))


@pytest.fixture
def read(tmp_path):
    def reading(data: bytes, name: str = "in.jsonl", asked: str = "auto", **options):
        path = tmp_path / name
        path.write_bytes(data)
        source = open_source(str(path))
        try:
            reader = LineReader(source, asked, **options)
            return reader.format, [(line.number, line.data, line.error and line.error.code) for line in reader]
        finally:
            source.close()

    return reading


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1}\n{"b":2}\n', b'{"a":1}\n{"b":2}', b'{"a":1}\r\n{"b":2}\r\n', b'\xef\xbb\xbf{"a":1}\n{"b":2}\n',
        b'{"a":1}\n{"b":2}\r', b' {"a":1}\t\n{"b":2}  \n',
    ],
)  # fmt: skip
def test_line_ends_and_marks(read, data):
    assert read(data) == ("jsonl", [(1, b'{"a":1}', None), (2, b'{"b":2}', None)])


def test_blank_lines_count_but_are_no_rows(read):
    assert read(b'\n\r\n  \n{"a":1}\n\n{"b":2}\n\n')[1] == [(4, b'{"a":1}', None), (6, b'{"b":2}', None)]
    assert read(b"") == ("jsonl", [])
    assert read(b"\n\n", "in.dat") == ("jsonl", [])
    assert read(b"\xef\xbb\xbf") == ("jsonl", [])


def test_only_line_feeds_end_lines(read):
    odd = "a\u2028b\u0085c\x0bd\x0ce\rf".encode()
    assert read(odd, "in.txt") == ("text", [(1, odd, None)])


@pytest.mark.parametrize("size", [-2, -1, 0, 1, 2, 3, 100, 5000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_lines_around_the_limit(read, size, end):
    limit = 1000
    data = b"x" * (limit + size)
    rows = read(b"first\n" + data + end + (b"last" if end else b""), "in.txt", limit=limit)[1]
    expected = (2, data, None) if size <= 0 else (2, b"", "line_too_long")
    assert rows == [(1, b"first", None), expected, *([(3, b"last", None)] if end else [])]


def test_text_keeps_the_spaces_of_prompts(read):
    assert read(b"  a b \n\tc\r\n", "in.txt") == ("text", [(1, b"  a b ", None), (2, b"\tc", None)])


@pytest.mark.parametrize(
    ("name", "data", "asked", "expected"),
    [
        ("a.jsonl", b"plain", "auto", "jsonl"), ("a.ndjson", b"plain", "auto", "jsonl"),
        ("a.TXT", b"{}", "auto", "text"), ("a.dat", b"\n {", "auto", "jsonl"),
        ("a.dat", b"\n[x", "auto", "text"), ("a", b"hello {", "auto", "text"),
        ("a.jsonl", b"{}", "text", "text"), ("a.txt", b"x", "jsonl", "jsonl"),
    ],
)  # fmt: skip
def test_which_format_a_file_has(read, name, data, asked, expected):
    assert read(data, name, asked)[0] == expected


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst", "in.jsonl"])
def test_compressed_files(read, name):
    packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(name.split(".")[-1], bytes)
    assert len(read(packed(ROWS), name)[1]) == 1000
    if packed is not bytes:
        # Several members or frames in one file, as `cat` and parallel compressors make them.
        assert len(read(packed(ROWS) + packed(ROWS), name)[1]) == 2000


def test_a_file_that_is_cut_meanwhile_gives_no_half_row(tmp_path):
    path = tmp_path / "in.jsonl"
    for length in (9005, ROWS.index(b"\n", 9000) + 1):  # within a line, after one
        path.write_bytes(ROWS * 50)
        source = open_source(str(path))
        lines = iter(LineReader(source))
        next(lines)
        os.truncate(path, 40 * len(ROWS) + length)
        with pytest.raises(RunError, match="become shorter"):
            [json.loads(line.data) for line in lines]
        source.close()


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_damaged_compressed_files_are_errors(read, name):
    packed = (gzip.compress if name.endswith("gz") else zstandard.compress)(ROWS)
    for cut in (1, 5, len(packed) // 2, len(packed) - 1):
        with pytest.raises(RunError):
            read(packed[:cut], name)
    with pytest.raises(RunError):
        read(packed[:20] + bytes(20) + packed[40:], name)


@pytest.mark.parametrize("name", ["in.txt.gz", "in.txt.zst"])
def test_all_whole_lines_before_the_damage_are_rows(tmp_path, name):
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    texts = [hashlib.sha256(b"%d" % i).hexdigest().encode() for i in range(20_000)]
    packed = pack(b"\n".join(texts))
    unpacker = zlib.decompressobj(wbits=31) if name.endswith("gz") else zstandard.ZstdDecompressor().decompressobj()
    cut = packed[: len(packed) // 2]
    whole = unpacker.decompress(cut).split(b"\n")[:-1]
    assert 5000 < len(whole) < 15_000
    damaged = cut + b"\xff" * 2000 + packed[len(cut) + 2000 :]
    for content, least in ((cut, len(whole)), (damaged, len(whole) // 2)):
        (tmp_path / name).write_bytes(content)
        source, lines = open_source(str(tmp_path / name)), []
        with pytest.raises(RunError, match="reading failed after line") as caught:
            for line in LineReader(source):
                lines.append(line.data)
        source.close()
        assert len(lines) >= least and lines[: len(whole)] == texts[: len(lines)][: len(whole)]
        # What damage becomes may be lines, and blank ones among them.
        assert content is damaged or f"after line {len(lines)}: " in str(caught.value)


def test_padding_behind_gzip_members_is_no_damage(read):
    assert len(read(gzip.compress(ROWS) + bytes(3000) + gzip.compress(ROWS) + bytes(10), "in.jsonl.gz")[1]) == 2000
    with pytest.raises(RunError, match="after line 1000: damaged gzip"):
        read(gzip.compress(ROWS) + b"rest", "in.jsonl.gz")


def test_names_and_content_that_disagree(read):
    with pytest.raises(RunError, match=r"gzip.*\.gz"):
        read(gzip.compress(ROWS), "in.jsonl")
    with pytest.raises(RunError, match=r"Zstandard.*\.zst"):
        read(zstandard.compress(ROWS), "in.jsonl")
    with pytest.raises(RunError, match="not gzip"):
        read(ROWS, "in.jsonl.gz")
    with pytest.raises(RunError, match="UTF-16"):
        read('{"a":1}'.encode("utf-16"))


def test_inputs_that_cannot_be_opened(tmp_path):
    with pytest.raises(RunError, match="No such file"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(RunError, match="folder"):
        open_source(str(tmp_path))


def test_a_pipe_gives_rows_as_they_come(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    got_first = threading.Event()

    def feed():
        with open(fifo, "wb", buffering=0) as pipe:
            pipe.write(b'{"a":1}\n')
            assert got_first.wait(10)
            pipe.write(b'{"b":2}\n')

    thread = threading.Thread(target=feed)
    thread.start()
    source = open_source(str(fifo))
    reader = iter(LineReader(source))
    assert next(reader).data == b'{"a":1}'
    got_first.set()
    assert [line.data for line in reader] == [b'{"b":2}']
    thread.join()
    source.close()


def test_a_silent_pipe_can_be_interrupted():
    read_end, write_end = os.pipe()
    os.write(write_end, b'{"a":1}\n{"torn')
    stdin = os.dup(0)
    os.dup2(read_end, 0)
    try:
        source = open_source("-")
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
    lines = []
    thread = threading.Thread(target=lambda: lines.extend(LineReader(source)))
    thread.start()
    source.interrupt()
    thread.join(5)
    assert not thread.is_alive()
    source.close()
    os.close(read_end)
    os.close(write_end)


def test_digests_are_of_content(read, tmp_path):
    path = tmp_path / "in.jsonl"

    def digest(data):
        path.write_bytes(data)
        source = open_source(str(path))
        (line,) = LineReader(source, limit=1000)
        source.close()
        return line.digest

    assert digest(b'{"a":1}') == digest(b' {"a":1} \r\n') == digest(b'\n\n{"a":1}\n')
    assert digest(b'{"a":1}') != digest(b'{"a":2}')
    assert digest(b"x" * 1001) != digest(b"x" * 1002)


@given(st.lists(st.sampled_from([b"{}", b"\n", b"\r", b"x", b"\xff", b" ", b"\x00", b"y" * 40]), max_size=40))
def test_any_bytes_are_cut_like_split_does(tmp_path_factory, pieces):
    data = b"".join(pieces)
    path = tmp_path_factory.mktemp("any") / "in.txt"
    path.write_bytes(data)
    source = open_source(str(path))
    rows = [(line.number, line.data, line.error is not None) for line in LineReader(source, limit=64)]
    source.close()
    expected = []
    for number, line in enumerate(data.split(b"\n"), 1):
        content = line.removesuffix(b"\r")
        if len(content) > 64:
            expected.append((number, b"", True))
        elif content.strip():
            expected.append((number, content, False))
    assert rows == expected


def test_64_mib_lines_are_read_and_longer_ones_pass_in_little_memory(tmp_path, batch, fake_engine):
    """The real limit, once: one line of just 64 MiB, one longer, and the rows around them."""
    limit = 64 << 20
    head, tail = b'{"custom_id":"big","prompt":"', b'"}'
    with open(batch.input, "wb") as file:
        file.write(b'{"custom_id":"a","prompt":"x"}\n')
        file.write(head + b"y" * (limit - len(head) - len(tail)) + tail + b"\n")
        for _ in range(65):
            file.write(b"z" * (1 << 20))
        file.write(b'\n{"custom_id":"b","prompt":"x"}\n')
    batch.run(limit=limit)
    assert set(batch.answers()) == {"a", "b"}
    failures = {row["custom_id"]: row["error"] for row in batch.failures()}
    assert failures["big"]["code"] == "context_length_exceeded"
    assert failures["line-3"]["code"] == "line_too_long"
    assert str(limit) in failures["line-3"]["message"]
    assert json.dumps(failures).count("zz") == 0


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("rows.json", b'[{"prompt": "x"}]\n', "JSON array"),
        ("rows", b"\n [\n", "JSON array"),
        ("rows.csv", b"a prompt\n", "ends in .csv"),
        ("rows.tsv", b"", "ends in .tsv"),
        ("rows", b'id,"prompt",label\r\n1,x,y\n', "CSV"),
    ],
)
def test_other_formats_are_refused_instead_of_run_as_prompts(tmp_path, name, content, why):
    path = tmp_path / name
    path.write_bytes(content)
    for asked in ("auto", "text"):
        source = open_source(str(path))
        try:
            if asked == "text":
                assert LineReader(source, "text").format == "text"
            else:
                with pytest.raises(RunError, match=why):
                    LineReader(source, "auto")
        finally:
            source.close()


@pytest.mark.parametrize("line", [b"Hello, world\n", b"red,\n", b"One\n", b"What is 1,5?\n", b"[INST] Hello [/INST]\n"])
def test_prompts_with_commas_are_prompts(tmp_path, line):
    path = tmp_path / "prompts"
    path.write_bytes(line)
    source = open_source(str(path))
    assert LineReader(source).format == "text"
    source.close()
