"""What a framework calls its parameters, and which parts of which logical tensors lie in them."""
