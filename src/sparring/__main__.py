"""`python -m sparring`, also for the processes that it starts."""

import os
import sys

# sys.path starts with the working directory, where a yaml.py in a downloaded run would replace the library
here, named = sys.path[0], os.environ.get("PYTHONPATH", "")
if not sys.flags.safe_path and here not in named.split(os.pathsep):
    if os.path.samefile(here or os.curdir, os.path.join(os.path.dirname(__file__), os.pardir)):
        # Sparring itself is there, and the processes that it starts must find it
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, named)))
    else:
        del sys.path[0]

from sparring.cli.main import main  # noqa: E402

if "RANK" not in os.environ:
    raise SystemExit(main())
import traceback  # noqa: E402

from sparring.processes.launch import leave  # noqa: E402

try:
    code = main()
except Exception:  # print it like the interpreter, then leave without the shutdown of libraries
    traceback.print_exc()
    code = 1
leave(code)
