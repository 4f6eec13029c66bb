"""Build DeepSpeed's ops ahead of time: ``build_matrix.yaml`` in, repaired and verified wheels out."""
