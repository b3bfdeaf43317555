"""Operations on the leaves of a tree: fused, packed, in place."""
