"""Operations on the leaves of a tree: dtypes, checks, messages."""
