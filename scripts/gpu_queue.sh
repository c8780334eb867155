#!/usr/bin/env bash
# Run everything that requires a GPU: tests, step benchmarks, then training until the time limit.
#
#   scripts/gpu_queue.sh OUT [SECONDS]              # with a GPU; 840 seconds by default
#   DEVICE=cpu scripts/gpu_queue.sh OUT 60          # tiny sizes, to try the script
#
# OUT receives the log of each part and the run directory. Tests and benchmarks take at most 220
# seconds each; training uses what is left of SECONDS, and at most 60 more to stop.
set -uo pipefail
mkdir -p "${1:?usage: scripts/gpu_queue.sh OUT [SECONDS]}"
out=$(cd "$1" && pwd)
limit=${2:-840}
device=${DEVICE:-cuda}
python=${PYTHON:-python}
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD FEDGEN_HOME=${FEDGEN_HOME:-$out/home}

if [ "$device" = cuda ]; then
    dpsgd=(--profile --repeats 20) dpdm=(--records 2048 --copies 2 --repeats 3) critics=(--critics 1000)
    run=(experiment=dpgan_mnist_128)
else
    dpsgd=(--profile --width 4 --rows 4 --repeats 1) dpdm=(--records 4 --copies 2 --width 8 --repeats 1)
    critics=(--critics 20 --widths 4 --rows 4 --timed 20 --steps 1 --repeats 1)
    run=(method=dpgan_small data=digits rounds=20)
fi

# part NAME COMMAND...: a failing part does not stop the others
part() {
    local name=$1
    shift
    timeout --signal=INT --kill-after=20 200 "$@" > "$out/$name.txt" 2>&1
    echo "$name: status $?, after $SECONDS s"
}

part tests "$python" -m pytest -q -p no:cacheprovider tests/test_cuda.py
part dpsgd "$python" scripts/bench_dpsgd.py --device "$device" "${dpsgd[@]}"
part dpdm "$python" scripts/bench_dpdm.py --device "$device" "${dpdm[@]}"
part critics "$python" scripts/bench_critics.py --device "$device" "${critics[@]}"

# an interrupted run finishes its round; fedgen report and fedgen sample read its checkpoint
remaining=$((limit - SECONDS))
if [ "$remaining" -gt 10 ]; then
    timeout --signal=INT --kill-after=60 "$remaining" "$python" -m fedgen.cli train "${run[@]}" \
        device="$device" evaluation=none run_dir="$out/run" > "$out/run.txt" 2>&1
    echo "run: status $?, after $SECONDS s"
else
    echo "run: skipped, no time is left"
fi
