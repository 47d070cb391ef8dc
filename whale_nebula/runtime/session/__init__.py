"""The session of the processes of a run: rendezvous, agreement on programs and steps, failures."""
