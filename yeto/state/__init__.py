"""The syncer's tensors: immutable fragment versions and the checkpoint."""
