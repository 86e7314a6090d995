"""Reports: a program on one page of HTML, which needs nothing else."""
