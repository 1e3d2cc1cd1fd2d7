import os
import traceback

from sparring.cli.main import main
from sparring.processes.launch import leave

if "RANK" not in os.environ:
    raise SystemExit(main())
try:
    code = main()
except Exception:  # as the interpreter would, which would then take libraries down
    traceback.print_exc()
    code = 1
leave(code)
