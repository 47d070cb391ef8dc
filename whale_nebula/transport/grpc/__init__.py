"""Links over gRPC: one bidirectional stream of frames between two workers, with reconnection."""
