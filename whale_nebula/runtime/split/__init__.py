"""Operators over several devices of a stage: ops are made again for their pieces, with collectives between."""
