"""The engines that compute the times of a run."""
