"""Another tenant of the GPU: bursts of large matrix products every 0.3 to 0.7 s, each logged.

usage: python3 -m tests.gpu.aggressor --seconds S --truth FILE.npz [--seed N]
"""

from __future__ import annotations

import argparse
import os
import random
import time

import numpy as np
import torch

PRODUCTS, SIZE = 40, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--truth", required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    a = torch.randn(SIZE, SIZE, dtype=torch.half, device="cuda")
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    print("ready", flush=True)
    bursts = []
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        time.sleep(rng.uniform(0.3, 0.7))
        start = time.monotonic_ns()
        for _ in range(PRODUCTS):
            a @ a
        torch.cuda.synchronize()
        bursts.append((start, time.monotonic_ns()))
    np.savez(options.truth, bursts=np.array(bursts, np.int64), pid=os.getpid())


if __name__ == "__main__":
    main()
