"""A worker's side of runs: the plugin, the messages that it answers, its chunks, what it says of itself."""
