"""What a call from Python costs over the same call from C: a tiny layer, in turns, in one process.

    python bench/python/call_overhead.py [--device cuda] [--json]

C is a loop over moekit_layer_run with the same tensors (bench/python/call_loop.c, compiled with cc). On a GPU calls are
enqueued in batches, with the device idle before each, and the host's time is taken: no call waits for the one before.
Each figure is the median of the batches, in microseconds a call; "over C" is the difference of the medians.
"""

import argparse
import ctypes
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np

import moekit
from moekit import _layer, _library, _tvm_ffi

EXPERTS, TOP_K, HIDDEN, INTER = 8, 2, 64, 32


def c_loop():
    source = pathlib.Path(__file__).with_name("call_loop.c")
    folder = tempfile.mkdtemp()
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder}/call_loop.so", source], check=True)
    time_calls = ctypes.CDLL(f"{folder}/call_loop.so").time_calls
    time_calls.restype = ctypes.c_int64
    time_calls.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return time_calls


def make_layer(device):
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((EXPERTS, 2 * INTER, HIDDEN)).astype(np.float32)
    down = rng.standard_normal((EXPERTS, HIDDEN, INTER)).astype(np.float32)
    router = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32)
    options = {"router_weight": router, "top_k": TOP_K, "max_tokens": 1, "num_threads": 1, "device": device}
    if device == "cpu":
        return moekit.MoELayer(gate_up=gate_up, down=down, **options)
    import torch

    gate_up, down = (torch.from_numpy(w).bfloat16() for w in (gate_up, down))
    return moekit.MoELayer(gate_up=gate_up, down=down, **options)


def c_call(layer, tensors, time_calls, stream):
    """A function that times calls of the C loop on these tensors."""
    slot = _layer._Slot()
    for view, value in zip((slot.hidden, slot.ids, slot.weights, slot.output), tensors):
        view.set(value, "tensor")
    slot.routed.stream = stream
    run = ctypes.cast(_library.lib.moekit_layer_run, ctypes.c_void_p)

    def timed(count):
        nanoseconds = time_calls(run, layer._handle, ctypes.addressof(slot.routed), count)
        _library.check(0 if nanoseconds >= 0 else 8)
        return nanoseconds / 1e3 / count

    return timed


def python_call(call):
    def timed(count):
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e6 / count

    return timed


def cases(layer, kind, device, time_calls):
    """{name: timed(count)}: C first, with the tensors of `kind`."""
    hidden, ids, weights = (
        np.ones((1, HIDDEN), np.float32), np.arange(TOP_K, dtype=np.int32)[None], np.full((1, TOP_K), 0.5, np.float32))
    stream = None
    if kind == "torch":
        import torch

        hidden, ids, weights = (torch.from_numpy(a).to(device) for a in (hidden, ids, weights))
        if device != "cpu":
            hidden = hidden.bfloat16()
            stream = torch.cuda.current_stream().cuda_stream
        out = torch.empty_like(hidden)
    else:
        out = np.empty_like(hidden)
    found = {
        "C": c_call(layer, (hidden, ids, weights, out), time_calls, stream),
        "layer(x, ids, weights, out=y)": python_call(lambda: layer(hidden, ids, weights, out=out)),
        "layer(x, ids, weights)": python_call(lambda: layer(hidden, ids, weights)),
    }
    if device == "cpu":
        found["layer(x)"] = python_call(lambda: layer(hidden))
    if kind == "torch":
        import moekit.torch

        number = moekit.torch.register_layer(layer)
        moe_out = torch.ops.moekit.moe_out
        found["torch.ops.moekit.moe_out"] = python_call(lambda: moe_out(hidden, ids, weights, number, out))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--calls", type=int, default=64, help="of a batch; a GPU's queue takes about 1000 launches")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    settle = lambda: None  # noqa: E731
    if on_gpu:
        import torch

        settle = torch.cuda.synchronize
    layer, time_calls = make_layer(args.device), c_loop()
    for kind in ("torch",) if on_gpu else ("numpy", "torch"):
        if kind == "torch":
            try:
                import torch  # noqa: F401
            except ImportError:
                print("torch: not installed")
                continue
        for path in ("ctypes", "tvm_ffi"):
            _tvm_ffi.run, _tvm_ffi._settled = None, path == "ctypes"
            if path == "tvm_ffi" and _tvm_ffi.find() is None:
                print("tvm_ffi: not installed, or torch is not imported")
                continue
            found = cases(layer, kind, args.device, time_calls)
            samples = {name: [] for name in found}
            for batch in range(args.batches + 5):
                for name, timed in found.items():
                    settle()
                    us = timed(args.calls)
                    if batch >= 5:  # the first ones warm up
                        samples[name].append(us)
            settle()
            c = statistics.median(samples["C"])
            for name, times in samples.items():
                low, middle, high = np.percentile(times, (10, 50, 90))
                row = {"device": args.device, "tensors": kind, "path": path, "call": name, "us": middle, "p10": low,
                       "p90": high, "over_c_us": middle - c}
                if args.json:
                    print(json.dumps(row))
                else:
                    print(f"{args.device} {kind:6}{path:8}{name:32}{middle:7.2f} us ({low:.2f} to {high:.2f}), "
                          f"over C {middle - c:6.2f}")


if __name__ == "__main__":
    main()
