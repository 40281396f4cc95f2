"""Programs that show runs: TensorBoard, started and ended by us, and W&B, which is told where a run's data is."""
