"""How processes that train copies, or pieces, of one model come to run one plan.

Planning together is a *session*, which all processes of a group begin at the same place
of their programs. It has rounds: in each, every process says what it is about to plan
and what that costs there, or that it has planned all, or that it failed. The first
process looks at what all said and answers once, for all: with the plan that it made
from the largest of each number, or with an error that names who differs, failed or did
not come. No process waits for anything but that answer, and none longer than the
timeout of the group. So all go on, or all raise. See ``docs/design/same-plan.md``.
"""

import json
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from remat.core.errors import BudgetError, RankError
from remat.core.graph import TrainingGraph
from remat.planning.plan import Plan, plan_from_json, plan_to_json
from remat.planning.same_plan import (
    Amounts,
    amounts_of,
    difference,
    plan_digest,
    structure,
    with_largest,
)
from remat.torch_compat.process_groups import Postings

Facts = Mapping[str, str]
"""What all processes have to have alike: names for people, and words."""

_CURE = (
    "Call remat.fit with the same arguments and equal shapes in all processes, or give "
    "group=None, with which each process plans for itself"
)

_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = (
    weakref.WeakKeyDictionary()
)
_now: ContextVar["Session | None"] = ContextVar("session", default=None)


def session_now() -> "Session | None":
    """Return the session that plans now, ``None`` where a process plans for itself."""
    return _now.get()


@contextmanager
def planning_together(
    group: dist.ProcessGroup | None, facts: Facts
) -> Generator["Session | None"]:
    """Let what is planned inside be the same in all processes of a group.

    Parameters
    ----------
    group
        The processes, each of which comes here; ``None`` for this one alone.
    facts
        What is asked for, and with what it is planned.

    Raises
    ------
    RankError
        In all processes, if one fails inside, differs, or does not come within the
        timeout of the group.
    """
    if group is None or group.size() == 1:
        yield None
        return
    number = _sessions.get(group, 0)
    _sessions[group] = number + 1
    session = Session(Postings(group, f"remat/{number}"), facts)
    before = _now.set(session)
    try:
        yield session
        session.finish()
    except BaseException as error:
        session.leave(error)
        raise
    finally:
        _now.reset(before)


class Session:
    """What one process does in a session.

    Parameters
    ----------
    postings
        What processes say to one another.
    facts
        As for :func:`planning_together`.
    """

    def __init__(self, postings: Postings, facts: Facts) -> None:
        self._postings = postings
        self._facts = facts
        self._round = 0
        self._digests: list[str] = []
        # What ended it for all.
        self._failure: RankError | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process answers."""
        return self._postings.rank == 0

    def plan(
        self,
        graph: TrainingGraph,
        facts: Facts,
        budget: Any,
        solve: Callable[[TrainingGraph, Any], Plan],
    ) -> Plan:
        """Return the plan of a step that all processes are about to plan.

        Parameters
        ----------
        graph
            The step with what it costs here.
        facts
            What is to be alike of it.
        budget
            For one device; where it is a number, the smallest of all counts.
        solve
            Returns a plan of a step for a budget; called in the first process alone.

        Raises
        ------
        BudgetError
            In all processes, if no schedule fits.
        RankError
            In all, if one differs, fails or does not come.
        """

        def answer(said: list[dict[str, Any]]) -> dict[str, Any]:
            amounts = [Amounts(**each["amounts"]) for each in said]
            budgets = [each["budget_bytes"] for each in said]
            least = budget if None in budgets else min(budgets)
            found.append(solve(with_largest(graph, amounts), least))
            return {"plan": plan_to_json(found[0])}

        found: list[Plan] = []
        answered = self._ask(
            {
                "facts": {"step": "a step", **facts, "its graph": structure(graph)},
                "amounts": asdict(amounts_of(graph)),
                "budget_bytes": budget if isinstance(budget, int) else None,
            },
            answer,
        )
        plan = found[0] if found else plan_from_json(answered["plan"])
        self._digests.append(plan_digest(plan))
        return plan

    def choose(self, facts: Facts, choose: Callable[[], list[int]]) -> list[int]:
        """Return numbers that the first process chooses, in all processes.

        Parameters
        ----------
        facts
            What is to be alike of what is chosen from.
        choose
            Returns the numbers; called in the first process alone.

        Raises
        ------
        RankError
            In all, if one differs, fails or does not come.
        """
        said = {"facts": {"step": "a choice", **facts}}
        return self._ask(said, lambda _said: {"chosen": choose()})["chosen"]

    def note(self, plan: Plan) -> None:
        """Make sure at the end that all have this plan, too."""
        self._digests.append(plan_digest(plan))

    def finish(self) -> None:
        """Wait until all have planned all, and compare what they have.

        Raises
        ------
        RankError
            In all processes, if they have not the same.
        """
        plans = ", ".join(digest[:16] for digest in self._digests)
        facts = {"step": "no further step", "plans": plans}
        self._ask({"facts": facts}, lambda _said: {})

    def leave(self, error: BaseException) -> None:
        """Tell the others of an error, unless they have it."""
        if self._failure is not None:
            return
        message = f"{type(error).__name__}: {error}"
        name = f"{self._round}"
        try:
            if self.is_first:
                self._answer(name, self._failed((0,), message))
            else:
                self._say(name, {"failed": message})
        except dist.DistError:
            # The store is gone, and others find that out as well.
            return

    # --- a round -----------------------------------------------------------------

    def _ask(
        self,
        said: dict[str, Any],
        answer: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Say something and return what the first process answers."""
        if self._failure is not None:
            raise self._failure
        said["facts"] = {**self._facts, **said["facts"]}
        name = f"{self._round}"
        try:
            if self.is_first:
                return self._answered(name, said, answer)
            self._say(name, said)
            answered = self._await_answer(name)
        except dist.DistError as error:
            msg = (
                "the store of the process group is gone while processes planned together "
                f"({str(error).splitlines()[0]}): process 0 has ended, or is out of reach"
            )
            self._failure = RankError(msg, ranks=(0,))
            raise self._failure from error
        self._round += 1
        if "budget" in answered:
            raise BudgetError(answered["message"], **answered["budget"])
        if "message" in answered:
            self._failure = RankError(answered["message"], ranks=answered["ranks"])
            raise self._failure
        return answered

    def _answered(
        self,
        name: str,
        said: dict[str, Any],
        answer: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Answer in the first process, whatever happens."""
        try:
            answered = answer(self._collect(name, said))
        except BudgetError as error:
            fields = ("budget_bytes", "required_bytes")
            several = ("required_by_device", "budget_by_device")
            given = {field: getattr(error, field) for field in (*fields, *several)}
            self._answer(name, {"message": str(error), "budget": given})
            self._round += 1
            raise
        except RankError as error:
            self._failure = error
            self._answer(name, {"message": str(error), "ranks": error.ranks})
            raise
        except BaseException as error:
            failed = self._failed((0,), f"{type(error).__name__}: {error}")
            self._failure = RankError(failed["message"], ranks=(0,))
            self._answer(name, failed)
            raise
        self._answer(name, answered)
        self._round += 1
        return answered

    def _collect(self, name: str, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what all said, in the order of ranks.

        Raises
        ------
        RankError
            If one failed, did not come, or differs.
        """
        until_s = time.monotonic() + self._postings.timeout_s
        found = [said]
        for rank in range(1, self._postings.size):
            if not self._postings.wait(f"{name}/{rank}", until_s):
                raise self._missing(name)
            found.append(json.loads(self._postings.read(f"{name}/{rank}")))
            self._postings.remove(f"{name}/{rank}")
        for rank, each in enumerate(found):
            if "failed" in each:
                failed = self._failed((rank,), each["failed"])
                raise RankError(failed["message"], ranks=failed["ranks"])
        differing = difference([each["facts"] for each in found])
        if differing is not None:
            msg = f"processes that are to run the same plan differ: {differing.text}. {_CURE}"
            raise RankError(msg, ranks=differing.ranks)
        return found

    def _await_answer(self, name: str) -> dict[str, Any]:
        until_s = time.monotonic() + self._postings.timeout_s
        if not self._postings.wait(f"{name}/answer", until_s):
            self._failure = self._missing(name)
            raise self._failure
        return json.loads(self._postings.read(f"{name}/answer"))

    def _say(self, name: str, said: dict[str, Any]) -> None:
        self._postings.post(f"{name}/{self._postings.rank}", json.dumps(said).encode())

    def _answer(self, name: str, answered: dict[str, Any]) -> None:
        self._postings.post(f"{name}/answer", json.dumps(answered).encode())

    def _missing(self, name: str) -> RankError:
        """Return the error that names who did not come."""
        postings = self._postings
        came = [postings.rank]
        came += [
            r for r in range(1, postings.size) if postings.is_posted(f"{name}/{r}")
        ]
        ranks = [rank for rank in range(postings.size) if rank not in came]
        # The first says nothing before it answers.
        if len(ranks) > 1 and not self.is_first:
            ranks.remove(0)
        who = f"process {ranks[0]}" if len(ranks) == 1 else f"processes {ranks}"
        msg = (
            f"{who} did not come to plan within {postings.timeout_s:g} s, the timeout of the "
            "process group: it has ended, is slower than that, or does not call remat.fit, or "
            "the model, where the others do. All processes of a group plan together; with "
            "group=None each plans for itself"
        )
        return RankError(msg, ranks=ranks)

    @staticmethod
    def _failed(ranks: tuple[int, ...], message: str) -> dict[str, Any]:
        msg = f"process {ranks[0]} failed in planning, so no process goes on: {message}"
        return {"message": msg, "ranks": ranks}
