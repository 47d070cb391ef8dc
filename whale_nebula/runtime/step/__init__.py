"""Executing a step: from the call of a training function to the update of its variables."""
