"""The part of the suite that computes, once for each path that the CPU has when features are missing.

Features are masked one after the other, newest first. Whenever another instruction set is chosen because of it, the
tests below run: they use the chosen one where they name none, and compare those that are left. A mask that changes
no choice would run the same code again, so it gets no run; that each single feature takes away what it must is in
tests/test_package.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = [f"tests/native/test_{name}.py" for name in ("gemm", "attention", "ops", "sampling", "engine")]
TESTS = [*KERNELS, "tests/worker", "tests/test_reference.py"]
# Scalar kernels take minutes for what the others do in a second. Of the default model's rows, the suite itself
# computes some with them: tests/worker/test_same_bytes.py and tests/system/test_same_bytes.py.
SCALAR_TESTS = [*KERNELS, "tests/worker/test_model.py"]

FEATURES = """
from coremill.native import ffi, lib
present = (i for i in range(lib.cm_cpu_feature_count()) if lib.cm_cpu_has(i))
print(*(ffi.string(lib.cm_cpu_feature_name(i)).decode() for i in present))
"""
CHOSEN = "from coremill.native import ffi, lib; print(ffi.string(lib.cm_isa_active()).decode())"


def environment(mask: str) -> dict[str, str]:
    return {**os.environ, "COREMILL_ISA": "", "COREMILL_CPU_MASK": mask}


def ask(code: str, mask: str = "") -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(mask), check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def masks() -> list[tuple[str, str]]:
    """Each mask under which another instruction set is chosen than before, and which."""
    found, masked, before = [], [], ask(CHOSEN)
    for feature in reversed(ask(FEATURES).split()):
        masked.append(feature)
        chosen = ask(CHOSEN, ",".join(masked))
        if chosen != before:
            found.append((",".join(masked), chosen))
            before = chosen
    return found


def main() -> int:
    for mask, chosen in masks():
        print(f"\n{chosen}: COREMILL_CPU_MASK={mask}", flush=True)
        tests = SCALAR_TESTS if chosen == "scalar" else TESTS
        pytest = [sys.executable, "-m", "pytest", "-r", "fE", *tests, *sys.argv[1:]]
        if status := subprocess.run(pytest, env=environment(mask), cwd=ROOT).returncode:
            print(f"failed with COREMILL_CPU_MASK={mask}", file=sys.stderr)
            return status
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # pytest has said its part
        sys.exit(130)
