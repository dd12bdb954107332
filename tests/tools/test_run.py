"""`coremill run` as far as it gets without a model."""

import errno
import os

import pytest
from click.testing import CliRunner

from coremill.config.errors import RunError
from coremill.coordinator.batch.job import write_stats
from coremill.tools import cli


def coremill(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli.main, [str(arg) for arg in args])
    return done.exit_code, done.stderr


def test_stats_that_cannot_be_written_leave_nothing(tmp_path, monkeypatch):
    path = tmp_path / "stats.json"
    write_stats(str(path), {"rows": 1})
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("json.dump", full)
    with pytest.raises(RunError, match=r"--stats .*stats\.json: No space left"):
        write_stats(str(path), {"rows": 2})
    assert os.listdir(tmp_path) == ["stats.json"] and path.read_bytes() == before


def test_a_system_message_without_a_chat_is_refused(tmp_path, monkeypatch):
    rows, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    rows.write_text("x\n")
    code, said = coremill("run", rows, "-m", "absent", "-o", out, "--system", "Be brief.", "--no-chat")
    assert code == 2 and "--system and --no-chat" in said
    monkeypatch.setenv("COREMILL_NO_CHAT", "1")
    code, said = coremill("run", rows, "-m", "absent", "-o", out, "--system", "Be brief.")
    assert code == 2 and "--system and COREMILL_NO_CHAT" in said


def test_stats_replace_stats_only(tmp_path):
    rows, stats, out = tmp_path / "in.jsonl", tmp_path / "stats.json", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "x"}\n')
    for victim in (rows, tmp_path):
        code, said = coremill("run", rows, "-m", "absent", "-o", out, "--stats", victim)
        assert code == 2 and "--stats" in said
    assert rows.read_text() == '{"prompt": "x"}\n'
    write_stats(str(stats), {"rows": 1, "errors": 0})
    code, said = coremill("run", rows, "-m", "absent", "-o", out, "--stats", stats)
    assert code == 1 and "absent: there is no such file" in said and not out.exists()
