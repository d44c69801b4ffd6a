"""From files to batches, and the state in a node's memory."""
