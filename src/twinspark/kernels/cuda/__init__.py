"""CUDA C++ kernels without a toolkit: compiled at first use, launched through the driver.

Owns compiling, caching, loading and launching. What kernels compute lies beside their op, such as
`kernels/exl3/rows.cu`. Read in order: compile.py, launch.py.
"""
