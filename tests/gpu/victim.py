"""A PyTorch program that answers requests one after another on one thread, and logs each: the truth for runs on a real GPU.

It mirrors the simulated victim (gputail/sim/programs/victim.c) kind by kind and fault by fault. A request is an input
made, copied to the GPU, a small transformer, and the result copied back; then 2 ms of rest. With --fault, some of its
requests do to themselves what the fault is called for, after two clean seconds.

Needs a CUDA GPU and PyTorch. Prints "ready" once warmed up, begins with a line on its standard input, and writes an
.npz: `requests` and `faults`, (n, 2) start and end in CLOCK_MONOTONIC ns; `pid`.

With --varied a fault takes about 6, 17 or 45 hundredths of a usual request, and 1 request in 8 has one.

Of kind threads, another thread answers beside it, on a stream of its own, and logs nothing. Faults shift8, shift12, shift30 and ramp
are none: from half of the time on every request has so many hundredths more work for the GPU (ramp: up to 30, over 3 seconds).

Of kind loop, a request is 2000 launches of a kernel that does next to nothing, and a wait.

usage: python3 -m tests.gpu.victim --kind cpu|gpu|graph|async|copy|threads|loop [--fault FAULT] --seconds S --truth FILE.npz
                                   [--cpu N] [--seed N] [--varied]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import threading
import time

import numpy as np

CLEAN_S = 2.0
FAULT_SHARE, VARIED_SHARE = 0.03, 0.125
SIZES = (0.06, 0.17, 0.45)  # of a usual request, with --varied
REST_S = 0.002
PAGEABLE_BYTES = 192 << 20
MORE = 48
COPY_BYTES = 192 << 20
LOOP = 2000
GPU_BATCH = 224  # so large that the GPU, not the program, is what requests wait for
# What a fault takes where it is not varied, as its size: products, bytes, seconds, instructions, pairs of calls.
PLAIN = {
    "none": 0, "gside": 64, "gdevsync": 64, "devsync": 64, "pageable": PAGEABLE_BYTES, "gil": 0.03, "ptxjit": 1500, "alloc": 4,
    "morework": MORE, "compute": 0.005, "sleep": 0.005, "shift8": 0.08, "shift12": 0.12, "shift30": 0.3, "ramp": 0.3,
}  # fmt: skip
PINNED = ("async", "gpu", "threads")  # kinds whose inputs need not be copied by the CPU
BESIDE = ("gside", "gdevsync", "devsync")
SHIFTS = ("shift8", "shift12", "shift30", "ramp")


class Victim:
    """One kind of program, warmed up, with whatever its fault needs."""

    def __init__(self, kind: str, fault: str) -> None:
        import torch

        self.torch, self.kind, self.fault = torch, kind, fault
        # Batch and width make the CPU-bound one launch for most of its time, and the others wait for the GPU.
        batch, width, layers = (4, 512, 12) if kind in ("cpu", "async") else (64 if kind == "graph" else GPU_BATCH, 1024, 8)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).half().cuda().train()
        self.inputs = [torch.randn((batch, 64, width)).half() for _ in range(4)]
        if kind in PINNED:
            self.inputs = [x.pin_memory() for x in self.inputs]
        if kind == "async":
            self.output = torch.empty((batch, width), dtype=torch.half).pin_memory()
            self.done = torch.cuda.Event()
        if kind == "copy":
            self.pinned = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
            self.target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self.small = torch.zeros(1024, device="cuda")
        self.batch, self.more = batch, torch.randn((batch * (MORE if kind == "cpu" else 2), 64, width)).half()
        if kind in PINNED:
            self.more = self.more.pin_memory()
        self.big = torch.randn(PAGEABLE_BYTES // 4) if fault == "pageable" else None
        self.big_on_gpu = torch.empty(PAGEABLE_BYTES // 4, device="cuda") if fault == "pageable" else None
        self.side = torch.randn((4096, 4096), dtype=torch.half, device="cuda") if fault in (*BESIDE, *SHIFTS) else None
        self.side_out = torch.empty_like(self.side) if self.side is not None else None
        self.side_stream = torch.cuda.Stream()
        self.thread: threading.Thread | None = None
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.modules = 0
        self.more_products = 0  # what every request has more of
        self.next = 0
        with torch.no_grad():
            self.graph = self._captured() if kind == "graph" else None
            for _ in range(30):
                self.answer("none", 0)
            for _ in range(3 if fault not in SHIFTS else 0):
                self.answer(fault, PLAIN[fault])
                self.end_fault()
            if fault == "morework":
                for share in (*SIZES, 1):
                    self.answer(fault, 1 + share)

    def _captured(self) -> object:
        torch = self.torch
        self.x = self.inputs[0].cuda()
        with torch.cuda.stream(self.side_stream):
            for _ in range(3):
                self.model(self.x)
        torch.cuda.current_stream().wait_stream(self.side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.y = self.model(self.x)
        return graph

    def end_fault(self) -> None:
        """Wait until nothing of the fault is left that could hurt the next request."""
        self.side_stream.synchronize()
        if self.thread:
            self.thread.join()
            self.thread = None

    def calibrate(self) -> float:
        """Seconds that the fault takes for each unit of its size."""
        if self.fault in ("none", "gil", "compute", "sleep", "morework"):
            return 1.0
        size = {"pageable": PAGEABLE_BYTES, "ptxjit": 1500, "alloc": 8}.get(self.fault, 64)
        self.torch.cuda.synchronize()
        start = time.monotonic()
        if self.fault in (*BESIDE, *SHIFTS):
            self._queue_beside(size)
        elif self.fault == "pageable":
            self._upload(size)
        elif self.fault == "ptxjit":
            self._compile(size)
        else:
            self._allocate(size)
        self.torch.cuda.synchronize()
        return (time.monotonic() - start) / size

    def _queue_beside(self, products: float) -> None:
        with self.torch.cuda.stream(self.side_stream):
            for _ in range(max(1, round(products))):
                self.torch.mm(self.side, self.side, out=self.side_out)

    def _upload(self, size: float) -> None:
        count = max(1024, int(size) // 4)
        self.big_on_gpu[:count].copy_(self.big[:count])

    def answer(self, fault: str, size: float) -> None:
        """One request; size is that of its fault, in the units of PLAIN."""
        if fault in BESIDE:
            self._queue_beside(size)
        x = self.more[: round(self.batch * size)] if fault == "morework" else self.inputs[self.next % len(self.inputs)]
        self.next += 1
        if fault == "pageable":
            self._upload(size)
        if self.kind == "loop":
            for _ in range(LOOP):
                self.small.add_(1)
            self.torch.cuda.synchronize()
            return
        if self.kind == "copy":
            self.target.copy_(self.pinned, non_blocking=True)
        if self.graph:
            self.x.copy_(x)
        else:
            x = x.to("cuda", non_blocking=self.kind in PINNED)
        if fault in ("gdevsync", "devsync"):
            self.torch.cuda.synchronize()
        elif fault == "gil":
            self.thread = threading.Thread(target=_compute, args=(size,))
            self.thread.start()
        elif fault == "ptxjit":
            self._compile(size)
        elif fault == "alloc":
            self._allocate(size)
        elif fault == "compute":
            _compute(size)
        elif fault == "sleep":
            time.sleep(size)
        if self.graph:
            self.graph.replay()
            y = self.y
        else:
            y = self.model(x)
        for _ in range(self.more_products):
            self.torch.mm(self.side, self.side, out=self.side_out)
        if self.kind == "async":
            self.output.copy_(y[:, 0], non_blocking=True)
            self.done.record()
            self.done.synchronize()
        else:
            y[:, 0].cpu()

    def _compile(self, instructions: float) -> None:
        """Load a module that the driver has to compile: its text is new each time, or it would come from the cache."""
        self.modules += 1
        body = "\n".join(f"fma.rn.f32 f, f, f, 0f{0x3F800000 + self.modules * 4096 + i:08X};" for i in range(max(1, int(instructions))))
        text = f"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {{
 .reg .f32 f; .reg .b64 a;
 ld.param.u64 a, [p];
 ld.global.f32 f, [a];
 {body}
 st.global.f32 [a], f;
 ret;
}}
"""
        module = ctypes.c_void_p()
        status = self.driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(text.encode()))
        if status:
            raise SystemExit(f"cuModuleLoadData failed with {status}")
        self.driver.cuModuleUnload(module)

    def _allocate(self, pairs: float) -> None:
        """Take memory from the driver and give it back, past the framework's cache."""
        for _ in range(max(1, round(pairs))):
            address = ctypes.c_uint64()
            status = self.driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1 << 30))
            if status:
                raise SystemExit(f"cuMemAlloc_v2 failed with {status}")
            self.driver.cuMemFree_v2(address)


def _compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def shift_at(options: argparse.Namespace, since_s: float) -> float:
    """How much more work, of the usual, a request has at that time since the beginning."""
    late_s = since_s - options.seconds / 2
    if late_s < 0:
        return 0
    return PLAIN[options.fault] * (min(late_s / 3, 1) if options.fault == "ramp" else 1)


def answer_beside(beside: Victim, over: threading.Event) -> None:
    """Another thread's requests, until that is over."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        while not over.is_set():
            beside.answer("none", 0)
            time.sleep(REST_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("cpu", "gpu", "graph", "async", "copy", "threads", "loop"), required=True)
    parser.add_argument("--fault", choices=PLAIN, default="none")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--truth", required=True)
    parser.add_argument("--cpu", type=int, help="pin the answering thread to this CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--varied", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    import torch

    torch.set_num_threads(1)
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu, options.cpu + 1} if options.kind == "threads" else {options.cpu})
    victim = Victim(options.kind, options.fault)
    unit_s = victim.calibrate()
    rng = random.Random(options.seed)
    over = threading.Event()
    beside = threading.Thread(target=answer_beside, args=(Victim("graph", "none") if options.kind == "threads" else victim, over))
    print("ready", flush=True)
    sys.stdin.readline()
    if options.kind == "threads":
        beside.start()
    requests, faults = [], []
    usual_s = 0.005
    begin = time.monotonic()
    with torch.no_grad():
        while (now := time.monotonic()) < begin + options.seconds:
            share = VARIED_SHARE if options.varied else FAULT_SHARE
            if options.fault in SHIFTS:
                victim.more_products = round(shift_at(options, now - begin) * usual_s / unit_s)
            is_faulty = options.fault not in ("none", *SHIFTS) and now > begin + CLEAN_S and rng.random() < share
            size: float = PLAIN[options.fault]
            if is_faulty and options.varied:
                part = rng.choice(SIZES)
                size = 1 + part if options.fault == "morework" else part * usual_s / unit_s
            start = time.monotonic_ns()
            victim.answer(options.fault if is_faulty else "none", size)
            end = time.monotonic_ns()
            requests.append((start, end))
            if len(requests) == 100:
                usual_s = sorted(last - first for first, last in requests)[50] / 1e9
            time.sleep(REST_S)
            if is_faulty:
                victim.end_fault()
                faults.append((start, end))
                time.sleep(REST_S)
    over.set()
    if beside.ident:
        beside.join()
    spans = {"requests": requests, "faults": faults}
    np.savez(options.truth, pid=os.getpid(), **{key: np.array(value, np.int64).reshape(-1, 2) for key, value in spans.items()})


if __name__ == "__main__":
    main()
