"""`python -m sparring`, also of the processes that it starts."""

import os
import sys

# first on the path is the working directory, where a yaml.py in somebody else's run would be taken for the library
here, named = sys.path[0], os.environ.get("PYTHONPATH", "")
if not sys.flags.safe_path and here not in named.split(os.pathsep):
    if os.path.samefile(here or os.curdir, os.path.join(os.path.dirname(__file__), os.pardir)):
        # Sparring itself lies there; the processes that it starts are to find it, too
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
except Exception:  # as the interpreter would, which would then take libraries down
    traceback.print_exc()
    code = 1
leave(code)
