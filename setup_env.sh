# Sourced by quickstart.sh and test.sh: makes .venv and installs this package into it, once.
# Fails with a reason. PYTHON chooses the interpreter, VENV the folder, TORCH_INDEX where torch comes from: the URL of an
# index, or `default`.

CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '\n==> %s\n' "$*"; }
fail() { printf '\nerror: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate found=""
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    command -v "$candidate" > /dev/null || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "$candidate"
      return
    fi
    found="$found${found:+, }$candidate ($("$candidate" --version 2>&1))"
  done
  fail "Python 3.11 or newer is needed; found: ${found:-none}. Install one, or set PYTHON=/path/to/python3.12"
}

# answers PYTHON URL: does it, within 5 seconds, through the proxies of the environment?
answers() {
  timeout 5 "$1" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1])' "$2" > /dev/null 2>&1
}

# On Linux, PyPI's torch brings CUDA. Without an NVIDIA driver PyTorch's own index has a build of a tenth of the size.
choose_torch() { # choose_torch PYTHON: sets index and build (default: CPU or CUDA, which pip alone finds out)
  index="${TORCH_INDEX:-}" build=default
  if [ -z "$index" ]; then
    index=default
    if [ "$(uname -s)" != Linux ]; then
      build=CPU
    elif nvidia-smi -L > /dev/null 2>&1; then
      build=CUDA
    elif answers "$1" "$CPU_INDEX/torch/"; then
      index="$CPU_INDEX"
    else
      say "$CPU_INDEX does not answer: torch comes from pip's default index, which may add CUDA"
    fi
  fi
  case "$index" in
    default) ;;
    */cpu) build=CPU ;;
    *) build=CUDA ;;
  esac
}

install_into() { # install_into PYTHON VENV WHAT...: makes the virtual environment and has pip install WHAT
  local python="$1" venv="$2" index build free_mb needed_mb=3000
  local small="0.4 GB to download, 1.4 GB on the disk" large="3 GB to download, 5.3 GB on the disk" size
  size="about a minute: $small"
  shift 2
  choose_torch "$python"
  if [ "$build" = CUDA ]; then
    needed_mb=9000 size="some minutes: $large"
  elif [ "$build" = default ]; then
    size="about a minute: $small; some minutes with CUDA: $large"
  fi
  free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
  [ "${free_mb:-0}" -ge "$needed_mb" ] \
    || fail "only $free_mb MB free on this disk; the virtual environment with the $build build of torch needs $needed_mb MB"
  if [ "$build" = default ] && [ "$free_mb" -lt 9000 ]; then
    say "only $free_mb MB free on this disk, and torch with CUDA needs 9000 MB: if pip brings it, the disk may be full"
  fi
  say "making a virtual environment in $venv with $("$python" --version)"
  "$python" -m venv "$venv" || fail "could not make it; on Debian and Ubuntu: apt install python3-venv"
  say "installing sparring and what it needs, with the $build build of torch ($size)"
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt)
  # nothing else is wanted of such an index: the next command brings what torch needs
  [ "$index" = default ] || "${pip[@]}" --no-deps --index-url "$index" torch \
    || fail "pip could not install torch from $index (see above); TORCH_INDEX=default takes pip's default index"
  "${pip[@]}" "$@" || fail "pip could not install the packages (see above); is the network reachable?"
}

set_up() { # set_up EXTRAS
  local python venv="${VENV:-.venv}" stamp wanted
  stamp="$venv/.installed"
  wanted="$(cat pyproject.toml constraints.txt | cksum) $1"
  # what was installed for the tests serves the quickstart too
  if [ -f "$stamp" ] && [[ "$(cat "$stamp")" == "$wanted"* ]]; then
    say "using the virtual environment in $venv"
  else
    python="$(find_python)" || exit 1
    install_into "$python" "$venv" -e ".$1"
    echo "$wanted" > "$stamp"
  fi
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
}
