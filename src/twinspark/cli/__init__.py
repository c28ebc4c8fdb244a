"""The commands. The only place where server and engine meet."""
