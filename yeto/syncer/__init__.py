"""The Trio shell around the coordinator: carries decisions out and decides nothing."""
