"""Invalid arguments, odd files and exhausted resources end with a one-line error and an exit code, no traceback."""

import errno
import json
import os
import resource
import subprocess

import pytest
from doubles_report import make_run
from test_cli import COMMANDS, SHORT, SPARRING, run_cli

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.errors import UserError
from sparring.runs.checkpoint import checkpoints
from sparring.runs.folder import folder_lock

NONSENSE = ["", "\0", "a" * 5000, "a/" * 3000, "-1", "0", "nan", "1e999", "9" * 5000, "fifo", "dir", "link", "--", "["]
NONSENSE += ["/dev/null/x", "\udcff", "é\u202e\n", "&a [*a]", "gym:", "a:b", "x=y", "ppo.gamma=["]
# the positional arguments that a command needs
WORDS = {
    "train": ["finetune"],
    "eval": ["none"],
    "compare": ["none", "none"],
    "report": ["run"],
    "watch": ["run", "--no-browser"],
    "prune": ["run", "--dry-run"],
    "config": ["finetune"],
    "completion": ["bash"],
    "check": ["tabletop"],
    "demos": ["reach_d0", "--episodes", "1"],
}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a run and odd files; commands stop before slow work."""

    def stop(*_, **__):
        raise UserError("this is as far as it goes here")

    for heavy in ("runs.run.Run.__init__", "processes.launch.launch", "runs.dry_run.dry_run", "check.command.check"):
        monkeypatch.setattr(f"sparring.{heavy}", stop)
    for heavy in ("report.page._Server.serve_forever", "demos.record.record", "demos.show.task_rows"):
        monkeypatch.setattr(f"sparring.{heavy}", stop)
    make_run(tmp_path / "run")
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("gone")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", list(COMMANDS))
def test_invalid_values_of_all_arguments_are_refused_or_accepted(work, capsys, command):
    actions = [action for action in COMMANDS[command]._actions if action.nargs != 0]
    words = WORDS.get(command, [])
    given = [
        [*words, flag, text] for a in actions if a.option_strings for flag in a.option_strings for text in NONSENSE
    ]
    given += [[*words, f"{a.option_strings[0]}={text}"] for a in actions if a.option_strings for text in NONSENSE]
    given += [[text, *words[1:]] for a in actions if not a.option_strings for text in NONSENSE]
    for case in given:
        code, _, err = run_cli(capsys, command, *case)  # another exception ends the test
        assert code in (0, 1, 2), case
        assert code == 0 or err.strip(), case
    assert (work / "link").is_symlink() and (work / "fifo").is_fifo()


EMPTY = {
    "train finetune --output ": "the argument after --output is empty",
    "train finetune --output=": "--output= is empty",
    "train finetune output=": "output= has no value",
    "train finetune output=''": "output = '' (from command line): expected text",
    "train finetune --resume ": "the argument after --resume is empty",
    "eval ": "the argument after eval is empty",
    "eval run --json ": "the argument after --json is empty",
    "report run ": "the argument after run is empty",
    "prune --yes ": "the argument after --yes is empty",
    "tasks --sheet ": "the argument after --sheet is empty",
    "config finetune ppo.gamma=": "ppo.gamma= has no value (a shell variable that is not set?); give one, or ",
}


@pytest.mark.parametrize("words", EMPTY)
def test_empty_value_is_refused(work, capsys, words):
    code, out, err = run_cli(capsys, *words.split(" "))
    assert (code, out) == (2, "") and err.startswith(f"sparring: {EMPTY[words]}")


def test_empty_output_base_is_ignored(monkeypatch):
    monkeypatch.setenv("OUTPUT_BASE", "")
    assert str(load_config().run_folder) == "outputs/finetune_rl"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), 1, "'a/b': No space left on device; make room, or"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 1, "Disk quota exceeded; make room"),
        (OSError(errno.EMFILE, "Too many open files", "x"), 1, "'x': Too many open files; raise the limit (ulimit -n)"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), 2, "'x': File name too long; give a shorter name"),
        (PermissionError(errno.EACCES, "Permission denied", b"x"), 2, "'x': Permission denied; give another path"),
        (OSError(errno.EROFS, "Read-only file system", "x"), 2, "'x': Read-only file system; give another path"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), 2, "'x': Is a directory"),
    ],
)
def test_system_errors_are_one_line_errors(monkeypatch, capsys, error, code, message):
    def fail(*_):
        raise error

    monkeypatch.setattr("sparring.runs.listing.find_runs", fail)
    got, out, err = run_cli(capsys, "runs")
    assert (got, out) == (code, "") and err.startswith(f"sparring: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file", "x"), OSError("odd"), ValueError("x")]
)
def test_unexpected_exceptions_are_not_caught(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("sparring.runs.listing.find_runs", fail)
    with pytest.raises(type(error)):
        main(["runs"])


def limited(limit, number, words, **options):
    """Run a command in a process with a resource limit."""
    return subprocess.run(
        [*SPARRING, *words],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(limit, (number, number)),
        **options,
    )


def test_full_stdout_is_a_one_line_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SPARRING, "config"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("sparring: No space left on device; make room") and done.stderr.count("\n") == 1


def test_report_that_does_not_fit_on_the_disk_keeps_the_old_one(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "run/report.html").write_text("the last one")
    done = limited(resource.RLIMIT_FSIZE, 10_000, ["report", "run"], cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "'run/report.html' cannot be written (File too large)" in done.stderr and "; make room" in done.stderr
    assert (tmp_path / "run/report.html").read_text() == "the last one"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("words", [["train", "finetune", *SHORT], ["config", "import", "old.yaml"]])
def test_file_that_does_not_fit_on_the_disk_is_removed(tmp_path, words):
    (tmp_path / "old.yaml").write_text("task_name: reach_d0\n")
    done = limited(resource.RLIMIT_FSIZE, 100, [*words, "--output", "out"], cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("sparring: ") == 1, done.stderr
    assert "out" in done.stderr and "(File too large)" in done.stderr
    assert "; make room, or give another folder; the same command resumes" in done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in (["old.yaml"], ["old.yaml", "writer.lock"])


def test_full_disk_ends_a_run_and_keeps_the_last_checkpoint(tmp_path):
    words = ["train", "finetune", *SHORT, "--output", str(tmp_path / "run"), "training.save_every=1"]
    first = subprocess.run([*SPARRING, *words], capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    whole = {path.name: path.read_bytes() for path in checkpoints(tmp_path / "run")[-1].iterdir()}
    # less than a checkpoint takes, more than a line of metrics
    done = limited(resource.RLIMIT_FSIZE, 30_000, [*words, "training.iterations=6"])
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    newest = checkpoints(tmp_path / "run")[-1]
    assert newest.name == "checkpoint-2"
    assert f"'{tmp_path}/run/checkpoint-3': " in done.stderr and not list((tmp_path / "run").glob(".partial*"))
    assert {path.name: path.read_bytes() for path in newest.iterdir()} == whole


def test_report_is_not_written_through_a_link(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, precious = make_run(tmp_path / "run"), tmp_path / "precious"
    precious.write_text("kept")
    (run / "report.html").symlink_to(precious)
    assert run_cli(capsys, "report", "run")[0] == 2
    (tmp_path / ".other.html.partial").symlink_to(precious)
    assert run_cli(capsys, "report", "run", "--output", "other.html")[0] == 0
    assert precious.read_text() == "kept" and (run / "report.html").is_symlink()
    assert not (tmp_path / "other.html").is_symlink()


@pytest.mark.parametrize(
    "status",
    [
        *("fifo", "/dev/zero", "gone", "folder", "[" * 100_000),
        {"progress": 5, "best": {"success_rate": "x"}, "phase": [], "task": 3, "why": {}},
        {"progress": {"updates": "x", "fraction": 10**400, "env_steps": [1]}, "best": [], "updated": "x"},
        {"state": "running", "pid": 10**30, "host": "x", "updated": 1e308, "progress": {"fraction": float("nan")}},
        {"state": 7, "last": {"x": [[[[]]]]}, "system": {"a": {"b": "c"}}, "seconds": "long"},
    ],
)
def test_runs_and_report_accept_any_status_file(tmp_path, monkeypatch, capsys, status):
    monkeypatch.chdir(tmp_path)
    file = make_run(tmp_path / "run") / "status.json"
    file.unlink()
    if isinstance(status, dict):
        file.write_text(json.dumps(status))
    elif status == "fifo":
        os.mkfifo(file)
    elif status == "folder":
        file.mkdir()
    elif status.startswith("["):
        file.write_text(status)
    else:
        file.symlink_to(status)
    for words in (["runs", "."], ["runs", ".", "--json"], ["report", "run", "--output", "page.html"]):
        code, out, err = run_cli(capsys, *words)
        # a status with `state` and `updated` is used; the report warns about all others
        warns = words[0] == "report" and not (isinstance(status, dict) and {"state", "updated"} <= status.keys())
        assert code == 0 and out and err.startswith("'run': status.json") == warns == bool(err)


@pytest.mark.parametrize("name", ["episode_metrics.jsonl", "evaluations.jsonl", "timeline.jsonl", "videos/index.jsonl"])
def test_runs_and_report_skip_invalid_lines(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    file = make_run(tmp_path / "run") / name
    file.parent.mkdir(exist_ok=True)
    odd = [None, -1, 10**30, 10**400, 1e308, "", "x", [1], {}, {"a": 1}, True, [[[[]]]]]
    keys = ("update", "timestamp", "who", "stage", "begin", "end", "file", "reward", "eval/success_rate", "success")
    lines = [json.dumps({key: value for key in keys} | {"file": "x.mp4"}) for value in odd]
    lines += [
        json.dumps({"who": [1], "stage": "a", "begin": 1.0, "end": 2.0}),
        '{"begin": 1e999, "end": 1e999}',
        "[" * 9000,
    ]
    with file.open("a") as opened:
        opened.write("\n".join(lines) + "\n")
    assert run_cli(capsys, "report", "run", "--output", "page.html")[0] == 0
    file.unlink()
    os.mkfifo(file)
    assert run_cli(capsys, "report", "run", "--output", "page.html")[0] == 0
    assert run_cli(capsys, "runs", ".")[0] == 0


def test_lock_that_is_no_regular_file_does_not_block(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "writer.lock").unlink(missing_ok=True)
    os.mkfifo(run / "writer.lock")
    assert run_cli(capsys, "runs", str(run))[0] == 0
    (run / "writer.lock").unlink()
    (run / "writer.lock").symlink_to(tmp_path / "made")
    with pytest.raises(UserError, match="cannot write there"), folder_lock(run):
        pass
    assert not (tmp_path / "made").exists()
