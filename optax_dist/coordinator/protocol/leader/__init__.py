"""The leader: the quorum, the leases and the rounds that it decides on."""
