"""What codecs do to bytes, and nothing of tensors on devices: parts in one buffer, integers in the bits they need."""
