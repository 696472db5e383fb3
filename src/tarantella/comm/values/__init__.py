"""The values that collectives take: arrays, tensors, numbers and strings.

`leaf` takes a value to a buffer and back, `strings` does so for strings, and `reductions` says in
which form MPI reduces a value.
"""
