"""The helper's memory stands still, however long it works."""

import random

from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService


def own_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))


def test_jobs_leave_nothing_behind(smollm2_description):
    """Of jobs of all sizes. When each piece that is read lies behind the one before, memory grows with every job."""
    rng, after = random.Random(1), []
    with TextService(description=smollm2_description) as service:
        for _ in range(3):
            for _ in range(300):
                service.prepare([TextRequest(prompt=[7] * rng.randint(50, 150))] * rng.randint(1, 32))
            after.append(own_bytes(service.pid))
    assert after[2] - after[1] < 300 << 10, after
