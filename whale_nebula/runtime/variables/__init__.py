"""Variables that several processes hold: who owns which, reads of all of them together, and checksums."""
