"""Sums over the ranks as operations of a TensorFlow graph."""
