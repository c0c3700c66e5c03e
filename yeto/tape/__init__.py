"""The tape: every fact and decision of a run, one JSON line each."""
