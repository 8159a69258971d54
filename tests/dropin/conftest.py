"""What the tests of calibration share."""

import pytest


@pytest.fixture
def nothing_stays_in_force():
    """No plan and no receiver of numbers is left by a test."""
    from taco_jax.dropin import compat, host_calls
    from taco_jax.dropin.hook import _hooks

    yield
    assert not (_hooks._used or _hooks._in_threads or _hooks._everywhere or host_calls._receivers)
    assert compat.context().value is None
