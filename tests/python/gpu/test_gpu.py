"""Layers on a GPU from Python: torch's CUDA tensors where they lie, streams, graphs, torch.compile, transformers.

Needs a GPU of compute capability 8.0 or later, torch with CUDA, and the plug-in libmoekit_cuda.so beside the library
(or MOEKIT_CUDA_PLUGIN); skipped elsewhere. apache-tvm-ffi is used where it is installed, and left out as well.
"""

import gc
import threading

import numpy as np
import pytest
from weights import weights

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)
import moekit  # noqa: E402
import moekit.torch  # noqa: E402

E, K, H, I = 16, 4, 256, 128  # noqa: E741
MAX_TOKENS = 512
CUDA = torch.device("cuda", 0)
# bf16 rows, products of bf16 and bf16 slot rows: 2^-9 for each of some roundings in a row. The GPU tests of the
# kernels see 6e-4 to 2e-3.
BOUND = 5e-3


def host_weights(seed=0):
    gate_up, down, router = (torch.from_numpy(w) for w in weights(seed, E, H, I))
    return gate_up.bfloat16(), down.bfloat16(), router


def make_layer(device, seed=0, **options):
    gate_up, down, router = host_weights(seed)
    return moekit.MoELayer(gate_up=gate_up, down=down, router_weight=router, top_k=K, max_tokens=MAX_TOKENS, device=device,
                           **options)


@pytest.fixture(scope="module")
def layer():
    made = make_layer(CUDA)
    assert made.explain()["chosen"]["backend"] in ("sm90", "cuda_decode", "cuda_ref")
    return made


@pytest.fixture(scope="module")
def on_cpu():
    return make_layer("cpu", activations="f32")


def inputs(tokens, seed=1):
    """hidden, ids and weights on the GPU; and the same on the CPU, rows as float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=generator).bfloat16()
    score, ids = torch.randn(tokens, E, generator=generator).softmax(1).topk(K)
    host = hidden.float(), ids.int(), score.contiguous()
    return (hidden.to(CUDA), host[1].to(CUDA), host[2].to(CUDA)), host


def error(got, wanted):
    got, wanted = got.double().cpu(), wanted.double().cpu()
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.usefixtures("call_path")
@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 300, 512])
def test_tensors_of_the_gpu_against_the_cpu(layer, on_cpu, tokens):
    given, host = inputs(tokens)
    y = layer(*given)
    assert y.device == given[0].device and y.dtype == torch.bfloat16 and y.shape == (tokens, H)
    assert error(y, on_cpu(*host)) < BOUND


def test_tensors_of_the_host_on_a_gpu(layer, on_cpu):
    _, host = inputs(40)
    assert error(layer(*host), on_cpu(*host)) < BOUND
    routed = layer.details(host[0])
    np.testing.assert_array_equal(routed.topk_ids, on_cpu.details(host[0]).topk_ids)
    assert error(torch.from_numpy(np.asarray(routed.output)), on_cpu(host[0])) < BOUND


@pytest.mark.usefixtures("call_path")
def test_nothing_is_copied_or_allocated(layer):
    given, _ = inputs(64)
    out = torch.empty_like(given[0])
    wanted = layer(*given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info(0)[0]
    for _ in range(50):
        assert layer(*given, out=out) is out
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.mem_get_info(0)[0]) == before
    assert torch.equal(out, wanted)
    # Memory inside of a larger tensor is read and written where it lies.
    wide = torch.zeros(3 * 64, H, dtype=torch.bfloat16, device=CUDA)
    wide[64:128] = given[0]
    layer(wide[64:128], *given[1:], out=wide[128:])
    assert torch.equal(wide[128:], wanted) and not wide[:64].any()


@pytest.mark.usefixtures("call_path")
def test_calls_follow_the_current_stream(layer):
    old, _ = inputs(32, seed=2)
    new, _ = inputs(32, seed=3)
    wanted = layer(*new)
    torch.cuda.synchronize()
    hidden = old[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # 50 ms: a call on another stream would read the old rows
        hidden.copy_(new[0])
        y = layer(hidden, *new[1:])
    stream.synchronize()
    assert torch.equal(y, wanted)


class Exporter:
    """Another library's array: DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **more):
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, **more)


def test_other_libraries_arrays_and_an_explicit_stream(layer):
    given, _ = inputs(16)
    wanted = layer(*given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for name in (stream, stream.cuda_stream):
        out = torch.zeros_like(given[0])
        hidden, target = Exporter(given[0]), Exporter(out)
        assert layer(hidden, *given[1:], out=target, stream=name) is target
        stream.synchronize()
        assert torch.equal(out, wanted) and hidden.streams == [stream.cuda_stream]
    with pytest.raises(moekit.UnsupportedError, match="out="):
        layer(Exporter(given[0]), *given[1:])


def test_cupy_arrays(layer):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    given, _ = inputs(16)
    wanted = layer(*given)
    torch.cuda.synchronize()
    ids, share = (cupy.from_dlpack(t) for t in given[1:])
    out = torch.zeros_like(given[0])
    layer(given[0], ids, share, out=out)
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.usefixtures("call_path")
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_a_cuda_graph_replays_other_routings(layer, tokens):
    static, _ = inputs(tokens)
    out = torch.zeros_like(static[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch asks for a warm-up
        layer(*static, out=out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*static, out=out)
        fresh = layer(out, *static[1:])  # and with memory of the graph's pool
    seen = set()
    for seed in (4, 5, 6):
        given, _ = inputs(tokens, seed)
        seen.add(given[1].cpu().numpy().tobytes())
        for target, value in zip(static, given):
            target.copy_(value)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        first, second = out.clone(), fresh.clone()
        assert torch.equal(first, layer(*given))
        assert torch.equal(second, layer(first, *given[1:]))
    assert len(seen) == 3


class Block(torch.nn.Module):
    """Norm, a router of torch, moekit's experts, residual."""

    def __init__(self, layer):
        super().__init__()
        self.norm = torch.nn.RMSNorm(H, dtype=torch.bfloat16)
        self.gate = torch.nn.Linear(H, E, bias=False, dtype=torch.bfloat16)
        self.moe = moekit.torch.MoEModule(layer)

    def forward(self, x):
        rows = self.norm(x)
        share, ids = self.gate(rows).float().softmax(-1).topk(K)
        return x + self.moe(rows, ids.flatten(0, -2), share.flatten(0, -2))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(layer, mode):
    torch.manual_seed(0)
    block = Block(layer).to(CUDA).eval()
    compiled = torch.compile(block, fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(4):
            x = torch.randn(2, 8, H, generator=torch.Generator().manual_seed(seed)).bfloat16().to(CUDA)
            wanted = block(x)
            got = compiled(x).clone()
            # Fused norms round otherwise, which may move a choice of experts between near ties.
            rows = (got.float() - wanted.float()).flatten(0, 1).norm(dim=1) / wanted.float().flatten(0, 1).norm(dim=1)
            assert (rows < 2e-2).sum() >= 14, rows


def test_operators_pass_torchs_own_checks(layer):
    given, _ = inputs(8)
    number = moekit.torch.register_layer(layer)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moekit.moe, (*given, number), test_utils=tests)
    torch.library.opcheck(torch.ops.moekit.moe_out, (*given, number, torch.empty_like(given[0])), test_utils=tests)


@pytest.mark.usefixtures("call_path")
def test_what_does_not_fit_is_refused(layer):
    (hidden, ids, share), host = inputs(8)
    for call, match in (
        (lambda: layer(hidden), "topk_ids and topk_weights"),
        (lambda: layer(hidden.float(), ids, share), "bf16"),
        (lambda: layer(hidden, ids.long(), share), "i32"),
        (lambda: layer(hidden, ids, host[2]), "topk_weights"),
        (lambda: layer(hidden, ids, share, out=torch.empty(8, H, dtype=torch.bfloat16)), "output"),
        (lambda: layer(hidden.t().contiguous().t(), ids, share), "contiguous"),
        (lambda: layer(hidden[:, :-1], ids, share), "hidden"),
        (lambda: layer(*host, stream=1), "stream"),
        (lambda: layer(hidden, ids, share, stream="x"), "stream"),
        (lambda: make_layer("cuda:77"), "77"),
    ):
        with pytest.raises(moekit.MoekitError, match=match):
            call()
    assert layer(hidden, ids, share).shape == (8, H)  # the layer stays usable


def test_two_threads_two_layers_two_streams(layer):
    other = make_layer(CUDA, seed=9)
    given, _ = inputs(48)
    wanted = {id(x): x(*given) for x in (layer, other)}
    torch.cuda.synchronize()
    wrong = []

    def work(mine):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                y = mine(*given)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(y, wanted[id(mine)]):
                    wrong.append(mine)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in (layer, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_layers_give_their_memory_back():
    def free():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(0)[0]

    for _ in range(2):
        make_layer(CUDA)
    before = free()
    for _ in range(5):
        make_layer(CUDA)
    assert before - free() < 8 << 20


def test_ten_thousand_calls_leak_nothing(layer):
    given, _ = inputs(1)

    def resident_kib():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    def call(count):
        for _ in range(count):
            layer(*given)
        torch.cuda.synchronize()

    call(3000)
    before = resident_kib(), torch.cuda.mem_get_info(0)[0]
    call(10000)
    assert resident_kib() - before[0] < 1024
    assert torch.cuda.mem_get_info(0)[0] == before[1]


def test_transformers_on_a_gpu():
    transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 is not installed")
    import moekit.transformers as adapter

    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            if name.endswith("gate.weight"):
                weight.mul_(4)
    model = model.eval().to(CUDA)
    ids = torch.randint(1, 128, (2, 9), device=CUDA)
    adapter.configure(strict=True)
    with torch.no_grad():
        wanted = model(ids).logits
        model.set_experts_implementation("moekit")
        got = model(ids).logits
    assert error(got, wanted) < 3e-2
    assert all(adapter._packed[m].layer.explain()["chosen"]["backend"].startswith(("sm90", "cuda"))
               for m in model.modules() if m in adapter._packed)
    assert sum(m in adapter._packed for m in model.modules()) == 2
