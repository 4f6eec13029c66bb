"""Figures for the documentation: what the loader costs, and how fast each tier steps, side by side in one run."""

from dsops_builder.bench.session import bench

__all__ = ["bench"]
