#!/usr/bin/env bash
# tools/gpu_check.sh [--python PYTHON] [--cpu]: checks the CUDA backend on this machine's GPU.
#
# Builds for its chip, asks the doctor, compares every op with the CPU backend, looks for wrong memory
# accesses with compute-sanitizer where that is installed, runs quick microbenchmarks, and ends with a
# short table. Exit status 0 if all passed. Logs: runs/gpu_check/.
#
# --python: an interpreter that has jax with its CUDA plugin, pytest, numpy and ml_dtypes; else an
#   environment is made in .venv-gpu (which takes some minutes the first time).
# --cpu: the same steps on the CPU backend alone, on a machine without a GPU: to try this script.
set -uo pipefail
cd "$(dirname "$0")/.."

python="" device=cuda
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python="${2:?--python must name an interpreter}"; shift 2 ;;
    --cpu) device=cpu; shift ;;
    *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done

logs=runs/gpu_check
mkdir -p "$logs"
names=() results=() seconds=()
# step NAME COMMAND...: runs it, its output in a log of that name; the last lines are shown if it fails.
step() {
  local name="$1" start=$SECONDS log
  log="$logs/${name// /_}.log"
  shift
  printf '%-28s ' "$name"
  if "$@" >"$log" 2>&1; then results+=(passed); else results+=(FAILED); fi
  names+=("$name") seconds+=($((SECONDS - start)))
  echo "${results[-1]} after ${seconds[-1]} s"
  [ "${results[-1]}" = passed ] || { tail -n 25 "$log" | sed 's/^/    /'; return 1; }
}
skip() { names+=("$1") results+=("skipped: $2") seconds+=(0); printf '%-28s skipped: %s\n' "$1" "$2"; }

chip="none"
if [ "$device" = cuda ]; then
  if ! gpu="$(nvidia-smi --query-gpu=name,compute_cap,driver_version --format=csv,noheader 2>&1)"; then
    echo "gpu_check: there must be an NVIDIA GPU; nvidia-smi says: $gpu" >&2
    echo "gpu_check: --cpu tries the same steps without one" >&2
    exit 2
  fi
  gpu="$(head -n 1 <<<"$gpu")"
  capability="$(cut -d, -f2 <<<"$gpu" | tr -d ' ')"
  case "$capability" in
    10.0) chip=100a ;;
    10.3) chip=103a ;;
    12.*) chip=120f ;;
    *) chip="${capability/./}" ;;
  esac
else
  gpu="no GPU: $(grep -m 1 'model name' /proc/cpuinfo | cut -d: -f2 | xargs)"
fi
echo "gpu_check: $gpu"

make_environment() {
  local extras=test,bench
  [ "$device" = cpu ] || extras="$extras,cuda13"
  python3 -m venv .venv-gpu && .venv-gpu/bin/python -m pip install -q --upgrade pip &&
    .venv-gpu/bin/python - "$extras" <<'PYTHON'
import subprocess, sys, tomllib
settings = tomllib.load(open("pyproject.toml", "rb"))
optional = settings["project"]["optional-dependencies"]
wanted = [r for extra in sys.argv[1].split(",") for r in optional[extra]]
wanted += settings["project"]["dependencies"] + ["nanobind>=2.9", "cmake>=3.24", "ninja"]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", "-q", *wanted]))
PYTHON
}
if [ -z "$python" ]; then
  step "environment" make_environment || exit 1
  python="$PWD/.venv-gpu/bin/python"
fi

# With the FFI headers of the jaxlib that is there; the module lands beside a copy of the Python files.
build() {
  local package="$PWD/build/gpu_check/package" cuda=ON
  [ "$device" = cpu ] && cuda=OFF
  "$python" -m cmake --version >/dev/null 2>&1 && cmake=("$python" -m cmake) || cmake=(cmake)
  "${cmake[@]}" -S . -B build/gpu_check "-DPython_EXECUTABLE=$("$python" -c 'import sys; print(sys.executable)')" \
    -DNVFP4_CUDA=$cuda "-DNVFP4_CUDA_TARGETS=$chip" -DNVFP4_WERROR=ON &&
    "${cmake[@]}" --build build/gpu_check --parallel "$(nproc)" &&
    rm -rf "$package" && mkdir -p "$package" && cp -r python/jax_nvfp4_ops "$package" &&
    rm -f "$package"/jax_nvfp4_ops/_native*.so && cp build/gpu_check/_native*.so "$package/jax_nvfp4_ops"
}
step "build for $chip" build || exit 1

export PYTHONPATH="$PWD/build/gpu_check/package" XLA_PYTHON_CLIENT_PREALLOCATE=false
if [ "$device" = cuda ]; then
  export JAX_PLATFORMS=cuda,cpu NVFP4_REQUIRE_CUDA=1 only=cuda
else
  export JAX_PLATFORMS=cpu only=cpu
fi
tests() { "$python" -m pytest -q -p no:cacheprovider tests/test_backends.py -k "$only" "$@"; }
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 4 --dist worksteal)

step "doctor" "$python" -m jax_nvfp4_ops doctor
step "ops against the CPU" tests "${workers[@]}"
if [ "$device" = cpu ]; then
  skip "compute-sanitizer" "no GPU"
elif ! command -v compute-sanitizer >/dev/null; then
  skip "compute-sanitizer" "not on PATH"
else
  for tool in memcheck racecheck; do
    step "compute-sanitizer $tool" timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$python" -m pytest -q -p no:cacheprovider tests/test_backends.py \
      -k "$only and (quantize_what_recipes_mix or every_example)"
  done
fi
step "microbenchmarks" "$python" -m jax_nvfp4_ops bench --quick --json "$logs/bench.json" --csv "$logs/bench.csv"

{
  echo
  cat "$logs/microbenchmarks.log"
  echo
  echo "$gpu"
  for i in "${!names[@]}"; do printf '%-28s %-24s %4d s\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"; done
} | tee "$logs/table.txt"
for result in "${results[@]}"; do [ "$result" != FAILED ] || exit 1; done
