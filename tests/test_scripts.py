"""The shell scripts parse, and setting up fails with a reason. Nothing is installed here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted(ROOT.glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.fixture
def checkout(tmp_path):
    """A folder with setup_env.sh, what it reads, and a `bin` whose stubs come first in PATH."""
    for name in ("setup_env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def stub(folder, name, body):
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def python_stub(folder, name, version, then=""):
    """Answers --version and the version test like a Python of that version; `then` handles the rest."""
    major, minor = version.split(".")[:2]
    new_enough = 0 if (int(major), int(minor)) >= (3, 11) else 1
    body = f'if [ "$1" = --version ]; then echo "Python {version}"; exit 0; fi\n'
    body += f'if [ "$1" = -c ]; then exit {new_enough}; fi\n{then}'
    return stub(folder, name, body)


def set_up(folder, extras="", **environment):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV")}
    script = f'set -euo pipefail; . ./setup_env.sh; set_up "{extras}"; echo "active: $VIRTUAL_ENV"'
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=clean | {"PATH": path} | environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_strict(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    if script.name != "setup_env.sh":  # that one is sourced
        assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail\n" in text
        assert os.access(script, os.X_OK), f"{script.name} is not executable"
    for line in text.splitlines():
        assert "/home/" not in line


def test_a_python_that_is_too_old(checkout):
    old = python_stub(checkout, "old-python", "3.8.10")
    result = set_up(checkout, PYTHON=str(old))
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"error: Python 3.11 or newer is needed; found: {old} (Python 3.8.10). "
        "Install one, or set PYTHON=/path/to/python3.12"
    )
    assert not (checkout / ".venv").exists()


def test_no_python_at_all(checkout):
    result = set_up(checkout, PYTHON="no-such-python")
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "error: Python 3.11 or newer is needed; found: none. Install one, or set PYTHON=/path/to/python3.12"
    )


def test_the_first_python_that_is_new_enough_is_taken(checkout):
    python_stub(checkout, "python3", "3.8.10")
    python_stub(checkout, "python3.13", "3.13.1", then="echo chosen >&2; exit 1")
    assert "chosen" in set_up(checkout).stderr


def test_a_missing_venv_module(checkout):
    broken = python_stub(checkout, "python3.12", "3.12.1", then='echo "No module named venv" >&2; exit 1')
    result = set_up(checkout, PYTHON=str(broken))
    assert result.returncode == 1
    assert "==> making a virtual environment in .venv with Python 3.12.1" in result.stdout
    assert result.stderr.splitlines() == [
        "No module named venv",
        "",
        "error: could not make it; on Debian and Ubuntu: apt install python3-venv",
    ]
    assert not (checkout / ".venv" / ".installed").exists()


def test_too_little_disk(checkout):
    python = python_stub(checkout, "python3.12", "3.12.1", then="exit 9")
    stub(checkout, "df", 'echo "Filesystem 1M-blocks Used Available"; echo "disk 9000 8000 1000 89% /"')
    result = set_up(checkout, PYTHON=str(python))
    assert result.returncode == 1
    assert result.stderr.strip() == ("error: only 1000 MB free on this disk; the virtual environment needs 3000 MB")


def fake_python(checkout):
    """Makes a "virtual environment" with the tested interpreter's name only; `pip` counts its calls."""
    then = (
        '[ "$2" = venv ] || exit 9\nmkdir -p "$3/bin"\n'
        'printf \'#!/bin/sh\\necho "$@" >> pip.log\\nexit ${PIP_FAILS:-0}\\n\' > "$3/bin/python"\n'
        'chmod +x "$3/bin/python"; echo "VIRTUAL_ENV=$3" > "$3/bin/activate"'
    )
    stub(checkout, "df", 'echo "Filesystem 1M-blocks Used Available"; echo "disk 9000 0 9000 0% /"')
    return str(python_stub(checkout, "python3.12", "3.12.1", then))


def test_it_installs_once_and_again_only_when_something_changed(checkout):
    python = fake_python(checkout)

    def calls():
        return (checkout / "pip.log").read_text().splitlines()

    first = set_up(checkout, PYTHON=python)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines()[-1] == "active: .venv"
    assert calls() == ["-m pip install --quiet --disable-pip-version-check -c constraints.txt -e ."]
    again = set_up(checkout, PYTHON=python)
    assert "==> using the virtual environment in .venv" in again.stdout and len(calls()) == 1
    set_up(checkout, extras="[dev]", PYTHON=python)
    assert calls()[1:] == ["-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]"]
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    set_up(checkout, extras="[dev]", PYTHON=python)
    assert len(calls()) == 3


def test_a_failed_installation_is_told_and_tried_again(checkout):
    python = fake_python(checkout)
    result = set_up(checkout, PYTHON=python, PIP_FAILS="1")
    assert result.returncode == 1
    assert "error: pip could not install the packages (see above); is the network reachable?" in result.stderr
    assert set_up(checkout, PYTHON=python).returncode == 0


def test_this_interpreter_is_found(checkout):
    script = "set -eu; . ./setup_env.sh; find_python"
    environment = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == sys.executable
