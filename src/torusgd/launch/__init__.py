"""Starting ranks, here or under torchrun, and what becomes of them: stop, failure, restart, a rank that hangs.

One process watches the ranks; the user sees one line.
May import: errors, signals, importing, untrusted, recipe, runtime, comm, train.
"""
