"""The engines that compute the timing of a run."""
