"""The stock tier: DeepSpeed's own ``setup.py``, run for one op and one target."""
