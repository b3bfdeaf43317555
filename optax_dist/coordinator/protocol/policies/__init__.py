"""Decisions beside the quorum's rules, such as which member has which samples."""
