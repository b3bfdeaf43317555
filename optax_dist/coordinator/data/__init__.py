"""The data that replicas compute on: arguments, micro-batches, probe."""
