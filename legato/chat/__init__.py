"""A conversation in the terminal: the history (pure), the screen, and the loop between them."""
