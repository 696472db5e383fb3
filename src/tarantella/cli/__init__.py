"""The command: options, then a plan of hosts, devices and ranks, then mpiexec."""
