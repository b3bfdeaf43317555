"""What a coordinator decides beside the quorum's rules: who computes on what."""
