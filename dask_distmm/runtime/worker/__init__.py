"""A worker's side of runs: the plugin, the handlers of messages, the chunks, the description of the process."""
