"""Checks the hosts of a job before the job: see `doctor`."""
