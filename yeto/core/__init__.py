"""The coordinator: a pure function from facts to decisions. No clock, no randomness, no I/O."""
