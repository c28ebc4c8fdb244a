"""A team's end: whatever it is, the collectives are let go."""

import pytest

from twinspark.distributed.join import Links
from twinspark.distributed.launch import LocalRanks
from twinspark.distributed.team import LeadingTeam, TeamRules
from twinspark.errors import RankFailed


@pytest.fixture
def team():
    """Rank 0 of a team whose other rank has no link, so nobody is lost."""
    rules = TeamRules(size=2, traits={}, timeout_s=2.0)
    found = LeadingTeam(Links(fate={}, plan={}, store=("none", 0)), rules, LocalRanks())
    found.freed = []
    found._free_stuck = lambda: found.freed.append(found.fate.failure)
    found._wait_freed = lambda _timeout_s: found.freed.append("waited for") or False
    yield found
    found.close()


def test_a_failure_frees_who_waits_before_anything_else(team):
    team.on_failure = lambda failure: team.freed.append("told")
    failure = team.fail(RuntimeError("the device is on fire"))
    assert team.freed[0] is failure
    with pytest.raises(RankFailed, match="rank 0 failed: RuntimeError: the device is on fire"):
        team.check()


def test_an_orderly_end_frees_it_too(team):
    team.check()
    team.close()
    assert team.freed == [None, "waited for"]


def test_nobody_waits_for_collectives_after_a_failure(team):
    team.fail(RuntimeError("the device is on fire"))
    team.close()
    assert "waited for" not in team.freed
