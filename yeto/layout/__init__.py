"""Named parameters to fragments."""
