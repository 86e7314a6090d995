"""`python -m mdfuse` is the command `mdfuse`."""

from mdfuse.cli.main import app

app(prog_name="mdfuse")
