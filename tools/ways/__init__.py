"""Counts the files of the package that a gradient and a SIGKILL pass through, by running them; `ways` has the rule."""
