"""The leader: members, gradients and attempts in, decisions out."""
