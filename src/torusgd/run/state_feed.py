"""The state of a run for ranks that join: sent to each by a rank at work, beside the steps that it goes on taking.

Between two steps the rank at work copies its state, and after each further step that step's mean gradient; a thread
sends them. The rank that joins makes the same updates as all others, with the same bits, and computes and sums nothing.

Only the length of the pause depends on this file: ranks that meet send the whole state to those that don't hold it
(`newest_state.agree`). All of it is ours; Elan and torchft, too, have a peer send the state, which holds up its steps.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, Queue
from threading import Thread
from typing import Any

from ..comm.base import CommError, Liveness
from ..comm.groups import Group, alone
from ..ranks.generations import Generations
from ..step.model_state import StepState
from ..weights import Tensors
from .build import build
from .job import Job
from .newest_state import Retained
from .saving import RunState, share_tensors

# Steps that a rank which joins may be behind when it says that it is ready.
HARDLY_BEHIND = 2
# Bytes that may wait to be sent to a rank, or four times the state if that is more; then it is too slow.
LEAST_WAITING = 64 << 20

Event = Mapping[str, Any]  # the line of events.jsonl for what was done last


class StateFeeds:
    """What a rank at work sends to ranks that join, its `generations.joiners`; made anew whenever the ranks change."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._feeds: dict[int, _Feed] = {}

    def after_step(self, tensors: StepState, state: RunState, is_updated: bool, event: Callable[[], Event]) -> None:
        """Sends on what a step has done, and the whole state to ranks that want it for the first time."""
        # Copies, since the next step changes them while the thread sends.
        for feed in self._feeds.values():
            feed.send(tensors.change(is_updated), state, event())
        for rank in self._generations.joiners:
            if rank not in self._feeds:
                whole = {name: t.detach().clone() for name, t in tensors.state_dict(state.step, keep=True).items()}
                self._feeds[rank] = _Feed(rank, self._generations)
                self._feeds[rank].send(whole, state, event(), is_whole=True)

    def end(self) -> None:
        """The ranks change as planned, after this step: threads send what is left, and end."""
        for feed in self._feeds.values():
            feed.messages.put(None)
        self._feeds = {}

    def close(self) -> None:
        """Gives up what is still under way."""
        for feed in self._feeds.values():
            feed.close()


class _Feed:
    def __init__(self, rank: int, generations: Generations) -> None:
        self._rank, self._generations = rank, generations
        self.messages: Queue[tuple[dict[str, Any], Tensors] | None] = Queue()
        self._group: Group | None = None
        self._is_over, self._most = False, LEAST_WAITING
        Thread(target=self._run, daemon=True, name="torusgd-state-feed").start()

    def send(self, tensors: Tensors, state: RunState, event: Event, is_whole: bool = False) -> None:
        """Takes tensors that nobody changes any more."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if is_whole:
            self._most = max(self._most, 4 * size)
        elif self.messages.qsize() * size > self._most:
            # A mean gradient is half of what the step's own all-reduce has sent, or less. So this network is slower
            # than the steps, and the queue would only grow; the ranks that meet send the state.
            self.close()
        if not self._is_over:
            self.messages.put(({"state": state.as_dict(), "event": event, "is_whole": is_whole}, tensors))

    def close(self) -> None:
        """Sends nothing any more; the rank at the other end learns of it."""
        self._is_over = True
        with suppress(Empty):
            while True:
                self.messages.get_nowait()
        self.messages.put(None)
        if self._group is not None:
            self._group.abort()

    def _run(self) -> None:
        with suppress(CommError):  # the rank is lost, or the feed is closed
            group = self._group = self._generations.meet_joiner(self._rank, lambda: self._is_over)
            if self._is_over:  # and `close` may have seen no group yet: the rank at the other end would wait for ever
                group.abort()
            while (message := self.messages.get()) is not None:
                header, tensors = message
                group.broadcast_text(json.dumps({**header, "behind": self.messages.qsize()}))
                for _ in share_tensors(tensors, group):
                    pass
            if not self._is_over:
                group.broadcast_text("")
                group.barrier()  # else the connection could close before the other end has read all
        self._is_over = True


class StateFollower:
    """A rank that joins, which follows the ranks at work until it takes part. `retained`: what it has by now."""

    def __init__(self, job: Job, retained: Retained, liveness: Liveness) -> None:
        # Nobody is there to compute anything twice, nor to form a grid with.
        options = job.options.model_copy(update={"audit": 0.0, "grid": None})
        job, world = replace(job, options=options, trace=None), alone(job.device)
        self._retained, self._state = retained, retained.state
        self._event: Event = {}
        known: dict[str, Any] = {"fingerprint": retained.fingerprint, "network": retained.network}
        self._trainer = build(job, retained.data, world, liveness, **known)

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        """Takes what a `StateFeeds` sends, until it ends or is lost; see `LastingFunction.follow`."""
        step = self._trainer.step
        try:
            while text := source.broadcast_text(""):
                header = json.loads(text)
                tensors, state = share_tensors({}, source), RunState.from_dict(header["state"])
                if header["is_whole"]:
                    # Half a state is worse than none: if the source is lost now, this rank joins without.
                    self._state = None  # until all of it has come
                    step.state.load_state_dict(tensors)
                else:
                    step.state.follow(step.schedule[state.step - 1], dict(tensors))
                self._state, self._event = state, header["event"]
                # The ranks change after a later step, until which the thread sends what is left: all of them hold the
                # same state when they meet.
                if header["behind"] <= HARDLY_BEHIND:
                    caught_up()
            source.barrier()
        except CommError:
            source.abort()

    def keep(self) -> Retained:
        self._trainer.close()
        if self._state is None:
            return self._retained
        tensors = self._trainer.step.state.state_dict(self._state.step, keep=True)
        return replace(self._retained, state=self._state, tensors=tensors, last_event=partial(dict, self._event))
