"""remat: train any PyTorch model within a byte budget."""
