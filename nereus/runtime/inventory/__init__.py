"""What machines have: GPUs and their health from the drivers' own libraries, nodes of a Ray cluster."""
