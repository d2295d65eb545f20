"""The order of the tasks over nodes that are given, and which of them are parameter servers."""
