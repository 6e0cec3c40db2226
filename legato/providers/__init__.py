"""Where answers come from. Each provider turns a request into a stream of events."""
