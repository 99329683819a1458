"""What a run of verl, NeMo-RL or OpenRLHF wrote down of itself, read back: W&B, TensorBoard, console logs."""
