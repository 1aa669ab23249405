"""torch tensors, the operators and torch.compile."""

import copy
import gc
import os
import shutil
import signal

import moekit
import numpy as np
import pytest
from weights import E, H, K, rows, weights

torch = pytest.importorskip("torch", reason="torch is not installed")
import moekit.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("call_path")


@pytest.fixture(scope="module")
def layer():
    gate_up, down, router = (torch.from_numpy(w) for w in weights())
    return moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, max_tokens=16, num_threads=2)


@pytest.fixture(scope="module")
def exact(layer):
    return layer(rows(7))


def test_torch_in_torch_out(layer, exact):
    x = torch.from_numpy(rows(7))
    y = layer(x)
    assert isinstance(y, torch.Tensor) and y.dtype == torch.float32
    np.testing.assert_array_equal(y.numpy(), exact)
    np.testing.assert_array_equal(layer(x.t().contiguous().t()).numpy(), exact)
    for dtype in (torch.bfloat16, torch.float16):
        out = layer(x.to(dtype))
        assert out.dtype == dtype
        wide = layer(x.to(dtype).float())
        assert torch.equal(out, wide.to(dtype))
    out = torch.zeros(7, H)
    assert layer(x, out=out) is out and torch.equal(out, y)
    details = layer.details(x)
    ids, share = torch.from_numpy(details.topk_ids).long(), torch.from_numpy(details.topk_weights)
    assert torch.equal(layer(x, ids, share), y)


def test_layouts_that_alternate(layer):
    x = torch.from_numpy(rows(8))
    for _ in range(2):
        for value in (x, x[:3], x.bfloat16(), rows(8), x.t().contiguous().t(), x[::2]):
            y = layer(value)
            wide = value.float().contiguous() if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            wanted = layer(wide).to(y.dtype) if isinstance(y, torch.Tensor) else layer(wide).numpy()
            assert (y == wanted).all()


def test_tensors_that_do_not_fit(layer):
    x = torch.from_numpy(rows(2))
    with pytest.raises(moekit.InvalidArgumentError, match="meta"):
        layer(x.to("meta"))
    with pytest.raises(moekit.InvalidArgumentError, match="strided"):
        layer(x.to_sparse())
    with pytest.raises(ValueError, match="f64"):
        layer(x.double())
    with pytest.raises(ValueError, match="complex64|code 5 with 64 bits"):
        layer(x.to(torch.complex64))
    with pytest.raises(moekit.UnsupportedError, match="no_grad"):
        layer(x.clone().requires_grad_())
    with torch.no_grad():
        layer(x.clone().requires_grad_())


def test_fp8_weights():
    gate_up, down, router = (torch.from_numpy(w) for w in weights(hidden=128, inter=128))
    scale = torch.full((E, 2, 1), 0.01), torch.full((E, 1, 1), 0.01)
    codes = [(w / 0.01).to(torch.float8_e4m3fn) for w in (gate_up, down)]
    config = moekit.MoEConfig(top_k=K, gate_up_weights="fp8_block", down_weights="fp8_block")
    layer = moekit.MoELayer(
        config,
        gate_up=moekit.Matrix(codes[0], scale[0]),
        down=moekit.Matrix(codes[1], scale[1]),
        router_weight=router,
        activations="f32",
    )
    plain = moekit.MoELayer(
        gate_up=codes[0].float() * 0.01, down=codes[1].float() * 0.01, router_weight=router, top_k=K
    )
    x = torch.from_numpy(rows(5, 128))
    torch.testing.assert_close(layer(x), plain(x), rtol=2e-5, atol=2e-5)


def test_operators_pass_torchs_own_checks(layer, exact):
    number = moekit.torch.register_layer(layer)
    assert moekit.torch.register_layer(layer) == number
    x = torch.from_numpy(rows(7))
    with torch.no_grad():
        assert torch.equal(torch.ops.moekit.moe(x, None, None, number), torch.from_numpy(exact))
        out = torch.zeros_like(x)
        torch.ops.moekit.moe_out(x, None, None, number, out)
        assert torch.equal(out, torch.from_numpy(exact))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moekit.moe.default, (x, None, None, number), test_utils=checks)
    torch.library.opcheck(torch.ops.moekit.moe_out.default, (x, None, None, number, out), test_utils=checks)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_module_and_compile_without_graph_breaks(layer, exact, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()
    block = moekit.torch.MoEModule(layer)
    x = torch.from_numpy(rows(7))

    def model(x):
        return block(torch.tanh(x) * 2.0) + x

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(block(x), torch.from_numpy(exact))
        assert torch.equal(block(x.reshape(7, 1, H)), torch.from_numpy(exact).reshape(7, 1, H))
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)  # inductor's tanh is its own
        longer = torch.from_numpy(rows(40))
        assert torch.equal(block(longer), torch.cat([layer(longer[t : t + 16]) for t in range(0, 40, 16)]))
    assert copy.deepcopy(block).number == block.number


def test_operators_run_on_torchs_threads(layer, exact, monkeypatch):
    use = moekit.torch._use_openmp
    if use is None or use(1) != 0:
        pytest.skip("this torch, or this libmoekit, has no OpenMP to borrow")
    use(0)
    asked = []
    monkeypatch.setattr(moekit.torch, "_use_openmp", lambda on: (asked.append(on), use(on))[1])
    number = moekit.torch.register_layer(layer)
    x = torch.from_numpy(rows(7))
    torch.matmul(torch.ones(256, 256), torch.ones(256, 256))  # torch's team is there
    for _ in range(50):
        assert torch.equal(torch.ops.moekit.moe(x, None, None, number), torch.from_numpy(exact))
    assert asked == [1, 0] * 50
    asked.clear()
    with pytest.raises(moekit.InvalidArgumentError):
        torch.ops.moekit.moe(x[:, :-1].contiguous(), None, None, number)
    assert asked == [1, 0]  # also where the call fails
    monkeypatch.setattr(moekit._library, "generation", 1)  # as in a forked child
    moekit.torch.on_torchs_threads(lambda: None)
    assert asked == [1, 0]


def test_operators_after_fork(layer, exact):
    number = moekit.torch.register_layer(layer)
    x = torch.from_numpy(rows(7))
    torch.matmul(torch.ones(256, 256), torch.ones(256, 256))  # the parent's OpenMP team, which the child lacks
    torch.ops.moekit.moe(x, None, None, number)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends a hang
        same = torch.equal(torch.ops.moekit.moe(x, None, None, number), torch.from_numpy(exact))
        os._exit(0 if same else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(torch.ops.moekit.moe(x, None, None, number), torch.from_numpy(exact))


def test_operators_refuse_a_layer_that_is_gone():
    gate_up, down, router = weights()
    layer = moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K)
    number = moekit.torch.register_layer(layer)
    del layer
    gc.collect()
    with pytest.raises(moekit.InvalidArgumentError, match="no layer"):
        torch.ops.moekit.moe(torch.zeros(1, H), None, None, number)
