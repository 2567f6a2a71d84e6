"""What the operators share: device checks, precision, block sizes, registration with PyTorch, sums."""
