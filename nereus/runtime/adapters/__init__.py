"""Adapters: a framework's own objects as storages with fragments of logical tensors, to read, fill and hand back."""
