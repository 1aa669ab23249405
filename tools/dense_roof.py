#!/usr/bin/env python3
"""Dense rates of the GPU at 8192^3, sustained: 8 products a CUDA graph, 25 replays back to back, random data.

Prints one JSON object: TFLOP/s, median (min-max of times in us), of bf16 and of tensor-wise fp8 through cuBLASLt.
"""

import json
import statistics

import torch

N = 8192
PRODUCTS = 8
REPLAYS = 25


def rate(product):
    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PRODUCTS):
            product()
    times = []
    for _ in range(REPLAYS + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / PRODUCTS)
    times = times[3:]
    median = statistics.median(times)
    return {"tflops": round(2 * N**3 / median * 1e-6, 1), "us": round(median, 1), "us_min": round(min(times), 1),
            "us_max": round(max(times), 1)}


def main():
    a = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(N, N, device="cuda", dtype=torch.bfloat16)
    result = {"bf16": rate(lambda: torch.mm(a, b.t()))}
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    result["fp8_tensor"] = rate(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16,
                                                         use_fast_accum=True))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
