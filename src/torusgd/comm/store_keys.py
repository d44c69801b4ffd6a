"""Every key of the ranks' common store, by which processes of a run meet, beat, report and decide without a group.

All code takes its keys from here: no two uses meet in one name, and no attempt, generation or group finds an old one.
"""

from typing import Self


class Key(str):
    """A key, or the prefix of several; `format` fills in what stands in braces.

    The table says who writes it or begins what stands under it, who reads it, and when; `path` has the prefixes before.

    >>> RESULT.format(rank=3), RESULT.path
    ('result/3', 'attempt-{attempt}/result/{rank}')
    """

    path: str

    def __new__(cls, name: str, writer: str, reader: str, when: str, under: "Key | None" = None) -> Self:
        key = super().__new__(cls, name)
        key.path = name if under is None else f"{under.path}/{name}"
        return key


# Ranks of our own launcher.
STOP = Key("stop", "launcher", "every rank", "the run shall stop after the step under way")
ATTEMPT = Key("attempt-{attempt}", "launcher", "every rank", "the ranks are started, for the first time or anew")
GENERATION = Key("generation", "launcher", "every rank", "ranks were lost, join or leave", ATTEMPT)
WANTS_STATE = Key("wants-state/{rank}", "a rank that joins", "launcher", "it has opened its data", ATTEMPT)
READY = Key("ready/{rank}", "a rank that joins", "launcher", "it could take part", ATTEMPT)
STATE_GROUP = Key("state-{generation}-{rank}", "a rank that joins", "who sends it the state", "they meet", ATTEMPT)
MEETING = Key("meeting-{generation}", "its ranks", "its ranks", "the ranks of a generation meet", ATTEMPT)
RESULT = Key("result/{rank}", "rank", "launcher", "its function has returned", ATTEMPT)
FINGERPRINT = Key("fingerprint", "the first rank", "a rank that joins", "a run begins, or its ranks change", ATTEMPT)
JOINING = Key("joining", "a rank that joins", "launcher", "it fails before it takes part: FAILURES under it", ATTEMPT)

# Ranks of another launcher, such as torchrun: they agree on a prefix that no earlier attempt has used.
WORD = Key("word/{rank}", "rank", "the first rank", "it has come")
ANSWER = Key("answer", "the first rank", "every rank", "all have come: their words, and the prefix of the attempt")
HEARD = Key("heard/{rank}", "rank", "the first rank", "its word is in the answer", ATTEMPT)
ALL_HEARD = Key("all-heard", "the first rank", "every rank", "all words are", ATTEMPT)

# Ranks that meet, whoever has launched them.
HERE = Key("here", "rank", "rank", "it has come: a counter", MEETING)
ALL_HERE = Key("all-here", "the last rank to come", "every rank", "all have come", MEETING)
GPU = Key("gpu/{rank}", "rank with a GPU", "every rank", "before they meet", MEETING)
GPU_RANKS = Key("ranks-of-{gpu}", "rank with a GPU", "rank with that GPU", "before they meet: a counter", MEETING)
SHARED_GPU = Key("shared-gpu", "a rank too many on its GPU", "every rank", "before they meet", MEETING)
WORLD = Key("world", "its ranks", "its ranks", "the group of all ranks is built", MEETING)

# Heartbeats and failures, in each attempt.
BEATS = Key("beats", "every rank", "whoever watches", "always", ATTEMPT)
BEAT = Key("{rank}", "rank", "launcher, or the first rank", "each second", BEATS)
ROLL = Key("roll", "the first rank", "every rank", "each second, unless the launcher is ours", BEATS)
FAILURES = Key("failures", "rank", "launcher, or every rank", "a rank ends by an error", ATTEMPT)
FAILURE = Key("{rank}", "rank", "launcher", "it ends by an error", FAILURES)
CAUSES = Key("causes", "rank", "rank", "it ends by an error that is no loss of others: a counter", FAILURES)
CAUSE = Key("cause/{number}", "rank", "every rank", "likewise", FAILURES)
SPEAKER = Key("speaker", "the first rank that asks", "every rank", "one of them prints why all end", FAILURES)

# Groups, under the prefix that `groups.build` is given.
GLOO = Key("gloo", "torch", "torch", "members connect")
NCCL = Key("nccl", "torch", "torch", "members connect")
MESH = Key("mesh-{first}-{apart}", "members", "members", "a group of many is built: a part of its tree")
SUBGROUPS = Key("groups", "members", "members", "a group is split")
FOREIGN_SUBGROUPS = Key("torusgd", "members", "members", "a group of torch's registry is split")
SUBGROUP = Key("sub{number}/{members}", "members", "members", "a group is split", SUBGROUPS)
PAIR = Key("pair-{low}-{high}", "two members", "two members", "they begin to exchange messages", SUBGROUPS)
ALL_CONNECTED = Key("all-connected", "members", "members", "Gloo's own algorithms begin", SUBGROUPS)
ARRIVALS = Key("arrivals", "the first member", "the first member", "steps leave out late work: a counter", SUBGROUPS)
ARRIVALS_OF = Key("arrivals{number}", "members", "members", "always", SUBGROUPS)
ARRIVED = Key("{step}", "member", "every member", "a virtual worker is done: a counter", ARRIVALS_OF)
CLAIMS = Key("claims", "the first member", "the first member", "ranks steal work: a counter", SUBGROUPS)
CLAIMS_OF = Key("claims{number}", "members", "members", "always", SUBGROUPS)
CLAIMED = Key("{turn}/{member}", "member", "members near it", "a virtual worker is claimed: a counter", CLAIMS_OF)
