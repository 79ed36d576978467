"""The benchmarks behind `python -m jax_nvfp4_ops bench`; the package itself never imports them."""
