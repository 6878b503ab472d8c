"""Benchmarks: this project and its peers side by side in one run; ``python -m flashgen bench``. Figures are ratios within that run."""
