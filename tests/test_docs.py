"""The Python examples of README and docs/python.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_examples_run(repo_root, smollm2_gguf, model_folder, tmp_path, page):
    examples = EXAMPLE.findall((repo_root / page).read_text())
    program = tmp_path / "examples.py"
    program.write_text("".join(examples).replace('"smollm2"', repr(str(smollm2_gguf))))
    environment = {**os.environ, "COREMILL_CACHE": str(model_folder / "packs")}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert examples and done.stdout
