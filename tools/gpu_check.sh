#!/usr/bin/env bash
# On a machine with a CUDA GPU: the GPU tests, the benchmark, then the loss tests that need no interpreter.
# Needs torch, triton and pytest; installs nothing and uses no network. Run it from anywhere.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: tools/gpu_check.sh [--time-limit SECONDS] [--out FOLDER] [--python PYTHON] [--full] [--tune] [--shapes T,V,K ...]

  --time-limit SECONDS  for everything (default 540); the most important rows come first, what is measured is kept
  --out FOLDER          where <gpu>-<date>.json and the logs go (default benchmarks)
  --python PYTHON       an interpreter that has torch, triton and pytest (default python3)
  --full                the whole grid of shapes instead of a few
  --tune                first tune the Triton kernels for the shapes that are measured (use --shapes: it takes long);
                        the new table also goes to the folder
  --shapes T,V,K ...    these shapes only; the last option

exit codes: 0 all passed, 1 a test or a row failed, 2 wrong options or nothing to run on
TEXT
}

fail() {
    echo "gpu_check: error: $1" >&2
    exit 2
}

limit=540 out=benchmarks python=python3 bench=(--tp-shard 1 8) shapes=(--quick) tune=
while [ $# -gt 0 ]; do
    case $1 in
        --time-limit) limit=${2:?--time-limit needs seconds}; shift 2 ;;
        --out) out=${2:?--out needs a folder}; shift 2 ;;
        --python) python=${2:?--python needs an interpreter}; shift 2 ;;
        --full) shapes=(); shift ;;
        --tune) tune=yes bench+=(--tune); shift ;;
        --shapes) shift; shapes=(--shapes "$@"); set -- ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option '$1'" ;;
    esac
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail "--time-limit is '$limit': set whole seconds above 0"
command -v "$python" >/dev/null || fail "--python: '$python' is not there: name an interpreter"
mkdir -p "$out"
out=$(cd "$out" && pwd)
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
left() { # seconds until PERCENT of the limit have gone by
    local seconds=$((limit * $1 / 100 - SECONDS + started))
    echo $((seconds > 5 ? seconds : 5))
}
pytest() { # the project's own options name plugins that may be missing here
    PYTHONUNBUFFERED=1 timeout "$1" "$python" -m pytest -o addopts= --import-mode=importlib -p no:cacheprovider -q -rfE "${@:2}"
}
name=$gpu-$(date -u +%Y-%m-%d)
code=0
finished() { # NAME STATUS
    [ "$2" -eq 0 ] && echo "== $1: passed" || { echo "== $1: FAILED (exit code $2)"; code=1; }
}

echo "== GPU tests"
status=0
pytest "$(left 35)" tests/gpu 2>&1 | tee "$out/$name-tests.log" || status=$?
finished "GPU tests" $status

echo "== benchmark"
status=0
seconds=$(left 80)
PYTHONUNBUFFERED=1 timeout "$(left 92)" "$python" -m mopd.bench.losses --device cuda "${shapes[@]}" "${bench[@]}" \
    --time-limit "$seconds" --output "$out/$name.json" 2>&1 | tee "$out/$name.log" || status=$?
[ -f "$out/$name.json" ] || status=1
[ -z "$tune" ] || cp mopd/losses/triton/tuning.json "$out/$name-tuning.json"
finished benchmark $status

echo "== loss tests on the CPU of this machine"
status=0
pytest "$(left 100)" tests/parity/losses tests/unit/losses --ignore-glob='*test_triton*' 2>&1 |
    tee -a "$out/$name-tests.log" || status=$?
finished "loss tests" $status

echo "== student on the GPU"
status=0
PYTHONUNBUFFERED=1 "$python" tools/gpu_student.py --time-limit "$(left 100)" --out "$out/$name-student.json" 2>&1 |
    tee "$out/$name-student.log" || status=$?
finished student $status

echo "== results: $out/$name.json"
exit $code
