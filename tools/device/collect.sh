#!/bin/bash
# All that the reports of a CUDA card are made of, in one command of several minutes: start, conformance, parity, speed, attention alone, gaps
# between kernels, kernels, compute-sanitizer. For a machine that is there for a short time; `report.py` takes them one after the other.
#
#     tools/device/collect.sh FERRUM OUT
#
# writes conformance.txt, parity.txt, bench.txt, attention.txt, gaps.txt, kernels.txt and sanitizer.txt into OUT. Needs NVRTC on the loader's
# path, python3 with numpy and gguf, 45 GB in /dev/shm for models with random weights, for attention.txt nvcc and cupy, for gaps.txt g++ and
# CUPTI, and for the last two ncu and compute-sanitizer.
set -u
ferrum=$(realpath "$1") out=$(realpath -m "$2")
cd "$(dirname "$0")/../.." || exit
models=/dev/shm/ferrum-models work=$(mktemp -d)
mkdir -p "$out" "$models"
trap 'rm -rf "$work" "$models"' EXIT
# No kernels that an earlier run has compiled, so that the first start is one.
export XDG_CACHE_HOME=$work/cache

began=$SECONDS
say() { echo "[$((SECONDS - began)) s] $*"; }
took() {
    local from to
    from=$(date +%s%N)
    "$@" > "$work/took.log" 2>&1 || { echo "failed: $(tail -1 "$work/took.log")" && return; }
    to=$(date +%s%N) && echo "$(((to - from) / 1000000)) ms"
}
model() { python3 tools/models/make_random_model.py "$@" --repeat > "$work/model.log" 2>&1 || tail -3 "$work/model.log"; }
cases() { "$ferrum" verify ops --backend cuda --json "${@:2}" > "$work/cases-$1.json" 2> "$work/cases-$1.err"; }

"$ferrum" devices
{
    echo "first token of the demo model: $(took "$ferrum" run --backend cuda Hello -n 1)"
    echo "again, with all kernels kept: $(took "$ferrum" run --backend cuda Hello -n 1)"
} | tee "$out/bench.txt"

making=()
model llama-3.1-8b $models/8b-bf16 & making+=($!)
model llama-3.1-8b $models/8b-gptq --dtype gptq4 & making+=($!)
model llama-3.1-8b $models/8b-q4.gguf --format gguf --dtype q4_k_m & making+=($!)
model llama-3.1-8b $models/8b-q4-2.gguf --format gguf --dtype q4_k_m --layers 2 & making+=($!)
model llama-3.1-8b $models/8b-bf16-2 --layers 2 & making+=($!)
model llama-3.2-1b $models/1b-bf16 & making+=($!)
model qwen3-30b-a3b $models/30b-q4.gguf --format gguf --dtype q4_k_m & making+=($!)
model qwen3-30b-a3b $models/30b-q4-2.gguf --format gguf --dtype q4_k_m --layers 2 & making+=($!)
running=()
for activations in bf16 f16; do cases $activations --activations $activations & running+=($!); done
wait "${running[@]}"
python3 - "$work"/cases-*.json <<'PYTHON' | tee "$out/conformance.txt"
import json, pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    try:
        cases = json.loads(path.read_text())
    except ValueError:
        print(path.stem, "gave no JSON:", path.with_suffix(".err").read_text()[-300:])
        continue
    failed = [case for case in cases if case["outcome"] == "failed"]
    print(path.stem.removeprefix("cases-"), len(cases), "cases", len(failed), "failed")
    for case in failed[:5]:
        print("  ", case["dtype"], case["name"], case.get("reason", "")[:200])
PYTHON
say conformance

# NAME ACTIVATIONS
parity() { "$ferrum" verify model "fixtures/models/$1" --backend cuda --activations "$2" --json > "$work/model-$1-$2.json" 2> "$work/model-$1-$2.err"; }
export -f parity
export ferrum work
for activations in bf16 f16; do find fixtures/models -mindepth 1 -maxdepth 1 -printf "%f $activations\n" | sort; done |
    xargs -P 8 -L 1 bash -c 'parity "$@"; echo $? > "$work/model-$1-$2.status"' parity
python3 - "$work"/model-*.status <<'PYTHON' > "$out/parity.txt"
import json, pathlib, sys

def number(value):
    """A number of the program's JSON, which has null for what is not finite."""
    return "not finite" if value is None else f"{value:.1e}"

for path in map(pathlib.Path, sys.argv[1:]):
    name, status = path.stem.removeprefix("model-"), path.read_text().strip()
    try:
        found = json.loads(path.with_suffix(".json").read_text())
    except ValueError:
        print(name, path.with_suffix(".err").read_text().strip()[:200], "status", status)
        continue
    layers = [layer["relative"] for layer in found["layers"]]
    worst = None if None in layers else max(layers)
    words = "" if found["agrees"] else f"first diverging layer {found['first_diverging_layer']} "
    print(name, number(worst), number(found["kl"]), f"{100 * found['top1']:.1f} %", f"{words}status", status)
PYTHON
wait "${making[@]}"
say "parity: $(grep -c 'status 0' "$out/parity.txt") of $(wc -l < "$out/parity.txt") agree"

bench() { echo "== $*"; timeout 90 "$ferrum" bench "$@" --backend cuda --repeat 2; }
{
    echo "8B in Q4_K_M, one token: $(took "$ferrum" run $models/8b-q4.gguf --backend cuda Hello -n 1)"
    bench $models/8b-q4.gguf --prompt 1024 --gen 128 --batch 8
    bench $models/8b-gptq --prompt 1024 --gen 128 --batch 8
    bench $models/8b-bf16 --prompt 4096 --gen 64
    bench $models/8b-bf16 --prompt 1024 --gen 64 --batch 8,64
    bench $models/1b-bf16 --prompt 1024 --gen 128
    bench $models/30b-q4.gguf --prompt 2048 --gen 64 --batch 32
    bench $models/8b-q4.gguf --prompt 1024 --gen 64 --batch-invariant
} 2>&1 | tee -a "$out/bench.txt"
say bench

if command -v nvcc > /dev/null; then
    python3 tools/device/attention.py > "$out/attention.txt" 2>&1
    say "attention alone"
fi

cuda=$(dirname "$(dirname "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")") cupti=$cuda/extras/CUPTI
if g++ -shared -fPIC -I"$cuda/include" -I"$cupti/include" -o "$work/trace.so" tools/device/trace.cpp -L"$cupti/lib64" -lcupti 2> "$work/trace.err"; then
    for name in 1b-bf16 8b-q4.gguf 30b-q4.gguf; do
        echo "== $models/$name"
        CUDA_INJECTION64_PATH=$work/trace.so FERRUM_TRACE=$work/trace.csv LD_LIBRARY_PATH=$cupti/lib64:${LD_LIBRARY_PATH:-} \
            timeout 60 "$ferrum" bench "$models/$name" --backend cuda --prompt 1024 --gen 64 --repeat 1 > /dev/null 2> "$work/bench.err"
        python3 tools/device/trace.py "$work/trace.csv" 2>&1
    done > "$out/gaps.txt"
    say gaps
else
    cp "$work/trace.err" "$out/gaps.txt"
fi

# The kernels of the last steps, behind those that measure the device's peak.
kernels() {
    timeout 90 ncu --clock-control none --cache-control none --metrics gpu__time_duration.sum --csv --print-units base \
        "$ferrum" bench "$1" --backend cuda --prompt "$2" --gen 4 --repeat 1 > "$work/ncu.csv" 2> "$work/ncu.err"
    python3 - "$work/ncu.csv" "$1" <<'PYTHON'
import csv, sys
rows = csv.DictReader(line for line in open(sys.argv[1]) if line.startswith('"'))
found = [(row["Kernel Name"].split("(")[0], row["Grid Size"], float(row["Metric Value"].replace(",", "")) / 1e3) for row in rows]
while found and found[-1][0].startswith("nvjet"):
    found.pop()
print(f"== {sys.argv[2]}")
for name, grid, us in found[-45:]:
    print(f"{us:9.1f} µs  {name} {grid}")
print("attention of the prompt:", [f"{name} {us:.1f} µs" for name, _, us in found if "flash" in name and us > 40][-2:])
PYTHON
}
if command -v ncu > /dev/null; then
    { kernels $models/8b-q4-2.gguf 1024; kernels $models/30b-q4-2.gguf 1024; kernels $models/8b-bf16-2 4096; } > "$out/kernels.txt"
    say kernels
fi

if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck initcheck synccheck; do
        for op in gemm_gptq moe_gate_up paged_attention run_graph sample; do
            (
                log=$work/$tool-$op.log
                timeout 100 compute-sanitizer --tool $tool --error-exitcode 7 "$ferrum" verify ops --backend cuda --filter $op > "$log" 2>&1
                status=$? summary=$(grep SUMMARY "$log" | tail -1)
                echo "$tool $op: status $status, $summary"
                case "$status $summary" in
                    "0 "*" SUMMARY: 0 "*) ;;
                    # What it has found; where it has found nothing, the program says why it failed.
                    *" SUMMARY: 0 "* | *" ") tail -3 "$log" | cut -c1-200 ;;
                    *) grep '^=====' "$log" | head -40 | cut -c1-200 ;;
                esac
            ) &
        done
    done | tee "$out/sanitizer.txt"
    wait
    say compute-sanitizer
fi
