"""Replay: what a job would have taken under one policy of adaptation or another, on traces of lengths and pools."""
