"""`python -m accel`."""

from accel.cli import app

app(prog_name="python -m accel")
