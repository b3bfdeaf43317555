"""Runs of real processes: what is started, what strikes it, and what must hold.

`processes.py` starts, strikes and watches them; `replica.py` is what each runs;
`between_hosts.py` puts them on hosts of their own; `checks.py` looks at the end.
"""
