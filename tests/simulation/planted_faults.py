"""The faults that are planted into the protocol: the simulation finds every one."""

from __future__ import annotations

from typing import Any

from tests.simulation import bad, faults, fragments, groups, leases, slots
from tests.simulation.planted import Planted


def _one(
  name: str, module: str, old: str, new: str, kind: Any = faults
) -> Planted:
  return Planted(name, ((module, old, new),), kind)


def _aimed(
  name: str, module: str, old: str, new: str, kind: Any = faults
) -> Planted:
  return Planted(name, ((module, old, new),), kind, aimed=True)


# What a leader puts anew, instead of giving way.
_AT_THE_NEXT_PLACE = (
  "        self.position += 1\n"
  "        self._entries = [*self.record.entries, *self._entries]\n"
  "        self._held_for_next = self._held + self._held_for_next\n"
  "        self.record = None\n"
)


FAULTS = (
  _one(
    "more is summed than was asked for after a partial sum",
    "follower.follower",
    "        if taken or sequence < 0:\n",
    "        if sequence < 0:\n",
  ),
  _one(
    "the end of the run is told before it stands in the log",
    "leader.leader",
    "if state is not None and arrival is not None and not ends:",
    "if state is not None and arrival is not None:",
  ),
  _one(
    "what is added to a partial sum is submitted as another sum",
    "submission",
    "-1 if reported else self.partial,",
    "-1,",
  ),
  _one(
    "after a dropped sum the next one has its gradients, too",
    "submission",
    "    self.total, self.gradients, self._sent = None, [], 0\n",
    "    self.gradients, self._sent = [], 0\n",
  ),
  _one(
    "a training loop goes on with the state that it has",
    "submission",
    "    self.admission, self.base, self.ended = admission, base, None\n",
    "    self.admission, self.ended = admission, None\n",
  ),
  _one(
    "all of a sum gets the outcome of what was added to it",
    "submission",
    "    if partial is not None:\n      rest -=",
    "    if False:\n      rest -=",
  ),
  _one(
    "terms are trimmed like other records (the old loss of safety)",
    "log",
    "for p in positions if p not in kept",
    "for p in positions",
  ),
  _one(
    "who reads the log forgets the fence",
    "log",
    "      if answer.value is not None:\n        return FellOff",
    "      if False:\n        return FellOff",
  ),
  _one(
    "a step is committed before all are done",
    "leader.attempt",
    "for p in parts if self._reported >= everybody]",
    "for p in parts]",
  ),
  _one(
    "a commit in an attempt that was told does not wait for all",
    "leader.attempt",
    "      return own\n",
    "      return [self._report(p) for p in parts]\n",
  ),
  _one(
    "a token is lost: a drop is not told",
    "leader.leader",
    "      self._out.say(state, msg.Dropped(sequence, reason, count, lease, whole))",
    "      pass",
  ),
  _one(
    "what rests on a decision is said before it stands in the log",
    "log",
    "    if self._entries:\n      self._held_for_next.append(effect)",
    "    if True:\n      effects.append(effect)",
  ),
  Planted(
    "a stale snapshot is served, and taken",
    (
      (
        "follower.applier",
        "if self.sound and not self.needs and self.step >= serve.at_least:",
        "if self.sound:",
      ),
      (
        "follower.applier",
        "      if step < self.step and self.sound:",
        "      if False:",
      ),
      (
        "follower.applier",
        "    if step > self.step:\n      self._need(",
        "    if False:\n      self._need(",
      ),
    ),
  ),
  _one(
    "a conflict is taken for success",
    "log",
    'case PutAnswered(_, "done"):',
    'case PutAnswered(_, "done" | "conflict"):',
  ),
  _one(
    "an unknown answer is taken for success",
    "log",
    'case PutAnswered(_, "done"):',
    'case PutAnswered(_, "done" | "unknown"):',
  ),
  _one(
    "after an unknown answer the record is put at the next place",
    "log",
    "      case PutAnswered():\n",
    '      case PutAnswered(_, "unknown"):\n'
    + _AT_THE_NEXT_PLACE
    + "      case PutAnswered():\n",
  ),
  _one(
    "a run that has begun is begun anew",
    "follower.search",
    "starts = view.untouched and situation.start is not None",
    "starts = True",
  ),
  _one(
    "a gradient in a commit is sent to the next leader again",
    "follower.session",
    "      if self.pending is not None and self.pending.sequence == part.sequence:"
    "\n        self.pending = None",
    "      if False:\n        self.pending = None",
  ),
  _one(
    "a new leader takes old gradients for fresh ones",
    "leader.leader",
    "    local_step = message.local_step\n",
    "    local_step = self._quorum.step\n",
  ),
  Planted(
    "a gap in the log is jumped over",
    (
      (
        "follower.follower",
        "    if position > self._position >= 0:\n      # The records",
        "    if False:\n      # The records",
      ),
      (
        "follower.follower",
        "if called and self._search.replaced(called, self.view):",
        "if False:",
      ),
    ),
  ),
  _one(
    "an old membership goes on over a new connection",
    "follower.follower",
    "    if self.incarnation != self._promised:\n      # A membership",
    "    if False:\n      # A membership",
  ),
  _one(
    "an optimistic mean is dropped after it was reported",
    "follower.follower",
    "    steps = self.view.apply(position, record)\n",
    "    steps = self.view.apply(position, record)\n"
    "    if any(isinstance(e, Joined) for e in record.entries):\n"
    "      for attempt in list(self.applier._work):\n"
    "        self.applier._drop(attempt)\n",
  ),
  _one(
    "the journal tells of what might not have been",
    "leader.outbox",
    "    self.hold(fx.WriteJournal(note))",
    "    self.add(fx.WriteJournal(note))",
  ),
  _one(
    "an idle leader never learns that it was replaced",
    "leader.leader",
    "      probe = self._log.probe()",
    "      probe = None",
  ),
  _one(
    "a lost member is not noticed",
    "leader.leader",
    '        if state is not None:\n          self._remove(state, f"its conn',
    '        if False:\n          self._remove(state, f"its conn',
  ),
  _one(
    "two memberships get one number",
    "leader.leader",
    "    self._next_incarnation += 1\n    self._roster.add(",
    "    self._roster.add(",
  ),
  _one(
    "a replaced leader goes on after the other's record",
    "log",
    "      case GetAnswered():\n        self.deposed = True\n",
    "      case GetAnswered() if self.record is None:\n"
    "        self.deposed = True\n"
    "      case GetAnswered():\n" + _AT_THE_NEXT_PLACE,
  ),
  _aimed(
    "a late fingerprint takes back a request for a snapshot",
    "leader.leader",
    "    state.applied = max(state.applied, message.step)\n    replica, step",
    "    state.applied = max(state.applied, message.step)\n"
    "    state.needs = False\n    replica, step",
  ),
  Planted(
    "a mean that can't come any more is waited for",
    (
      (
        "world",
        "      for aggregation in list(process.aggregations.values()):\n"
        "        self.peer_lost(process, aggregation, peer)",
        "      for aggregation in list(process.aggregations.values()):\n"
        "        aggregation.moved = math.inf",
      ),
      (
        "world",
        "if peer.process in process.losing:\n        self.fail",
        "if False:\n        self.fail",
      ),
      (
        "follower.applier",
        'if work.status == "runs" and any(',
        "if False and any(",
      ),
    ),
    aimed=True,
  ),
  _one(
    "a store that tells of a gap is asked again without a pause",
    "follower.follower",
    "            self._search.pause(now)\n",
    "            pass\n",
  ),
  # What outsiders would plant.
  _one(
    "an inline mean takes the first member's gradient for all",
    "leader.leader",
    "payloads = [a.message.payload for a in arrivals]",
    "payloads = [arrivals[0].message.payload for a in arrivals]",
  ),
  _one(
    "the parts of an attempt have another weight",
    "leader.leader",
    "      c.weight,\n",
    "      c.weight / 2,\n",
  ),
  _one(
    "a wish to save is not told to the next leader",
    "follower.follower",
    "      if kind in self._wishes:\n",
    "      if kind in self._wishes and kind is not msg.Save:\n",
  ),
  _one(
    "a wish to save is forgotten by its leader",
    "leader.leader",
    "        self._saving = True",
    "        self._saving = False",
  ),
  _one(
    "fingerprints are not compared",
    "leader.leader",
    "    if digest != message.digest:",
    "    if False:",
  ),
  _one(
    "a fingerprint is only compared with those of the same replica",
    "leader.leader",
    "    if digest != message.digest:",
    "    if first == replica and digest != message.digest:",
  ),
  _aimed(
    "a welcome to an earlier call is accepted",
    "follower.follower",
    "if peer != self._link.called or welcome.call != self._link.calls:",
    "if peer != self._link.called:",
  ),
  _one(
    "a replica that has lost its leader does not ask who hears it",
    "follower.search",
    "    if True in votes:\n      return math.inf",
    "    if False:\n      return math.inf",
  ),
  _one(
    "the store's heartbeats of a leader are ignored",
    "follower.search",
    "      if self._beat not in (None, beat):\n        self._heard = now",
    "      pass",
  ),
  _one(
    "an earlier state counts as the current one",
    "leader.roster",
    "    return self.applied >= step and not self.needs",
    "    return self.applied >= 0 and not self.needs",
  ),
  _one(
    "a replica in need of a snapshot counts as one with the state",
    "leader.roster",
    "    return self.applied >= step and not self.needs",
    "    return self.applied >= step",
  ),
  _one(
    "a leader whose members are all lost ends well",
    "leader.leader",
    '      self._resign("the store doesn\'t answer")',
    '      self._record_end("all replicas have left", "")',
  ),
  _one(
    "the last replica that leaves ends the run of one that was lost",
    "leader.leader",
    "        if not self._roster and not self._candidates.lost:",
    "        if not self._roster:",
  ),
  _one(
    "no witness has the mean of a single gradient",
    "leader.attempt",
    "    witness = max(able, key=key, default=None)",
    "    witness = None",
  ),
  _one(
    "readers are not told of an attempt",
    "leader.attempt",
    "    return (*(part.incarnation for part in parts), *self.message.readers)",
    "    return tuple(part.incarnation for part in parts)",
  ),
  _aimed(
    "a run that fails takes steps",
    "leader.leader",
    "    if self._ending.is_decided:\n      return  # With an error, steps might",
    "    if False:\n      return  # With an error, steps might",
    # A round is over by time alone.
    fragments,
  ),
  _one(
    "a replica of another optimizer is let in",
    "leader.leader",
    "    if why:\n      self._out.send(peer, msg.Refused(why))",
    "    if False:\n      self._out.send(peer, msg.Refused(why))",
  ),
  _aimed(
    "two processes with one number replace each other for ever",
    "follower.follower",
    "    if self._rival in self.view.members:",
    "    if False:",
  ),
  _one(
    "a store that is lost is asked again",
    "follower.follower",
    """        self._fail("CoordinatorError", f"The store can't be used: {reason}.")""",
    "        pass",
  ),
  _one(
    "a lost replica counts as one that left",
    "leader.leader",
    "    counts_as_left = left or self._config.lower_on_loss",
    "    counts_as_left = True",
  ),
  _one(
    "a replica leaves before the others have its state",
    "leader.leader",
    "      waits = bool(late) or busy",
    "      waits = busy",
  ),
  _one(
    "a removed replica is told that it left",
    "leader.leader",
    "    self._log.add(Removed(incarnation, left, reason))",
    "    self._log.add(Removed(incarnation, True, reason))",
  ),
  _one(
    "the end does not wait for who is behind",
    "leader.leader",
    "    if not late or self._now >= since",
    "    if True or self._now >= since",
  ),
  _one(
    "a gradient of an older step counts for this one",
    "leader.leader",
    "      local_step = -1 - self._config.max_staleness\n",
    "      local_step = self._quorum.step\n",
  ),
  _one(
    "a snapshot that fails is not asked for again",
    "follower.applier",
    '      self.needs = f"the snapshot failed: {failed.reason}"\n      self.ask()',
    '      self.needs = f"the snapshot failed: {failed.reason}"',
  ),
  _one(
    "a new leader does not ask for gradients again",
    "follower.follower",
    "    if self.session.pending is not None:\n      self._arrive()\n    self._tell_w",
    "    self._tell_w",
  ),
  _one(
    "a member that failed is told to be the witness's success",
    "leader.attempt",
    "    self._held += own\n    return []",
    "    return own",
  ),
  # What comes late, twice, or of before.
  _one(
    "an answer to an earlier request is taken for the latest",
    "log",
    "    if answer.request != self._request:\n      return None\n    match answer:\n"
    '      case PutAnswered(_, "done")',
    '    match answer:\n      case PutAnswered(_, "done")',
  ),
  _aimed(
    "a submission that comes twice counts twice",
    "leader.leader",
    "    if message.sequence <= state.sequence or",
    "    if message.sequence < state.sequence or",
  ),
  _aimed(
    "a report of an earlier attempt counts for this one",
    "leader.attempt",
    "    if id_ != self.id:\n      return []\n",
    "    if False:\n      return []\n",
  ),
  _aimed(
    "a buffered sum survives its leader",
    "follower.session",
    "    taken, self.taken = self.taken, None\n    if taken is None or",
    "    taken = self.taken\n    if taken is None or",
  ),
  _one(
    "what was buffered stays after a commit",
    "follower.session",
    "      self.taken = None\n      step = commit",
    "      step = commit",
  ),
  _one(
    "a removal does not change the membership",
    "membership",
    "          self.membership = position\n          self.departed",
    "          self.departed",
  ),
  _aimed(
    "a replica that came back still counts as departed",
    "membership",
    "    self.departed.pop(member.replica, None)\n",
    "",
  ),
  _aimed(
    "a gradient of a removed member is kept",
    "leader.gradients",
    "self.accepted.pop(drop.incarnation, None)\n",
    "self.accepted.get(drop.incarnation)\n",
  ),
  _aimed(
    "a new leader is not told of the fingerprint of a damaged state",
    "follower.follower",
    "      if kind in self._wishes:\n",
    "      if kind in self._wishes and kind is not msg.Fingerprint:\n",
  ),
  _one(
    "a leader forgets under which id all have begun an attempt",
    "leader.attempt",
    "    return self.optimistic or self.message.attempt\n",
    "    return self.message.attempt\n",
  ),
  # The rules below the protocol.
  _one(
    "a gradient that is too old by one step counts",
    "quorum.arguments",
    "  return local_step >= global_step - max_staleness\n",
    "  return local_step >= global_step - max_staleness - 1\n",
  ),
  _one(
    "a lost member's attempt goes on",
    "quorum.rules",
    "  if attempt is not None and replica in attempt.pending:\n    draft.ab",
    "  if False:\n    draft.ab",
  ),
  _one(
    "a lost replica lowers the quorum",
    "quorum.rules",
    "  draft.lost += reason is ev.Reason.LOST\n  draft.working",
    "  draft.working",
  ),
  _one(
    "after a failed attempt nobody is asked again",
    "quorum.state",
    "        self.ask(member.replica, self.quota(member.replica))\n",
    "        pass\n",
  ),
  _one(
    "the samples of a lost replica are lost",
    "ledger.rules",
    "  _give_back(draft, event.holder, returned, held.copied)\n",
    "",
    leases,
  ),
  _aimed(
    "the samples of a replaced replica stay leased",
    "leader.leader",
    "      self._reclaim(old.member.incarnation)\n",
    "",
    leases,
  ),
  # Runs whose samples are leased.
  _one(
    "a member that gets no lease with a commit keeps its old one",
    "policies.leases",
    "{p.incarnation: () for p in parts}",
    "{}",
    leases,
  ),
  _one(
    "samples that were given up are forgotten when others are",
    "ledger.progress",
    "    given_up = sp.union(self.skipped, skipped)",
    "    given_up = skipped or self.skipped",
    leases,
  ),
  _one(
    "a sample counts twice: what is sent is taken in",
    "policies.leases",
    "    if sp.size(message.data) != message.count * self.state.unit:\n",
    "    self._step(ledger.Claim(incarnation, message.data))\n"
    "    if not ledger.fits(self.state, incarnation, message.data):\n"
    "      inside = self.data(incarnation)\n"
    "      mine = ledger.Held(message.data, inside)\n"
    "      held = self.state.held | {incarnation: mine}\n"
    "      self.state = self.state._replace(held=held)\n"
    "    if sp.size(message.data) != message.count * self.state.unit:\n",
    leases,
  ),
  _one(
    "what is committed is not in what a replica starts with",
    "follower.follower",
    "      self.view = welcome.view.copy()\n",
    "      self.view = welcome.view.copy()\n"
    "      self.view.progress = Progress()\n",
    leases,
  ),
  _one(
    "a replica is not told of its samples",
    "leader.leader",
    "      self._out.say(state, asked)",
    "      pass",
    leases,
  ),
  _one(
    "samples of a sum are drawn again",
    "submission",
    "    drawn = [*self._round, *(g.data for g in self.gradients)]\n",
    "    drawn = [*self._round]\n",
    leases,
  ),
  _one(
    "only the last gradient's samples are submitted",
    "submission",
    "      sp.join(*(gradient.data for gradient in gradients)),\n",
    "      sp.join(*(gradient.data for gradient in gradients[-1:])),\n",
    leases,
  ),
  _one(
    "the samples of all but the last local step are forgotten",
    "submission",
    "      self._round.append(self.drawn)\n",
    "      self._round = [self.drawn]\n",
    leases,
  ),
  # Deterministic runs.
  _one(
    "a step may have more than its slots",
    "leader.leader",
    "    local_step = message.local_step\n",
    "    local_step = message.local_step\n"
    "    config = self._quorum.config._replace(exact=False)\n"
    "    self._quorum = dataclasses.replace(self._quorum, config=config)\n",
    slots,
  ),
  _one(
    "slots of the next step are leased before this one is committed",
    "ledger.state",
    "    limit = done + samples\n",
    "    limit = done + 2 * samples\n",
    slots,
  ),
  _one(
    "slots are added in the order in which they come",
    "ledger.tree",
    "    middle = start + (1 << (stop - start - 1).bit_length() - 1)\n",
    "    middle = next(s for s in sorted(starts) if s > start)\n",
    slots,
  ),
  _one(
    "an addition that was dropped stays in the sum",
    "submission",
    "    self.gradients, self.total = self.gradients[: self._sent], self._sent_total\n",
    "    self.gradients = self.gradients[: self._sent]\n",
    slots,
  ),
  _one(
    "a slot that two replicas compute counts twice",
    "ledger.rules",
    "      if other != holder and sp.overlap(theirs.out, spans):\n",
    "      if False:\n",
    slots,
  ),
  _one(
    "a slot counts as compared once it is computed",
    "policies.leases",
    "and has_all and (alone or audit.is_settled(self._able))",
    "and has_all",
    slots,
  ),
  _one(
    "of two replicas that agree, both are wrong",
    "policies.audit",
    "if digest != right]",
    "if digest == right]",
    slots,
  ),
  _one(
    "a replica whose gradients are wrong may join again",
    "leader.leader",
    '    why = why or self._wrong.get(peer, "")\n',
    "",
    slots,
  ),
  _one(
    "the digests of a lost replica count",
    "policies.audit",
    "      votes.pop(incarnation, None)\n",
    "      pass\n",
    slots,
  ),
  # Replicas of several processes.
  _one(
    "a mean is there as soon as one process has it",
    "speaker",
    "    if reports.keys() == self._everyone:\n",
    "    if key[0] == 'mean' or reports.keys() == self._everyone:\n",
    groups,
  ),
  _one(
    "only process 0 looks whether numbers are finite",
    "speaker",
    "        finite = all(answer.finite for answer in answers)\n",
    "        finite = input_.finite\n",
    groups,
  ),
  _one(
    "the others are not told of a snapshot",
    "speaker",
    "      case _ if isinstance(effect, orders.ORDERS):\n",
    "      case _ if isinstance(effect, orders.ORDERS) and (\n"
    "        not isinstance(effect, fx.Restore)\n"
    "      ):\n",
    groups,
  ),
  # Learners that never wait.
  _one(
    "contributions count alike, whatever is in them",
    "rounds",
    "      codec.replace(part, weight=share * len(parts))\n",
    "      codec.replace(part, weight=1.0)\n",
    fragments,
  ),
  _one(
    "what is in a contribution is not sent again",
    "follower.follower",
    "        pending.work,\n",
    "        pending.work if self._office < 0 else b'',\n",
    fragments,
  ),
  _one(
    "a contribution to a round that is over is kept for the next",
    "leader.leader",
    "    local_step = message.local_step\n    held =",
    "    local_step = max(message.local_step, self._quorum.step)\n    held =",
    fragments,
  ),
  # What is forgotten when something else happens.
  _one(
    "the answer of a member that was removed is still waited for",
    "leader.leader",
    "    self._note_removed(state, left, reason)\n    self._dismiss(incarnation)\n",
    "    self._note_removed(state, left, reason)\n",
  ),
  _one(
    "a new leader expects replicas that have left",
    "leader.leader",
    "      self._quorum, _ = quorum.step(\n"
    "        self._quorum, self._departure(left)(replica)\n      )\n",
    "",
  ),
  _one(
    "members are told without a pause that all have begun",
    "leader.leader",
    "      attempt.limited = True\n",
    "",
  ),
  _one(
    "members that do not come to a new leader stay",
    "leader.leader",
    "      until = now + self._limits.pace\n      self._roster.add",
    "      until = now + 1e6\n      self._roster.add",
  ),
  _one(
    "a leader forgets which submission of a member was the latest",
    "leader.leader",
    "    state.sequence = message.sequence\n",
    "",
  ),
  _one(
    "a leader that does not reach the store stays",
    "leader.leader",
    "    if log.record is not None and now >= log.since + self._limits.pace:\n",
    "    if False:\n",
  ),
  _one(
    "sums count as one gradient in the journal",
    "leader.gradients",
    "    self.applied += sum(part.count for part in parts)\n",
    "    self.applied += len(parts)\n",
  ),
  _one(
    "queued gradients count before they may",
    "leader.leader",
    "      if not self._may_count(state, message):\n        return\n",
    "",
  ),
  _one(
    "a commit names another attempt than its members took part in",
    "leader.leader",
    "      parts, id_ = attempt.message.parts, attempt.id\n",
    "      parts = attempt.message.parts\n"
    "      id_ = AttemptId(self.term, commit.step, commit.attempt + 1)\n",
  ),
  _one(
    "a gradient that is dropped still counts as gathered",
    "quorum.state",
    "      self.gathered -= inside.count\n",
    "",
  ),
  _one(
    "after a failed attempt the same step counts as taken",
    "quorum.state",
    "        counted = member.local_step - 1\n",
    "        counted = member.local_step\n",
  ),
  _one(
    "a replica joins with the state of another step",
    "follower.applier",
    "    elif not self._todo and self.step != step:\n",
    "    elif False:\n",
  ),
  _one(
    "a process that is no member claims leadership at once",
    "follower.search",
    "return self._heard + (2 * silence if situation.position else 0.0)",
    "return self._heard",
  ),
  # A replica that is bad.
  Planted(
    "samples are given up whoever's gradients are not finite",
    (
      ("ledger.not_finite", " and len(set(by)) >= needed:", ":"),
      (
        "ledger.not_finite",
        "  good = {holder for holder in live",
        "  return live\n  good = {holder for holder in live",
      ),
      (
        "ledger.rules",
        "  avoided = not_finite.avoided(draft, holder)\n  later",
        "  avoided = ()\n  later",
      ),
    ),
    bad.leased,
  ),
  _one(
    "strikes of a replica that is not trusted count",
    "ledger.not_finite",
    "  return holder in good and all(\n    not others or ",
    "  return True or all(\n    not others or ",
    bad.of_slots,
  ),
  _one(
    "a slot counts as zeros because one replica says so",
    "policies.leases",
    "    return ledger.are_bad(self.state, incarnation, bad)\n",
    "    return message.finite\n",
    bad.of_slots,
  ),
  _one(
    "a step that takes no gradient is no stall",
    "leader.leader",
    "    if self._policy.has_begun(step):\n      self._stall.waits()\n",
    "    pass\n",
    bad.plain,
  ),
  _one(
    "data that was skipped ends a run well",
    "leader.leader",
    "      if wrong:\n        self._give_up(wrong)\n        return\n",
    "",
    leases,
  ),
  _one(
    "who has only bad samples left waits for ever",
    "leader.leader",
    "    incarnation = self._policy.swap()\n",
    "    incarnation = None\n",
    bad.leased,
  ),
)
