"""One rank of a PyTorch job on real GPUs: NCCL's own log is kept beside what the rank logs of itself.

Kinds: data (data-parallel training of a small transformer; the framework reduces gradients), tensor (tensor-parallel
inference: each layer split over the ranks, its partial sums reduced after it), graph (the same captured in a CUDA graph and
replayed), calls (a few steps of every collective that the framework offers, on three communicators, one of them split off).

With --late a rank does something else first in 5 of 100 steps, for about --delay milliseconds: sleep, compute (on its CPU), copy
(pageable, to its GPU), larger (a larger batch, before what is reduced).

Prints "ready" before there is any communicator, begins with a line on its standard input, and writes an .npz: `pid`, `device`,
`requests` and `faults` (n, 2) start and end in CLOCK_MONOTONIC ns, `come` (n,) when the first collective of each request was called,
`replays` of graphs. NCCL writes its own log to where NCCL_DEBUG_FILE says.

usage: python3 -m tests.gpu.rank --kind data|tensor|graph|calls --rank R --ranks N --meet FILE --truth FILE.npz
       [--seconds S] [--late sleep|compute|copy|larger --delay MS] [--seed N] [--cpu N]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable

import numpy as np

WIDTH, HEADS, LAYERS, TOKENS = 1024, 8, 6, 64
BATCH, STEPS_OF_CALLS = 16, 20
LATE_SHARE, QUIET_STEPS = 0.05, 100
REST_S = 0.002
MIB = 1 << 20


class Training:
    """Data-parallel training: one request a step, from the batch to its loss on the host."""

    def __init__(self, rank: int) -> None:
        import torch

        self.torch = torch
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, dropout=0.0)
        model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).cuda()
        self.model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn((BATCH, TOKENS, WIDTH)).pin_memory()
        self.replays = 0

    def step(self) -> int:
        x = self.inputs.to("cuda", non_blocking=True)
        loss = self.model(x).square().mean()
        come = time.monotonic_ns()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        return come


class Inference:
    """Tensor-parallel layers, eager or in a graph."""

    def __init__(self, ranks: int, captured: bool) -> None:
        import torch

        self.torch = torch
        self.first = [torch.randn((WIDTH, 4 * WIDTH // ranks), device="cuda").half() / 32 for _ in range(LAYERS)]
        self.second = [torch.randn((4 * WIDTH // ranks, WIDTH), device="cuda").half() / 64 for _ in range(LAYERS)]
        self.inputs = torch.randn((BATCH * TOKENS, WIDTH)).half().pin_memory()
        self.x = self.inputs.cuda()
        self.replays, self.come = 0, 0
        self.graph = None
        if captured:
            for _ in range(3):
                self._layers()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = self._layers()

    def _layers(self) -> object:
        x = self.x
        self.come = 0
        for first, second in zip(self.first, self.second, strict=True):
            y = self.torch.relu(x @ first) @ second
            self.come = self.come or time.monotonic_ns()
            self.torch.distributed.all_reduce(y)
            x = self.torch.nn.functional.layer_norm(x + y, (WIDTH,))
        return x

    def step(self) -> int:
        self.x.copy_(self.inputs, non_blocking=True)
        if self.graph:
            self.come = time.monotonic_ns()
            self.graph.replay()
            self.replays += 1
            y = self.y
        else:
            y = self._layers()
        y[:, 0].cpu()
        return self.come


class EveryCall:
    """Each collective of the framework once a step, on communicators of their own."""

    def __init__(self, rank: int, ranks: int) -> None:
        import torch

        self.torch, self.rank, self.ranks = torch, rank, ranks
        self.groups = [None, torch.distributed.new_group(list(range(ranks))), torch.distributed.new_group(list(range(ranks)))]
        self.replays = 0

    def step(self) -> int:
        torch, ranks = self.torch, self.ranks
        dist = torch.distributed
        come = time.monotonic_ns()
        for number, group in enumerate(self.groups):
            for dtype in (torch.half, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32, torch.int64):
                dist.all_reduce(torch.ones(1000 * (number + 1), dtype=dtype, device="cuda"), group=group)
            x = torch.ones(4096 * ranks * (number + 1), device="cuda")
            dist.broadcast(x, 0, group=group)
            dist.reduce(x, 0, group=group)
            whole = torch.empty(len(x) * ranks, device="cuda")
            dist.all_gather_into_tensor(whole, x, group=group)
            dist.reduce_scatter_tensor(x, whole, group=group)
            dist.all_to_all_single(torch.empty_like(x), x, group=group)
        torch.cuda.synchronize()
        return come


def late_by(what: str, delay_s: float) -> Callable[[], None]:
    """What a late rank does first, for about so long."""
    import torch

    if what == "copy":
        pageable = torch.randn(64 * MIB // 4)
        on_gpu = torch.empty_like(pageable, device="cuda")
        on_gpu.copy_(pageable)
        torch.cuda.synchronize()
        start = time.monotonic()
        on_gpu.copy_(pageable)
        torch.cuda.synchronize()
        copies = max(1, round(delay_s / (time.monotonic() - start)))

        def upload() -> None:
            for _ in range(copies):
                on_gpu.copy_(pageable)

        return upload
    if what == "larger":
        wide = torch.randn((8192, 8192), device="cuda").half()
        out = torch.empty_like(wide)
        torch.mm(wide, wide, out=out)
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(8):
            torch.mm(wide, wide, out=out)
        torch.cuda.synchronize()
        products = max(1, round(8 * delay_s / (time.monotonic() - start)))

        def multiply() -> None:
            for _ in range(products):
                torch.mm(wide, wide, out=out)

        return multiply

    def compute() -> None:
        until = time.monotonic() + delay_s
        while time.monotonic() < until:
            sum(range(1000))

    return compute if what == "compute" else lambda: time.sleep(delay_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("data", "tensor", "graph", "calls"), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--meet", required=True, help="a file that does not exist yet, the same for all ranks")
    parser.add_argument("--truth", required=True)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--late", choices=("sleep", "compute", "copy", "larger"))
    parser.add_argument("--delay", type=float, default=20, help="milliseconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", type=int, help="pin the rank to this CPU and the next")
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu, options.cpu + 1})
    device = torch.device("cuda", options.rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    print("ready", flush=True)
    sys.stdin.readline()
    # With a device the communicators are made at once, and the second of a kind is split off the first.
    dist.init_process_group("nccl", init_method=f"file://{options.meet}", rank=options.rank, world_size=options.ranks, device_id=device)
    make = {
        "data": lambda: Training(options.rank),
        "tensor": lambda: Inference(options.ranks, False),
        "graph": lambda: Inference(options.ranks, True),
        "calls": lambda: EveryCall(options.rank, options.ranks),
    }
    job = make[options.kind]()
    # Every rank takes the same steps: how many, the first one says.
    late = late_by(options.late, options.delay / 1000) if options.late else None
    rng = random.Random(options.seed)
    requests, faults, come = [], [], []
    enabled = torch.enable_grad() if options.kind == "data" else torch.no_grad()
    over = torch.zeros(1, device=device)
    begin = time.monotonic()
    with enabled:
        while True:
            if options.kind == "calls":
                if len(requests) == STEPS_OF_CALLS:
                    break
            elif len(requests) % 50 == 0:
                over.fill_(time.monotonic() > begin + options.seconds)
                dist.broadcast(over, 0)
                if over.item():
                    break
                time.sleep(REST_S)
            is_faulty = late is not None and len(requests) > QUIET_STEPS and rng.random() < LATE_SHARE
            start = time.monotonic_ns()
            if is_faulty and late:
                late()
            come.append(job.step())
            end = time.monotonic_ns()
            requests.append((start, end))
            if is_faulty:
                faults.append((start, end))
            time.sleep(REST_S)
    dist.destroy_process_group()
    spans = {"requests": requests, "faults": faults}
    arrays = {key: np.array(value, np.int64).reshape(-1, 2) for key, value in spans.items()}
    np.savez(options.truth, pid=os.getpid(), device=options.rank, come=np.array(come, np.int64), replays=job.replays, **arrays)


if __name__ == "__main__":
    main()
