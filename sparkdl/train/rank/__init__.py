"""What runs in a rank of a gang: strategies on tensors, what a rank holds, and its records."""
