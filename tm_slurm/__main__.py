"""`python -m tm_slurm` is `tm-slurm`."""

from tm_slurm.cli.app import main

if __name__ == "__main__":
    main(prog_name="tm-slurm")
