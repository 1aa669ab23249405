"""The routed experts of a layer in torch, timed on request. Runs as a child of `moekit bench --peers`.

A line of JSON on standard input asks, one on standard output answers. Descriptor 3 holds the weights, descriptor 4 the
rows and routings of a point and, behind them, room for the output.
"""

import json
import math
import mmap
import os
import sys
import time

# Of the folder in which somebody happens to stand, nothing is to be imported.
sys.path = [p for p in sys.path if p not in ("", os.getcwd())]
answers, sys.stdout = sys.stdout, sys.stderr

WEIGHTS, ROWS = 3, 4


class Experts:
    def start(self, threads, gpu):
        global torch, F
        import torch
        import torch.nn.functional as F

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.device = torch.device("cpu")
        if gpu is not None:
            if not torch.cuda.is_available():
                raise RuntimeError(f"torch {torch.__version__} sees no GPU")
            self.device = torch.device("cuda", gpu)
            torch.cuda.set_device(self.device)
            return {"torch": torch.__version__, "threads": torch.get_num_threads(), "bf16": True}
        try:
            bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        except (AttributeError, RuntimeError):
            bf16 = False
        return {"torch": torch.__version__, "threads": torch.get_num_threads(), "bf16": bf16}

    def take(self, buffer, at, shape, dtype):
        """A copy of a tensor that lies at byte `at`, and the byte behind it."""
        count = math.prod(shape)
        view = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).reshape(shape)
        return view.to(self.device, copy=True), at + count * view.element_size()

    def weights(self, experts, width, columns, inter, dtype, biases, activation):
        self.dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        self.experts, self.width, self.activation = experts, width, activation
        buffer = mmap.mmap(WEIGHTS, 0)
        gate_up, at = self.take(buffer, 0, (experts, columns, width), self.dtype)
        down, at = self.take(buffer, at, (experts, width, inter), self.dtype)
        self.gate_up_bias = self.down_bias = None
        if biases[0]:
            self.gate_up_bias, at = self.take(buffer, at, (experts, columns), torch.float32)
            self.gate_up_bias = self.gate_up_bias.to(self.dtype)
        if biases[1]:
            self.down_bias, at = self.take(buffer, at, (experts, width), torch.float32)
            self.down_bias = self.down_bias.to(self.dtype)
        buffer.close()
        self.copies = [(gate_up, down)]
        self.multiply, name = self.choose_product()
        return {"implementation": name}

    def choose_product(self):
        """torch's grouped product where this version has one for the device and this type, else a linear an expert."""
        rows = torch.ones(2, 16, dtype=self.dtype, device=self.device)
        matrices = torch.ones(2, 16, 16, dtype=self.dtype, device=self.device)
        ends = torch.tensor([1, 2], dtype=torch.int32, device=self.device)
        for name, product in (
            ("torch.nn.functional.grouped_mm", getattr(F, "grouped_mm", None)),
            ("torch._grouped_mm", getattr(torch, "_grouped_mm", None)),
        ):
            try:
                if product and bool((product(rows, matrices.transpose(-2, -1), offs=ends) == 16).all()):
                    return lambda x, w, ends: product(x, w.transpose(-2, -1), offs=ends), name
            except (RuntimeError, TypeError, NotImplementedError):
                pass
        if self.on_gpu():
            raise RuntimeError(f"torch {torch.__version__} has no grouped product for {self.dtype} on this GPU")
        return self.linear_per_expert, "linear per expert"

    def on_gpu(self):
        return self.device.type == "cuda"

    @staticmethod
    def linear_per_expert(x, w, ends):
        out = x.new_empty(x.shape[0], w.shape[1])
        first = 0
        for expert, last in enumerate(ends.tolist()):
            if last > first:
                out[first:last] = F.linear(x[first:last], w[expert])
            first = last
        return out

    def set_copies(self, count):
        while len(self.copies) < count:
            self.copies.append(tuple(w.clone() for w in self.copies[0]))
        return {}

    def calls(self, tokens, top_k, count):
        self.buffer = mmap.mmap(ROWS, 0)
        hidden, at = self.take(self.buffer, 0, (tokens, self.width), torch.bfloat16)
        hidden = hidden.to(self.dtype)
        self.routings = []
        for _ in range(count):
            ids, at = self.take(self.buffer, at, (tokens, top_k), torch.int32)
            weights, at = self.take(self.buffer, at, (tokens, top_k), torch.float32)
            # On a GPU each call reads rows of its own, as ours do.
            rows = hidden.clone() if self.on_gpu() else hidden
            self.routings.append((rows, ids.long(), weights.to(self.dtype), bool((ids < 0).any())))
        self.output_at = at
        return {}

    def activate(self, gate_up):
        a = self.activation
        kind, limit = a["kind"], a["limit"]
        if a["gated"]:
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            gate, up = gate_up, None
        if limit is not None and up is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if kind == "silu":
            gate = F.silu(gate)
        elif kind == "gelu":
            gate = F.gelu(gate)
        elif kind == "gelu_tanh":
            gate = F.gelu(gate, approximate="tanh")
        elif kind == "relu2":
            gate = F.relu(gate).square()
        else:
            gate, up = gate * torch.sigmoid(a["alpha"] * gate), up + a["beta"]
        return gate if up is None else gate * up

    def call_on_gpu(self, copy, call):
        """The same without a size that the host would have to know, for a graph: slots without an expert come last."""
        gate_up_weights, down_weights = self.copies[copy]
        hidden, ids, weights, has_holes = self.routings[call]
        flat = ids.reshape(-1)
        if has_holes:
            flat = flat.masked_fill(flat < 0, self.experts)
        experts, order = flat.sort(stable=True)
        numbers = torch.arange(self.experts, device=self.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        named = experts.clamp(max=self.experts - 1)
        sums = self.multiply(hidden[order // ids.shape[1]], gate_up_weights, ends)
        if self.gate_up_bias is not None:
            sums = sums + self.gate_up_bias[named]
        rows = self.multiply(self.activate(sums), down_weights, ends)
        if self.down_bias is not None:
            rows = rows + self.down_bias[named]
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        if has_holes:
            rows = rows.masked_fill((experts >= self.experts).unsqueeze(-1), 0)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(order.numel(), device=self.device)
        return rows[slots].reshape(*ids.shape, -1).sum(dim=1)

    def call(self, copy, call):
        if self.on_gpu():
            return self.call_on_gpu(copy, call)
        gate_up_weights, down_weights = self.copies[copy]
        hidden, ids, weights, has_holes = self.routings[call]
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        if has_holes:
            order = order[(flat < 0).sum() :]
        experts = flat[order]
        ends = torch.bincount(experts, minlength=self.experts).cumsum(0).to(torch.int32)
        tokens = order // ids.shape[1]
        sums = self.multiply(hidden[tokens], gate_up_weights, ends)
        if self.gate_up_bias is not None:
            sums = sums + self.gate_up_bias[experts]
        rows = self.multiply(self.activate(sums), down_weights, ends)
        if self.down_bias is not None:
            rows = rows + self.down_bias[experts]
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        if has_holes:
            return torch.zeros_like(hidden).index_add_(0, tokens, rows)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(order.numel())
        return rows[slots].reshape(*ids.shape, -1).sum(dim=1)

    def run(self):
        output = self.call(0, 0).float().contiguous()
        room = torch.frombuffer(self.buffer, dtype=torch.float32, count=output.numel(), offset=self.output_at)
        room.copy_(output.reshape(-1))
        return {}

    def time(self, turns):
        times = []
        for copy, call in turns:
            start = time.perf_counter()
            self.call(copy, call)
            times.append((time.perf_counter() - start) * 1e6)
        return {"times": times}

    def launches(self, enqueue, untimed, timed):
        """Microseconds of each timed launch of a graph of what `enqueue` does."""
        enqueue()  # libraries load their kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            enqueue()
        times = []
        for _ in range(untimed + timed):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3)
        del graph
        torch.cuda.empty_cache()  # the bench shares this GPU
        return times[untimed:]

    def graph(self, turns, untimed, timed):
        def enqueue():
            for copy, call in turns:
                self.call(copy, call)

        return {"times": [us / len(turns) for us in self.launches(enqueue, untimed, timed)]}

    def dense(self, fp8):
        """Dense products of 8192 x 8192 random matrices, eight a graph, back to back."""
        n, products = 8192, 8
        a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        if fp8:
            a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
            one = torch.ones((), device=self.device)

        def enqueue():
            for _ in range(products):
                if fp8:
                    torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
                else:
                    torch.mm(a, b.t())

        times = sorted(self.launches(enqueue, 3, 25))
        return {"tflops": 2 * n**3 * products / times[len(times) // 2] * 1e-6}


def main():
    experts = Experts()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = getattr(experts, question.pop("do"))(**question)
        except Exception as error:  # whatever it is, the bench prints it as this peer's reason
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


main()
