"""Rehearsals: a planned step with real messages over a network of hosts on one machine, and timed waits for compute.

The network lab is here too: namespaces with a given latency and bandwidth. `rehearsal.py` joins plan and lab.
"""
