"""Plans of the engine `peer`: the order of each rank's work, the chunks that it reads of others, its costs. Pure."""
