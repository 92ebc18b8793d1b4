"""The command line, `tm-slurm`. Nothing here imports torch."""
