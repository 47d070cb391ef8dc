"""An owner's datasets for other readers: published interfaces, grants, the service, and its client."""
