"""Another tenant of the node: after two quiet seconds a burst every 0.3 to 0.7 s, each logged.

It mirrors the simulated aggressor (gputail/sim/programs/aggressor.c). xgemm: 40 large matrix products; xcopy: pinned
copies to the GPU, one after another; cpuhog: three busy loops for 120 ms on the CPU given, and no GPU.

Prints "ready", begins with a line on its standard input, and writes an .npz: `bursts`, (n, 2) start and end in
CLOCK_MONOTONIC ns; `pid`.

With --varied bursts are of three lengths, most of them short, and come every 50 to 120 ms.

usage: python3 -m tests.gpu.aggressor --kind xgemm|xcopy|cpuhog --seconds S --truth FILE.npz [--cpu N] [--seed N] [--varied]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable

import numpy as np

QUIET_S = 2.0
PRODUCTS, SIZE = 40, 8192
COPIES, COPY_BYTES = 8, 256 << 20
LENGTHS = (1 / 40, 1 / 8, 1 / 3)  # of a burst, with --varied
HOGS, HOG_S = 3, 0.12


def multiply() -> Callable[[float], None]:
    import torch

    a = torch.randn(SIZE, SIZE, dtype=torch.half, device="cuda")
    out = torch.empty_like(a)

    def burst(length: float) -> None:
        for _ in range(max(1, round(length * PRODUCTS))):
            torch.mm(a, a, out=out)
        torch.cuda.synchronize()

    return burst


def copy() -> Callable[[float], None]:
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")

    def burst(length: float) -> None:
        for _ in range(max(1, round(length * COPIES))):
            device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return burst


def hog(length: float) -> None:
    children = []
    for _ in range(HOGS):
        child = os.fork()
        if not child:
            until = time.monotonic() + length * HOG_S
            while time.monotonic() < until:
                pass
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("xgemm", "xcopy", "cpuhog"), required=True)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--truth", required=True)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--varied", action="store_true")
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    burst = {"xgemm": multiply, "xcopy": copy}[options.kind]() if options.kind != "cpuhog" else hog
    for _ in range(3):
        burst(1)
    rng = random.Random(options.seed)
    print("ready", flush=True)
    sys.stdin.readline()
    bursts = []
    until = time.monotonic() + options.seconds
    time.sleep(QUIET_S)
    while True:
        time.sleep(rng.uniform(0.05, 0.12) if options.varied else rng.uniform(0.3, 0.7))
        if time.monotonic() + 0.2 > until:
            break
        start = time.monotonic_ns()
        burst(rng.choice(LENGTHS) if options.varied else 1)
        bursts.append((start, time.monotonic_ns()))
    np.savez(options.truth, bursts=np.array(bursts, np.int64).reshape(-1, 2), pid=os.getpid())


if __name__ == "__main__":
    main()
