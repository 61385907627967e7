"""The short form of the fault campaign: each kind of fault once."""

from pathlib import Path

import pytest

from tests.support.campaign import campaign, faults
from tests.support.campaign.processes import tiny_chat_model

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(1200)]

SEED = 11


async def test_faults_cost_no_request_and_no_token(tmp_path: Path) -> None:
    """All streams but the poison equal an undisturbed run, and nothing stays behind."""
    model = tiny_chat_model.write(tmp_path / "model")
    count = len(faults.INJECT)
    assert count >= 15
    report = await campaign.run(model, tmp_path, count=count, seed=SEED, scale=0.5)
    print(report.line())
    assert report.failures == []
    assert report.leaks == []
    assert report.poisoned == 1
    assert len(report.pauses) == count
    assert report.answered > 100
