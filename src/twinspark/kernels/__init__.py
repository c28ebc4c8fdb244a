"""One op a file: public call and reference body. Knows tensors only."""
