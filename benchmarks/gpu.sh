#!/usr/bin/env bash
# Runs named steps on a bare GPU machine, in the repository's root, after the parts of .gpu were staged and installed:
#
#   . /tmp/gpu/env.sh; OUT=$OUT bash benchmarks/gpu.sh decode conv          one step after the other, each with a limit
#   bash benchmarks/gpu.sh decode-quick:120 conv-quick:200                  NAME:SECONDS sets another limit
#
# A step that fails or runs out of time does not stop the rest. $OUT gets few files: log.txt, one JSON a benchmark,
# summary.txt, and the Triton cache (triton-cache.*, carried next time in .gpu/cache) where KEEP_CACHE=1.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-/tmp/bench-out}
mkdir -p "$OUT"
export TRITON_CACHE_DIR=/tmp/triton-cache FLA_CACHE_RESULTS=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false TYPER_STANDARD_TRACEBACK=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export ACCEL_COMMIT=${ACCEL_COMMIT:-$(cat .gpu/commit 2>/dev/null || git rev-parse HEAD 2>/dev/null || true)}
export PATH=$PATH:/usr/local/cuda/bin
# tests/upstreams.py installs other FLA releases from these wheels
[ -d .gpu/upstreams ] && export PIP_NO_INDEX=1 PIP_NO_COMPILE=1 PIP_FIND_LINKS=$PWD/.gpu/upstreams ACCEL_TEST_CACHE=/tmp/accel-tests
log=$OUT/log.txt
summary=$OUT/summary.txt
# tests/sanitize.py in eight processes under one tool; 123 where one of them fails
sanitize="env PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -P 8 -I{} compute-sanitizer --error-exitcode 9 --report-api-errors no"
parts="python3 tests/sanitize.py --part {}/8 < <(seq 0 7)"

more="8,256,256,3,1,8192;16,32,32,7,3,24000;8,128,128,2,512,16000;8,256,256,3,4,8191;8,250,250,3,8,8192;8,512,512,1,1,8192"
more+=";1,512,512,3,9,256"

step() { # NAME -> its default limit in seconds and its command
  case $1 in
    demo) limit=120 command="python3 -m accel demo" ;;
    doctor) limit=60 command="python3 -m accel doctor" ;;
    tests) limit=400 command="python3 -m pytest -q -x -m gpu tests" ;;
    tests-all) limit=500 command="python3 -m pytest -q -m gpu tests" ;;
    parity) limit=420 command="python3 -m pytest -q -m gpu -n 6 tests/test_upstream.py" ;;
    fla-tests) limit=300 command="env FLA_ROUTES=$OUT/fla-tests.json python3 -m pytest -q -n 12 .gpu/fla_tests" ;;
    # a part of causal-conv1d's own tests: CC1D_EVERY=4 before the command
    cc1d-tests) limit=500 command="env CC1D_ROUTES=$OUT/cc1d-tests.json python3 -m pytest -q -n 14 .gpu/cc1d_tests/test_causal_conv1d.py" ;;
    mamba-tests) limit=400 command="env CC1D_ROUTES=$OUT/mamba-tests.json python3 -m pytest -q .gpu/cc1d_tests/mamba" ;;
    memcheck) limit=300 command="$sanitize --tool memcheck --padding 1024 $parts" ;;
    racecheck) limit=300 command="$sanitize --tool racecheck $parts" ;;
    decode) limit=240 command="python3 -m benchmarks.decode --out $OUT/decode.json" ;;
    decode-quick) limit=180 command="python3 -m benchmarks.decode --quick --out $OUT/decode.json" ;;
    decode-ours) limit=90 command="python3 -m benchmarks.decode --quick --only accel --out $OUT/decode-ours.json" ;;
    host) limit=240 command="python3 -m benchmarks.host --out $OUT/host.json" ;;
    cold) limit=400 command="python3 -m benchmarks.cold --out $OUT/cold.json" ;;
    conv) limit=420 command="python3 -m benchmarks.conv --out $OUT/conv.json" ;;
    conv-quick) limit=300 command="python3 -m benchmarks.conv --quick --out $OUT/conv.json" ;;
    conv-small) limit=120 command="python3 -m benchmarks.conv --shapes 1,512,2048 --out $OUT/conv_small.json" ;;
    conv-device) limit=350 command="python3 -m benchmarks.conv --no-host --out $OUT/conv.json" ;;
    conv-ours) limit=120 command="python3 -m benchmarks.conv --quick --only 'accel (ops),gluon' --out $OUT/conv-ours.json" ;;
    dense) limit=420 command="python3 -m benchmarks.dense --out $OUT/dense.json" ;;
    # one token's steps, narrow and wide layers, long reach, rows that are no whole vectors, one tap, a short call
    dense-more) limit=300 command="python3 -m benchmarks.dense --kinds bf16 --shapes '$more' --out $OUT/dense_more.json" ;;
    dense-quick) limit=150 command="python3 -m benchmarks.dense --kinds bf16 --out $OUT/dense.json" ;;
    e2e-decode) limit=180 command="python3 -m benchmarks.e2e_decode --out $OUT/e2e_decode.json" ;;
    e2e-decode-graph) limit=180 command="python3 -m benchmarks.e2e_decode --mode graph --tokens 128 --out $OUT/e2e_decode_graph.json" ;;
    e2e-decode-compiled) limit=400 command="python3 -m benchmarks.e2e_decode --mode compiled --batches 1 --out $OUT/e2e_decode_compiled.json" ;;
    e2e-train) limit=400 command="python3 -m benchmarks.e2e_train --warm-up 24 --out $OUT/e2e_train.json" ;;
    e2e-train-2) limit=400 command="python3 -m benchmarks.e2e_train --layers 2 --out $OUT/e2e_train.json" ;;
    e2e-conv) limit=90 command="python3 -m benchmarks.e2e_train --conv-only --out $OUT/e2e_conv.json" ;;
    e2e-mamba) limit=500 command="python3 -m benchmarks.e2e_mamba --warm-up 16 --out $OUT/e2e_mamba.json" ;;
    e2e-qwen3-next) limit=400 command="python3 -m benchmarks.e2e_transformers --families qwen3_next --warm-up 16 --out $OUT/e2e_qwen3_next.json" ;;
    e2e-qwen3-next-step) limit=400 command="python3 -m benchmarks.e2e_transformers_step --warm-up 16 --out $OUT/e2e_qwen3_next_step.json" ;;
    e2e-nemotron-h) limit=400 command="python3 -m benchmarks.e2e_transformers --families nemotron_h --warm-up 16 --out $OUT/e2e_nemotron_h.json" ;;
    # on two GPUs
    cp) limit=200 command="python3 -m benchmarks.cp --out $OUT/cp.json" ;;
    cp-zigzag) limit=200 command="python3 -m benchmarks.cp --layout zigzag --out $OUT/cp_zigzag.json" ;;
    fsdp) limit=300 command="python3 -m benchmarks.fsdp --out $OUT/fsdp.json" ;;
    *) return 1 ;;
  esac
}

python3 -m benchmarks.triton_cache unpack .gpu/cache 2>&1 | tail -n 1 | tee -a "$log"
for word in "$@"; do
  name=${word%%:*}
  if ! step "$name"; then
    echo "no step $name" | tee -a "$summary"
    continue
  fi
  [ "$word" = "$name" ] || limit=${word##*:}
  echo "=== $name (at most $limit s): $command" | tee -a "$log"
  begin=$SECONDS
  eval "timeout -k 5 $limit $command" >"$OUT/.step" 2>&1
  status=$?
  cat "$OUT/.step" >>"$log"
  tail -n "${TAIL:-70}" "$OUT/.step" | cut -c1-220
  echo "$name: exit $status after $((SECONDS - begin)) s" | tee -a "$log" | tee -a "$summary"
done
rm -f "$OUT/.step"
if [ "${KEEP_CACHE:-0}" = 1 ]; then
  timeout 120 python3 -m benchmarks.triton_cache pack "$OUT" --most-parts 3 2>&1 | tail -n 1 | tee -a "$log"
fi
echo "=== summary"
cat "$summary"
