"""Where a decode step's time goes on a card, in the order in which its kernels run, from what `trace.cpp` writes.

    python3 tools/device/trace.py TRACE

`chain` is the time from the end of the kernel before to the end of this one, so the chains of a step add up to it; `gap` is
the time between the two in which nothing ran, negative where a kernel began before the one before it had ended.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from statistics import median

STEPS = 20


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as lines:
        rows = [line.rstrip("\n").split(",", 3) for line in lines]
    kernels = sorted((int(begin), int(end), int(grid), name.split("(")[0]) for begin, end, grid, name in rows)
    ends = [i for i, kernel in enumerate(kernels) if kernel[3].startswith("sample")][-STEPS - 1 :]
    if len(ends) < 2:
        sys.exit(f"{sys.argv[1]} has {len(ends)} launches of `sample`, expected 2 or more: one ends each step of a model that runs on one device")
    of_kernel: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    steps, nothing = [], 0.0
    for before, last in zip(ends, ends[1:]):
        steps.append((kernels[last][1] - kernels[before][1]) / 1e3)
        for i in range(before + 1, last + 1):
            begin, end, grid, name = kernels[i]
            previous = max(kernel[1] for kernel in kernels[max(i - 8, 0) : i])
            gap = (begin - previous) / 1e3
            nothing += max(gap, 0)
            of_kernel[name, grid].append(((end - previous) / 1e3, (end - begin) / 1e3, gap))
    print(f"a step takes {median(steps):.0f} µs, gaps are {100 * nothing / sum(steps):.1f} % of it")
    for (name, grid), times in sorted(of_kernel.items(), key=lambda item: -sum(time[0] for time in item[1])):
        chain, duration, gap = (median(column) for column in zip(*times))
        count = len(times) / len(steps)
        print(f"{sum(time[0] for time in times) / len(steps):8.1f} µs: {count:5.1f} of chain {chain:6.2f}, duration {duration:6.2f}, gap {gap:6.2f}  {name} {grid}")


if __name__ == "__main__":
    main()
