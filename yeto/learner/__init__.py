"""The learner: a training loop that never waits for the network, and its client."""
