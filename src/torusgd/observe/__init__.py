"""What a run reports of itself: events, trackers, traces, the comparison with a plan."""
