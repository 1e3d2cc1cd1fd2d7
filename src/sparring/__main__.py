import os

from sparring.cli import main
from sparring.launch import leave

code = main()
if "RANK" in os.environ:
    leave(code)
raise SystemExit(code)
