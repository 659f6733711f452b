"""The work of the commands, a module each; `cli` reads their options and imports only the one that is called."""
