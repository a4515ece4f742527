"""A PyTorch program that answers requests one after another and logs each of them: the truth for runs on a real GPU.

Needs a CUDA GPU and PyTorch. It prints "ready" once warmed up, answers requests for the seconds asked for, and writes
an .npz: `requests`, (n, 2) start and end in CLOCK_MONOTONIC ns; `pid`; `mode`.

usage: python3 -m tests.gpu.victim --mode eager|gpu|graph|events --seconds S --truth FILE.npz
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch

REST_S = 0.002


class Eager:
    """A small transformer, input from pageable memory and result back to it, as most inference code does it."""

    def __init__(self, batch: int, width: int, layers: int) -> None:
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, dropout=0.0)
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).half().cuda().train()
        self.shape = (batch, 64, width)
        self.inputs = [torch.randn(self.shape).half() for _ in range(4)]
        self.next = 0

    @torch.no_grad()
    def answer(self) -> None:
        self.next = (self.next + 1) % len(self.inputs)
        x = (self.inputs[self.next] + 0.5).to("cuda")
        self.model(x)[:, 0].cpu()


class Graph:
    """The same model replayed as one CUDA graph."""

    def __init__(self) -> None:
        self.inner = Eager(32, 512, 8)
        self.x = torch.randn(self.inner.shape, dtype=torch.half, device="cuda")
        self.host = torch.randn(self.inner.shape, dtype=torch.half).pin_memory()
        stream = torch.cuda.Stream()
        with torch.no_grad():
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.inner.model(self.x)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = self.inner.model(self.x)

    def answer(self) -> None:
        self.x.copy_(self.host, non_blocking=True)
        self.graph.replay()
        self.y[:, 0].cpu()


class Events:
    """An asynchronous program: pinned copies, and an event that it waits for."""

    def __init__(self) -> None:
        self.inner = Eager(8, 512, 6)
        self.host = torch.randn(self.inner.shape, dtype=torch.half).pin_memory()
        self.out = torch.empty((self.inner.shape[0], self.inner.shape[2]), dtype=torch.half).pin_memory()
        self.done = torch.cuda.Event()

    @torch.no_grad()
    def answer(self) -> None:
        x = self.host.to("cuda", non_blocking=True)
        self.out.copy_(self.inner.model(x)[:, 0], non_blocking=True)
        self.done.record()
        self.done.synchronize()


MODES = {"eager": lambda: Eager(4, 512, 8), "gpu": lambda: Eager(64, 1024, 8), "graph": Graph, "events": Events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--truth", required=True)
    options = parser.parse_args()
    program = MODES[options.mode]()
    for _ in range(30):
        program.answer()
    torch.cuda.synchronize()
    print("ready", flush=True)
    requests = []
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        start = time.monotonic_ns()
        program.answer()
        requests.append((start, time.monotonic_ns()))
        time.sleep(REST_S)
    np.savez(options.truth, requests=np.array(requests, np.int64), pid=os.getpid(), mode=options.mode)


if __name__ == "__main__":
    main()
