"""Wrong input of every sort: whatever a user gives, mdfuse works or raises an error of its own.

One module per sort of input; `driver.py` runs them, `launch/fuzz` from the command line.
"""
