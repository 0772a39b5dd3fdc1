"""The real probe over a driver library that is played."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from gpupool_agent.devices.mps_daemons.probe import MULTIPROCESSOR_COUNT, ProbeError, probe

NOT_READY = 807


class PlayedCuda:
    """Answers every call; ``fails`` is the one that gives 807."""

    def __init__(self, fails: str = "") -> None:
        self.called: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_MPS_SERVER_NOT_READY"
            if name == "cuDeviceGetAttribute":
                assert arguments[1] == MULTIPROCESSOR_COUNT
                arguments[0]._obj.value = 13
            return NOT_READY if name == self._fails else 0

        return call


def test_it_says_what_it_was_given_and_leaves_in_order() -> None:
    cuda = PlayedCuda()
    assert probe(cuda) == 13
    assert cuda.called[0] == "cuInit"
    assert cuda.called[-2:] == ["cuMemFree_v2", "cuCtxDestroy_v2"]


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGet", "cuCtxCreate_v2", "cuMemAlloc_v2"])
def test_a_call_that_fails_is_named_with_its_error(call: str) -> None:
    cuda = PlayedCuda(call)
    with pytest.raises(ProbeError, match=rf"{call}: CUDA_ERROR_MPS_SERVER_NOT_READY \(807\)"):
        probe(cuda)
    made = call == "cuMemAlloc_v2"
    assert ("cuCtxDestroy_v2" in cuda.called) == made


def test_a_host_without_the_library_gets_no_client_through() -> None:
    from gpupool_agent.devices.mps_daemons import probe as program

    try:
        ctypes.CDLL(program.LIBRARY)
    except OSError:
        assert program.main() == 1
    else:
        pytest.skip("this host has libcuda")
