"""The shell scripts parse, and a failed set-up gives the reason. No test installs anything."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [*sorted(ROOT.glob("*.sh")), ROOT / ".ci" / "run"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = "-m pip install --quiet --disable-pip-version-check -c constraints.txt"
TORCH_FROM = f"{PIP} --no-deps --index-url"


@pytest.fixture
def checkout(tmp_path):
    """A folder with setup_env.sh, its inputs, and a `bin` of stubs that is first in PATH: Linux without a driver."""
    for name in ("setup_env.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    stub(tmp_path, "nvidia-smi", "exit 9")
    stub(tmp_path, "uname", "echo Linux")
    free_disk(tmp_path, 9000)
    return tmp_path


def stub(folder, name, body):
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def free_disk(folder, mb):
    stub(folder, "df", f'echo "Filesystem 1M-blocks Used Available"; echo "disk 90000 8000 {mb} 89% /"')


def python_stub(folder, name, version, then=""):
    """A stub that handles --version and the version test like a Python of that version; `then` handles the rest.

    It logs network requests in asked.log; only the URL in ANSWERS responds, after SLOW seconds.
    """
    major, minor = version.split(".")[:2]
    new_enough = 0 if (int(major), int(minor)) >= (3, 11) else 1
    body = f'if [ "$1" = --version ]; then echo "Python {version}"; exit 0; fi\n'
    body += 'case "$2" in *urllib*) echo "$3" >> asked.log; sleep ${SLOW:-0}; [ "$3" = "$ANSWERS" ]; exit;; esac\n'
    body += f'if [ "$1" = -c ]; then exit {new_enough}; fi\n{then}'
    return stub(folder, name, body)


def set_up(folder, extras="", **environment):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VENV", "TORCH_INDEX", "ANSWERS")}
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


def test_python_that_is_too_old_is_refused(checkout):
    old = python_stub(checkout, "old-python", "3.8.10")
    result = set_up(checkout, PYTHON=str(old))
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"error: Python 3.11 or newer is needed; found: {old} (Python 3.8.10). "
        "Install one, or set PYTHON=/path/to/python3.12"
    )
    assert not (checkout / ".venv").exists()


def test_missing_python_is_reported(checkout):
    result = set_up(checkout, PYTHON="no-such-python")
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "error: Python 3.11 or newer is needed; found: none. Install one, or set PYTHON=/path/to/python3.12"
    )


def test_first_python_that_is_new_enough_is_used(checkout):
    python_stub(checkout, "python3", "3.8.10")
    python_stub(checkout, "python3.13", "3.13.1", then="echo chosen >&2; exit 1")
    assert "chosen" in set_up(checkout).stderr


def test_missing_venv_module_is_reported(checkout):
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


@pytest.mark.parametrize(("driver", "build", "needed"), [(False, "default", 3000), (True, "CUDA", 9000)])
def test_too_little_disk_space_is_refused(checkout, driver, build, needed):
    python = python_stub(checkout, "python3.12", "3.12.1", then="exit 9")
    stub(checkout, "nvidia-smi", f"exit {0 if driver else 9}")
    free_disk(checkout, needed - 1)
    result = set_up(checkout, PYTHON=str(python))
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"error: only {needed - 1} MB free on this disk; the virtual environment with the {build} build of torch "
        f"needs {needed} MB"
    )
    free_disk(checkout, needed)
    assert "==> making a virtual environment" in set_up(checkout, PYTHON=str(python)).stdout


def fake_python(checkout):
    """A stub that creates a virtual environment with stubs only; its `pip` logs calls in pip.log."""
    then = (
        '[ "$2" = venv ] || exit 9\nmkdir -p "$3/bin"\n'
        'printf \'#!/bin/sh\\necho "$@" >> pip.log\\nexit ${PIP_FAILS:-0}\\n\' > "$3/bin/python"\n'
        'chmod +x "$3/bin/python"; echo "VIRTUAL_ENV=$3" > "$3/bin/activate"'
    )
    return str(python_stub(checkout, "python3.12", "3.12.1", then))


def lines(file):
    return file.read_text().splitlines() if file.exists() else []


def test_driver_selects_the_cuda_build_of_the_default_index(checkout):
    stub(checkout, "nvidia-smi", '[ "$1" = -L ] && echo "GPU 0: one"')
    result = set_up(checkout, PYTHON=fake_python(checkout), ANSWERS=f"{CPU_INDEX}/torch/")
    assert "with the CUDA build of torch" in result.stdout
    assert lines(checkout / "pip.log") == [f"{PIP} -e ."] and not lines(checkout / "asked.log")


def test_without_a_driver_torch_comes_from_pytorchs_cpu_index(checkout):
    result = set_up(checkout, extras="[dev]", PYTHON=fake_python(checkout), ANSWERS=f"{CPU_INDEX}/torch/")
    assert (result.returncode, result.stderr) == (0, "")
    assert "with the CPU build of torch" in result.stdout and "does not answer" not in result.stdout
    assert lines(checkout / "pip.log") == [f"{TORCH_FROM} {CPU_INDEX} torch", f"{PIP} -e .[dev]"]


@pytest.mark.parametrize("slow", ["0", "30"])
def test_unreachable_index_falls_back_to_the_default_index(checkout, slow):
    free_disk(checkout, 3000)
    started = time.monotonic()
    result = set_up(checkout, PYTHON=fake_python(checkout), SLOW=slow)
    assert result.returncode == 0 and time.monotonic() - started < 15
    printed = " ".join(result.stdout.split())
    assert f"==> {CPU_INDEX} does not answer: torch comes from pip's default index, which may add CUDA" in printed
    small, large = "0.4 GB to download, 1.4 GB on the disk", "3 GB to download, 5.3 GB on the disk"
    assert f"with the default build of torch (about a minute: {small}; some minutes with CUDA: {large})" in printed
    assert "==> only 3000 MB free on this disk, and torch with CUDA needs 9000 MB" in printed
    assert lines(checkout / "asked.log") == [f"{CPU_INDEX}/torch/"]
    assert lines(checkout / "pip.log") == [f"{PIP} -e ."]


def test_no_disk_warning_if_cuda_fits(checkout):
    free_disk(checkout, 9000)
    assert "free on this disk" not in set_up(checkout, PYTHON=fake_python(checkout)).stdout


def test_macos_has_one_build(checkout):
    stub(checkout, "uname", "echo Darwin")
    set_up(checkout, PYTHON=fake_python(checkout), ANSWERS=f"{CPU_INDEX}/torch/")
    assert lines(checkout / "pip.log") == [f"{PIP} -e ."] and not lines(checkout / "asked.log")


@pytest.mark.parametrize(
    ("index", "build", "calls"),
    [
        ("default", "default", [f"{PIP} -e ."]),
        ("https://here/whl/cpu", "CPU", [f"{TORCH_FROM} https://here/whl/cpu torch", f"{PIP} -e ."]),
        ("https://here/whl/cu126", "CUDA", [f"{TORCH_FROM} https://here/whl/cu126 torch", f"{PIP} -e ."]),
    ],
)
def test_given_index_is_used_without_a_request(checkout, index, build, calls):
    stub(checkout, "nvidia-smi", "exit 0")
    result = set_up(checkout, PYTHON=fake_python(checkout), TORCH_INDEX=index)
    assert f"with the {build} build of torch" in result.stdout
    assert lines(checkout / "pip.log") == calls and not lines(checkout / "asked.log")


def test_index_without_this_torch_is_reported(checkout):
    result = set_up(checkout, PYTHON=fake_python(checkout), TORCH_INDEX="https://here", PIP_FAILS="1")
    assert result.returncode == 1
    assert result.stderr.strip() == (
        "error: pip could not install torch from https://here (see above); "
        "TORCH_INDEX=default takes pip's default index"
    )
    assert len(lines(checkout / "pip.log")) == 1 and not (checkout / ".venv" / ".installed").exists()


def test_packages_are_installed_again_only_after_a_change(checkout):
    python = fake_python(checkout)

    def calls():
        return lines(checkout / "pip.log")

    first = set_up(checkout, PYTHON=python)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines()[-1] == "active: .venv"
    assert calls() == [f"{PIP} -e ."]
    again = set_up(checkout, PYTHON=python)
    assert "==> using the virtual environment in .venv" in again.stdout and len(calls()) == 1
    set_up(checkout, extras="[dev]", PYTHON=python)
    assert calls()[1:] == [f"{PIP} -e .[dev]"]
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    set_up(checkout, extras="[dev]", PYTHON=python)
    assert len(calls()) == 3


def test_failed_installation_is_reported_and_retried(checkout):
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


def test_version_is_the_same_in_all_files_and_tags(tmp_path):
    """release.sh refuses a tag of another version before it builds anything."""
    text = (ROOT / "src/sparring/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', text, re.M)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    result = subprocess.run(["bash", ROOT / "release.sh", "v9.9.9"], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip() == (
        f"error: the tag is v9.9.9, but src/sparring/__init__.py has version {version}; expected v{version}"
    )
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert './release.sh "$GITHUB_REF_NAME"' in workflow and 'tags: ["v*"]' in workflow


def test_image_copies_existing_files_that_are_not_ignored():
    """The image installs like the scripts, from the same index."""
    text = (ROOT / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()}
    allowed = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert copied == allowed and {"src", "setup_env.sh", "pyproject.toml", "constraints.txt"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    assert f"ARG TORCH_INDEX={CPU_INDEX}\n" in text and "set_up" in text


def test_quickstart_trains_a_policy_and_a_world_model_and_writes_a_report(checkout):
    """With a `sparring` that only logs its arguments; tests/test_docs.py runs the real commands."""
    shutil.copy(ROOT / "quickstart.sh", checkout)
    stub(checkout, "sparring", 'echo "$@" >> sparring.log')
    stub(checkout, "xdg-open", "echo opened >> sparring.log")
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "DISPLAY": ":0"}
    environment |= {"PYTHON": fake_python(checkout)}
    command = ["bash", "quickstart.sh", "seed=1"]
    result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    lift, world_model, page = (
        "outputs/quickstart/lift_d0",
        "outputs/quickstart/world_model",
        "outputs/quickstart/report.html",
    )
    # without a terminal the script opens no browser
    assert lines(checkout / "sparring.log") == [
        f"train finetune --config configs/lift_d0.yaml training.total_timesteps=150000 --output {lift} seed=1",
        f"train teacher --config configs/quickstart.yaml --output {world_model}",
        f"report {lift} {world_model} --output {page}",
    ]
    assert f"==> done: open {page}" in result.stdout
    assert "  sparring train all --config configs/quickstart.yaml --output " in result.stdout
