"""Testing aids: links over memory that fail as they are told to, and simulated runs."""
