"""Attention of a decode by itself: how long each kernel takes, and its share of the bandwidth of a large copy.

    python3 tools/device/attention.py

Compiles `flash_decode_f16.cu` and `flash_f16.cu` with `nvcc` for the card that is there and launches them from a captured
graph, over caches that are together larger than the second cache. Needs cupy. Results are compared with f32 arithmetic.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import cupy as cp
import numpy as np

KERNELS = Path(__file__).resolve().parents[2] / "crates/ferrum-kernels/src/cuda/kernels"
HEAD, BLOCK, LARGEST_WINDOW = 128, 32, 0x7FFFFFFF
THREADS, MOST_PARTS, LAUNCHES = 128, 32, 64
# Sequences, keys, kv heads, queries of each.
CASES = [(1, 512, 8, 4), (1, 1024, 8, 4), (1, 4096, 8, 4), (1, 2048, 4, 8), (8, 1024, 8, 4), (32, 1024, 8, 4), (64, 1024, 8, 4), (64, 4096, 8, 4)]


@dataclass
class Kernel:
    """A kernel and what `flash.rs` says of its tiles."""

    name: str
    file: str
    rows: int
    keys: int
    least: int
    resident: int
    shared: int

    def load(self, folder: str) -> cp.RawKernel:
        """Compiles the kernel's file for this card."""
        capability = cp.cuda.Device().compute_capability
        target = capability + ("a" if capability >= "90" else "")
        cubin = f"{folder}/{self.name}.cubin"
        command = ["nvcc", "-std=c++17", "-gencode", f"arch=compute_{target},code=sm_{target}", "-cubin", "-DACT_BF16", "-o", cubin]
        subprocess.run([*command, str(KERNELS / self.file)], check=True)
        kernel = cp.RawModule(path=cubin).get_function(self.name)
        if self.shared:
            kernel.max_dynamic_shared_size_bytes = self.shared
        return kernel


def tile_bytes(keys: int) -> int:
    """Shared memory of a tile of 16 rows: `shared_bytes` in `flash.rs`."""
    row = (HEAD + 8) * 2
    return 2 * keys * 8 + 16 * 4 + 4 * 16 * 4 + 4 * 32 * 4 + (16 + 2 * keys) * row + 16 * (keys + 8) * 2


ALL = [
    Kernel("flash_decode_f16_128", "flash_decode_f16.cu", 8, 64, 1, 3, 0),
    Kernel("flash_f16_16x128", "flash_f16.cu", 16, 64, 2, 4, tile_bytes(64)),
]


class Cache:
    """Layers of a paged cache of f16, whose blocks lie in no order, and a query for each sequence."""

    def __init__(self, seqs: int, keys: int, kv_heads: int, group: int) -> None:
        self.seqs, self.keys, self.kv_heads, self.group = seqs, keys, kv_heads, group
        blocks = seqs * -(-keys // BLOCK)
        vectors = blocks * kv_heads * BLOCK
        layers = max(1, (256 << 20) // (vectors * HEAD * 4))
        random = cp.random.standard_normal
        self.layers = [[random((vectors, HEAD), dtype=cp.float32).astype(cp.float16) for _ in range(2)] for _ in range(min(layers, 32))]
        self.tables = cp.asarray(np.random.default_rng(0).permutation(blocks).astype(np.int32)).reshape(seqs, -1)
        self.q = (random((seqs, kv_heads * group, HEAD), dtype=cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
        self.starts = cp.arange(seqs + 1, dtype=cp.int32)
        self.lens = cp.full(seqs, keys, cp.int32)

    def expected(self) -> cp.ndarray:
        """Attention of the first sequence over the first layer."""
        q = (self.q[0].astype(cp.uint32) << 16).view(cp.float32)
        k, v = (
            x.reshape(-1, self.kv_heads, BLOCK, HEAD)[self.tables[0]].transpose(1, 0, 2, 3).reshape(self.kv_heads, -1, HEAD)[:, : self.keys].astype(cp.float32)
            for x in self.layers[0]
        )
        weights = cp.exp(cp.einsum("hkd,hgd->hgk", k, q.reshape(self.kv_heads, self.group, HEAD)) / np.sqrt(HEAD))
        return cp.einsum("hgk,hkd->hgd", weights / weights.sum(-1, keepdims=True), v).reshape(-1, HEAD)


def measure(kernel: Kernel, launcher: cp.RawKernel, cache: Cache) -> tuple[float, int, float]:
    """Microseconds of a launch, the parts of a tile, and the error of the first sequence."""
    heads = cache.kv_heads * cache.group
    tiles = -(-cache.group // kernel.rows)
    blocks = cache.seqs * tiles * cache.kv_heads
    room = cp.cuda.Device().attributes["MultiProcessorCount"] * kernel.resident
    parts = min(max(room // blocks, 1), -(-cache.keys // (kernel.keys * kernel.least)), MOST_PARTS)
    out = cp.full((cache.seqs, heads, HEAD), 0x7FC0, cp.uint16)
    partial = cp.empty(parts * cache.seqs * heads * (HEAD + 2), cp.float32)
    counters = cp.zeros(blocks, cp.int32)
    null, number, long = np.int64(0), np.int32, np.int64

    def launch(layer: int) -> None:
        k, v = cache.layers[layer]
        # In the order of FLASH_PARAMS in `flash.cuh`.
        arguments = (
            *(out, cache.q, null, partial, k, v, null, null, cache.starts, cache.lens, cache.tables),
            *map(number, (cache.seqs, cache.tables.shape[1], BLOCK, cache.kv_heads, cache.group, HEAD, HEAD, cache.seqs, cache.keys, 0)),
            *map(long, (0, heads * HEAD, HEAD, heads * HEAD, HEAD)),
            *(np.float32(HEAD**-0.5), np.float32(0)),
            *map(number, (1, LARGEST_WINDOW, 0, parts, 0, tiles, 0, LARGEST_WINDOW, cache.seqs, 0)),
            counters if parts > 1 else null,
        )
        launcher((blocks * parts,), (THREADS,), arguments, shared_mem=kernel.shared)

    launch(0)
    found, expected = (out[0].astype(cp.uint32) << 16).view(cp.float32), cache.expected()
    error = float(cp.linalg.norm(found - expected) / cp.linalg.norm(expected))
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        for i in range(LAUNCHES):
            launch(i % len(cache.layers))
        graph = stream.end_capture()
        times = [elapsed(lambda: graph.launch(stream), stream) / LAUNCHES for _ in range(12)]
    return median(times[2:]), parts, error


def elapsed(work, stream=None) -> float:
    """Microseconds of some work."""
    begin, end = cp.cuda.Event(), cp.cuda.Event()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return cp.cuda.get_elapsed_time(begin, end) * 1e3


def main() -> None:
    source = cp.zeros(1 << 28, cp.float32)
    target = cp.empty_like(source)
    copy = 2 * source.nbytes / min(elapsed(lambda: cp.copyto(target, source)) for _ in range(6)) / 1e6
    print(f"a copy of 1 GiB: {copy:.2f} TB/s")
    del source, target
    with tempfile.TemporaryDirectory() as folder:
        launchers = [kernel.load(folder) for kernel in ALL]
    for case in CASES:
        cache = Cache(*case)
        for kernel, launcher in zip(ALL, launchers):
            time, parts, error = measure(kernel, launcher, cache)
            rate = case[0] * case[1] * case[2] * HEAD * 4 / time / 1e6
            words = "{} sequences of {} keys, {} kv heads of {}".format(*case)
            print(f"{words}: {kernel.name} {time:.1f} µs, {100 * rate / copy:.0f} % of the copy, {parts} parts, error {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
