"""Files that are replaced as a whole."""

import os

import pytest

from coremill.config.errors import ConfigError
from coremill.config.outputs import check_replaceable


def test_only_our_own_files_are_replaced(tmp_path):
    path = tmp_path / "file"
    check_replaceable("--x", str(path), b"OURS", "a pack")
    for content in (b"", b"OURS", b"OURS and more"):
        path.write_bytes(content)
        check_replaceable("--x", str(path), b"OURS", "a pack")
    for content in (b"O", b"OUR", b"my notes", b" OURS"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"--x .*file: the file exists and is not a pack"):
            check_replaceable("--x", str(path), b"OURS", "a pack")
        assert path.read_bytes() == content


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", "/dev/null"):
        with pytest.raises(ConfigError, match="regular file"):
            check_replaceable("--x", str(path), b"OURS", "a pack")
