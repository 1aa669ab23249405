"""moekit.load_layer and moekit.MoELayer with NumPy: values, arguments, errors, threads, fork, memory."""

import array
import gc
import os
import threading

import ml_dtypes
import moekit
import numpy as np
import pytest
from moekit_program import FIXTURES
from tensor_files import read_safetensors, row_errors
from weights import E, H, I, K, reference, relative, rows, weights

MODEL = FIXTURES / "qwen3moe-bf16-sharded"
pytestmark = pytest.mark.usefixtures("call_path")


@pytest.fixture(scope="module")
def layer():
    gate_up, down, router = weights()
    return moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, max_tokens=32, num_threads=2)


@pytest.mark.parametrize(
    "fixture",
    ["qwen3moe-bf16-sharded", "deepseekv3-ct-nvfp4", "gptoss-mxfp4", "mixtral-ct-fp8dynamic", "qwen2moe-bf16"],
)
def test_checkpoints_against_golden_outputs(fixture):
    golden = read_safetensors(FIXTURES / fixture / "golden.safetensors")
    number = min(int(name.split(".")[0].removeprefix("layer")) for name in golden if name.startswith("layer"))
    layer = moekit.load_layer(FIXTURES / fixture, number, activations="f32", num_threads=2)
    details = layer.details(golden[f"layer{number}.input"])
    others = np.arange(17) != 5  # row 5 is zero: its routing is arbitrary
    np.testing.assert_array_equal(details.topk_ids[others], golden[f"layer{number}.topk_ids"][others])
    assert row_errors(details.output, golden[f"layer{number}.output"]).max() < 2e-5
    assert details.dropped == 0


def test_first_moe_layer_is_the_default():
    layer = moekit.load_layer(FIXTURES / "deepseekv3-bf16")
    assert layer.config.num_experts == 8 and layer.config.shared_inter == 64 and layer.config.scoring == "sigmoid"


def test_inspect_and_explain():
    assert moekit.inspect(MODEL)["family"] == "qwen3_moe"
    assert any(t["name"].endswith("gate.weight") for t in moekit.inspect(MODEL, tensors=True)["tensors"])
    explanation = moekit.load_layer(MODEL).explain()
    assert explanation["chosen"]["backend"] and explanation["candidates"]


def test_layer_from_stacked_weights(layer):
    gate_up, down, _ = weights()
    x = rows(9)
    details = layer.details(x)
    wanted = reference(x, gate_up, down, details.topk_ids, details.topk_weights)
    assert relative(details.output, wanted) < 1e-6
    np.testing.assert_array_equal(layer(x), details.output)
    np.testing.assert_array_equal(layer(x, details.topk_ids, details.topk_weights), details.output)
    np.testing.assert_array_equal(layer(x, details.topk_ids.astype(np.int64), details.topk_weights), details.output)


def test_biases_that_are_given_are_announced():
    gate_up, down, router = weights()
    x = rows(5)
    silent, loud = np.zeros(E, np.float32), np.where(np.arange(E) < K, 99, 0).astype(np.float32)
    bias = moekit.Matrix(down, bias=np.full((E, H), 0.25, np.float32))
    options = dict(gate_up=gate_up, router_weight=router, top_k=K, num_threads=1)
    plain = moekit.MoELayer(down=down, router_bias=silent, **options).details(x)
    shifted = moekit.MoELayer(down=bias, router_bias=silent, **options).details(x)
    wanted = plain.output + 0.25 * plain.topk_weights.sum(1, keepdims=True)
    assert relative(shifted.output, wanted) < 1e-6
    for name in ("router_bias", "selection_bias"):
        chosen = moekit.MoELayer(down=down, **{name: loud}, **options).details(x)
        np.testing.assert_array_equal(np.sort(chosen.topk_ids, 1), np.tile(np.arange(K), (5, 1)))


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved", "transposed", "per expert"])
def test_every_layout_gives_the_same_bits(layer, order):
    gate_up, down, router = weights()
    gate, up = gate_up[:, :I], gate_up[:, I:]
    options = dict(router_weight=router, top_k=K, num_threads=1)
    if order == "gate_up":
        other = moekit.MoELayer(gate_up=gate_up, down=down, **options)
    elif order == "up_gate":
        other = moekit.MoELayer(gate_up=np.concatenate([up, gate], 1), down=down, order=order, **options)
    elif order == "interleaved":
        both = np.stack([gate, up], 2).reshape(E, 2 * I, H)
        other = moekit.MoELayer(gate_up=both, down=down, order=order, **options)
    elif order == "transposed":
        both, other_down = (np.ascontiguousarray(w.transpose(0, 2, 1)) for w in (gate_up, down))
        other = moekit.MoELayer(gate_up=both, down=other_down, transposed=True, **options)
    else:
        other = moekit.MoELayer(gate=list(gate), up=list(up), down=list(down), **options)
    x = rows(7)
    np.testing.assert_array_equal(other(x), layer(x))
    assert other.config.inter == I and other.config.hidden == H and other.config.num_experts == E


def test_no_expert_and_zero_tokens(layer):
    x = rows(3)
    ids = np.array([[-1, -1], [2, -1], [1, 1]], np.int32)
    share = np.full((3, 2), 0.5, np.float32)
    gate_up, down, _ = weights()
    y = layer(x, ids, share)
    assert not y[0].any()
    assert relative(y, reference(x, gate_up, down, ids, share)) < 1e-6
    assert layer(x[:0]).shape == (0, H)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("out_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(layer, dtype, out_dtype):
    x = rows(5).astype(dtype)
    exact = layer(x.astype(np.float32))
    out = np.full((5, H), 7, out_dtype)
    assert layer(x, out=out) is out
    np.testing.assert_array_equal(out, exact.astype(out_dtype))
    assert layer(x).dtype == x.dtype


def test_strided_rows_are_read_and_written_in_place(layer):
    x = rows(6)
    exact = layer(x)
    wide = np.zeros((12, 2 * H), np.float32)
    wide[::2, ::2] = x
    np.testing.assert_array_equal(layer(wide[::2, ::2]), exact)
    np.testing.assert_array_equal(layer(np.asfortranarray(x)), exact)
    np.testing.assert_array_equal(layer(x[::-1]), exact[::-1])
    target = np.zeros((12, H), np.float32)
    layer(x, out=target[::2])
    np.testing.assert_array_equal(target[::2], exact)
    assert not target[1::2].any()


def test_buffers_and_dlpack(layer):
    x = rows(2)
    exact = layer(x)
    flat = memoryview(array.array("f", x.ravel())).cast("B").cast("f", (2, H))
    np.testing.assert_array_equal(layer(flat), exact)

    class Exporter:
        """Only __dlpack__, in the older or the newer form."""

        def __init__(self, value, versioned):
            self.value, self.versioned = value, versioned

        def __dlpack__(self, **kwargs):
            if not self.versioned and kwargs:
                raise TypeError("unexpected keyword")
            return self.value.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.value.__dlpack_device__()

    for versioned in (False, True):
        np.testing.assert_array_equal(layer(Exporter(x, versioned)), exact)
        out = np.zeros_like(x)
        layer(x, out=Exporter(out, versioned))
        np.testing.assert_array_equal(out, exact)


def test_read_only_is_an_input_and_no_output(layer):
    x = rows(4)
    exact = layer(x)
    x.flags.writeable = False
    np.testing.assert_array_equal(layer(x), exact)
    out = np.zeros_like(x)
    out.flags.writeable = False
    with pytest.raises(moekit.InvalidArgumentError, match="read-only"):
        layer(rows(4), out=out)
    assert not out.any()


@pytest.mark.parametrize(
    ("call", "builtin", "match"),
    [
        (lambda f: f(rows(2).tolist()), TypeError, "hidden: expected a tensor"),
        (lambda f: f(None), TypeError, "hidden: expected a tensor"),
        (lambda f: f(rows(2).astype(np.float64)), ValueError, "hidden must be f32, bf16 or f16"),
        (lambda f: f(rows(2).astype(np.complex64)), ValueError, "complex64|code 5 with 64 bits"),
        (lambda f: f(rows(2).astype(">f4")), ValueError, "byte order"),
        (lambda f: f(rows(2)[0]), ValueError, "hidden must be"),
        (lambda f: f(rows(2)[:, :-1]), ValueError, "hidden must be"),
        (lambda f: f(rows(2)[None]), ValueError, "hidden must be"),
        (lambda f: f(rows(33)), ValueError, "at most 32"),
        (lambda f: f(rows(2), np.zeros((2, K), np.int32)), ValueError, "come together"),
        (lambda f: f(rows(2), np.zeros((2, K), np.int16), np.zeros((2, K), np.float32)), ValueError, "topk_ids"),
        (lambda f: f(rows(2), np.zeros((2, K), np.int32), np.zeros((2, K))), ValueError, "topk_weights"),
        (lambda f: f(rows(2), np.full((2, K), E), np.zeros((2, K), np.float32)), ValueError, str(E)),
        (lambda f: f(rows(2), out=np.zeros((3, H), np.float32)), ValueError, "output must be"),
        (lambda f: f(rows(2), out=np.zeros((2, H), np.int32)), ValueError, "output must be"),
        (lambda f: f(rows(2), token_id=np.zeros(2)), TypeError, "no argument"),
        (lambda f: (lambda x: f(x, out=x))(rows(2)), ValueError, "overlap"),
    ],
)
def test_bad_calls(layer, call, builtin, match):
    with pytest.raises(moekit.InvalidArgumentError, match=match) as error:
        call(layer)
    assert isinstance(error.value, builtin)
    assert layer(rows(1)).shape == (1, H)  # the layer stays usable


def test_unaligned_arrays_are_refused(layer):
    raw = np.zeros(2 * H * 4 + 1, np.uint8)
    with pytest.raises(moekit.InvalidArgumentError, match="aligned"):
        layer(raw[1:].view(np.float32).reshape(2, H))


def test_errors_of_making_a_layer(tmp_path):
    gate_up, down, router = weights()
    with pytest.raises(ValueError, match="top_k"):
        moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router)
    with pytest.raises(ValueError, match="three axes"):
        moekit.MoELayer(gate_up=gate_up[0], down=down, top_k=K)
    with pytest.raises(ValueError, match="gate_up"):
        moekit.MoELayer(down=down, top_k=K)
    with pytest.raises(ValueError, match="equal length"):
        moekit.MoELayer(gate=list(gate_up[:, :I]), up=list(gate_up[:, I:])[:-1], down=list(down), top_k=K)
    with pytest.raises(ValueError, match="names no format"):
        moekit.MoELayer(gate_up=gate_up.astype(np.int8), down=down, top_k=K)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        moekit.MoELayer(moekit.MoEConfig(activation="relu"), gate_up=gate_up, down=down, top_k=K)
    with pytest.raises(ValueError, match="nope"):
        moekit.MoELayer(gate_up=gate_up, down=down, top_k=K, backend="nope")
    up = [moekit.Matrix(w, bias=np.zeros(I, np.float32)) for w in gate_up[:, I:]]
    with pytest.raises(ValueError, match=r"gate\[0\].bias is missing.*has_gate_up_bias"):
        moekit.MoELayer(gate=list(gate_up[:, :I]), up=up, down=list(down), top_k=K)
    with pytest.raises(ValueError, match=r"input_scale is given.*gate_up_input.static_scale"):
        moekit.MoELayer(gate_up=moekit.Matrix(gate_up, input_scale=1.0), down=down, top_k=K)
    with pytest.raises(ValueError, match="input_scale is missing.*down_input.static_scale"):
        static = moekit.MoEConfig(down_input=moekit.InputScheme("fp8_tensor", static_scale=True))
        moekit.MoELayer(static, gate_up=gate_up, down=down, top_k=K)
    with pytest.raises(ValueError, match="hash_routing"):
        moekit.MoELayer(moekit.MoEConfig(hash_routing=True), gate_up=gate_up, down=down, router_weight=router, top_k=K)
    with pytest.raises(ValueError, match="max_tokens"):
        moekit.MoELayer(gate_up=gate_up, down=down, top_k=K, max_tokens=0)
    with pytest.raises(moekit.InvalidArgumentError, match="directory"):
        moekit.load_layer(tmp_path / "missing")
    with pytest.raises(TypeError, match="layer"):
        moekit.load_layer(MODEL, "0")
    with pytest.raises(ValueError, match="dense"):
        moekit.load_layer(FIXTURES / "deepseekv3-bf16", 0)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(NotImplementedError, match="bert"):
        moekit.load_layer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(moekit.CorruptFileError):
        moekit.load_layer(tmp_path)


def test_exceptions_have_fitting_bases():
    pairs = {
        moekit.InvalidArgumentError: ValueError,
        moekit.WrongTypeError: TypeError,
        moekit.UnsupportedError: NotImplementedError,
        moekit.OutOfMemoryError: MemoryError,
        moekit.CudaError: RuntimeError,
        moekit.CommError: ConnectionError,
        moekit.TimeoutError_: TimeoutError,
        moekit.CorruptFileError: ValueError,
        moekit.InternalError: RuntimeError,
    }
    for error, builtin in pairs.items():
        assert issubclass(error, builtin) and issubclass(error, moekit.MoekitError)
        assert str(error("text")) == "text"


def test_weights_outlive_their_names():
    gate_up, down, router = weights(3)
    layer = moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, backend="ref", num_threads=1)
    x = rows(4)
    before = layer(x)
    del gate_up, down, router
    gc.collect()
    _ = [np.full((E, 2 * I, H), 9, np.float32) for _ in range(4)]
    np.testing.assert_array_equal(layer(x), before)


@pytest.mark.parametrize("ranks", [2, 3])
def test_thread_ranks(layer, ranks):
    gate_up, down, router = weights()
    x = rows(12)
    group = moekit.thread_ranks(ranks)
    shares = np.array_split(x, ranks)

    def work(rank):
        own = moekit.MoELayer(
            gate_up=gate_up, down=down, router_weight=router, top_k=K, rank=rank, num_threads=1, max_tokens=12
        )
        assert rank.size == ranks
        return own(shares[rank.index])

    np.testing.assert_array_equal(np.concatenate(group.run(work)), layer(x))


def test_a_rank_without_a_layer_tells_the_others():
    gate_up, down, router = weights()
    group = moekit.thread_ranks(3)
    good = {"gate_up": gate_up, "down": down, "router_weight": router, "top_k": K}
    failing = [
        ("gate_up", lambda rank: moekit.MoELayer(down=down, top_k=K, rank=rank)),
        ("combine", lambda rank: moekit.MoELayer(**good, rank=rank, combine="sideways")),
        ("layer is -3", lambda rank: moekit.load_layer("/nowhere", -3, rank=rank)),
        ("/nowhere", lambda rank: moekit.load_layer("/nowhere", rank=rank)),
    ]
    for words, fail in failing:

        def work(rank, fail=fail):
            try:
                fail(rank) if rank.index == 1 else moekit.MoELayer(**good, rank=rank)
            except moekit.MoekitError as error:
                return error
            return None

        errors = list(group.run(work))
        assert isinstance(errors[1], moekit.InvalidArgumentError) and words in str(errors[1])
        for rank in (0, 2):
            assert str(errors[rank]) == f"rank 1 could not make its plan: {errors[1]}"
    # The group is as good as before.
    outputs = list(group.run(lambda rank: moekit.MoELayer(**good, rank=rank, num_threads=1)(rows(3))))
    assert len(outputs) == 3


def test_a_missing_rank_is_a_timeout():
    gate_up, down, router = weights()
    group = moekit.thread_ranks(2, deadline=0.3)

    def work(rank):
        if rank.index == 1:
            return None
        return moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, rank=rank)(rows(2))

    with pytest.raises(TimeoutError):
        group.run(work)


def test_two_threads_call_two_layers_and_one(layer):
    gate_up, down, router = weights(7)
    other = moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, num_threads=2)
    x = rows(8)
    wanted = {id(layer): layer(x), id(other): other(x)}
    wrong = []

    def work(mine):
        for _ in range(200):
            if not np.array_equal(mine(x), wanted[id(mine)]):
                wrong.append(mine)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (layer, other, layer, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def run_in_child(body):
    """The exit status of a forked child that runs `body`; a hang is killed by an alarm."""
    pid = os.fork()
    if pid == 0:
        import signal

        signal.alarm(20)
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork(layer):
    x = rows(8)
    wanted = layer(x)
    group = moekit.thread_ranks(1)
    ranked = moekit.load_layer(MODEL, rank=group[0])

    def child():
        np.testing.assert_array_equal(layer(x), wanted)
        np.testing.assert_array_equal(layer(x), wanted)
        with pytest.raises(moekit.UnsupportedError, match="fork"):
            ranked(rows(1, 128))
        with pytest.raises(moekit.InvalidArgumentError, match="fork"):
            moekit.load_layer(MODEL, rank=group[0])
        moekit.load_layer(MODEL)(rows(1, 128))
        gc.collect()

    assert run_in_child(child) == 0
    np.testing.assert_array_equal(layer(x), wanted)


def resident_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_ten_thousand_calls_leak_nothing():
    gate_up, down, router = weights()
    layer = moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, num_threads=1, max_tokens=4)
    x = rows(1)
    ids, share = np.zeros((1, K), np.int32), np.ones((1, K), np.float32)

    def call(count):
        for _ in range(count):
            layer(x)
            layer(x, ids, share)
            try:
                layer(x[:, :-1])
            except ValueError:
                continue
            raise AssertionError("a row too short was taken")

    call(10000)  # arenas of two allocators grow at first
    before = resident_kib()
    call(10000)
    assert resident_kib() - before < 512  # a leak of 64 bytes a call would show


def test_made_and_dropped_layers_leak_nothing():
    gate_up, down, router = weights()

    def make(count):
        for _ in range(count):
            moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, num_threads=2)(rows(1))

    make(30)
    before = resident_kib()
    make(200)
    assert resident_kib() - before < 8192
