from __future__ import annotations

import pytest
import torch

# The references' products are small: threads of their own would only wait for each other, and for those of tests
# that run beside them.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Every tensor that torch makes without values holds NaN (or the largest integer) in every test, so that
    a result that was never written cannot pass for 0."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.ones(2).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
