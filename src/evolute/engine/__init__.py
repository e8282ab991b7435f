"""Any PyTorch model: its objective, and matrix-free products with its curvature."""
