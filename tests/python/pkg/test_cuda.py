"""Plans for a GPU and arrays of a GPU, with a plug-in that computes on the host (tests/plugins/fake_cuda.cc): all that
the package does around the kernels. tests/python/gpu has what needs a GPU."""

import ctypes
import os

import ml_dtypes
import moekit
import numpy as np
import pytest
from moekit_program import ROOT
from weights import H, K, relative, rows, weights

FAKE = ROOT / "build" / "tests" / "fake_cuda.so"
CUDA = 2


class Fake(ctypes.Structure):
    """moekit_fake_cuda, as far as it is read here."""

    _fields_ = [("num_gpus", ctypes.c_int32), ("arch_number", ctypes.c_int32), ("fail_runs", ctypes.c_int32),
                *((name, ctypes.c_int64) for name in ("uploads", "finishes", "workspaces", "runs", "device_runs")),
                ("kernels", ctypes.c_int32), ("knobs", ctypes.c_char_p), ("stream", ctypes.c_void_p),
                ("row_type", ctypes.c_char_p)]


@pytest.fixture(scope="module")
def fake():
    if not FAKE.exists():
        pytest.skip("the tests' fake plug-in was not built")
    before = os.environ.get("MOEKIT_CUDA_PLUGIN")
    os.environ["MOEKIT_CUDA_PLUGIN"] = str(FAKE)
    library = ctypes.CDLL(str(FAKE))
    library.moekit_fake_cuda_state.restype = ctypes.POINTER(Fake)
    yield library.moekit_fake_cuda_state().contents
    if before is None:
        del os.environ["MOEKIT_CUDA_PLUGIN"]


def make(device, **options):
    gate_up, down, router = weights()
    return moekit.MoELayer(gate_up=gate_up.astype(ml_dtypes.bfloat16), down=down.astype(ml_dtypes.bfloat16),
                           router_weight=router, top_k=K, max_tokens=32, device=device, **options)


@pytest.fixture(scope="module")
def layer(fake):
    return make("cuda")


class GpuArray:
    """Host memory that says that it lies on a GPU, as the fake's kernels take it."""

    def __init__(self, array):
        self.array, self.streams = np.ascontiguousarray(array), []

    def __dlpack_device__(self):
        return (CUDA, 0)

    def __dlpack__(self, *, stream=None, **_):
        self.streams.append(stream)
        bits = self.array.view(np.uint16) if self.array.dtype == ml_dtypes.bfloat16 else self.array
        capsule = bits.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        at = pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(at + 8).value = CUDA  # DLTensor.device.device_type
        if bits is not self.array:
            ctypes.c_uint8.from_address(at + 20).value = 4  # DLTensor.dtype.code: bfloat
        return capsule


def call(layer, x, ids, share, **more):
    """Through arrays of the "GPU"; the output, and the stream that the producer of hidden was told."""
    hidden, out = GpuArray(x.astype(ml_dtypes.bfloat16)), GpuArray(np.zeros(x.shape, ml_dtypes.bfloat16))
    assert layer(hidden, GpuArray(ids), GpuArray(share), out=out, **more) is out
    return out.array.astype(np.float32), hidden.streams


def test_a_plan_for_a_gpu(layer, fake):
    chosen = layer.explain()["chosen"]
    assert chosen["backend"] in ("sm90", "cuda_decode", "cuda_ref")
    x = rows(9).astype(ml_dtypes.bfloat16)
    runs = fake.runs
    wanted = make("cpu", activations="f32")(x.astype(np.float32))
    assert relative(layer(x.astype(np.float32)), wanted) < 1e-2
    assert fake.runs == runs + 1
    torch_device = type("device", (), {"__str__": lambda self: "cuda:0"})()  # as torch's shows itself
    assert make(torch_device).explain()["chosen"]["backend"] == chosen["backend"]


def test_arrays_of_the_gpu(layer, fake):
    details = layer.details(rows(9))
    ids, share = details.topk_ids, details.topk_weights
    before = fake.device_runs
    y, streams = call(layer, rows(9), ids, share)
    assert fake.device_runs == before + 1 and fake.stream is None and streams == [None]
    assert relative(y, details.routed) < 1e-2
    for stream, address in ((0x1230, 0x1230), (type("S", (), {"cuda_stream": 0x40})(), 0x40),
                            (type("P", (), {"ptr": 0x50})(), 0x50),
                            (type("C", (), {"__cuda_stream__": lambda self: (0, 0x60)})(), 0x60)):
        again, streams = call(layer, rows(9), ids, share, stream=stream)
        assert fake.stream == address and streams == [address]
        np.testing.assert_array_equal(again, y)
    call(layer, rows(9), ids, share, stream=0)
    assert fake.stream is None


def test_what_does_not_fit(layer):
    x, ids, share = rows(4), np.zeros((4, K), np.int32), np.ones((4, K), np.float32)
    with pytest.raises(moekit.UnsupportedError, match="out="):
        layer(GpuArray(x.astype(ml_dtypes.bfloat16)), GpuArray(ids), GpuArray(share))
    out = GpuArray(np.zeros((4, H), ml_dtypes.bfloat16))
    for hidden, more, match in (
        (GpuArray(x.astype(ml_dtypes.bfloat16)), {}, "pass topk_ids"),
        (GpuArray(x), {"topk_ids": GpuArray(ids), "topk_weights": GpuArray(share)}, "bf16"),
        (GpuArray(x.astype(ml_dtypes.bfloat16)), {"topk_ids": ids, "topk_weights": share}, "topk_ids"),
        (x, {"stream": 3}, "lies on the host"),
    ):
        with pytest.raises(moekit.InvalidArgumentError, match=match):
            layer(hidden, out=out, **more)
    with pytest.raises(TypeError, match="stream"):
        layer(GpuArray(x.astype(ml_dtypes.bfloat16)), GpuArray(ids), GpuArray(share), out=out, stream="main")
    with pytest.raises(moekit.InvalidArgumentError, match="expected cpu, cuda or cuda:N"):
        make("tpu")
    with pytest.raises(moekit.MoekitError, match="7"):
        make("cuda:7")
    assert relative(call(layer, x, ids, share)[0], call(layer, x, ids, share)[0]) == 0


def test_an_error_of_the_gpu(layer, fake):
    fake.fail_runs = 1
    with pytest.raises(moekit.CudaError, match="fell off the bus"):
        layer(rows(2))
    assert layer(rows(2)).shape == (2, H)


def test_a_cpu_layer_refuses_arrays_of_a_gpu(fake):
    host = make("cpu")
    with pytest.raises(moekit.InvalidArgumentError, match="hidden"):
        host(GpuArray(rows(2).astype(ml_dtypes.bfloat16)), out=np.zeros((2, H), np.float32))


def test_tvm_ffi_brings_its_current_stream(layer, fake):
    """As it notes torch's when a CUDA tensor passes; here for arrays that know no stream."""
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    from moekit import _tvm_ffi

    run = _tvm_ffi.find()
    assert run is not None
    ids, share = np.zeros((3, K), np.int32), np.full((3, K), 0.5, np.float32)
    wanted, _ = call(layer, rows(3), ids, share)
    for stream in (0x1234, 0x5678):
        out = GpuArray(np.zeros((3, H), ml_dtypes.bfloat16))
        given = [GpuArray(rows(3).astype(ml_dtypes.bfloat16)), GpuArray(ids), GpuArray(share)]
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            assert run(layer._address, *given, out) == 0, moekit._library.last_error()
        assert fake.stream == stream
        np.testing.assert_array_equal(out.array.astype(np.float32), wanted)
