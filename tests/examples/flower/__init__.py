"""Tests of the Flower app; those in `cases.py` run where Flower is installed, and `../test_flower.py` has them run."""
