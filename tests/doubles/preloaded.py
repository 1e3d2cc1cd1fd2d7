"""Starts processes as forks of an interpreter that has already imported torch.

Importing torch takes two seconds of a core, in each of the hundred processes that the tests start. Each test process
has a server, a new interpreter that has imported the modules of a run and has neither threads nor state; `Popen`
requests a fork from it. The new process gets the requested arguments, environment, folder and files, and becomes a
child of the requesting process: signals, exit codes and psutil work as usual. All other processes start as usual.
"""

import ctypes
import faulthandler
import fcntl
import gc
import inspect
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types

IMPORTED = ["accelerate", "gymnasium", "tensordict", "sparring.cli.train", "sparring.runs.dry_run"]
IMPORTED += ["sparring.envs.tabletop.backend", "sparring.evaluation.of_run", "sparring.phases.finetune"]
# modules that never import torch, as tests check
LIGHT = {"sparring.envs.worker_main"}
# options of Linux's prctl
SUBREAPER, NAME = 36, 15
Real = subprocess.Popen


def start_server() -> socket.socket:
    """The socket for requests of `Popen`; the server ends when it is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import preloaded; preloaded.run_as_server({theirs.fileno()})"
    silent = dict.fromkeys(("stdin", "stdout"), subprocess.DEVNULL)
    Real([sys.executable, "-u", "-c", code], pass_fds=[theirs.fileno()], **silent)
    theirs.close()
    return ours


class Popen(Real):
    """Like `subprocess.Popen`, but `python -m ...` and `python -c ...` are forked from the server."""

    server: socket.socket
    request_lock = threading.Lock()

    def _execute_child(self, *given):
        named = inspect.signature(Real._execute_child).bind(self, *given).arguments
        if (job := _job_of(named)) is None:
            super()._execute_child(*given)
            return
        pipes = [named[end] for end in ("p2cread", "c2pwrite", "errwrite")]
        numbers = [number if pipe < 0 else pipe for number, pipe in enumerate(pipes)]
        with self.request_lock:
            # during the request, a process whose parent has ended becomes a child of this one
            _prctl(SUBREAPER, 1)
            try:
                socket.send_fds(self.server, [pickle.dumps(job)], [*numbers, *named["pass_fds"]])
                self.pid = int(self.server.recv(20))
            finally:
                _prctl(SUBREAPER, 0)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(named[end] for end in ends))


def _job_of(named: dict) -> dict | None:
    """The request to the server; None: the command needs a new interpreter, or is another program."""
    words = list(map(str, named["args"])) if isinstance(named["args"], (list, tuple)) else [named["args"]]
    flags = []
    while words[1:] and words[1] in ("-u", "-P", "-X"):
        flags += [words.pop(1)]
        flags += [words.pop(1)] if flags[-1] == "-X" else []
    special = named["preexec_fn"] or named["shell"]
    if special or words[0] != sys.executable or words[1:2] not in (["-m"], ["-c"]) or words[2] in LIGHT:
        return None
    return {
        "how": words[1],
        "what": words[2],
        "arguments": words[3:],
        "flags": flags,
        "environment": dict(os.environ if named["env"] is None else named["env"]),
        "folder": str(named["cwd"] or os.getcwd()),
        "numbers": [0, 1, 2, *named["pass_fds"]],
        "session": named["start_new_session"],
        "group": named["process_group"],
    }


def _prctl(option: int, value) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def run_as_server(number: int) -> None:
    for module in IMPORTED:
        __import__(module)
    # garbage collection would touch, and so copy, the memory of the imported modules
    gc.freeze()
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    library = [path for path in sys.path if path and path not in own]
    job, files = _serve(socket.socket(fileno=number))
    _take_over(job, files, library)
    _run(job)


def _serve(requests: socket.socket) -> tuple[dict, list[int]]:
    """Fork for each request, until the other end is closed. Returns in the new processes only."""
    # the server is in the client's process group, but must end only when the client ends
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    while True:
        packed, files, _, _ = socket.recv_fds(requests, 1 << 20, 64)
        if not packed:
            os._exit(0)
        job = pickle.loads(packed)
        read, write = os.pipe()
        between = os.fork()
        if between:
            os.close(write)
            # once this has ended, the new process has its parent
            os.waitpid(between, 0)
            requests.send(os.read(read, 20))
            for file in (read, *files):
                os.close(file)
            continue
        between = os.getpid()
        if pid := os.fork():
            os.write(write, str(pid).encode())
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        for file in (read, write):
            os.close(file)
        requests.close()
        if job["session"]:
            os.setsid()
        if job["group"] is not None and job["group"] >= 0:
            os.setpgid(0, job["group"])
        # a command may start other processes: it gets its own server, in the same state as this one
        Popen.server, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if job["what"] != "sparring" or os.fork():
            requests.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            return job, files
        _prctl(NAME, b"server")
        for file in (Popen.server, *files):
            file.close() if isinstance(file, socket.socket) else os.close(file)


def _take_over(job: dict, files: list[int], library: list[str]) -> None:
    """Set up the process as a new interpreter: files, folder, environment, path, arguments, seeds."""
    # first duplicate to numbers above all targets
    first = 1 + max(job["numbers"] + files)
    for number, file in zip(job["numbers"], [fcntl.fcntl(file, fcntl.F_DUPFD, first) for file in files], strict=True):
        os.dup2(file, number)
        os.close(file)
    for file in set(files) - set(job["numbers"]):
        os.close(file)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = [] if "-P" in job["flags"] else [job["folder"]] if job["how"] == "-m" else [""]
    sys.path[:] = list(dict.fromkeys(here + [path for path in own if path] + library))
    sys.argv = [job["how"], *job["arguments"]]
    for module in (random, sys.modules["numpy"].random, sys.modules["torch"]):
        module.seed()
    if "faulthandler" in job["flags"]:
        faulthandler.enable()
    # psutil would report the environment of the server
    _prctl(NAME, f"rank {os.environ['RANK']}".encode() if "RANK" in os.environ else b"python")


def _run(job: dict) -> None:
    if job["what"] == "sparring":
        subprocess.Popen = Popen
    if job["how"] == "-m":
        runpy.run_module(job["what"], run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(job["what"], "<string>", "exec"), main.__dict__)
