"""Rollouts without end: nothing grows, nothing slows down. ``LONG=whole`` goes on for half an hour."""

import asyncio
import os

import pytest
from soak import Soak, soak

WHOLE = os.environ.get("LONG") == "whole"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_rollouts_go_on_without_growing(tmp_path):
    minutes, warm_up, fresh_every = (30, 5, 60) if WHOLE else (1.5, 0.5, 30)
    moments = asyncio.run(
        soak(tmp_path, minutes * 60, warm_up=warm_up * 60, fresh_every=fresh_every, say=lambda _: None)
    )
    found = Soak(moments, warm_up * 60)
    print(found)
    assert found.files <= 0
    if WHOLE:  # in a minute the allocator has not settled, and a noisy machine decides about the speed
        assert found.memory <= 1.1 and found.throughput >= 0.9
