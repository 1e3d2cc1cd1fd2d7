import os

from sparring.cli.main import main

if "RANK" not in os.environ:
    raise SystemExit(main())
import traceback  # noqa: E402

from sparring.processes.launch import leave

try:
    code = main()
except Exception:  # as the interpreter would, which would then take libraries down
    traceback.print_exc()
    code = 1
leave(code)
