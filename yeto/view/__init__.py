"""What a person sees of a run: folds of the tape."""
