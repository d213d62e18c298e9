#!/usr/bin/env bash
# On a machine with a CUDA GPU: runs the quickstart, proves the compiled kernels, measures them, and runs the student;
# the stages stand below. Needs torch, triton and pytest; uses no network and installs nothing but --wheels, for itself.
# Run it from anywhere.
set -euo pipefail

# NAME SHARE WHAT, the most important first; SHARE of the time that is left goes to a stage, unused time to the next
stages="
first 27 the quickstart in two minutes: trains, sends weights to the rollout, scores, saves and resumes
kernels 25 the compiled Triton kernels: every loss, tail, clamp and layout, not finite numbers, 2^31 logits, CUDA graphs
goals 15 what the losses must reach on a GPU: time, memory, the fused LM head
benchmark 20 the losses beside published styles and released packages
losses 15 all other loss tests, on the GPU where they can be
student 25 students on the GPU beside fp32 on the CPU, experts, latent attention and vision too, a model of full size, a rollout that shares its GPU, weights from process to process (tools/gpu_student.py)
"

usage() {
    cat <<'TEXT'
usage: tools/gpu_check.sh [--time-limit SECONDS] [--stages NAME,NAME ...] [--list] [--out FOLDER] [--python PYTHON]
                          [--wheels FOLDER] [--full] [--tune] [--shapes T,V,K ...]

  --time-limit SECONDS  for everything (default 540); what is measured is kept, a stage without time left is skipped
  --stages NAME,NAME    these stages only, with all of the time; in the order of --list
  --list                the stages and their share of the time; needs no GPU
  --out FOLDER          where <gpu>-<date>.json and the logs go (default benchmarks)
  --python PYTHON       an interpreter that has torch, triton and pytest (default python3)
  --wheels FOLDER       packages to add to that interpreter for this run: NAME.whl, or the pieces of a large one in order
                        (split -b 60M NAME.whl NAME.whl.); with them goes what they depend on
  --full                the whole grid of shapes instead of a few
  --tune                first tune the Triton kernels for the shapes that are measured (use --shapes: it takes long);
                        the new table also goes to the folder
  --shapes T,V,K ...    these shapes only; the last option

exit codes: 0 all passed or skipped, 1 a test or a row failed or did not end in time, 2 wrong options or no GPU
TEXT
}

fail() {
    echo "gpu_check: error: $1" >&2
    exit 2
}

limit=540 out=benchmarks wheels= python=python3 bench=(--tp-shard 1 8) shapes=(--quick) tune= chosen=
known=$(awk 'NF { print $1 }' <<<"$stages" | paste -sd, -)
while [ $# -gt 0 ]; do
    case $1 in
        --time-limit) limit=${2:?--time-limit needs seconds}; shift 2 ;;
        --stages) chosen=${2:?--stages needs names}; shift 2 ;;
        --list) awk 'NF { share = $2; $2 = ""; print $0 " (" share " %)" }' <<<"$stages"; exit 0 ;;
        --out) out=${2:?--out needs a folder}; shift 2 ;;
        --python) python=${2:?--python needs an interpreter}; shift 2 ;;
        --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
        --full) shapes=(); shift ;;
        --tune) tune=yes bench+=(--tune); shift ;;
        --shapes) shift; shapes=(--shapes "$@"); set -- ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option '$1'" ;;
    esac
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--time-limit is '$limit': set whole seconds above 0"
for name in ${chosen//,/ }; do
    [[ ,$known, == *,$name,* ]] || fail "--stages names '$name': choose among $known"
done
command -v "$python" >/dev/null || fail "--python: '$python' is not there: name an interpreter"
mkdir -p "$out"
out=$(cd "$out" && pwd)
if [ -n "$wheels" ]; then
    store=$(mktemp -d)
    trap 'rm -rf "$store"' EXIT
    for piece in "$wheels"/*.whl "$wheels"/*.whl.*; do # in the order of their names
        if [ -f "$piece" ]; then cat "$piece" >>"$store/$(basename "${piece%%.whl*}").whl"; fi
    done
    "$python" -m pip install --quiet --no-index --no-deps --target "$store/packages" "$store"/*.whl 2>"$out/.pip" ||
        fail "--wheels: $(grep -m 1 ERROR "$out/.pip" || tail -n 1 "$out/.pip"): bring whole wheels, every piece of them"
    rm -f "$out/.pip"
    export PYTHONPATH="$store/packages${PYTHONPATH:+:$PYTHONPATH}"
fi
cd "$(dirname "$0")/.."

probe='
import importlib.util as find, re, sys
missing = [name for name in ("torch", "triton", "pytest") if find.find_spec(name) is None]
if missing:
    sys.exit("this interpreter lacks " + ", ".join(missing) + ": install them, or name another with --python")
import torch, triton
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no CUDA device: run this on a machine with a GPU")
name = torch.cuda.get_device_name()
print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, python {sys.version.split()[0]}", file=sys.stderr)
print(re.sub("[^a-z0-9]+", "-", name.lower()).strip("-"))
'
if ! gpu=$("$python" -c "$probe" 2>"$out/.probe"); then
    reason=$(tail -n 1 "$out/.probe")
    rm -f "$out/.probe"
    fail "$reason"
fi
cat "$out/.probe"
rm -f "$out/.probe"

started=$SECONDS
name=$gpu-$(date -u +%Y-%m-%d)
code=0
pytest() { # SECONDS FILES: the project's own options name plugins that may be missing here; INT lets it report
    PYTHONUNBUFFERED=1 timeout --signal=INT --kill-after=20 "$1" "$python" -m pytest -o addopts= \
        --import-mode=importlib -p no:cacheprovider -q -rfEs "${@:2}"
}
kernels() {
    pytest "$1" tests/gpu/test_kernels.py tests/parity/losses/test_{topk_definition,precision}.py \
        tests/unit/losses/test_{non_finite*,triton_*,topk_properties,misuse}.py
}
goals() { pytest "$1" tests/gpu --ignore-glob='*test_kernels*'; }
losses() {
    pytest "$1" tests/parity/losses tests/unit/losses --ignore-glob='*test_triton_*' --ignore-glob='*test_non_finite*' \
        --ignore-glob='*test_topk_*' --ignore-glob='*test_precision*' --ignore-glob='*losses/test_misuse*'
}
benchmark() {
    local status=0
    PYTHONUNBUFFERED=1 timeout "$1" "$python" -m mopd.bench.losses --device cuda "${shapes[@]}" "${bench[@]}" \
        --time-limit $(($1 * 85 / 100)) --output "$out/$name.json" || status=$?
    [ -f "$out/$name.json" ] || status=1
    [ -z "$tune" ] || cp mopd/losses/triton/tuning.json "$out/$name-tuning.json"
    return $status
}
first() {
    PYTHONUNBUFFERED=1 "$python" tools/gpu_student.py --stages quickstart --time-limit "$1" --out "$out/$name-first.json"
}
student() {
    PYTHONUNBUFFERED=1 "$python" tools/gpu_student.py --stages student,families,training,scoring,shared,ipc,collective \
        --time-limit "$1" --out "$out/$name-student.json"
}

run_stage() { # NAME SECONDS
    local status=0
    echo "== $1, at most $2 s"
    "$1" "$2" 2>&1 | tee "$out/$name-$1.log" || status=$?
    case $status in
        0) echo "== $1: passed" ;;
        124) echo "== $1: FAILED, not done within $2 s"; code=1 ;;
        *) echo "== $1: FAILED (exit code $status)"; code=1 ;;
    esac
}

shares=0
while read -r stage share _; do
    [ -z "$stage" ] || [[ -n $chosen && ,$chosen, != *,$stage,* ]] || shares=$((shares + share))
done <<<"$stages"
while read -r stage share _ <&3; do
    if [ -z "$stage" ]; then continue; fi
    if [[ -n $chosen && ,$chosen, != *,$stage,* ]]; then
        echo "== $stage: skipped, not among --stages"
        continue
    fi
    seconds=$(((limit - SECONDS + started) * share / shares))
    shares=$((shares - share))
    if [ "$seconds" -lt 5 ]; then
        echo "== $stage: skipped, $seconds s of the time limit are left for it"
        continue
    fi
    run_stage "$stage" "$seconds"
done 3<<<"$stages"

"$python" tools/gpu_rows.py "$out/$name"
echo "== results: $out/$name*"
exit $code
