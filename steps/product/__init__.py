"""One way for every product: a request is decided once, prepared once, and called with
addresses."""
