"""What operators share: devices and their gate, precision, block sizes, registration with PyTorch, sums."""
