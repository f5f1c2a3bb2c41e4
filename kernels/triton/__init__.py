"""The ops as Triton kernels, for NVIDIA (sm_80, sm_90) and AMD (gfx942): what `reference.py` means.

Importing this package loads no Triton; importing a module of it does.
"""
