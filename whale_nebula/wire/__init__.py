"""The wire protocol, sans-I/O: frames, sessions, sealing, control messages."""
