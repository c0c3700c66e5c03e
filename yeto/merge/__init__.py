"""Tensor functions of the merge; nothing here knows of learners or rounds."""
