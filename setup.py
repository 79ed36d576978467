"""Hands the compiled module to CMake; everything else is in pyproject.toml."""

from setuptools import setup

setup(cmake_source_dir=".")
