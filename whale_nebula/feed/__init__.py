"""The user's batch: cutting it, and telling whether two clusters hold the same one."""
