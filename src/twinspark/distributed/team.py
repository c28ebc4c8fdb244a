"""The ranks of one model as one of them sees them: join, links, collectives, one end for all.

Rank 0 leads: it listens, may start other ranks on its own machine, and sends plans. The others
follow. When one fails, every one of them ends with exit code 70 within seconds; `close` is the
orderly end. Read next: `join.py`, `fate.py`, `group.py`, `plan_link.py`.
"""

import atexit
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from twinspark.distributed.digest import DigestBook
from twinspark.distributed.fate import Fate, RankMemory
from twinspark.distributed.frames import Frame, FrameKind
from twinspark.distributed.group import ProcessRank, make_group, make_store, open_store
from twinspark.distributed.join import Links, Traits, gather_ranks, join_rank0, listen
from twinspark.distributed.launch import LocalRanks
from twinspark.distributed.leaving import leave
from twinspark.distributed.notes import Note
from twinspark.distributed.plan_link import PlanReceiver, PlanSender
from twinspark.errors import EngineDied, RankFailed, TwinSparkError

JOIN_LIMIT_S = 300.0
GRACE_S = 0.1
LEAVE_S = 1.0
STUCK_S = 0.5
"""For the main thread to end by itself after a failure: a silent rank is left within 3 s in all."""
HALT_S = 1.5
"""A rank leaves by itself LEAVE_S after a halt; who has not by now is stopped or stuck."""
CLOSE_S = 2.0
"""For the halt and the ranks' exits; a server gives its engine five seconds in all."""
POLL_S = 0.25

OnWait = Callable[[str, float], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TeamRules:
    """How a team finds and watches itself.

    Attributes:
        size: number of ranks.
        traits: what they must have in common.
        timeout_s: silence that counts as death.
        join_limit_s: longest wait for a rank, and for its weights to be loaded afterwards.
        usable_bytes: this rank's memory, told to the others.
        device: of this rank's tensors, "cpu" or "cuda:N".
        exits: rank 0's process ends with the ranks even where its main thread is stuck. That is
            always so where a rank is another machine's, as nobody else can free the thread then.
    """

    size: int
    traits: Traits
    timeout_s: float
    join_limit_s: float = JOIN_LIMIT_S
    usable_bytes: Callable[[], int | None] = lambda: None
    device: str = "cpu"
    exits: bool = False


class Team(ABC):
    """What both kinds of rank have.

    Attributes:
        rank: this process.
        size: number of ranks.
        fate: the links on which ranks live and end together.
        group: the collectives.
    """

    group: ProcessRank

    def __init__(
        self,
        rank: int,
        links: Links,
        rules: TeamRules,
        *,
        how_ended: Callable[[int], str | None] = lambda _rank: None,
    ) -> None:
        """Take the links of a finished join and begin to watch."""
        self.rank, self.size = rank, rules.size
        self._rules = rules
        self._free_stuck: Callable[[], None] = lambda: None
        self._wait_freed: Callable[[float], bool] = lambda _timeout_s: True
        self.fate = Fate(
            rank,
            links.fate,
            timeout_s=rules.timeout_s,
            usable_bytes=rules.usable_bytes,
            on_failure=self._end_all,
            on_note=self._on_note,
            how_ended=how_ended,
        )

    def connect(self, store: Any, local_host: str) -> None:
        """Make the collectives.

        Args:
            store: rank 0's, as this rank sees it.
            local_host: this machine's address on the way to rank 0.

        Raises:
            RankFailed: a rank could not be reached, or two share a GPU.
        """
        self.group = make_group(
            store,
            self.rank,
            self.size,
            local_host=local_host,
            device=self._rules.device,
            failed=self.failed,
        )
        self._free_stuck, self._wait_freed = self.group.abort, self.group.wait_aborted
        if self.fate.failure is not None:  # found while the group was being made
            self._free_stuck()

    def check(self) -> None:
        """See that no rank has failed so far; what was computed since is worth nothing.

        Raises:
            RankFailed: one has.
        """
        if self.fate.failure is not None:
            raise self.fate.failure

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed so far."""
        return self.fate.failure is not None

    def failed(self, error: Exception) -> RankFailed:
        """The cause behind a broken link or collective, which is a symptom on this rank.

        Waits for the fate link to find the rank that is gone.
        """
        found = self.fate.wait_failure(self._rules.timeout_s + LEAVE_S)
        return found or self.fate.fail(f"rank {self.rank} lost its link to the others: {error}")

    def _end_all(self, failure: RankFailed) -> None:
        # a GPU that waits for a rank that is gone would hold up even the end of this process
        self._free_stuck()
        self._on_failure(failure)

    def _end_group(self) -> None:
        """The end of the collectives, which after a failure nobody waits for."""
        self._free_stuck()
        if not self.has_failed and not self._wait_freed(LEAVE_S):
            logger.debug("rank %d: the collectives have not ended yet", self.rank)

    @abstractmethod
    def _on_failure(self, failure: RankFailed) -> None:
        """All ranks must end, for this cause."""

    @abstractmethod
    def _on_note(self, rank: int, note: Note) -> None:
        """A peer has sent a note that is not about fate."""


class LeadingTeam(Team):
    """Rank 0's view.

    Attributes:
        plan: where plans go.
        on_failure: called from the thread that found a failure, after ranks on this machine have
            been ended; it must return soon or end the process. None: the error is raised where
            the main thread next meets a link or a collective.
    """

    def __init__(self, links: Links, rules: TeamRules, children: LocalRanks) -> None:
        """See `lead`."""
        self.on_failure: Callable[[RankFailed], None] | None = None
        self._children = children
        self._exits = rules.exits or len(children.ranks) < rules.size - 1
        self._loaded: set[int] = set()
        self._book = DigestBook()
        self._main = threading.current_thread()
        self._closed = threading.Event()
        super().__init__(0, links, rules, how_ended=children.how_ended)
        self.plan = PlanSender(links.plan)
        self.fate.start()

    @property
    def memory(self) -> list[RankMemory]:
        """What every rank last said about its memory, in rank order."""
        own = RankMemory(usable_bytes=self._rules.usable_bytes(), age_s=0.0)
        return [own, *(told for _, told in sorted(self.fate.memory().items()))]

    @property
    def local_pids(self) -> dict[int, int]:
        """Processes that this one started, by rank."""
        return self._children.pids

    def wait_loaded(self, on_wait: OnWait) -> None:
        """Wait until every rank can take plans, then hold all of them to short silences.

        Raises:
            RankFailed: a rank failed, or took too long.
        """
        start_s = monotonic()
        while len(self._loaded) < self.size - 1:
            missing = [rank for rank in range(1, self.size) if rank not in self._loaded]
            waited_s, limit_s = monotonic() - start_s, self._rules.join_limit_s
            on_wait(
                f"waiting for rank {', '.join(map(str, missing))} to load",
                min(1.0, waited_s / limit_s),
            )
            if waited_s > limit_s:
                raise self.fate.fail(f"rank {missing[0]} did not load within {limit_s:g} s")
            if failure := self.fate.wait_failure(POLL_S / 5):
                raise failure
        self.fate.send({"type": "serving"})
        self.fate.be_strict()

    def send(self, frame: Frame) -> bytes:
        """Send a frame to every other rank; its bytes.

        Raises:
            RankFailed: a rank failed.
        """
        self.check()
        data = frame.pack()
        try:
            self.plan.send(data)
        except RankFailed as error:
            raise self.failed(error) from error
        return data

    def fail(self, error: BaseException) -> RankFailed:
        """Rank 0 cannot go on: tell the others why, and give what all end with."""
        if isinstance(error, RankFailed):
            return self.fate.fail(str(error))
        return self.fate.fail(f"rank 0 failed: {describe(error)}")

    def compare(self, number: int, digest: str) -> None:
        """Compare rank 0's digest of a round with those that have come.

        Raises:
            RankFailed: another rank has another one.
        """
        if problem := self._book.add_own(number, digest):
            raise self.fate.fail(problem)

    def close(self) -> None:
        """The orderly end: all other ranks are asked to go, and exit with 0."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        if self.fate.failure is None:
            until_s = monotonic() + CLOSE_S
            self.fate.halt()
            self.plan.send_now(Frame(kind=FrameKind.HALT).pack())
            self.fate.wait_ended(HALT_S)
            self._children.end(max(GRACE_S, until_s - monotonic()))
        self._children.end(GRACE_S)
        self.fate.close()
        self.plan.close()
        self._end_group()

    def _on_failure(self, failure: RankFailed) -> None:
        self._children.end(GRACE_S)  # a stopped one is killed, which frees who waits for it
        if threading.current_thread() is self._main:
            return  # it raises the failure itself
        if self.on_failure is not None:
            self.on_failure(failure)
        elif self._exits and not self._closed.wait(STUCK_S):
            leave(str(failure))

    def _on_note(self, rank: int, note: Note) -> None:
        if note["type"] == "loaded":
            self._loaded.add(rank)
        elif note["type"] == "digest":
            problem = self._book.add(rank, int(note["round"]), str(note["value"]))
            if problem:
                self.fate.fail(problem)


class FollowingTeam(Team):
    """Any other rank's view.

    Attributes:
        plan: where plans come from.
    """

    def __init__(self, rank: int, links: Links, rules: TeamRules) -> None:
        """See `follow`."""
        self._main = threading.current_thread()
        self._finished = threading.Event()
        super().__init__(rank, links, rules)
        self.plan = PlanReceiver(links.plan[0])
        self.fate.start()

    def loaded(self) -> None:
        """Tell rank 0 that this rank takes plans."""
        self.fate.send({"type": "loaded"})

    def send_digest(self, number: int, digest: str) -> None:
        """Tell rank 0 this rank's digest of a round."""
        self.fate.send({"type": "digest", "round": number, "value": digest})

    def fail(self, error: BaseException) -> RankFailed:
        """This rank cannot go on: tell the others why."""
        if isinstance(error, RankFailed) and self.fate.failure is not None:
            return self.fate.failure
        return self.fate.fail(f"rank {self.rank} failed: {describe(error)}")

    def close(self) -> None:
        """The orderly end, after rank 0 has asked for it."""
        self._finished.set()
        self.fate.close()
        self.plan.close()
        self._end_group()

    def _on_failure(self, failure: RankFailed) -> None:
        if threading.current_thread() is not self._main:
            leave(str(failure))

    def _on_note(self, rank: int, note: Note) -> None:
        if note["type"] == "serving":
            self.fate.be_strict()
        elif note["type"] == "halt":
            # also in the middle of loading, where nobody listens for the plan's last frame
            threading.Thread(target=self._leave_soon, name="halt", daemon=True).start()

    def _leave_soon(self) -> None:
        if not self._finished.wait(LEAVE_S):
            leave(f"rank {self.rank} ends: rank 0 has asked for it", code=0)


def lead(
    rules: TeamRules,
    *,
    address: tuple[str, int],
    commands: Callable[[tuple[str, int]], Mapping[int, Sequence[str]]],
    on_wait: OnWait,
) -> LeadingTeam:
    """Become rank 0: listen, start what runs on this machine, wait for all, connect.

    Args:
        rules: of the team.
        address: where to listen; port 0 takes a free one.
        commands: told the address, gives argument lists of ranks to start here, by rank.
        on_wait: told what is awaited and the part of the time that is gone; may raise to end it.

    Raises:
        ConfigError: the address cannot be used.
        RankFailed: a rank differs, fails or does not come.
    """
    with listen(*address) as listener:
        here = listener.getsockname()[:2]
        store, store_port = make_store(here[0])
        children = LocalRanks()
        try:
            children.start(commands(here))
            links = gather_ranks(
                listener,
                rules.size,
                rules.traits,
                store=(here[0], store_port),
                limit_s=rules.join_limit_s,
                on_wait=on_wait,
                check=children.check,
            )
            for link in (*links.fate.values(), *links.plan.values()):
                link.settimeout(None)
            team = LeadingTeam(links, rules, children)
        except BaseException:
            children.end(LEAVE_S)
            raise
    try:
        atexit.register(team.close)
        on_wait("connecting the ranks", 0.0)
        team.connect(store, here[0])
    except (EngineDied, KeyboardInterrupt):  # somebody has asked for it
        team.close()
        raise
    except BaseException as error:
        team.fail(error)
        team.close()
        raise
    return team


def follow(rank: int, rules: TeamRules, *, address: tuple[str, int]) -> FollowingTeam:
    """Become another rank: find rank 0, join, connect.

    Raises:
        ConfigError: the address is none.
        RankFailed: rank 0 is not there or refuses.
    """
    links = join_rank0(address, rank, rules.size, rules.traits, limit_s=rules.join_limit_s)
    team = FollowingTeam(rank, links, rules)
    local_host = _local_host(links.fate[0])
    try:
        team.connect(open_store(links.store), local_host)
    except BaseException as error:
        team.fail(error)
        raise
    return team


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, TwinSparkError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _local_host(link: socket.socket) -> str:
    return str(link.getsockname()[0])
