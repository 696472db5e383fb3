"""`tnt.run`: a function on ranks, from the process that calls it to the ranks and back."""
