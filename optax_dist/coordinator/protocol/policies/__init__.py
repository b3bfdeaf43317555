"""What a leader decides beside the quorum's rules: who computes on what."""
