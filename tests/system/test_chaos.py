"""A little chaos over some rows of each kind. tests/soak/chaos.py does it for a minute and over whole files."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def chaos():
    spec = importlib.util.spec_from_file_location("chaos", Path(__file__).with_name("chaos.py"))
    module = sys.modules["chaos"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(workload):
    """Labels behind one prefix, long documents, chats; some ten seconds of work."""
    chosen = [*workload("label")[:48], *workload("read")[:3], *workload("write")[:24]]
    for number, row in enumerate(chosen):
        row["body"]["temperature"] = number % 3 / 2
    return chosen


def test_chaos(rows, make_runs, chaos):
    undisturbed = make_runs().fresh(rows)
    runs = make_runs()
    runs.write(rows)
    figures = chaos.disturb(runs, len(rows), random.Random(4), every=1.0, deaths=2)
    assert chaos.judge(runs, undisturbed) == [], figures
    assert figures.coordinators_killed == 2 and figures.workers_stopped == 1 and figures.workers_killed >= 3, figures
