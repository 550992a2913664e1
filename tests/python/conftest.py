from __future__ import annotations

import os

import pytest
import torch

from dualkv import _abi
from dualkv.forest import tile_sizes

# cuBLAS, which the references use, is deterministic with this; it is read when the first product starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

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


# Cases with known answers run on the CPU with these, and again with those of test_cuda_cases.py.


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture(params=(torch.float32, torch.bfloat16, torch.float16), ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=(torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def every_dtype(request):
    return request.param


@pytest.fixture(params=["cpu", "cuda"])
def cpu_or_gpu(request):
    """Both, one after the other: the CPU, and `gpu`."""
    return request.getfixturevalue("gpu") if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def gpu():
    """The device; skips the test where the CUDA kernels cannot run. Not a marker, which would start CUDA in
    processes whose tests fork."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    try:
        tile_sizes(_abi.CUDA, num_heads=1, num_kv_heads=1, head_dim=64)
    except NotImplementedError:
        pytest.skip("needs a build with CUDA kernels")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
