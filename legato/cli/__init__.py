"""The command line: each command builds its objects and hands over. A command is imported when it is called."""
