"""The fixture that runs a test once for each way in which calls of layers reach the library."""

import pytest


@pytest.fixture(params=["ctypes", "tvm_ffi"])
def call_path(request, monkeypatch):
    from moekit import _tvm_ffi

    if request.param == "tvm_ffi":
        pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
        assert _tvm_ffi.find() is not None
    else:
        monkeypatch.setattr(_tvm_ffi, "run", None)
        monkeypatch.setattr(_tvm_ffi, "_settled", True)
