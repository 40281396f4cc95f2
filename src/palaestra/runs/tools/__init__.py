"""External tools that show runs: TensorBoard, which the service starts, and Weights & Biases."""
