"""The wire protocol, sans-I/O: bytes to messages and back."""
