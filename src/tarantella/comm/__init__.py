"""Collectives on buffers of the host: MPI and NumPy, and no TensorFlow."""
