"""The data that replicas compute on: arguments, indices, micro-batches, probe."""
