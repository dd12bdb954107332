"""What tests of several commands share."""

import pytest

from coremill.config.cputimes import CpuTimes
from coremill.tools.bench import rounds


@pytest.fixture
def restless(monkeypatch):
    """A machine that never comes to rest: half of it is always busy with something else, and nobody waits."""
    monkeypatch.setattr(rounds, "wait_for_rest", lambda cores, patience=0: (0.5, CpuTimes.read(cores)))
