"""`coremill perplexity` on the default model, recomputed from the logits it writes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from coremill.config.errors import ConfigError, ModelError
from coremill.native.packfile import open_pack
from coremill.tools.perplexity import Score, add_scores, chunks_of, command

CTX = 256


@pytest.fixture(scope="module")
def text(repo_root: Path, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "docs.txt"
    path.write_text((repo_root / "tests/data/reference/docs.txt").read_text(encoding="utf-8")[:2600], encoding="utf-8")
    return path


@pytest.fixture
def run(smollm2_pack: Path):
    def invoke(*args: object) -> str:
        result = CliRunner().invoke(command, [*map(str, args), "-m", str(smollm2_pack)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return invoke


def test_perplexity_follows_from_the_logits(run, text, tmp_path, smollm2_pack):
    from coremill.coordinator.text.tokenizer import ModelTokenizer

    out = tmp_path / "logits.npy"
    report = json.loads(run(text, "--ctx", CTX, "--logits", out, "--json"))
    with open_pack(smollm2_pack) as pack:
        ids = ModelTokenizer.from_description(pack.tokenizer).encode(text.read_text(encoding="utf-8"))
        vocab_size = pack.spec.vocab_size
    logits = np.load(out, mmap_mode="r")
    assert logits.dtype == np.float32 and logits.shape == (len(ids), vocab_size)
    assert 2 * CTX < len(ids) < 3 * CTX
    surprises = []
    for row in range(2 * CTX):
        if row % CTX >= CTX // 2 and row % CTX < CTX - 1:
            x = logits[row].astype(np.float64)
            surprises.append(np.log(np.exp(x - x.max()).sum()) + x.max() - x[ids[row + 1]])
    assert report["scored_tokens"] == len(surprises) == 2 * (CTX // 2 - 1)
    assert math.isclose(report["perplexity"], math.exp(np.mean(surprises)), rel_tol=1e-5)
    error = report["perplexity"] * np.std(surprises) / math.sqrt(len(surprises) - 1)
    assert math.isclose(report["standard_error"], error, rel_tol=1e-4)
    assert report["tokens"] == len(ids) and report["chunks"] == 3
    assert report["unscored_tail_tokens"] == len(ids) - 2 * CTX
    assert 5 < report["perplexity"] < 40
    assert not list(tmp_path.glob("*.part"))


def test_text_output_and_steps_do_not_matter(run, text):
    printed = [run(text, "--ctx", CTX, "--step-tokens", step) for step in (32, 100)]
    assert printed[0].splitlines()[:3] == printed[1].splitlines()[:3]
    assert printed[0].startswith("perplexity  ") and "in chunks of 256" in printed[0]
    assert "not scored  the last" in printed[0]


def test_a_text_shorter_than_a_chunk_is_scored(run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("The capital of France is Paris, and the capital of Italy is Rome.")
    report = json.loads(run(short, "--json"))
    assert report["chunks"] == 1 and report["unscored_tail_tokens"] == 0
    assert report["scored_tokens"] == report["tokens"] - 1 - report["tokens"] // 2


def test_chunks_and_bos():
    ids = [1, *range(10, 19)]
    assert chunks_of(ids, 4, None) == [[1, 10, 11, 12], [13, 14, 15, 16], [17, 18]]
    assert chunks_of(ids, 4, 1) == [[1, 10, 11, 12], [1, 14, 15, 16], [1, 18]]


def test_scores_do_not_depend_on_how_a_chunk_is_cut():
    logits = np.random.default_rng(1).standard_normal((9, 5)).astype(np.float32)
    chunk, sums = [0, 1, 2, 3, 4, 3, 2, 1, 0], []
    for step in (1, 4, 9):
        score = Score()
        for begin in range(0, 9, step):
            add_scores(score, chunk, begin, logits[begin : begin + step])
        assert score.num_scored == 4
        sums.append(score.total)
    assert np.allclose(sums, sums[0], rtol=1e-12)
    logits[6, 2] = np.nan
    with pytest.raises(ModelError, match="not finite"):
        add_scores(Score(), chunk, 0, logits)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"abc\xff def", (), "not valid UTF-8 at byte 3"),
        (b"", (), "0 tokens long"),
        (b"word " * 20, ("--ctx", "100000"), "context length is 8192"),
        (None, (), "No such file"),
    ],
)
def test_what_is_refused(run, tmp_path, content, options, message):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        run(path, *options)


def test_logits_replace_logits_only(run, text, tmp_path, smollm2_pack):
    notes, part, out = tmp_path / "notes", tmp_path / "out.npy.part", tmp_path / "out.npy"
    for path in (notes, part):
        path.write_bytes(b"mine")
    for victim in (text, notes, smollm2_pack):
        before = victim.stat()
        with pytest.raises(ConfigError, match=rf"--logits .*{victim.name}.* is not an \.npy file"):
            run(text, "--logits", victim)
        assert victim.stat().st_ino == before.st_ino and victim.stat().st_mtime_ns == before.st_mtime_ns
    np.save(out, np.zeros(3))
    short = tmp_path / "text"
    short.write_text("One, two, three, four, five")
    run(short, "--logits", out)
    assert np.load(out, mmap_mode="r").ndim == 2 and part.read_bytes() == b"mine"


def test_logits_to_a_place_that_cannot_be_written(run, text, tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        run(text, "--logits", tmp_path / "absent" / "out.npy")
