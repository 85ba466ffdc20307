"""Exact top-k of thinwire next to torch.topk(x.abs(), k), interleaved, on one thread.

    .venv/bin/python bench/torch_topk.py [ELEMENTS]

Prints the median times and the median of the paired ratios, after checking that both select the same entries.
"""

import statistics
import sys
import time

import numpy as np
import torch

import thinwire

REPETITIONS = 9


def main() -> None:
    numel = int(sys.argv[1]) if len(sys.argv) > 1 else 16 << 20
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.distributions.Laplace(0.0, 1.0).sample((numel,))
    values = x.numpy()
    print(f"torch {torch.__version__}, {numel:,} elements, one thread")
    for density in (0.001, 0.01):
        selector = thinwire.TopK(density)
        k = max(1, int(density * numel + 0.5))
        times: list[tuple[float, float]] = []
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            largest = torch.topk(x.abs(), k, sorted=False)
            between = time.perf_counter()
            indices, _ = thinwire.select(selector, values)
            times.append((between - begin, time.perf_counter() - between))
        ours = np.sort(np.abs(values[np.from_dlpack(indices)]))
        if not np.array_equal(ours, np.sort(largest.values.numpy())):
            raise SystemExit("thinwire and torch selected different magnitudes")
        theirs_ms, ours_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(theirs / mine for theirs, mine in times)
        pair = f"torch.topk {theirs_ms:8.1f} ms   thinwire {ours_ms:7.2f} ms"
        print(f"density {density:<6} {pair}   {ratio:5.1f} times faster")


if __name__ == "__main__":
    main()
