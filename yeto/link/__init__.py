"""Trio streams that carry the wire protocol; shared by syncer and learner."""
