"""Tests of the log's entries."""

import dataclasses

from optax_dist.coordinator.protocol import entries


def test_another_mean_changes_nothing_else():
  part = entries.Part(1, "a", 2, 3, 0, 1, 1.0, ((0, 4),))
  commit = entries.Committed(
    attempt=entries.AttemptId(1, 2, 3, 4),
    parts=(part,),
    readers=(5,),
    inline=True,
    mean=b"old",
    save=True,
    details=(entries.Details("[7]", 0.5, 0.25),),
    dropped=(("stale", 2),),
    leases=(((4, 8),),),
    others=(entries.Leased(9, ((8, 12),)),),
    skipped=((12, 16),),
  )
  assert all(
    getattr(commit, field.name) not in (field.default, None)
    for field in dataclasses.fields(commit)
  )
  assert commit.with_mean(b"new") == dataclasses.replace(commit, mean=b"new")
