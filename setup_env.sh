# Sourced by quickstart.sh and test.sh: makes .venv and installs this package into it, once.
# Fails with a reason. PYTHON chooses the interpreter, VENV the folder.

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

set_up() { # set_up EXTRAS
  local python venv="${VENV:-.venv}" stamp wanted free_mb
  stamp="$venv/.installed"
  wanted="$(cat pyproject.toml constraints.txt | cksum) $1"
  # what was installed for the tests serves the quickstart too
  if [ -f "$stamp" ] && [[ "$(cat "$stamp")" == "$wanted"* ]]; then
    say "using the virtual environment in $venv"
  else
    python="$(find_python)" || exit 1
    free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "${free_mb:-0}" -ge 3000 ] || fail "only $free_mb MB free on this disk; the virtual environment needs 3000 MB"
    say "making a virtual environment in $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "could not make it; on Debian and Ubuntu: apt install python3-venv"
    say "installing sparring and what it needs (about a minute, 1.5 GB)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".$1" \
      || fail "pip could not install the packages (see above); is the network reachable?"
    echo "$wanted" > "$stamp"
  fi
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
}
